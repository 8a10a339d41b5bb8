"""`agent-r1-trl doctor --run`: two real steps of a recipe on this machine, and what they say about it.

    agent-r1-trl doctor --run --config recipe.yaml
    agent-r1-trl doctor --run --config recipe.yaml --run_tokens 4096 --update_layout shared
    torchrun --nproc_per_node 2 -m agent_r1_trl.features.doctor.run_command --config recipe.yaml

The settings are those of `train`. The steps are real: the recipe's model, environment, rewards, trainer, micro-batch.
Prompts are few and trajectories short, what is not a part of every step is switched off (`_OFF`), and everything is
written to a temporary folder that is removed. Of several processes the first one reports what it measured itself.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any

from transformers import PrinterCallback, ProgressCallback

from agent_r1_trl.cli.arguments import EvalArguments, TrainArguments
from agent_r1_trl.cli.console import PlainConsole
from agent_r1_trl.cli.errors import UsageError, is_main_process, run_command
from agent_r1_trl.cli.parser import RecipeParser
from agent_r1_trl.cli.train import (
    check_num_processes,
    device_defaults,
    find_trainer,
    load_data,
    make_task,
    make_trainer,
    trainer_class,
    use_one_gpu,
)
from agent_r1_trl.features.doctor.command_arguments import DoctorArguments, MemoryArguments, TrialArguments
from agent_r1_trl.features.doctor.memory_command import estimate_recipe
from agent_r1_trl.features.doctor.report import Report, has_errors, render
from agent_r1_trl.features.doctor.trial import Meter, judge, report_failure
from agent_r1_trl.trainers.config import ModelConfig

COMMAND = "agent-r1-trl doctor --run"
_OFF = {
    **{"report_to": "none", "push_to_hub": False, "save_strategy": "no", "eval_strategy": "no", "journal": False},
    **{"load_best_model_at_end": False, "metric_for_best_model": None, "resume_from_checkpoint": None},
    **{"logging_strategy": "steps", "logging_steps": 1, "disable_tqdm": True, "log_completions": False},
    **{"record_trajectories": "none", "push": None, "num_iterations": 1, "max_steps": 2},
    **{"steps_per_generation": None, "generation_batch_size": None, "eval_dataset_name": None},
    **{"critic_uses_filtered": False, "critic_warmup_steps": 0, "num_train_epochs": 3.0},
    **{"sampling": None, "echo": None, "prompts_per_rollout": None, "updates_per_rollout": None},
}
"""What the trial changes in every recipe."""
_NAMED = (
    "sampling", "echo", "prompts_per_rollout", "updates_per_rollout", "num_iterations", "critic_warmup_steps",
    "save_strategy", "eval_strategy",
)  # fmt: skip
"""What of these the recipe has is named, since the trial did not look at it."""


def run_trial(argv: Sequence[str]) -> int:
    """Run two steps and print the findings; returns the exit code.

    Raises:
        UsageError: there is a mistake in the recipe or on the command line.
    """
    use_one_gpu()
    config_class = trainer_class(find_trainer(argv)).config_class
    kinds = (TrialArguments, TrainArguments, config_class, ModelConfig)
    about = "Train two real steps of a recipe on this machine, and say what they took."
    elsewhere = (EvalArguments, DoctorArguments, MemoryArguments)
    parser = RecipeParser(kinds, command=COMMAND, about=about, elsewhere=elsewhere)
    arguments, script_args, args, model_args = parser.parse(argv, defaults=device_defaults())
    if not model_args.model_name_or_path:
        raise UsageError("--model_name_or_path: not set. Pass the directory or the Hub id of a model.")
    check_num_processes(os.environ, args.world_size, script_args.num_processes_expected)
    report, estimate = Report(), None
    savings: dict[str, float] = {}
    try:
        flags = [flag for flag in argv if flag != "--run"]
        _, estimate, savings = estimate_recipe([*flags, "--num_processes", str(args.world_size)])
    except UsageError as error:
        report.skip("memory", f"Not estimated: {error}")
    with tempfile.TemporaryDirectory(prefix="agent-r1-doctor-") as folder:
        changes = _shortened(parser, config_class, arguments, args, folder)
        try:
            _measure(report, parser, config_class, script_args, model_args, changes, estimate, savings)
        except Exception as error:
            if os.environ.get("AGENT_R1_TRL_DEBUG"):
                traceback.print_exc()
            report.findings.clear()  # nothing is said about what was not measured
            report_failure(report, error, settings=parser.settings, savings=savings)
    if is_main_process():
        PlainConsole().print(render(report.findings))
    return int(has_errors(report.findings))


def _shortened(parser: Any, config_class: type, arguments: Any, args: Any, folder: str) -> dict[str, Any]:
    """The settings that make a trial of the recipe."""
    group, per_pass = args.num_generations or 1, args.per_device_train_batch_size * args.world_size
    least = math.lcm(group, per_pass) // per_pass
    num_batches = least * math.ceil(min(args.gradient_accumulation_steps, 2) / least)
    changes = _OFF | {"output_dir": folder, "gradient_accumulation_steps": num_batches}
    known = {item.name for item in dataclasses.fields(config_class)}
    changes = {name: value for name, value in changes.items() if name in known}
    short = {"max_turns": min(args.max_turns, arguments.run_turns)}
    if args.max_completion_length is not None:
        short["max_completion_length"] = min(args.max_completion_length, arguments.run_tokens)
    try:
        parser.make(config_class, **changes, **short)
        return changes | short
    except UsageError:  # other limits need the recipe's lengths
        return changes


def _scope(parser: Any, changes: dict[str, Any]) -> str:
    """What was run, and which parts of the recipe were not."""
    given = {
        name: getattr(parser.settings[name], "value", parser.settings[name]) for name in _NAMED if name in changes
    }
    off = [f"{name}={value}" for name, value in given.items() if value not in (changes[name], "no")]
    tokens, turns = (changes.get(name, parser.settings[name]) for name in ("max_completion_length", "max_turns"))
    text = f"Two steps of trajectories of up to {turns} turns and {tokens} tokens, in a temporary folder."
    return f"{text} Not looked at: {', '.join(off)}." if off else text


def _measure(
    report: Report,
    parser: Any,
    config_class: type,
    script_args: Any,
    model_args: Any,
    changes: dict[str, Any],
    estimate: Any,
    savings: dict[str, float],
) -> None:
    args, script_args = parser.make(config_class, **changes), dataclasses.replace(script_args, eval_dataset_name=None)
    data, task = {"train_dataset": load_data(script_args)[0], "eval_dataset": None}, make_task(script_args)
    trainer: Any = make_trainer(script_args, args, model_args, **task, **data)
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    meter = Meter(trainer)
    try:
        trainer.train()
    finally:
        meter.close()
        if trainer.env_factory is not None:
            trainer.rollouts.close()
    report.ok("trial", _scope(parser, changes))
    judge(
        report,
        meter.trial,
        settings=parser.settings | {"bf16": args.bf16, "fp16": args.fp16, "dtype": model_args.dtype},
        has_vllm=importlib.util.find_spec("vllm") is not None,
        estimate=estimate,
        savings=savings,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of this module with `python -m`, without `--run`, which torchrun takes for its own."""
    return run_command(run_trial, argv)


if __name__ == "__main__":
    sys.exit(main())

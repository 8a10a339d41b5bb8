"""`agent-r1-trl doctor --run`: two real steps of a recipe on this machine, and what they say about it.

    agent-r1-trl doctor --run --config recipe.yaml
    agent-r1-trl doctor --run --config recipe.yaml --run_tokens 4096 --update_layout shared
    torchrun --nproc_per_node 2 -m agent_r1_trl.cli.doctor_run --config recipe.yaml

The settings are those of `train`. The steps are real: the recipe's model, environment, rewards, trainer, micro-batch.
Prompts are few and trajectories short, what is not a part of every step is switched off (`_OFF`), and everything is
written to a temporary folder that is removed.
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

from agent_r1_trl.cli.errors import UsageError, is_main_process, run_command
from agent_r1_trl.cli.recipe import read_recipe, split_config

COMMAND = "agent-r1-trl doctor --run"
EXIT_ERRORS = 1
_OFF = {
    **{"report_to": "none", "push_to_hub": False, "save_strategy": "no", "eval_strategy": "no", "replay": None},
    **{"load_best_model_at_end": False, "metric_for_best_model": None, "resume_from_checkpoint": None},
    **{"logging_strategy": "steps", "logging_steps": 1, "disable_tqdm": True, "log_completions": False},
    **{"record_trajectories": "none", "push_trajectories": False, "num_iterations": 1, "max_steps": 2},
    **{"steps_per_generation": None, "generation_batch_size": None, "eval_dataset_name": None},
    **{"critic_uses_filtered": False, "critic_warmup_steps": 0, "push_critic": False, "num_train_epochs": 3.0},
}
"""What the trial changes in every recipe."""


def run_trial(argv: Sequence[str]) -> int:
    """Run two steps and print the findings; returns the exit code.

    Raises:
        UsageError: there is a mistake in the recipe or on the command line.
    """
    from agent_r1_trl.cli.launch import check_launcher, use_one_gpu
    from agent_r1_trl.cli.train import find_trainer

    check_launcher(os.environ)
    path, _ = split_config(argv)
    if path is not None:
        read_recipe(path)
    find_trainer(argv)
    use_one_gpu()

    from agent_r1_trl.cli.console import PlainConsole
    from agent_r1_trl.doctor import has_errors, render

    with tempfile.TemporaryDirectory(prefix="agent-r1-doctor-") as folder:
        findings = examine(argv, folder)
    if is_main_process():
        PlainConsole().print(render(findings))
    return EXIT_ERRORS if has_errors(findings) else 0


def examine(argv: Sequence[str], folder: str) -> list[Any]:
    """Findings of a trial in a folder.

    Raises:
        UsageError: there is a mistake in the recipe or on the command line.
    """
    from agent_r1_trl.cli.launch import check_num_processes, device_defaults
    from agent_r1_trl.doctor.report import Report
    from agent_r1_trl.doctor.trial import report_failure

    parser, config_class = _parser(argv)
    arguments, script_args, args, model_args = parser.parse(argv, defaults=device_defaults())
    if not model_args.model_name_or_path:
        raise UsageError("--model_name_or_path: not set. Pass the directory or the Hub id of a model.")
    check_num_processes(os.environ, args.world_size, script_args.num_processes_expected)
    changes = _shortened(parser, config_class, arguments, args, folder)
    report = Report()
    try:
        _measure(report, parser, config_class, script_args, model_args, changes)
    except Exception as error:
        if os.environ.get("AGENT_R1_TRL_DEBUG"):
            traceback.print_exc()
        savings = _estimates(parser, model_args, {}, args.world_size)[1]
        report_failure(report, error, settings=parser.settings, savings=savings)
    return report.findings


def _parser(argv: Sequence[str]) -> tuple[Any, type]:
    from agent_r1_trl.cli.arguments import DoctorArguments, EvalArguments, MemoryArguments, TrainArguments
    from agent_r1_trl.cli.arguments import TrialArguments as Trial
    from agent_r1_trl.cli.parser import RecipeParser
    from agent_r1_trl.cli.train import find_trainer, trainer_class
    from agent_r1_trl.trainers.trl_arguments import ModelConfig

    config_class = trainer_class(find_trainer(argv)).config_class
    kinds = (Trial, TrainArguments, config_class, ModelConfig)
    elsewhere = (EvalArguments, DoctorArguments, MemoryArguments)
    return RecipeParser(kinds, command=COMMAND, elsewhere=elsewhere), config_class


def _shortened(parser: Any, config_class: type, arguments: Any, args: Any, folder: str) -> dict[str, Any]:
    """The settings that make a trial of the recipe."""
    from agent_r1_trl.trainers.stability_settings import StabilitySettings

    own = {item.name: item for item in dataclasses.fields(StabilitySettings)}
    changes = {name: item.default for name, item in own.items() if item.default is not dataclasses.MISSING}
    group, per_pass = args.num_generations or 1, args.per_device_train_batch_size * args.world_size
    least = math.lcm(group, per_pass) // per_pass
    passes = least * math.ceil(min(args.gradient_accumulation_steps, 2) / least)
    changes |= _OFF | {"output_dir": folder, "gradient_accumulation_steps": passes}
    known = {item.name for item in dataclasses.fields(config_class)} | {"eval_dataset_name"}
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
    from agent_r1_trl.trainers.stability_settings import StabilitySettings

    names = [item.name for item in dataclasses.fields(StabilitySettings)]
    names += [
        name for name in ("num_iterations", "critic_warmup_steps", "save_strategy", "eval_strategy") if name in changes
    ]
    given = {name: getattr(parser.settings[name], "value", parser.settings[name]) for name in names}
    off = [f"{name}={value}" for name, value in given.items() if value not in (changes[name], "no")]
    tokens, turns = (changes.get(name, parser.settings[name]) for name in ("max_completion_length", "max_turns"))
    text = f"Two steps of trajectories of up to {turns} turns and {tokens} tokens, in a temporary folder."
    return f"{text} Not looked at: {', '.join(off)}." if off else text


def _measure(
    report: Any, parser: Any, config_class: type, script_args: Any, model_args: Any, changes: dict[str, Any]
) -> None:
    from agent_r1_trl.doctor.trial import Meter, attention_kernels, judge, of_all_processes, time_variants
    from agent_r1_trl.update.layout import UPDATE_LAYOUTS

    own = {name: value for name, value in changes.items() if name != "eval_dataset_name"}
    args = parser.make(config_class, **own)
    trainer = _make(dataclasses.replace(script_args, eval_dataset_name=None), args, model_args)
    meter = Meter(trainer)
    try:
        trainer.train()
        meter.close()
        not_timed = _why_alone(trainer)
        variants = None
        if not not_timed:
            variants = time_variants(
                trainer,
                meter.trial.buffer,
                layouts=UPDATE_LAYOUTS,
                kernels=attention_kernels(meter.trial.device),
            )
    finally:
        meter.close()
        if trainer.env_factory is not None:
            trainer.rollouts.close()
    trial = of_all_processes(meter.trial)
    of_recipe, savings = _estimates(parser, model_args, {}, args.world_size)
    of_trial, _ = _estimates(parser, model_args, own, args.world_size, trial)
    report.ok("trial", _scope(parser, changes))
    judge(
        report,
        trial,
        settings=parser.settings | {"bf16": args.bf16, "fp16": args.fp16, "dtype": model_args.dtype},
        variants=variants,
        not_timed=not_timed,
        has_vllm=importlib.util.find_spec("vllm") is not None,
        of_trial=of_trial,
        of_recipe=of_recipe,
        savings=savings,
    )


def _make(script_args: Any, args: Any, model_args: Any) -> Any:
    from transformers import PrinterCallback, ProgressCallback

    from agent_r1_trl.cli.train import load_data, make_task, make_trainer

    train_dataset, _ = load_data(script_args, args)
    task = make_task(script_args)
    trainer = make_trainer(script_args, args, model_args, **task, train_dataset=train_dataset, eval_dataset=None)
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    return trainer


def _why_alone(trainer: Any) -> str:
    """Why layouts cannot be compared in this run; empty where they can."""
    if trainer.accelerator.num_processes > 1:
        return f"{trainer.accelerator.num_processes} processes train together"
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return "weights are sharded"
    return ""


def _estimates(
    parser: Any, model_args: Any, changes: dict[str, Any], num_processes: int, trial: Any = None
) -> tuple[Any, list[Any]]:
    """The estimate of `agent-r1-trl memory`, and what would lower it; None and nothing where it has none.

    Args:
        parser: with the recipe's settings.
        model_args: of the model.
        changes: settings in place of the recipe's.
        num_processes: that train together.
        trial: what was computed, for the estimate of exactly that.
    """
    from agent_r1_trl.cli.arguments import MemoryArguments
    from agent_r1_trl.cli.memory import make_setup, read_model
    from agent_r1_trl.memory import estimate_memory, find_savings

    values = parser.settings | changes
    names = {item.name for item in dataclasses.fields(MemoryArguments) if item.name in values}
    model_args = dataclasses.replace(model_args)
    try:
        given = {name: getattr(values[name], "value", values[name]) for name in names}
        arguments = MemoryArguments(**given | {"num_processes": num_processes})
        shape = read_model(model_args)
        setup = make_setup(arguments, model_args, max_positions=shape.max_positions)
        if trial is not None:
            setup = _as_computed(setup, trial)
        return estimate_memory(shape, setup), find_savings(shape, setup)
    except (ValueError, TypeError):
        return None, []


def _as_computed(setup: Any, trial: Any) -> Any:
    """The setup of the micro-batches that the trial computed, in place of the largest that could be."""
    rows, prompt, completion = trial.widest
    return dataclasses.replace(
        setup,
        micro_batch=rows,
        prompt_tokens=prompt,
        completion_tokens=completion,
        row_tokens=trial.row_tokens,
        rows_per_trajectory=1,
        trajectory_tokens=None,
        max_tokens_per_micro_batch=trial.pass_tokens if setup.is_packed else None,
        update_rows=None,
        rollout_rows=min(setup.rollout_rows, max(1, trial.num_trajectories // trial.num_processes)),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m agent_r1_trl.cli.doctor_run`, without `--run`: torchrun takes that for its own."""
    from agent_r1_trl.cli.doctor import run

    return run_command(run, ["--run", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())

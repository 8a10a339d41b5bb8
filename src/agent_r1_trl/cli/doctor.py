"""`agent-r1-trl doctor`: find what is wrong with model, template, tools or environment before a run.

    agent-r1-trl doctor --config recipe.yaml
    agent-r1-trl doctor --model Qwen/Qwen3-0.6B --env my_module.MyEnv --dataset data.jsonl
    agent-r1-trl doctor --run --config recipe.yaml

Exit code 0: no errors. 1: errors that would spoil a run. 2: the checks could not start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from agent_r1_trl.cli.arguments import DoctorArguments, TrainArguments, TrialArguments
from agent_r1_trl.cli.errors import UsageError, run_command
from agent_r1_trl.cli.options import options_of, show_help
from agent_r1_trl.cli.recipe import read_recipe, split_config

COMMAND = "agent-r1-trl doctor"
EXIT_ERRORS = 1


def run(argv: Sequence[str]) -> int:
    """Run the checks; returns the exit code."""
    if show_help(COMMAND, argv, "Check a run before it starts.", _options):
        return 0
    if "--run" in argv:
        from agent_r1_trl.cli.doctor_run import run_trial

        return run_trial(argv)
    config_path, _ = split_config(argv)
    recipe = {} if config_path is None else read_recipe(config_path)

    from agent_r1_trl.cli.console import PlainConsole
    from agent_r1_trl.cli.resolve import load_rows, resolve_env, resolve_object
    from agent_r1_trl.doctor import Finding, has_errors, render, run_doctor
    from agent_r1_trl.evaluation.loading import is_local
    from agent_r1_trl.trainers.precision import REMEDY, problem_of_recipe

    arguments = _read(argv)
    if not arguments.model_name_or_path:
        raise UsageError("--model: not set. Pass the directory or the Hub id of the model to examine.")
    try:
        is_local(arguments.model_name_or_path)
    except ValueError as error:
        raise UsageError(str(error)) from error
    env = resolve_env(arguments.env, arguments.env_kwargs) if arguments.env else None
    tools = [resolve_object("tools", path) for path in arguments.tools or []]
    rows = None
    if arguments.dataset_name:
        rows = load_rows(
            "dataset_name",
            arguments.dataset_name,
            config=arguments.dataset_config,
            split=arguments.dataset_train_split,
        )
    checks = run_doctor(
        arguments.model_name_or_path,
        env=env,
        tools=tools or None,
        examples=rows,
        chat_template=arguments.chat_template,
        response_template=arguments.response_template,
        chat_template_kwargs=arguments.chat_template_kwargs or None,
        thinking=arguments.thinking,
        max_completion_length=arguments.max_completion_length,
        trust_remote_code=arguments.trust_remote_code,
    )
    if problem := problem_of_recipe(recipe):
        checks.append(Finding(level="warning", check="precision", message=problem, cure=REMEDY))
    PlainConsole().print(render(checks))
    return EXIT_ERRORS if has_errors(checks) else 0


def _read(argv: Sequence[str]) -> Any:
    from agent_r1_trl.cli.parser import RecipeParser
    from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig
    from agent_r1_trl.trainers.trl_arguments import ModelConfig

    elsewhere = (TrainArguments, TrialArguments, MultiTurnGRPOConfig, MultiTurnPPOConfig, ModelConfig)
    parser = RecipeParser((DoctorArguments,), command=COMMAND, elsewhere=elsewhere, modes={"--run": elsewhere})
    (arguments,) = parser.parse(argv)
    return arguments


def _options() -> list[dict[str, Any]]:
    return options_of(Settings=DoctorArguments, Two_real_steps=TrialArguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m agent_r1_trl.cli.doctor`."""
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())

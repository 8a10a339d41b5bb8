"""`agent-r1-trl doctor`: find what is wrong with model, template, tools or environment before a run.

    agent-r1-trl doctor --config recipe.yaml
    agent-r1-trl doctor --model Qwen/Qwen3-0.6B --env my_module.MyEnv --dataset data.jsonl
    agent-r1-trl doctor --run --config recipe.yaml

Exit code 0: no errors. 1: errors that would spoil a run. 2: the checks could not start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_r1_trl.cli.console import PlainConsole
from agent_r1_trl.cli.errors import UsageError, users_mistakes
from agent_r1_trl.cli.parser import OF_RECIPES, RecipeParser
from agent_r1_trl.cli.recipe import read_recipe, split_config
from agent_r1_trl.cli.resolve import resolve_env, resolve_object
from agent_r1_trl.environments.data_files import load_rows
from agent_r1_trl.evaluation.loading import is_local
from agent_r1_trl.features.doctor import Finding, has_errors, render, run_doctor
from agent_r1_trl.features.doctor.command_arguments import DoctorArguments, TrialArguments
from agent_r1_trl.features.doctor.run_command import run_trial
from agent_r1_trl.trainers.weights import REMEDY, problem_of_recipe

COMMAND = "agent-r1-trl doctor"
EXIT_ERRORS = 1


def run(argv: Sequence[str]) -> int:
    """Run the checks; returns the exit code."""
    if "--run" in argv:
        return run_trial(argv)
    arguments = _read(argv)
    if not arguments.model_name_or_path:
        raise UsageError("--model: not set. Pass the directory or the Hub id of the model to examine.")
    with users_mistakes():
        is_local(arguments.model_name_or_path)
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
        max_completion_length=arguments.max_completion_length,
        **arguments.chat_options(),
    )
    config_path, _ = split_config(argv)
    recipe = {} if config_path is None else read_recipe(config_path)
    if problem := problem_of_recipe(recipe):
        checks.append(Finding(level="warning", check="precision", message=problem, cure=REMEDY))
    PlainConsole().print(render(checks))
    return EXIT_ERRORS if has_errors(checks) else 0


def _read(argv: Sequence[str]) -> Any:
    elsewhere = (TrialArguments, *OF_RECIPES)
    about = "Check a run before it starts; with --run, by two real steps (--run --help lists the settings of those)."
    parser = RecipeParser(
        (DoctorArguments,), command=COMMAND, about=about, elsewhere=elsewhere, modes={"--run": elsewhere}
    )
    (arguments,) = parser.parse(argv)
    return arguments

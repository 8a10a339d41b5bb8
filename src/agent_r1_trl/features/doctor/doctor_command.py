"""`agent-r1-trl doctor`: find what is wrong with model, template, tools or environment before a run.

    agent-r1-trl doctor --config recipe.yaml
    agent-r1-trl doctor --model Qwen/Qwen3-0.6B --env my_module.MyEnv --dataset data.jsonl

Exit code 0: no errors. 1: errors that would spoil a run. 2: the checks could not start.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agent_r1_trl.cli.errors import UsageError, users_mistakes
from agent_r1_trl.cli.parser import OF_RECIPES, RecipeParser
from agent_r1_trl.cli.recipe import config_of
from agent_r1_trl.cli.resolve import resolve_env, resolve_function
from agent_r1_trl.display.console import PlainConsole
from agent_r1_trl.environments.data_files import load_rows
from agent_r1_trl.evaluation.agent import is_local
from agent_r1_trl.features.doctor.checks import run_doctor
from agent_r1_trl.features.doctor.command_arguments import HELP
from agent_r1_trl.features.doctor.command_trial import examine_start
from agent_r1_trl.features.doctor.memory_command import read_setup
from agent_r1_trl.features.doctor.report import Report, has_errors, render
from agent_r1_trl.features.doctor.savings import find_savings
from agent_r1_trl.features.doctor.scores import examine_scores
from agent_r1_trl.trainers.memory import GIB, estimate_memory, find_peak, is_checkpointing_needless, judge
from agent_r1_trl.trainers.metrics import REMEDY, problem_of_recipe

COMMAND = "agent-r1-trl doctor"


def run(argv: Sequence[str]) -> int:
    """Run the checks; returns the exit code."""
    about, kinds = HELP["doctor"]
    parser = RecipeParser(kinds, command=COMMAND, about=about, elsewhere=OF_RECIPES)
    (arguments,) = parser.parse(argv)
    if not arguments.model_name_or_path:
        raise UsageError("--model: not set. Pass the directory or the Hub id of the model to examine.")
    with users_mistakes():
        is_local(arguments.model_name_or_path)
    env = resolve_env(arguments.env, arguments.env_kwargs) if arguments.env else None
    tools = [resolve_function("tools", path) for path in arguments.tools or []]
    for name in ("reward_funcs", "turn_reward_funcs"):  # not called, but there
        for path in parser.recipe.get(name) or []:
            resolve_function(name, path)
    rows = None
    if arguments.dataset_name:
        where = {"config": arguments.dataset_config, "split": arguments.dataset_train_split}
        rows = load_rows("dataset_name", arguments.dataset_name, **where)
    report = Report()
    report.findings += run_doctor(
        arguments.model_name_or_path,
        env=env,
        tools=tools or None,
        examples=rows,
        max_completion_length=arguments.max_completion_length,
        **arguments.chat_options(),
    )
    if arguments.load_weights:
        examine_scores(
            report,
            arguments.model_name_or_path,
            update_layout=parser.recipe.get("update_layout", "auto"),
            model_init_kwargs=parser.recipe.get("model_init_kwargs"),
            trust_remote_code=arguments.trust_remote_code,
            chat_template=arguments.chat_template,
            response_template=arguments.response_template,
        )
    if problem := problem_of_recipe(parser.recipe):
        report.warning("precision", problem, REMEDY)
    path = config_of(argv)
    if path is None and arguments.num_prompts is not None:
        raise UsageError("--num_prompts: rows are sampled as a recipe says, and there is none. Pass --config.")
    if path is not None:
        flags = ["--config", path, "--model_name_or_path", arguments.model_name_or_path]
        if arguments.num_prompts is not None:
            examine_start(report, flags, arguments.num_prompts)
        _report_memory(report, flags)
    PlainConsole().print(render(report.findings))
    return int(has_errors(report.findings))


def _report_memory(report: Report, flags: Sequence[str]) -> None:
    """Add the estimate of a recipe; a verdict only where there is a GPU to compare it with.

    It is no error: the launch, which the doctor does not know, may divide what lies on one GPU here.
    """
    try:
        setup = read_setup(flags)
    except UsageError as error:
        report.skip("memory", f"Not estimated: {error}")
        return
    peak = find_peak(estimate_memory(setup))
    text = f"By formula the recipe needs {peak / GIB:.1f} GiB at its peak on each GPU"
    verdict = judge(peak, setup.gpu_memory_gb)
    if not torch.cuda.is_available():
        report.skip("memory", f"{text}; this machine has none. agent-r1-trl memory says what it consists of.")
    elif verdict == "fits":
        hint = " It would fit with gradient_checkpointing: false as well." if is_checkpointing_needless(setup) else ""
        report.ok("memory", f"{text}, of {setup.gpu_memory_gb:.0f}.{hint}")
    else:
        changes = " or ".join(list(find_savings(setup))[:2]) or "use_peft: true"
        fix = f"Set, or launch with, {changes}. agent-r1-trl memory --accelerate_config reckons with your launch."
        report.warning("memory", f"{text}, of {setup.gpu_memory_gb:.0f}: {verdict}.", fix)

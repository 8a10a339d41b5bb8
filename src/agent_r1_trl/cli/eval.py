"""`agent-r1-trl eval`: run a model on a data set and score it, within the limits of a recipe.

agent-r1-trl eval --config recipe.yaml --model outputs/my-agent
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_trl.cli.errors import (
    InfrastructureError,
    UsageError,
    infrastructure_errors,
    model_problem,
    run_command,
)
from agent_r1_trl.cli.recipe import read_recipe, split_config
from agent_r1_trl.safe_text import set_rules

if TYPE_CHECKING:
    from rich.console import Console

    from agent_r1_trl.cli.arguments import EvalArguments
    from agent_r1_trl.evaluation import EvaluationResult

COMMAND = "agent-r1-trl eval"
RESULT_FILE = "evaluation.json"
STEP = 0
"""Under which the trajectories are recorded."""


def run(argv: Sequence[str]) -> int:
    """Evaluate a model; returns the exit code."""
    from agent_r1_trl.cli.arguments import EvalArguments, TaskArguments
    from agent_r1_trl.cli.options import options_of, show_help
    from agent_r1_trl.rollout.limits import RolloutSettings

    def options() -> list[dict[str, Any]]:
        return options_of(Task_and_data=TaskArguments, Limits_of_a_rollout=RolloutSettings, Evaluation=EvalArguments)

    if show_help(COMMAND, argv, "Run a model on a data set and score it.", options):
        return 0
    from agent_r1_trl.cli.console import PlainConsole

    config_path, _ = split_config(argv)
    if config_path is not None:
        read_recipe(config_path)
    arguments = read_arguments(argv)
    console = PlainConsole(soft_wrap=True)
    result = run_evaluation(arguments, console)

    from agent_r1_trl.cli.tables import result_table

    title = f"{arguments.model_name_or_path or arguments.replay}, {result.num_examples} examples"
    PlainConsole().print(result_table(result, title=title))
    if arguments.output_dir:
        folder = write_result(result, arguments.output_dir)
        hint = f"agent-r1-trl view {folder} --terminal --split eval --step {STEP}"
        console.print(f"{folder / RESULT_FILE}; trajectories: {hint}")
    return 0


def read_arguments(argv: Sequence[str]) -> EvalArguments:
    """Parse the arguments.

    Raises:
        UsageError: there is a mistake in the recipe or on the command line.
    """
    from agent_r1_trl.cli.arguments import EvalArguments, TrainArguments
    from agent_r1_trl.cli.parser import RecipeParser
    from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig
    from agent_r1_trl.trainers.trl_arguments import ModelConfig

    parser = RecipeParser(
        (EvalArguments,),
        command=COMMAND,
        elsewhere=(TrainArguments, MultiTurnGRPOConfig, MultiTurnPPOConfig, ModelConfig),
    )
    (arguments,) = parser.parse(argv)
    if not arguments.model_name_or_path and not arguments.replay:
        raise UsageError("--model: not set. Pass the directory or the Hub id of the model to evaluate.")
    if not (arguments.eval_dataset_name or arguments.dataset_name):
        raise UsageError("--dataset: not set. Pass a data file, a directory or a Hub id to evaluate on.")
    return arguments


def run_evaluation(arguments: EvalArguments, console: Console, *, description: str = "evaluation") -> EvaluationResult:
    """Load data, environment and model, and evaluate with a progress bar.

    Raises:
        UsageError: the environment, the data or the model cannot be loaded.
        InfrastructureError: no trajectory could be played, or the engine failed.
    """
    from agent_r1_trl.cli.progress import trajectory_progress
    from agent_r1_trl.cli.resolve import check_first_row, make_folder, resolve_env
    from agent_r1_trl.evaluation import evaluate_model
    from agent_r1_trl.evaluation.loading import check_model_folder
    from agent_r1_trl.generation import SamplingParams
    from agent_r1_trl.journal import eval_journal
    from agent_r1_trl.trainers.signal_handlers import signals_raise

    set_rules(arguments.secret_names, arguments.secret_patterns)
    if arguments.replay:
        return _replay(arguments, _load(arguments))
    env_factory = resolve_env(arguments.env, arguments.env_kwargs)  # type: ignore[arg-type]
    rows = _load(arguments)
    data = arguments.eval_dataset_name or arguments.dataset_name
    check_first_row(f"env={arguments.env!r}", env_factory, repr(data), rows)
    if arguments.output_dir:
        make_folder("output_dir", arguments.output_dir)
    try:
        check_model_folder(arguments.model_name_or_path, flag="model_name_or_path")  # type: ignore[arg-type]
        num_trajectories = len(rows) * arguments.num_generations_eval
        with signals_raise(), trajectory_progress(console, description, num_trajectories) as on_trajectory:
            return evaluate_model(
                arguments.model_name_or_path,
                env_factory,
                rows,
                use_vllm=arguments.use_vllm,
                limits=arguments.rollout_limits(),
                dtype=arguments.dtype,
                chat_template=arguments.chat_template,
                response_template=arguments.response_template,
                chat_template_kwargs=arguments.chat_template_kwargs or None,  # type: ignore[arg-type]
                thinking=arguments.thinking,
                max_batch_size=arguments.generation_batch_rows,
                trust_remote_code=arguments.trust_remote_code,
                params=SamplingParams(temperature=arguments.eval_temperature),
                num_generations=arguments.num_generations_eval,
                seed=arguments.seed,
                retry_failed=arguments.retry_failed,
                on_trajectory=on_trajectory,
                journal=eval_journal(arguments.output_dir) if arguments.output_dir and arguments.journal else None,
            )
    except OSError as error:
        raise UsageError(model_problem(arguments.model_name_or_path, error)) from error
    except infrastructure_errors() as error:
        raise InfrastructureError(str(error)) from error
    except ValueError as error:  # limits, template, environment
        raise UsageError(str(error)) from error


def _replay(arguments: EvalArguments, rows: Any) -> EvaluationResult:
    from agent_r1_trl.evaluation.evaluator import replay_evaluation
    from agent_r1_trl.rollout import NothingPlayedError

    try:
        return replay_evaluation(
            str(arguments.replay), rows, num_generations=arguments.num_generations_eval, seed=arguments.seed
        )
    except (ValueError, NothingPlayedError) as error:
        raise UsageError(str(error)) from error


def write_result(result: EvaluationResult, output_dir: str | Path) -> Path:
    """Write `evaluation.json` and the trajectories; returns the folder."""
    from agent_r1_trl.recording import TrajectoryStore

    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT_FILE).write_text(result.to_json(), encoding="utf-8")
    TrajectoryStore(folder).write(STEP, result.trajectories, split="eval")
    return folder


def _load(arguments: EvalArguments) -> Any:
    from agent_r1_trl.cli.resolve import load_rows

    is_own = arguments.eval_dataset_name is not None
    return load_rows(
        "eval_dataset_name" if is_own else "dataset_name",
        arguments.eval_dataset_name or arguments.dataset_name,  # type: ignore[arg-type]
        config=arguments.dataset_config,
        split=arguments.dataset_test_split if is_own else arguments.dataset_train_split,
        limit=arguments.num_examples,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m agent_r1_trl.cli.eval`."""
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())

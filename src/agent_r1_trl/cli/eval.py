"""`agent-r1-trl eval`: run a model on data sets and score it, within the limits of a recipe, beside baselines.

agent-r1-trl eval --config recipe.yaml --model outputs/my-agent
agent-r1-trl eval --config recipe.yaml --model outputs/grpo outputs/ppo --baselines base naive_rag closed_book
agent-r1-trl eval --config recipe.yaml --endpoint https://api.openai.com/v1 --model gpt-4.1-mini
agent-r1-trl eval compare scores-before scores-after
"""

from __future__ import annotations

import shlex
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
from agent_r1_trl.cli.shipped_recipes import found_paths
from agent_r1_trl.safe_text import set_rules

if TYPE_CHECKING:
    from rich.console import Console

    from agent_r1_trl.cli.arguments import EvalArguments
    from agent_r1_trl.cli.eval_plan import PlannedRow
    from agent_r1_trl.evaluation import Agent, EvaluationResult, EvaluationTable, TableRow
    from agent_r1_trl.evaluation.agent import HostedAgent

COMMAND = "agent-r1-trl eval"
RESULT_FILE = "evaluation.json"
STEP = 0
"""Under which the trajectories are recorded."""
VIEW_OPTIONS = f"--terminal --split eval --step {STEP}"


def run(argv: Sequence[str]) -> int:
    """Evaluate a model; returns the exit code."""
    from agent_r1_trl.cli.arguments import EvalArguments, TaskArguments
    from agent_r1_trl.cli.endpoint_settings import EndpointSettings
    from agent_r1_trl.cli.options import options_of, show_help
    from agent_r1_trl.rollout.limits import RolloutSettings

    def options() -> list[dict[str, Any]]:
        return options_of(
            Task_and_data=TaskArguments,
            Limits_of_a_rollout=RolloutSettings,
            Hosted_models=EndpointSettings,
            Evaluation=EvalArguments,
        )

    if argv and argv[0] == "compare":
        from agent_r1_trl.cli.eval_compare import run as compare

        return compare(argv[1:])
    if show_help(COMMAND, argv, "Run a model on data sets and score it, beside baselines.", options):
        return 0
    from agent_r1_trl.cli.console import PlainConsole
    from agent_r1_trl.cli.eval_trackers import report

    config_path, _ = split_config(argv)
    if config_path is not None:
        read_recipe(config_path)
    arguments = read_arguments(argv)
    console = PlainConsole(soft_wrap=True)
    table = run_table(arguments, console)
    _show(table, arguments)
    if arguments.output_dir:
        folder = write_table(table, arguments.output_dir)
        for row in table.rows:
            place = folder / row_folder(table, row)
            shown_place = shlex.quote(str(place))
            console.print(f"{place / RESULT_FILE}; trajectories: agent-r1-trl view {shown_place} {VIEW_OPTIONS}")
    report(table, arguments)
    if lost := [f"{row.dataset}, {row.method}" for row in table.rows if row.result.is_lost]:
        raise InfrastructureError(f"nothing could be played of: {'; '.join(lost)}. The causes stand below the table.")
    return 0


def read_arguments(argv: Sequence[str]) -> EvalArguments:
    """Parse the arguments.

    Raises:
        UsageError: there is a mistake in the recipe or on the command line.
    """
    from agent_r1_trl.cli.arguments import EvalArguments, TrainArguments
    from agent_r1_trl.cli.eval_players import check_flags
    from agent_r1_trl.cli.parser import RecipeParser
    from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig
    from agent_r1_trl.trainers.trl_arguments import ModelConfig

    parser = RecipeParser(
        (EvalArguments,),
        command=COMMAND,
        elsewhere=(TrainArguments, MultiTurnGRPOConfig, MultiTurnPPOConfig, ModelConfig),
        private=("report_to", "run_name"),  # in a recipe they are about training
    )
    (arguments,) = parser.parse(argv)
    if not arguments.model_name_or_path and not arguments.replay:
        raise UsageError("--model: not set. Pass the directory or the Hub id of the model to evaluate.")
    if not (arguments.eval_dataset_name or arguments.dataset_name):
        raise UsageError("--dataset: not set. Pass a data file, a directory or a Hub id to evaluate on.")
    check_flags(arguments, argv)
    config_path, _ = split_config(argv)
    recipe = {} if config_path is None else read_recipe(config_path)
    trained = found_paths(recipe.get("model_name_or_path"))
    if arguments.base_model is None and [trained] != arguments.model_name_or_path:
        arguments.base_model = trained
    return arguments


def run_evaluation(arguments: EvalArguments, console: Console, *, description: str = "evaluation") -> EvaluationResult:
    """The last row of a table; see `run_table`."""
    return run_table(arguments, console, description=description).rows[-1].result


def run_table(arguments: EvalArguments, console: Console, *, description: str = "evaluation") -> EvaluationTable:
    """Load data, environment and models, and play each row of the table with a progress bar.

    Raises:
        UsageError: the environment, the data or a model cannot be loaded, or a baseline is not possible.
        InfrastructureError: not one trajectory could be played, or the engine failed.
    """
    from agent_r1_trl.cli.eval_plan import data_flag, make_plan
    from agent_r1_trl.cli.eval_resume import leave_failures, unfinished
    from agent_r1_trl.cli.resolve import check_first_row, make_folder, resolve_env
    from agent_r1_trl.evaluation import EvaluationTable
    from agent_r1_trl.evaluation.loading import check_model_folder
    from agent_r1_trl.rollout import check_some_played

    set_rules(arguments.secret_names, arguments.secret_patterns)
    if arguments.replay:
        plan = make_plan(arguments, lambda: None)
        results = [_replay(arguments, row) for row in plan]
    else:
        env_factory = resolve_env(arguments.env, arguments.env_kwargs)  # type: ignore[arg-type]
        plan = make_plan(arguments, env_factory)
        for row in plan:
            data = f"{data_flag(arguments)}={row.source['dataset_name']!r}"
            check_first_row(f"env={arguments.env!r}", row.env_factory, data, row.rows)
        if arguments.output_dir:
            make_folder("output_dir", arguments.output_dir)
        try:
            for row in plan:
                flag = "base_model" if row.model == arguments.base_model else "model_name_or_path"
                if not row.is_hosted:
                    check_model_folder(str(row.model), flag=flag)
            with unfinished(arguments) as goes_on:
                results = _play_all(arguments, plan, console, description, goes_on)
                check_some_played([item for result in results for item in result.trajectories])
        except infrastructure_errors() as error:
            raise InfrastructureError(str(error)) from error
        except UsageError:
            raise
        except ValueError as error:  # limits, template, environment
            raise UsageError(str(error)) from error
        if told := leave_failures(arguments, results):
            console.print(told)
    return EvaluationTable(
        rows=[_table_row(arguments, row, result) for row, result in zip(plan, results, strict=True)]
    )


def _table_row(arguments: EvalArguments, row: PlannedRow, result: EvaluationResult) -> TableRow:
    from agent_r1_trl.evaluation import TableRow
    from agent_r1_trl.evaluation.groups import split_by, with_cost

    result.settings = {**result.settings, **row.source}
    if arguments.price_per_million_tokens:
        result = with_cost(result, arguments.price_per_million_tokens, seed=arguments.seed)
    parts = {arguments.by: split_by(result, row.rows, arguments.by, seed=arguments.seed)} if arguments.by else {}
    model = result.settings["model"] if row.is_hosted and row.model is not None else row.model
    return TableRow(method=row.method, dataset=row.dataset, model=model, result=result, by=parts)


def _play_all(
    arguments: EvalArguments, plan: Sequence[PlannedRow], console: Console, description: str, goes_on: bool
) -> list[EvaluationResult]:
    """The results in the order of the plan; each model is loaded once."""
    from agent_r1_trl.cli.eval_players import opened
    from agent_r1_trl.trainers.signal_handlers import signals_raise

    results: dict[int, EvaluationResult] = {}
    for player in dict.fromkeys(row.player for row in plan):
        rows = {index: row for index, row in enumerate(plan) if row.player == player}
        try:
            with signals_raise(), opened(arguments, next(iter(rows.values()))) as agent:
                for index, row in rows.items():
                    title = f"{row.dataset}, {row.method}" if row.folder else description
                    results[index] = _play(arguments, row, agent, console, title, goes_on)
            del agent  # before the next one is loaded
        except OSError as error:
            raise UsageError(model_problem(player[0], error)) from error
    return [results[index] for index in range(len(plan))]


def _play(
    arguments: EvalArguments, row: PlannedRow, agent: Agent | HostedAgent, console: Console, title: str, goes_on: bool
) -> EvaluationResult:
    from agent_r1_trl.cli.eval_players import hosted_settings, sampling_params
    from agent_r1_trl.cli.eval_resume import identity_of
    from agent_r1_trl.cli.progress import trajectory_progress
    from agent_r1_trl.evaluation import evaluate
    from agent_r1_trl.journal import eval_journal

    journal = None
    if arguments.output_dir and arguments.journal:
        journal = eval_journal(Path(arguments.output_dir) / row.folder)
    with trajectory_progress(console, title, len(row.rows) * arguments.num_generations_eval) as on_trajectory:
        result = evaluate(
            agent.generator,
            row.env_factory,
            agent.chat,
            row.rows,
            limits=row.limits(agent.limits),
            params=sampling_params(arguments, is_hosted=row.is_hosted),
            num_generations=arguments.num_generations_eval,
            seed=arguments.seed,
            retry_failed=arguments.retry_failed,
            on_trajectory=on_trajectory,
            journal=journal,
            resume=goes_on,
            identity=identity_of(arguments, row),
            keep_going=True,
        )
    how = hosted_settings(agent.generator) if row.is_hosted else {"use_vllm": arguments.use_vllm}
    result.settings = {"model": agent.name, **how, **result.settings}
    console.print(f"{title}: {result.settings['played']}")
    return result


def _replay(arguments: EvalArguments, row: PlannedRow) -> EvaluationResult:
    from agent_r1_trl.evaluation.evaluator import replay_evaluation
    from agent_r1_trl.rollout import NothingPlayedError

    folder = Path(str(arguments.replay)) / row.folder if row.folder else str(arguments.replay)
    num_generations, seed = arguments.num_generations_eval, arguments.seed
    try:
        return replay_evaluation(folder, row.rows, num_generations=num_generations, seed=seed, keep_going=True)
    except (ValueError, NothingPlayedError) as error:
        raise UsageError(str(error)) from error


def _show(table: EvaluationTable, arguments: EvalArguments) -> None:
    from agent_r1_trl.cli.console import PlainConsole, table_console
    from agent_r1_trl.cli.tables import result_table, rows_table

    if len(table.rows) == 1 and not arguments.by:
        result = table.rows[0].result
        played = arguments.model_name_or_path[0] if arguments.model_name_or_path else arguments.replay
        title = f"{played}, {result.num_examples} examples"
        PlainConsole().print(result_table(result, title=title))
        return
    table_console().print(rows_table(table))
    PlainConsole(soft_wrap=True).print("\n".join(table.notes()))


def write_result(result: EvaluationResult, output_dir: str | Path) -> Path:
    """Write `evaluation.json`, `examples.jsonl` and the trajectories; returns the folder."""
    from agent_r1_trl.evaluation.comparison import EXAMPLES_FILE, write_examples
    from agent_r1_trl.recording import TrajectoryStore

    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT_FILE).write_text(result.to_json(), encoding="utf-8")
    write_examples(result, folder / EXAMPLES_FILE)
    TrajectoryStore(folder).write(STEP, result.trajectories, split="eval")
    return folder


def write_table(table: EvaluationTable, output_dir: str | Path) -> Path:
    """Write the table as JSON, Markdown and CSV, and each row with its trajectories; returns the folder."""
    folder = Path(output_dir)
    for row in table.rows:
        write_result(row.result, folder / row_folder(table, row))
    stem = folder / RESULT_FILE
    stem.write_text(table.to_json(), encoding="utf-8")
    stem.with_suffix(".md").write_text(table.to_markdown(), encoding="utf-8")
    stem.with_suffix(".csv").write_text(table.to_csv(), encoding="utf-8")
    return folder


def row_folder(table: EvaluationTable, row: TableRow) -> str:
    """Where a row is kept below output_dir; "" for the only one."""
    return "" if len(table.rows) == 1 else f"{row.dataset}/{row.method}"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m agent_r1_trl.cli.eval`."""
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())

"""What `eval` sends to trackers: its figures; the table and some trajectories, as tables where a tracker has them."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_trl.cli.errors import InfrastructureError, UsageError
from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.safe_text import shown, shown_all

if TYPE_CHECKING:
    from agent_r1_trl.cli.arguments import EvalArguments
    from agent_r1_trl.evaluation import EvaluationTable

TRACKERS = ("tensorboard", "trackio", "wandb")
TABLE, SAMPLES = "eval/table", "eval/trajectories"
MAX_SAMPLES = 16
"""Trajectories of each row of the table, from the first example on."""
SAMPLE_COLUMNS = ["data set", "method", "example", "prompt", "completion", "reward", "stop reason"]
_LOG_DIR = "TENSORBOARD_LOGGING_DIR"


def check_trackers(names: Sequence[str] | None, output_dir: str | None) -> list[str]:
    """The trackers to report to; "none" is none.

    Raises:
        UsageError: there is no such tracker, it is not installed, or there is no directory for its files.
    """
    chosen = [name for name in dict.fromkeys(names or ()) if name != "none"]
    for name in chosen:
        if name not in TRACKERS:
            hint = did_you_mean(name, TRACKERS)
            raise UsageError(f"report_to={name!r}: must be some of {', '.join(TRACKERS)}, or none.{hint} Set it so.")
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"report_to={name!r}: the package {name} is not installed. Install it (pip install {name}), or set "
                "report_to to none."
            )
    if "tensorboard" in chosen and not (output_dir or os.environ.get(_LOG_DIR)):
        raise UsageError(
            f"report_to='tensorboard': there is no directory for its files. Set output_dir, or "
            f"the variable {_LOG_DIR}."
        )
    return chosen


def report(table: EvaluationTable, arguments: EvalArguments) -> None:
    """Send a table to the trackers of `report_to`, as a run of its own.

    Raises:
        InfrastructureError: one of them failed; names it.
    """
    senders: dict[str, Callable[[EvaluationTable, EvalArguments, int], None]] = {
        "tensorboard": _to_tensorboard,
        "trackio": _to_trackio,
        "wandb": _to_wandb,
    }
    for name in arguments.report_to or ():
        try:
            senders[name](table, arguments, trained_steps(*arguments.model_name_or_path or ()))
        except Exception as error:  # each has errors of its own
            kept = f" The results are in {arguments.output_dir}: pass --replay with it, and nothing is played again."
            raise InfrastructureError(
                f"report_to={name!r}: {type(error).__name__}: {error}.{kept if arguments.output_dir else ''}"
            ) from error


def trained_steps(*models: str) -> int:
    """The steps after which runs or checkpoints in directories were saved; 0 where they differ or are not known."""
    steps = set()
    for model in models:
        try:
            state = json.loads((Path(model) / "trainer_state.json").read_text(encoding="utf-8"))
            steps.add(int(state["global_step"]))
        except (OSError, ValueError, KeyError, TypeError):
            return 0
    return steps.pop() if len(steps) == 1 else 0


def figures(table: EvaluationTable) -> dict[str, float]:
    """`eval/METRIC`, of several rows `eval/DATA SET/METHOD/METRIC`; what has no value is left out."""
    found: dict[str, float] = {}
    for row in table.rows:
        place = "eval" if len(table.rows) == 1 else f"eval/{row.dataset}/{row.method}"
        values = {**row.result.metrics, "num_examples": float(row.result.num_examples)}
        found |= {f"{place}/{name}": float(value) for name, value in values.items() if math.isfinite(value)}
    return found


def samples(table: EvaluationTable) -> list[list[str]]:
    """The first trajectories of each row as text, in `SAMPLE_COLUMNS`, written as `log_completions` writes them."""
    from agent_r1_trl.trainers.trl_logs import write_as_text

    lines = []
    for row in table.rows:
        for item in row.result.trajectories[:MAX_SAMPLES]:
            conversation = deque([item.prompt_messages, item.completion_messages])
            write_as_text(conversation)
            reward = f"{item.total_reward:g}" if item.is_scored else ""
            cells = [row.dataset, row.method, item.example_id, *conversation, reward, item.stop_reason.value]
            lines.append([shown(str(cell)) for cell in cells])
    return lines


def _tables(table: EvaluationTable, make: Callable[..., Any]) -> dict[str, Any]:
    headings, lines = table.cells()
    return {
        TABLE: make(columns=headings, data=[[shown(cell) for cell in line] for line in lines]),
        SAMPLES: make(columns=SAMPLE_COLUMNS, data=samples(table)),
    }


def _run(table: EvaluationTable, arguments: EvalArguments) -> dict[str, Any]:
    """Name and configuration of the run."""
    name = f"eval-{Path(arguments.output_dir).name}" if arguments.output_dir else "eval"
    settings = {f"{row.dataset}/{row.method}": {"model": row.model, **row.result.settings} for row in table.rows}
    return {"name": arguments.run_name or name, "config": json.loads(json.dumps(shown_all(settings), default=repr))}


def _to_tensorboard(table: EvaluationTable, arguments: EvalArguments, step: int) -> None:
    from torch.utils.tensorboard import SummaryWriter

    folder = os.environ.get(_LOG_DIR) or str(Path(str(arguments.output_dir)) / "runs" / "eval")
    with SummaryWriter(log_dir=folder) as writer:
        for name, value in figures(table).items():
            writer.add_scalar(name, value, step)
        writer.add_text(TABLE, shown(table.to_markdown()), step)
        for number, line in enumerate(samples(table)):
            cells = [f"{title}:\n\n{_block(cell)}" for title, cell in zip(SAMPLE_COLUMNS, line, strict=True)]
            writer.add_text(f"{SAMPLES}/{number}", "\n\n".join(cells), step)


def _block(text: str) -> str:
    """Text that Markdown leaves as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _to_trackio(table: EvaluationTable, arguments: EvalArguments, step: int) -> None:
    import trackio

    trackio.init(project=os.environ.get("TRACKIO_PROJECT") or "huggingface", resume="allow", **_run(table, arguments))
    try:
        trackio.log({**figures(table), **_tables(table, trackio.Table), "train/global_step": step})
    finally:
        trackio.finish()


def _to_wandb(table: EvaluationTable, arguments: EvalArguments, step: int) -> None:
    import wandb

    project = os.environ.get("WANDB_PROJECT") or "huggingface"
    with wandb.init(project=project, job_type="eval", **_run(table, arguments)) as run:
        run.log({**figures(table), **_tables(table, wandb.Table), "train/global_step": step})

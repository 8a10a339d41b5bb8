"""Several evaluations side by side: a row for each method on each data set; as JSON and Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_r1_trl.evaluation.comparison import EXAMPLES_FILE, write_examples
from agent_r1_trl.evaluation.result import EvaluationResult, interval_text, number_text, to_json
from agent_r1_trl.recording import TrajectoryStore

RESULT_FILE = "evaluation.json"
STEP = 0
"""Under which the trajectories are recorded."""
FAILED = "infrastructure_failure_rate"
COLUMNS = {
    "exact_match": "EM",
    "f1": "F1",
    "success": "success",
    "reward": "reward",
    "turns": "turns",
    "tool_calls": "calls",
    "completion_tokens": "tokens",
    FAILED: "failed",
}
"""Metric -> heading; a metric that no row has is left out, and so are failures where there are none."""
WITH_INTERVAL = ("exact_match", "f1", "success", "reward")


@dataclass(kw_only=True)
class TableRow:
    """One method on one data set."""

    method: str
    dataset: str
    result: EvaluationResult
    model: str | None = None
    by: dict[str, dict[str, EvaluationResult]] = field(default_factory=dict)
    """Column -> tag -> the result of the examples with this tag."""

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON data: that of the result, what was evaluated, and the parts."""
        record = {"method": self.method, "dataset": self.dataset, **self.result.to_dict()}
        for column, tags in self.by.items():
            parts = {tag: part.to_dict() for tag, part in tags.items()}
            for part in parts.values():
                del part["duration_s"], part["settings"]
            record.setdefault("by", {})[column] = parts
        return record

    def lines(self) -> list[tuple[str, EvaluationResult]]:
        """Part with its result: "" for the whole, then each tag."""
        tags = [(f"{column}={tag}", part) for column, tags in self.by.items() for tag, part in tags.items()]
        return [("", self.result), *tags]


@dataclass(kw_only=True)
class EvaluationTable:
    """The rows of a table, in its order."""

    rows: list[TableRow] = field(default_factory=list)

    @property
    def columns(self) -> dict[str, str]:
        """Metric -> heading, of the metrics that some row has."""
        names = list(dict.fromkeys(name for row in self.rows for name in row.result.metrics))
        if not any(row.result.failures for row in self.rows):
            names = [name for name in names if name != FAILED]
        tries = {name: name for name in names if name.startswith("pass@")}
        known = {name: title for name, title in COLUMNS.items() if name in names}
        ahead = {name: title for name, title in known.items() if name in WITH_INTERVAL}
        return ahead | tries | known

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Headings, and the cells of each row as text."""
        lines = []
        for row in self.rows:
            for part, result in row.lines():
                cells = [f"{row.dataset}", f"- {part}" if part else row.method, str(result.num_examples)]
                for name in self.columns:
                    bounds = result.intervals.get(name, ()) if name in WITH_INTERVAL else ()
                    cells.append(f"{number_text(result.metrics.get(name, math.nan))} {interval_text(bounds)}".strip())
                lines.append(cells)
        return ["data set", "method", "examples", *self.columns.values()], lines

    def to_dict(self) -> dict[str, Any]:
        """A single row is returned flat; several are listed under `rows`."""
        if len(self.rows) == 1:
            return self.rows[0].to_dict()
        return {"rows": [row.to_dict() for row in self.rows]}

    def to_markdown(self) -> str:
        """A Markdown table, and below it how the rows were played."""
        headings, lines = self.cells()
        body = [headings, ["---"] * 2 + ["---:"] * (len(headings) - 2), *lines]
        escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in body]
        table = "".join(f"| {' | '.join(line)} |\n" for line in escaped)
        return table + "".join(f"\n- {' '.join(note.split())}" for note in self.notes()) + "\n"

    def write(self, output_dir: str | Path) -> list[Path]:
        """Write the table as JSON and Markdown, and each row with its trajectories; returns the rows' folders."""
        folder, is_alone = Path(output_dir), len(self.rows) == 1
        places = [folder if is_alone else folder / row.dataset / row.method for row in self.rows]
        for row, place in zip(self.rows, places, strict=True):
            write_result(row.result, place)
        (folder / RESULT_FILE).write_text(to_json(self.to_dict()), encoding="utf-8")
        (folder / RESULT_FILE).with_suffix(".md").write_text(self.to_markdown(), encoding="utf-8")
        return places

    def notes(self) -> list[str]:
        """Which model plays each method, and how."""
        notes: dict[str, None] = {}
        for row in self.rows:
            played = row.result.settings.get("played")
            notes[f"{row.method}: {row.model or 'a loaded model'}{f', {played}' if played else ''}"] = None
        failed = [
            f"{row.dataset}, {row.method}: {row.result.metrics[FAILED]:.1%} failed for no fault of the model and "
            f"stand in no other figure: {row.result.failures}."
            for row in self.rows
            if row.result.failures
        ]
        return [*notes, "In brackets: 95% interval over examples (bootstrap; Wilson's where each is 0 or 1).", *failed]


def write_result(result: EvaluationResult, output_dir: str | Path) -> None:
    """Write `evaluation.json`, `examples.jsonl` and the trajectories into a folder."""
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT_FILE).write_text(result.to_json(), encoding="utf-8")
    write_examples(result, folder / EXAMPLES_FILE)
    TrajectoryStore(folder).write(STEP, result.trajectories, split="eval")


def short_names(names: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """Short, distinct names of models or data sets, fit for folders: as many last parts as tell their paths apart.

    >>> short_names(["out/grpo", "Qwen/Qwen2.5-0.5B"]), short_names(["grpo/checkpoint-8", "ppo/checkpoint-8"])
    (['grpo', 'Qwen2.5-0.5B'], ['grpo_checkpoint-8', 'ppo_checkpoint-8'])

    Args:
        names: paths or ids.
        taken: what none may be called.
    """
    parts = [[part for part in name.split("/") if part.strip(".")] or ["unnamed"] for name in names]
    for length in range(1, max(map(len, parts), default=1) + 1):
        labels = ["_".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels) and not set(labels) & set(taken):
            return labels
    return [f"{label}_{index}" for index, label in enumerate(labels, start=1)]

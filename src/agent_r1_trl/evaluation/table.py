"""Several evaluations side by side: a row for each method on each data set; as JSON and Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_r1_trl.environments.data_files import tags_of
from agent_r1_trl.evaluation.comparison import EXAMPLES_FILE, write_examples
from agent_r1_trl.evaluation.result import OF_EVERY_TRAJECTORY, EvaluationResult, interval_text, number_text, to_json
from agent_r1_trl.recording import TrajectoryStore
from agent_r1_trl.trajectory import own_numbers

RESULT_FILE = "evaluation.json"
STEP = 0
"""Under which the trajectories are recorded."""
LOST = "lost_rate"
COLUMNS = {
    "exact_match": "EM",
    "f1": "F1",
    "success": "success",
    "reward": "reward",
    "turns": "turns",
    "tool_calls": "calls",
    "completion_tokens": "tokens",
    LOST: "lost",
}
"""Metric -> heading; a metric that no row has is left out, and so is `lost` where nothing was."""
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


@dataclass(kw_only=True)
class EvaluationTable:
    """The rows of a table, in its order."""

    rows: list[TableRow] = field(default_factory=list)

    @property
    def columns(self) -> dict[str, str]:
        """Metric -> heading, of the metrics that some row has."""
        names = list(dict.fromkeys(name for row in self.rows for name in row.result.metrics))
        if not any(row.result.failures for row in self.rows):
            names = [name for name in names if name != LOST]
        known = {name: title for name, title in COLUMNS.items() if name in names}
        columns = {name: title for name, title in known.items() if name in WITH_INTERVAL}
        columns |= {name: name for name in self.own_metrics}
        columns |= {name: name for name in names if name.startswith(("pass@", "pass^"))}
        return columns | known

    @property
    def own_metrics(self) -> list[str]:
        """The numbers of the user's own that have a column, from `Trajectory.info`."""
        names = dict.fromkeys(name for row in self.rows for name in row.result.metrics)
        return own_numbers(name for name in names if name not in OF_EVERY_TRAJECTORY and not name.startswith("pass"))

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Headings, and the cells of each row as text."""
        lines = []
        with_interval = (*WITH_INTERVAL, *self.own_metrics)
        for row in self.rows:
            results = {row.method: row.result}
            for column, parts in row.by.items():
                results |= {f"- {column}={tag}": part for tag, part in parts.items()}
            for name, result in results.items():
                cells = [row.dataset, name, str(result.num_examples)]
                for metric in self.columns:
                    bounds = result.intervals.get(metric, ()) if metric in with_interval else ()
                    value = number_text(result.metrics.get(metric, math.nan))
                    cells.append(f"{value} {interval_text(bounds)}".strip())
                lines.append(cells)
        return ["data set", "method", "examples", *self.columns.values()], lines

    def to_dict(self) -> dict[str, Any]:
        """A single row is returned flat; several are listed under `rows`."""
        if len(self.rows) == 1:
            return self.rows[0].to_dict()
        return {"rows": [row.to_dict() for row in self.rows]}

    def to_markdown(self) -> str:
        """A Markdown table, and below it how the rows were sampled."""
        headings, lines = self.cells()
        alignment = ["---"] * 2 + ["---:"] * (len(headings) - 2)
        text = ""
        for cells in (headings, alignment, *lines):
            escaped = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
            text += f"| {' | '.join(escaped)} |\n"
        for note in self.notes():
            text += f"\n- {' '.join(note.split())}"
        return text + "\n"

    def write(self, output_dir: str | Path) -> list[Path]:
        """Write the table as JSON and Markdown, and each row with its trajectories; returns the rows' folders."""
        folder, is_alone = Path(output_dir), len(self.rows) == 1
        places = [folder if is_alone else folder / row.dataset / row.method for row in self.rows]
        for row, place in zip(self.rows, places, strict=True):
            place.mkdir(parents=True, exist_ok=True)
            (place / RESULT_FILE).write_text(to_json(row.result.to_dict()), encoding="utf-8")
            write_examples(row.result, place / EXAMPLES_FILE)
            TrajectoryStore(place).write(STEP, row.result.trajectories, split="eval")
        (folder / RESULT_FILE).write_text(to_json(self.to_dict()), encoding="utf-8")
        (folder / RESULT_FILE).with_suffix(".md").write_text(self.to_markdown(), encoding="utf-8")
        return places

    def notes(self) -> list[str]:
        """Which model answers for each method, and how; and the panel of each data set."""
        notes: dict[str, None] = {}
        for row in self.rows:
            sampling = row.result.settings.get("played")
            notes[f"{row.method}: {row.model or 'a loaded model'}{f', {sampling}' if sampling else ''}"] = None
        panels = [(row.dataset, row.result.panel) for row in self.rows if row.result.panel]
        notes |= dict.fromkeys(f"{dataset}: panel {panel}" for dataset, panel in panels)
        lost = [
            f"{row.dataset}, {row.method}: {row.result.metrics[LOST]:.1%} of the trajectories were lost, for no fault "
            f"of the model, and count in no other figure: {row.result.failures}."
            for row in self.rows
            if row.result.failures
        ]
        return [*notes, "In brackets: 95% interval over examples (bootstrap; Wilson's where each is 0 or 1).", *lost]


def short_names(names: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """Short, distinct names of paths or ids, fit for folders and none `taken`: as many last parts as tell them apart.

    >>> short_names(["out/grpo", "Qwen/Qwen2.5-0.5B"]), short_names(["grpo/checkpoint-8", "ppo/checkpoint-8"])
    (['grpo', 'Qwen2.5-0.5B'], ['grpo_checkpoint-8', 'ppo_checkpoint-8'])
    """
    parts = [[part for part in name.split("/") if part.strip(".")] or ["unnamed"] for name in names]
    for length in range(1, max(map(len, parts), default=1) + 1):
        labels = ["_".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels) and not set(labels) & set(taken):
            return labels
    return [f"{label}_{index}" for index, label in enumerate(labels, start=1)]


def split_by(
    result: EvaluationResult, examples: Iterable[Mapping[str, Any]], column: str, *, seed: int = 0
) -> dict[str, EvaluationResult]:
    """The result of the examples of each tag (see `tags_of`), in the order of their first appearance."""
    tags = tags_of(examples, column)
    parts = {}
    for tag in dict.fromkeys(tags):
        chosen = [index for index, other in enumerate(tags) if other == tag]
        parts[tag] = EvaluationResult.from_rows(
            [result.rows[index] for index in chosen],
            example_ids=[result.example_ids[index] for index in chosen],
            seed=seed,
            num_generations=result.num_generations,
        )
    return parts

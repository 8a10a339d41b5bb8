"""Several evaluations side by side: a row for each method on each data set; as JSON, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.evaluation.result import EvaluationResult

FAILED = "infrastructure_failure_rate"
COLUMNS = {
    "exact_match": "EM",
    "f1": "F1",
    "success": "success",
    "reward": "reward",
    "turns": "turns",
    "tool_calls": "calls",
    "completion_tokens": "tokens",
    "cost_per_1000": "cost of 1000",
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
        if self.by:
            parts = {column: {tag: _part(part) for tag, part in tags.items()} for column, tags in self.by.items()}
            record["by"] = parts
        return record

    def lines(self) -> list[tuple[str, EvaluationResult]]:
        """Method with its result, then each tag with its own."""
        tags = [(f"- {column}={tag}", part) for column, tags in self.by.items() for tag, part in tags.items()]
        return [(self.method, self.result), *tags]


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
        columns = self.columns
        headings = ["data set", "method", "examples", *columns.values()]
        lines = [
            [row.dataset, method, str(result.num_examples), *(_cell(result, name) for name in columns)]
            for row in self.rows
            for method, result in row.lines()
        ]
        return headings, lines

    def to_dict(self) -> dict[str, Any]:
        """Of one row that row, flat; else `rows`."""
        if len(self.rows) == 1:
            return self.rows[0].to_dict()
        return {"rows": [row.to_dict() for row in self.rows]}

    def to_json(self) -> str:
        """`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, default=repr) + "\n"

    def to_markdown(self) -> str:
        """A Markdown table, and below it how the rows were played."""
        headings, lines = self.cells()
        body = [headings, ["---"] * 2 + ["---:"] * (len(headings) - 2), *lines]
        text = "".join(f"| {' | '.join(map(_escaped, line))} |\n" for line in body)
        return f"{text}\n{''.join(f'- {line}{chr(10)}' for line in map(_one_line, self.notes()))}"

    def to_csv(self) -> str:
        """A line for each row with every metric, its interval as `NAME_low` and `NAME_high`."""
        names = list(dict.fromkeys(name for row in self.rows for name in row.result.metrics))
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        ends = [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
        writer.writerow(["dataset", "method", "part", "model", "num_examples", "num_generations", *ends])
        for row in self.rows:
            for tag, result in row.lines():
                values = []
                for name in names:
                    bounds = result.intervals.get(name, (math.nan, math.nan))
                    values += [_plain(value) for value in (result.metrics.get(name, math.nan), *bounds)]
                part = "" if result is row.result else tag.removeprefix("- ")
                head = [row.dataset, row.method, part, row.model or "", result.num_examples, result.num_generations]
                writer.writerow([*head, *values])
        return file.getvalue()

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


def dataset_labels(names: Sequence[str]) -> list[str]:
    """Short, distinct names of data sets, fit for folders: a file's name without its ending, else the whole path.

    >>> dataset_labels(["data/test.jsonl", "hotpotqa/dev"]), dataset_labels(["a/b.jsonl", "a_b.jsonl", "c/b.jsonl"])
    (['test', 'hotpotqa_dev'], ['a_b.jsonl', 'a_b', 'c_b.jsonl'])
    """
    short = [_stem(name) for name in names]
    labels = [label if short.count(label) == 1 else _whole(name) for label, name in zip(short, names, strict=True)]
    return [
        label if labels.count(label) == 1 else f"{label}_{1 + labels[:index].count(label)}"
        for index, label in enumerate(labels)
    ]


def model_labels(names: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """Short, distinct names of models, fit for folders: as many last parts of their paths as tell them apart.

    >>> model_labels(["out/grpo", "Qwen/Qwen2.5-0.5B"]), model_labels(["grpo/checkpoint-8", "ppo/checkpoint-8"])
    (['grpo', 'Qwen2.5-0.5B'], ['grpo_checkpoint-8', 'ppo_checkpoint-8'])

    Args:
        names: directories or ids.
        taken: what no model may be called.
    """
    parts = [[part for part in name.split("/") if part.strip(".")] or ["model"] for name in names]
    for length in range(1, max(map(len, parts), default=1) + 1):
        labels = ["_".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels) and not set(labels) & set(taken):
            return labels
    return [f"{label}_{index}" for index, label in enumerate(labels, start=1)]


def _stem(name: str) -> str:
    path, dot, ending = name.rpartition(".")
    stem = path.rpartition("/")[2] if dot and "/" not in ending else ""
    return stem if stem.strip(".") else _whole(name)


def _whole(name: str) -> str:
    return name.strip("./").replace("/", "_") or "data"


def _part(result: EvaluationResult) -> dict[str, Any]:
    return {name: value for name, value in result.to_dict().items() if name not in ("duration_s", "settings")}


def _cell(result: EvaluationResult, name: str) -> str:
    value = result.metrics.get(name, math.nan)
    if not math.isfinite(value):
        return "-"
    text = _number(value)
    low, high = result.intervals.get(name, (math.nan, math.nan))
    has_interval = name in WITH_INTERVAL and math.isfinite(low) and math.isfinite(high)
    return f"{text} [{_number(low)}, {_number(high)}]" if has_interval else text


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _plain(value: float) -> Any:
    return value if math.isfinite(value) else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

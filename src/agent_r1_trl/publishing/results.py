"""The results of an evaluation in a card: one method on one data set, or the table that `agent-r1-trl eval` wrote.

The model's own results go into the metadata as well (`model-index`); those of the baselines stand beside them in the
text only, because the Hub takes what is in the metadata for the model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_r1_trl.publishing.names import data_name, is_hub_id
from agent_r1_trl.safe_text import markdown, markdown_code

MODEL = "model"
"""Method: the evaluated model, with its tools."""
METHODS = {
    MODEL: "this model with its tools",
    "base": "the model before the training, with the same tools",
    "naive_rag": "one search with the question, one answer",
    "closed_book": "no tools, one answer",
}
NOT_METRICS = ("num_examples", "num_generations", "duration_s")
"""Numbers of an evaluation that are no results."""
HEADING = "## Results"

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One method on one data set."""

    metrics: dict[str, tuple[float, Interval | None]]
    """Metric -> (value, 95% interval)."""
    method: str = MODEL
    data: str = ""
    """Hub id or path of the data set; its short name where that is all that is known."""
    num_examples: int | None = None
    temperature: float | None = None
    part: dict[str, str] = field(default_factory=dict)
    """`config` and `split` of a data set of the Hub."""


def of_model(evaluation: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """An `evaluation.json` in which the rows of the model in a directory have the method "model".

    In a table of several models each has a name of its own.
    """
    rows = evaluation.get("rows")
    if not isinstance(rows, list) or any(_mapping(row).get("method") == MODEL for row in rows):
        return dict(evaluation)
    return {**evaluation, "rows": [{**row, "method": MODEL} if _is_at(row, folder) else row for row in rows]}


def _is_at(row: Any, folder: Path) -> bool:
    row = _mapping(row)
    model = _mapping(row.get("settings")).get("model")
    is_baseline = row.get("method") in METHODS
    return not is_baseline and isinstance(model, str) and Path(model).resolve() == folder.resolve()


def scores_of(evaluation: Mapping[str, Any]) -> list[Scores]:
    """The rows of an `evaluation.json`; what has no finite value is left out."""
    rows = evaluation.get("rows", [evaluation])
    rows = [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
    return [found for found in map(_scores_of, rows) if found.metrics]


def _scores_of(row: Mapping[str, Any]) -> Scores:
    intervals, settings = (_mapping(row.get(name)) for name in ("intervals", "settings"))
    metrics = {
        str(name): (float(value), _interval(intervals.get(name)))
        for name, value in row.items()
        if name not in NOT_METRICS and _is_number(value)
    }
    num, temperature = row.get("num_examples"), settings.get("temperature")
    parts = {"config": settings.get("dataset_config"), "split": settings.get("dataset_split")}
    return Scores(
        metrics=metrics,
        method=str(row.get("method") or MODEL),
        data=str(settings.get("dataset_name") or row.get("dataset") or ""),
        num_examples=num if isinstance(num, int) and not isinstance(num, bool) else None,
        temperature=float(temperature) if _is_number(temperature) else None,  # type: ignore[arg-type]
        part={name: str(value) for name, value in parts.items() if value},
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _interval(bounds: Any) -> Interval | None:
    is_pair = isinstance(bounds, list | tuple) and len(bounds) == 2 and all(map(_is_number, bounds))
    return (float(bounds[0]), float(bounds[1])) if is_pair else None


# ---------------------------------------------------------------- text


def results_section(evaluation: Mapping[str, Any], data: str = "") -> str:
    """The figures of an `evaluation.json` with their intervals, a table for each data set.

    Args:
        evaluation: its content.
        data: name of the data set where the evaluation does not name one.
    """
    tables: dict[str, list[Scores]] = {}
    for scores in scores_of(evaluation):
        tables.setdefault(scores.data or data, []).append(scores)
    if not tables:
        return ""
    parts = [HEADING]
    for source, listed in tables.items():
        name = data_name(source)
        parts += [f"### {markdown(name or 'without a name')}"] if len(tables) > 1 else []
        parts += [_head(listed[0], name), _table(listed)]
    named = dict.fromkeys(scores.method for listed in tables.values() for scores in listed)
    if set(named) - {MODEL}:
        parts.append("\n".join(f"- {markdown(name)}: {METHODS[name]}" for name in named if name in METHODS))
    return "\n\n".join(part for part in parts if part)


def _head(scores: Scores, data: str) -> str:
    num = "?" if scores.num_examples is None else scores.num_examples
    of_data = f" of {markdown_code(data)}" if data else ""
    drawn = "" if scores.temperature is None else f", sampled at temperature {scores.temperature:g}"
    decoding = ", greedy" if scores.temperature == 0 else drawn
    return f"{num} examples{of_data}{decoding}; 95% intervals (bootstrap; Wilson's where each is 0 or 1)."


def _table(listed: Sequence[Scores]) -> str:
    """A line for each metric: with value and interval of the one method, or a column for each of several."""
    names = list(dict.fromkeys(name for scores in listed for name in scores.metrics))
    if len(listed) == 1:
        columns = ["value", "95% interval"]
        cells = [list(_value_and_interval(listed[0], name)) for name in names]
    else:
        columns = [markdown(scores.method) for scores in listed]
        cells = [[_both(scores, name) for scores in listed] for name in names]
    rows = [[markdown(name), *line] for name, line in zip(names, cells, strict=True)]
    return "\n".join(_line(line) for line in (["metric", *columns], ["---"] * (len(columns) + 1), *rows))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _value_and_interval(scores: Scores, name: str) -> tuple[str, str]:
    if name not in scores.metrics:
        return "", ""
    value, bounds = scores.metrics[name]
    return f"{value:.4g}", "" if bounds is None else f"{bounds[0]:.4g} to {bounds[1]:.4g}"


def _both(scores: Scores, name: str) -> str:
    value, bounds = _value_and_interval(scores, name)
    return f"{value} ({bounds})" if bounds else value


# ---------------------------------------------------------------- metadata


def model_index(name: str, evaluation: Mapping[str, Any], data: str = "") -> list[dict[str, Any]]:
    """The model's results in the Hub's form: one for each data set, each metric with its interval in `args`.

    Args:
        name: of the model.
        evaluation: the content of an `evaluation.json`.
        data: name of the data set where the evaluation does not name one.
    """
    results = [_result(scores, data) for scores in scores_of(evaluation) if scores.method == MODEL]
    return [{"name": name, "results": results}] if results else []


def _result(scores: Scores, data: str) -> dict[str, Any]:
    source = scores.data or data
    named = data_name(source) or "unknown"
    dataset = {"type": named, "name": named} | (scores.part if is_hub_id(source) else {})
    metrics: list[dict[str, Any]] = []
    for name, (value, bounds) in scores.metrics.items():
        arguments: dict[str, Any] = {} if scores.num_examples is None else {"num_examples": scores.num_examples}
        arguments |= {} if bounds is None else {"interval_95": list(bounds)}
        metric = {"type": name, "name": name.replace("_", " "), "value": value}
        metrics.append(metric | ({"args": arguments} if arguments else {}))
    return {
        "task": {"type": "text-generation", "name": "Multi-turn tool use"},
        "dataset": dataset,
        "metrics": metrics,
    }

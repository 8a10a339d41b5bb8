"""Two evaluations of the same examples: the difference of each metric with a paired bootstrap interval."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from agent_r1_trl.evaluation.result import EvaluationResult, difference

EXAMPLES_FILE = "examples.jsonl"


@dataclass(kw_only=True)
class MetricChange:
    """One metric in two evaluations, B against A."""

    before: float
    after: float
    low: float
    """The lower end of the 95% interval of after - before."""
    high: float
    pairs: dict[str, tuple[float, float]]
    """By the ids of the examples that have the metric in both: its values in A and B."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """On how many examples B is higher, lower and equal."""
        signs = [(two > one) - (two < one) for one, two in self.pairs.values()]
        return signs.count(1), signs.count(-1), signs.count(0)


def write_examples(result: EvaluationResult, path: str | Path) -> None:
    """One line for each example: its id, seed and row's digest, the sums of each metric, and its attempts."""
    size = result.num_generations
    lines = []
    for index, (example_id, row) in enumerate(zip(result.example_ids, result.rows, strict=True)):
        group = result.trajectories[index * size : (index + 1) * size]
        attempts = [
            {"reward": item.total_reward, "stop_reason": item.stop_reason.value, "turns": len(item.env_turns)}
            for item in group
        ]
        line = {"example_id": example_id, "reset_seed": result.reset_seeds[index], "sums": row, "attempts": attempts}
        if result.row_digests:
            line["row"] = result.row_digests[index]
        lines.append(json.dumps(line))
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_examples(path: str | Path) -> EvaluationResult:
    """The result in a file that `write_examples` wrote, without trajectories.

    Raises:
        ValueError: a line is broken.
    """
    ids = []
    seeds = []
    digests = []
    rows = []
    sizes = [1]
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            ids.append(str(record["example_id"]))
            seeds.append(int(record["reset_seed"]))
            digests += [str(record["row"])] if "row" in record else []  # older files have none
            rows.append({name: (float(pair[0]), float(pair[1])) for name, pair in record["sums"].items()})
            sizes.append(len(record["attempts"]))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: no example of an evaluation ({error}). Evaluate again."
            ) from error
    return EvaluationResult.from_rows(
        rows,
        example_ids=ids,
        reset_seeds=seeds,
        row_digests=digests if len(digests) == len(ids) else [],
        num_generations=max(sizes),
    )


def compare(before: EvaluationResult, after: EvaluationResult, *, seed: int = 0) -> dict[str, MetricChange]:
    """Each metric that both have.

    Raises:
        ValueError: they are not about the same panel; names what differs.
    """
    check_panels(before, after)
    return {
        name: MetricChange(before=one, after=two, low=low, high=high, pairs=_pairs(before, after, name))
        for name, (one, two, low, high) in difference(before, after, seed=seed).items()
    }


def check_panels(before: EvaluationResult, after: EvaluationResult) -> None:
    """Refuse to compare results of different panels.

    Raises:
        ValueError: the panels differ; says what each is, and where they differ first.
    """
    if before.panel != after.panel:
        raise ValueError(
            f"the panels differ: {_panel_text(before)} in the first evaluation, {_panel_text(after)} in the second; "
            f"{_first_difference(before, after)}. Pass two evaluations of the same rows in the same order, with one "
            "num_generations and seed."
        )


def changed_rows(before: EvaluationResult, after: EvaluationResult) -> list[str]:
    """Ids of the examples whose row has another content in the second; [] where one of them has no digests."""
    if not before.row_digests or not after.row_digests:
        return []
    found = zip(before.example_ids, before.row_digests, after.row_digests, strict=True)
    return [example_id for example_id, one, two in found if one != two]


def _panel_text(result: EvaluationResult) -> str:
    return f"{result.panel} (examples: {result.num_examples}, attempts at each: {result.num_generations})"


def _first_difference(before: EvaluationResult, after: EvaluationResult) -> str:
    both = zip_longest(before.example_ids, after.example_ids)
    for number, (one, two) in enumerate(both, start=1):
        if one != two:
            texts = ("missing" if name is None else repr(name) for name in (one, two))
            return f"row {number} is {' in the first and '.join(texts)} in the second"
    for name, one, two in zip_longest(before.example_ids, before.reset_seeds, after.reset_seeds):
        if one != two:
            return f"the seed of {name!r} is {one} in the first and {two} in the second"
    return "the examples and their seeds are the same, the attempts are not"


def _pairs(before: EvaluationResult, after: EvaluationResult, name: str) -> dict[str, tuple[float, float]]:
    """By example, the metric in both; ids that occur twice are numbered."""
    found: dict[str, tuple[float, float]] = {}
    for number, (example_id, *rows) in enumerate(zip(before.example_ids, before.rows, after.rows, strict=True)):
        (first, first_count), (second, second_count) = (row.get(name, (0.0, 0.0)) for row in rows)
        if first_count and second_count:
            key = f"{example_id} (row {number + 1})" if example_id in found else example_id
            found[key] = (first / first_count, second / second_count)
    return found

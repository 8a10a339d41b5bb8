"""Two evaluations of the same examples: is the difference more than chance?

- the difference of each metric with a paired bootstrap interval (`difference`)
- a permutation test: if the two were alike, each example's change could as well have the other sign

An example counts once, with the mean over its attempts.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_trl.evaluation.result import EvaluationResult, difference

if TYPE_CHECKING:
    import numpy as np

EXAMPLES_FILE = "examples.jsonl"
NUM_PERMUTATIONS = 10_000
MAX_EXACT = 12
"""Examples that differ, up to which all signs are tried."""


@dataclass(kw_only=True)
class Change:
    """One metric in two evaluations, B against A."""

    before: float
    after: float
    low: float
    """Of the 95% interval of after - before."""
    high: float
    p_value: float
    """Two-sided; NaN where no example has the metric in both."""
    num_better: int
    """Examples on which the metric is higher in B."""
    num_worse: int
    num_equal: int
    pairs: dict[str, tuple[float, float]]
    """By the ids of the examples that have the metric in both: its values in A and B."""


def write_examples(result: EvaluationResult, path: str | Path) -> None:
    """One line for each example: its id, the sums of each metric, and its attempts."""
    size = result.num_generations
    lines = []
    for index, (example_id, row) in enumerate(zip(result.example_ids, result.rows, strict=True)):
        group = result.trajectories[index * size : (index + 1) * size]
        attempts = [
            {"reward": item.total_reward, "stop_reason": item.stop_reason.value, "turns": len(item.env_turns)}
            for item in group
        ]
        lines.append(json.dumps({"example_id": example_id, "sums": row, "attempts": attempts}))
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_examples(path: str | Path) -> EvaluationResult:
    """The result in a file that `write_examples` wrote, without trajectories.

    Raises:
        ValueError: a line is broken.
    """
    ids, rows, sizes = [], [], [1]
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            ids.append(str(record["example_id"]))
            rows.append({name: (float(pair[0]), float(pair[1])) for name, pair in record["sums"].items()})
            sizes.append(len(record["attempts"]))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: no example of an evaluation ({error}). Evaluate again."
            ) from error
    return EvaluationResult.from_rows(rows, example_ids=ids, num_generations=max(sizes))


def compare(before: EvaluationResult, after: EvaluationResult, *, seed: int = 0) -> dict[str, Change]:
    """Each metric that both have.

    Raises:
        ValueError: they are not about the same examples; names some that differ.
    """
    import numpy as np

    after = _in_order_of(before, after)
    changes = {}
    for name, (_, low, high) in difference(before, after, seed=seed).items():
        pairs = _pairs(before, after, name)
        deltas = np.array([two - one for one, two in pairs.values()])
        changes[name] = Change(
            before=before.metrics[name],
            after=after.metrics[name],
            low=low,
            high=high,
            p_value=permutation_test(deltas, seed=seed),
            num_better=int((deltas > 0).sum()),
            num_worse=int((deltas < 0).sum()),
            num_equal=int((deltas == 0).sum()),
            pairs=pairs,
        )
    return changes


def permutation_test(deltas: Sequence[float] | np.ndarray, *, seed: int = 0) -> float:
    """Two-sided p-value of a mean change: how often random signs give a mean at least as far from 0.

    All signs are tried where few examples differ; else `NUM_PERMUTATIONS` draws, the observed signs among them.

    Args:
        deltas: (N,) change of each example.
        seed: of the draws.

    >>> permutation_test([1.0, 1.0, 1.0]), permutation_test([0.0, 0.0])
    (0.25, 1.0)
    """
    import numpy as np

    values = np.asarray(deltas, dtype=float)
    if not len(values):
        return math.nan
    values = values[values != 0]
    if not len(values):
        return 1.0
    bar = abs(values.sum()) * (1 - 1e-9)
    if len(values) <= MAX_EXACT:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(values))))
        return float((np.abs(signs @ values) >= bar).mean())
    rng, hits, left = np.random.default_rng(seed), 1, NUM_PERMUTATIONS - 1
    while left > 0:
        size = min(left, max(1, 2_000_000 // len(values)))
        signs = rng.integers(0, 2, size=(size, len(values)), dtype=np.int8) * 2.0 - 1.0
        hits += int((np.abs(signs @ values) >= bar).sum())
        left -= size
    return hits / NUM_PERMUTATIONS


def _pairs(before: EvaluationResult, after: EvaluationResult, name: str) -> dict[str, tuple[float, float]]:
    """By example, the metric in both; ids that occur twice are numbered."""
    found: dict[str, tuple[float, float]] = {}
    for number, (example_id, one, two) in enumerate(zip(before.example_ids, before.rows, after.rows, strict=True)):
        (first, first_count), (second, second_count) = one.get(name, (0.0, 0.0)), two.get(name, (0.0, 0.0))
        if first_count and second_count:
            key = f"{example_id} (row {number + 1})" if example_id in found else example_id
            found[key] = (first / first_count, second / second_count)
    return found


def _in_order_of(before: EvaluationResult, after: EvaluationResult) -> EvaluationResult:
    if before.example_ids == after.example_ids:
        return after
    for result, place in ((before, "first"), (after, "second")):
        if repeated := [item for item, count in Counter(result.example_ids).items() if count > 1]:
            raise ValueError(
                f"the {place} evaluation has several examples of one id: {_some(repeated)}, so that it is not known "
                "which belong together. Give each row an id of its own (column 'id'), and evaluate again."
            )
    places = {example_id: index for index, example_id in enumerate(after.example_ids)}
    only_before = [item for item in before.example_ids if item not in places]
    only_after = sorted(set(after.example_ids) - set(before.example_ids))
    if only_before or only_after:
        raise ValueError(
            f"the examples differ: {_some(only_before)} only in the first evaluation, {_some(only_after)} only in the "
            "second. Pass two evaluations of the same rows (the same --dataset and --num_examples)."
        )
    rows: list[Any] = [after.rows[places[item]] for item in before.example_ids]
    return EvaluationResult.from_rows(rows, example_ids=before.example_ids, num_generations=after.num_generations)


def _some(ids: Sequence[str]) -> str:
    shown = ", ".join(map(repr, ids[:3]))
    return f"{len(ids)} ({shown}{', ...' if len(ids) > 3 else ''})" if ids else "none"

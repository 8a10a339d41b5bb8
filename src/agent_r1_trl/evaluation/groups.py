"""Several attempts at an example, and several kinds of examples: pass@k, groups, tags."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agent_r1_trl.evaluation.result import EvaluationResult, Row
from agent_r1_trl.trajectory import Trajectory

NO_TAG = "(none)"


def pass_at_k(num_attempts: int, num_solved: int, k: int) -> float:
    """Chance that k of the attempts, drawn without replacement, hold a solved one (Chen et al. 2021).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 4, 2)
    (0.25, 0.5, 1.0)
    """
    return 1.0 - math.comb(num_attempts - num_solved, k) / math.comb(num_attempts, k)


def attempts_of(group_size: int) -> list[int]:
    """The values of k: powers of two, and the number of attempts.

    >>> attempts_of(6)
    [1, 2, 4, 6]
    """
    return sorted({1 << power for power in range(group_size.bit_length())} | {group_size})


def group_sums(group: Sequence[Trajectory]) -> Row:
    """What the attempts at one example add to `pass@k`, `solved_always` and `solved_never`; nothing for one attempt.

    A failure that was not the policy's fault is no attempt; with fewer than k of them left, `pass@k` is not counted.
    """
    played = [trajectory for trajectory in group if not trajectory.stop_reason.is_infrastructure_failure]
    if len(group) < 2 or not played:
        return {}
    num_solved = sum(trajectory.is_solved for trajectory in played)
    sums: Row = {
        f"pass@{k}": (pass_at_k(len(played), num_solved, k), 1.0) for k in attempts_of(len(group)) if k <= len(played)
    }
    sums["solved_always"] = (float(num_solved == len(played)), 1.0)
    sums["solved_never"] = (float(num_solved == 0), 1.0)
    return sums


def tags_of(examples: Iterable[Mapping[str, Any]], column: str) -> list[str]:
    """The value of a column in each example as text, "(none)" where it has none.

    Args:
        examples: rows of a data set.
        column: `metadata.type` is the key `type` of the column `metadata`.

    Raises:
        ValueError: no example has such a column.

    >>> tags_of([{"level": 1}, {}, {"level": None}], "level")
    ['1', '(none)', '(none)']
    """
    rows = list(examples)
    values = [_value_of(row, column) for row in rows]
    if rows and all(value is None for value in values):
        raise ValueError(
            f"by={column!r}: no row has such a column (the first one has {', '.join(map(str, rows[0]))}). Name one of "
            "them; a dot leads into a column that holds a mapping."
        )
    return [NO_TAG if value is None else str(value) for value in values]


def _value_of(example: Mapping[str, Any], column: str) -> Any:
    value: Any = example
    for name in [column] if column in example else column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def split_by(
    result: EvaluationResult, examples: Iterable[Mapping[str, Any]], column: str, *, seed: int = 0
) -> dict[str, EvaluationResult]:
    """The result of the examples of each tag, in the order of their first appearance.

    Raises:
        ValueError: no example has such a column.
    """
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

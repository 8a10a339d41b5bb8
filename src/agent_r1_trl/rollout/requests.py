"""Requests for trajectories: a row of the data set, a place in its group, and the seeds.

Seeds depend on what is sampled, not on when: a run is reproducible whatever its concurrency.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.safe_text import rules


@dataclass(kw_only=True, frozen=True)
class RolloutRequest:
    """One trajectory that is asked for."""

    example: dict[str, Any]
    """Row of the data set."""
    example_id: str = ""
    generation: int = 0
    """Member of the example's group."""
    seed: int = 0
    """For the sampler (and random dynamics of the environment); differs between the members of a group."""
    reset_seed: int = 0
    """For the initial state; the same for all members of a group."""
    attempt: int = 0
    """Number of failed tries before this one. The seeds do not depend on it."""


def rollout_requests(
    examples: Sequence[dict[str, Any]],
    *,
    first_row: int,
    group_size: int,
    seed: int,
    step: int | None,
    round_number: int = 0,
    places: Sequence[int] | None = None,
) -> list[RolloutRequest]:
    """One request per row.

    Args:
        examples: B rows of the data set.
        first_row: index of the first example among the rows of all ranks, whose groups are consecutive: in training
            those of the generation batch, in evaluation those of the whole evaluation.
        group_size: rows of one group.
        seed: of the run.
        step: the micro-step that trains on them, part of their seeds; None for evaluation, whose seeds are always the
            same, whatever the size of its batches.
        round_number: of a rollout that replaces groups of the step's first one, from 1 on; other seeds in each.
        places: index of each example among the rows of all ranks, where they are not consecutive.
    """
    requests = []
    rows = range(first_row, first_row + len(examples)) if places is None else places
    for row, example in zip(rows, examples, strict=True):
        group, generation = divmod(row, group_size)
        # Equal rows (all are, if the environment owns the data) are different draws.
        draw = (-1 if step is None else step, group, *([round_number] if round_number else []))
        name = example_key(example)
        rules().note(example)
        seeds = {"seed": derive_seed(seed, *draw, name, generation), "reset_seed": derive_seed(seed, *draw, name)}
        requests.append(RolloutRequest(example=dict(example), example_id=name, generation=generation, **seeds))
    return requests


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) from the parts, in order (run seed, step, example, generation, turn).

    >>> derive_seed(0, "a") == derive_seed(0, "a"), derive_seed(0, "a") == derive_seed("0", "a")
    (True, False)
    """
    text = json.dumps(list(parts), ensure_ascii=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def row_digest(example: Mapping[str, Any]) -> str:
    """Digest of all that a data set row says, the same in every process; of objects only their kind counts."""
    text = json.dumps(dict(example), sort_keys=True, default=lambda value: type(value).__name__, skipkeys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def example_key(example: Mapping[str, Any]) -> str:
    """Name of a data set row: its `id` column, else a digest of its content."""
    if example.get("id") is not None:
        return str(example["id"])
    text = json.dumps(dict(example), sort_keys=True, default=repr, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

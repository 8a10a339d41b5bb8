"""What each row of a generation batch asks for: its group, its place in the group, its seeds.

prompt -> [environment reset] -> [rollout (policy <-> tools)] -> Trajectory -> rewards on tokens -> filter
       -> batch -> advantages -> loss -> step -> sync weights -> next rollout
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_r1_trl.rollout import RolloutRequest, derive_seed, example_key


def rollout_requests(
    examples: Sequence[dict[str, Any]], *, first_row: int, group_size: int, seed: int, step: int | None
) -> list[RolloutRequest]:
    """One request per row.

    Args:
        examples: B rows of the data set.
        first_row: of the examples in the generation batch of all ranks; groups are consecutive rows of that.
        group_size: rows of one group.
        seed: of the run.
        step: the micro-step that trains on them, whose seeds are its own; None for evaluation, where every one draws
            alike.
    """
    requests = []
    for row, example in enumerate(examples, start=first_row):
        group, generation = divmod(row, group_size)
        # Equal rows of a batch (all are, if the environment owns the data) are different draws in training.
        draw = (-1,) if step is None else (step, group)
        example_id = example_key(example)
        requests.append(
            RolloutRequest(
                example=dict(example),
                example_id=example_id,
                generation=generation,
                seed=derive_seed(seed, *draw, example_id, generation),
                reset_seed=derive_seed(seed, *draw, example_id),
            )
        )
    return requests

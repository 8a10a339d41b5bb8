"""Settings of a training run that meets faults: failing environments, tools and servers, broken numbers, signals.

Each belongs to the collaborator that its comment names. All have defaults under which a run survives what passes and
ends, with the cause, at what does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from agent_r1_trl.settings import (
    Count,
    CountOrZero,
    SomeOf,
    setting,
)


@dataclass(kw_only=True)
class FaultSettings:
    """What a run does about faults that are not the policy's; `MultiTurnConfig` inherits it."""

    # ---- trajectories that fail (`rollouts.py`, `rewards.py`)
    retry_failed: CountOrZero = setting(
        0,
        "How often a trajectory that failed for no fault of the policy (not prompt_too_long) is played again in the "
        "same rollout, with the same row and the same seeds.",
    )
    min_group_size: Count | None = setting(
        None,
        "A prompt's trajectories count only if at least this many of them were played and scored; of a smaller group "
        "none is in the baseline. None: 2 where the estimator compares them, else 1.",
    )

    # ---- checkpoints that fail (`saving.py`)
    max_failed_saves: Count = setting(
        3, "End the run when this many checkpoints in a row could not be written (disk full)."
    )
    resume_without: Annotated[list[str], SomeOf("optimizer", "rng", "rollout", "data")] | None = setting(
        None,
        "What a resumed run does without: 'optimizer' (with its learning-rate schedule), 'rng', 'rollout' (under way) "
        "begin anew, 'data' goes on at the same place in other rows or another order.",
    )

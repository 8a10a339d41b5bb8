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
    Flag,
    Seconds,
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

    # ---- vLLM servers (`generation/vllm/fleet.py`)
    vllm_request_timeout: Seconds = setting(
        600.0,
        "Seconds that one turn may take on a vLLM server; the request then goes to another server. In process: "
        "seconds that one step of the engine may take; its requests then fail.",
    )
    vllm_health_timeout: Seconds = setting(
        30.0,
        "Seconds that a vLLM server may be silent to health checks while requests wait for it. A slow server answers "
        "them; a frozen one is left out, and its requests go to other servers.",
    )
    vllm_retry_window: Seconds = setting(
        300.0,
        "Seconds for which a request, or a weight sync, waits while no vLLM server can serve it. Set it longer than a "
        "restart of your servers takes.",
    )
    vllm_sync_timeout: Seconds = setting(
        120.0,
        "Seconds that a vLLM server may take over one part (256 MiB) of a weight sync. One that takes longer is left "
        "out.",
    )
    vllm_allow_public_servers: Flag = setting(
        False, "Use vLLM servers whose development routes, which have no password, are open at a public address."
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

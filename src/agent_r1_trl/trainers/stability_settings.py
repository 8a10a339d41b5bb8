"""Settings of StarPO-S: what a run does about groups without signal, and about its own collapse.

Each belongs to the collaborator that its comment names. All are off by default; then nothing is changed.

Source: RAGEN (arXiv 2504.20073, section 4) and RAGEN-2 (arXiv 2604.06268).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.trainers.echo_signals import check_echo_signals
from agent_r1_trl.trainers.shaping import RolloutShape, check_shape


@dataclass(kw_only=True)
class StabilitySettings:
    """What keeps a run stable; `MultiTurnConfig` inherits it."""

    # ---- filtering of groups (`group_filter.py`)

    # ---- dynamic sampling and curriculum (`resampling.py`, `curriculum.py`)

    # ---- signals of collapse (`echo_signals.py`)
    echo_trap: bool = field(
        default=False,
        metadata={
            "help": "Judge after every optimizer step whether the run is collapsing, and log the signals as echo/*. "
            "Nothing is done about it."
        },
    )
    echo_thresholds: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Fields of agent_r1_trl.echo_trap.Thresholds that differ from their defaults, for example "
            "{solved_reward: 0.95} or {repetition: [0.6, 0.95]}; on the command line as JSON."
        },
    )
    mutual_information_every: int = field(
        default=0,
        metadata={
            "help": "Every so many optimizer steps, score the first reasoning of one trajectory per prompt after "
            "every prompt of the rollout: P x P forward rows for P prompts. 0: never."
        },
    )

    # ---- what is done about them (`echo_guard.py`)

    # ---- rollout shaping (`shaping.py`)
    prompts_per_rollout: int | None = field(
        default=None,
        metadata={
            "help": "Prompts (initial states) of one rollout, over all processes; `steps_per_generation` follows from "
            "it. None: as TRL's settings say."
        },
    )
    updates_per_rollout: int | None = field(
        default=None,
        metadata={
            "help": "Optimizer steps on one rollout, all `num_iterations` passes together; "
            "`gradient_accumulation_steps` follows from it. None: as TRL's settings say."
        },
    )

    @property
    def rollout_shape(self) -> RolloutShape:
        """Prompts, responses and updates per rollout, as they follow from all settings."""
        return RolloutShape.of(self)

    def check_stability(self) -> None:
        """Check these settings.

        Raises:
            ValueError: names the option, its value, the rule and the cure.
        """
        check_shape(self)
        check_echo_signals(self)

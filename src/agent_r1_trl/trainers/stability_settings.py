"""Settings of StarPO-S: what a run does about groups without signal, and about its own collapse.

Each belongs to the collaborator that its comment names. All are off by default; then nothing is changed.

Source: RAGEN (arXiv 2504.20073, section 4) and RAGEN-2 (arXiv 2604.06268).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.trainers.echo_signals import check_echo_signals


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

    # ---- rollout shaping

    def check_stability(self) -> None:
        """Check these settings.

        Raises:
            ValueError: names the option, its value, the rule and the cure.
        """
        check_echo_signals(self)

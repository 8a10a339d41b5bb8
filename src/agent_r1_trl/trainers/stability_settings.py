"""Settings of StarPO-S: what a run does about groups without signal, and about its own collapse.

Each belongs to the collaborator that its comment names. All are off by default; then nothing is changed.

Source: RAGEN (arXiv 2504.20073, section 4) and RAGEN-2 (arXiv 2604.06268).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.trainers.echo_checks import check_echo_guard
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
    echo_actions: list[str] | None = field(
        default=None,
        metadata={
            "help": "What the guard does, and in which order, when the run collapses: 'filter', 'clip', 'entropy', "
            "'learning_rate', 'roll_back', 'stop'; 'all' for those that this run can take. None: there is no guard."
        },
    )
    echo_dry_run: bool = field(
        default=False,
        metadata={"help": "The guard only says what it would do. Nothing about the training changes."},
    )
    echo_patience: int = field(
        default=10,
        metadata={"help": "Number of optimizer steps that an action of the guard gets to work before the next one."},
    )
    echo_max_roll_backs: int = field(
        default=2, metadata={"help": "How often the guard's 'roll_back' goes back to a healthy checkpoint at most."}
    )
    echo_rate_factor: float = field(
        default=0.5,
        metadata={"help": "What the guard's 'learning_rate' multiplies all learning rates by, the critic's included."},
    )
    echo_rate_steps: int = field(
        default=20, metadata={"help": "Number of optimizer steps for which the guard's 'learning_rate' holds."}
    )
    echo_entropy_coef: float = field(
        default=0.001,
        metadata={"help": "Coefficient of TRL's entropy bonus from the guard's action 'entropy' on."},
    )

    # ---- rollout shaping

    def check_stability(self) -> None:
        """Check these settings.

        Raises:
            ValueError: names the option, its value, the rule and the cure.
        """
        check_echo_signals(self)
        check_echo_guard(self)

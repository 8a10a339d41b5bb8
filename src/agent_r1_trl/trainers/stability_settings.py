"""Settings of StarPO-S: what a run does about groups without signal, and about its own collapse.

Each belongs to the collaborator that its comment names. All are off by default; then nothing is changed.

Source: RAGEN (arXiv 2504.20073, section 4) and RAGEN-2 (arXiv 2604.06268).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.filtering import DEFAULT_VALUES, RULES, STATISTICS
from agent_r1_trl.rollout.limits import check_whole_number
from agent_r1_trl.trainers.config_checks import check_bool, check_choice
from agent_r1_trl.trainers.echo_checks import check_echo_guard
from agent_r1_trl.trainers.echo_ladder import ALL
from agent_r1_trl.trainers.echo_signals import check_echo_signals
from agent_r1_trl.trainers.group_filter import check_can_filter
from agent_r1_trl.trainers.shaping import RolloutShape, check_shape


@dataclass(kw_only=True)
class StabilitySettings:
    """What keeps a run stable; `MultiTurnConfig` inherits it."""

    # ---- filtering of groups (`group_filter.py`)
    filter_groups: str | None = field(
        default=None,
        metadata={
            "help": "Train only on the groups of a rollout whose returns differ most: 'top_fraction' (the best "
            "`filter_value` of the groups), 'top_p' (as many as hold `filter_value` of the spread) or 'min_p' (those "
            "with at least `filter_value` of the largest spread). A step in which no group has any spread is skipped. "
            "None: all."
        },
    )
    filter_value: float | None = field(
        default=None,
        metadata={
            "help": "The rule's share, above 0 and at most 1. None: 0.25 for 'top_fraction', 0.9 for 'top_p'; 'min_p' "
            "needs one."
        },
    )
    filter_statistic: str = field(
        default="std", metadata={"help": "The spread of a group's raw returns: 'std' or 'var'."}
    )
    filter_when: float | None = field(
        default=None,
        metadata={
            "help": "Filter only rollouts in which Std(RV)/Mean(RV), RV the variances of the groups, is above this. "
            "RAGEN-2 found that filtering helped at about 1.2 and hurt at 0.33. None: filter every rollout."
        },
    )
    filter_loss_scaling: bool = field(
        default=False, metadata={"help": "Multiply the loss by the share of the rows that the filter keeps."}
    )

    # ---- dynamic sampling and curriculum (`resampling.py`, `curriculum.py`)
    resample_rounds: int = field(
        default=0,
        metadata={
            "help": "After a rollout, replace prompt groups whose returns are all equal by groups of fresh prompts, "
            "in up to this many rounds. 0: train on what the first rollout gave."
        },
    )
    resample_max_trajectories: int | None = field(
        default=None,
        metadata={
            "help": "Number of trajectories, on all processes, that may be played for one batch in place of others. "
            "None: the rounds are the only limit."
        },
    )
    resample_max_seconds: float | None = field(
        default=None,
        metadata={
            "help": "No further round begins once the rounds of a batch have taken this many seconds (the time of "
            "their trajectories, so that a resumed run decides alike). None: as long as they take."
        },
    )
    pass_reward: float = field(
        default=0.5,
        metadata={
            "help": "A trajectory has passed if the environment's success is at least 1/2; where it reports none, if "
            "the outcome (without the rewards of turns) is at least this much (sampling/pass_rate, curriculum)."
        },
    )
    curriculum: bool = field(
        default=False,
        metadata={
            "help": "Draw prompts by their recent pass rate p, with weights max(curriculum_floor, 4 p (1 - p)); "
            "p begins at 1/2. Off: every prompt once per epoch."
        },
    )
    curriculum_floor: float = field(
        default=0.1, metadata={"help": "Smallest weight of a prompt, above 0 and at most 1 (1: all are drawn alike)."}
    )
    curriculum_rate: float = field(
        default=0.5,
        metadata={"help": "Weight of a prompt's newest group in its pass rate, above 0 and at most 1 (1: no memory)."},
    )

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
        metadata={
            "help": "Number of optimizer steps that an action of the guard gets to work before the next one. "
            "'filter', 'clip' and 'entropy' are undone after as many healthy steps."
        },
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
        for name in ("filter_loss_scaling", "curriculum", "echo_trap", "echo_dry_run"):
            check_bool(self, name)  # type: ignore[arg-type]
        check_shape(self)
        check_echo_signals(self)
        self._check_filter()
        check_echo_guard(self)
        check_resampling(self)

    def _check_filter(self) -> None:
        if self.filter_groups is None:
            return
        config: Any = self
        check_choice(config, "filter_groups", RULES)
        check_choice(config, "filter_statistic", STATISTICS)
        if self.filter_value is None and self.filter_groups not in DEFAULT_VALUES:
            raise ValueError(
                f"filter_value=None with filter_groups={self.filter_groups!r}, which has no usual value. Set "
                "filter_value to a number above 0 and at most 1."
            )
        value, gate = self.filter_value, self.filter_when
        if value is not None and (not is_number(value) or not 0 < value <= 1):
            raise ValueError(
                f"filter_value={value!r} must be a number above 0 and at most 1. Set filter_value to such a share."
            )
        if gate is not None and (not is_number(gate) or gate < 0):
            raise ValueError(
                f"filter_when={gate!r} must be a finite number >= 0 (0.5 to 1 is a start). Set filter_when "
                "to such a number, or remove it to filter every rollout."
            )
        check_can_filter(config)


def check_resampling(config: Any) -> None:
    """Check dynamic sampling and the curriculum.

    Raises:
        ValueError: names the option, its value, the rule and the cure.
    """
    check_whole_number("resample_rounds", config.resample_rounds, minimum=0)
    if config.resample_rounds and config.num_generations < 2:
        raise ValueError(
            f"resample_rounds={config.resample_rounds} with num_generations={config.num_generations}: a group of one "
            "has no spread, so every group would be replaced. Set num_generations to 2 or more, or remove "
            "resample_rounds."
        )
    has_rounds = config.resample_rounds or {"filter", ALL} & set(config.echo_actions or ())  # the guard's rounds
    options = {"resample_max_trajectories": has_rounds, "resample_max_seconds": has_rounds}
    for name, is_read in (options | {"pass_reward": has_rounds or config.curriculum}).items():
        if not is_read and getattr(config, name) != config.default_of(name):
            other = " and curriculum=False" if name == "pass_reward" else ""
            raise ValueError(
                f"{name}={getattr(config, name)!r} has no effect with resample_rounds=0{other}. Set resample_rounds "
                f"to 2, say, or remove {name}."
            )
    check_whole_number("resample_max_trajectories", config.resample_max_trajectories, is_optional=True)
    limit = config.resample_max_trajectories
    if limit is not None and limit < config.num_generations:
        raise ValueError(
            f"resample_max_trajectories={limit} is less than a group (num_generations={config.num_generations}), so "
            f"nothing could be replaced. Set it to {config.num_generations} or more, or remove it."
        )
    seconds = config.resample_max_seconds
    if seconds is not None and (not is_number(seconds) or seconds <= 0):
        raise ValueError(
            f"resample_max_seconds={seconds!r} must be a number of seconds > 0, or None. Set it to such a value."
        )
    if not is_number(config.pass_reward):
        raise ValueError(f"pass_reward={config.pass_reward!r} must be a finite number. Set it to 0.5, say.")
    for name in ("curriculum_floor", "curriculum_rate"):
        value = getattr(config, name)
        if not is_number(value) or not 0 < value <= 1:
            raise ValueError(f"{name}={value!r} must be above 0 and at most 1. Set {name} to such a value.")


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

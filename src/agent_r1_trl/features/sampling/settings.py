"""The setting `sampling`: which prompts are drawn, and which groups are trained on.

Source: RAGEN (arXiv 2504.20073, section 4) and RAGEN-2 (arXiv 2604.06268).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from agent_r1_trl.settings import (
    CountOrZero,
    Flag,
    NotNegative,
    Number,
    PositiveShare,
    SettingsGroup,
    setting,
)

RULES = ("top_fraction", "top_p", "min_p")
"""Rules of the group filter, besides the user's own."""
DEFAULT_VALUES = {"top_fraction": 0.25, "top_p": 0.9}
"""Rule -> its value in the paper that it comes from; `min_p` comes from none."""


@dataclass(kw_only=True)
class SamplingSettings(SettingsGroup):
    """Group filter, dynamic sampling and curriculum; all of it is off by default."""

    filter_groups: str | None = setting(
        None,
        "Train only on the groups whose returns differ most: 'top_fraction', 'top_p' or 'min_p' (docs/filtering.md). "
        "Or your own: a function, or its path, my_module.my_rule. None: all groups.",
    )
    filter_value: PositiveShare | None = setting(
        None,
        "The rule's share, above 0 and at most 1. None: 0.25 for 'top_fraction', 0.9 for 'top_p'; 'min_p' needs one.",
    )
    filter_when: NotNegative | None = setting(
        None,
        "Filter only rollouts with Std(RV)/Mean(RV) above this, RV the variances of the groups. None: every rollout.",
    )
    filter_loss_scaling: Flag = setting(False, "Multiply the loss by the share of the rows that the filter keeps.")

    resample_rounds: CountOrZero = setting(
        0,
        "Maximum number of rounds in which groups with equal returns are replaced by groups of fresh prompts.",
    )
    pass_reward: Annotated[float, Number()] = setting(
        0.5,
        "Outcome from which a trajectory passes, where the environment reports no success (sampling/pass_rate, "
        "curriculum).",
    )
    curriculum: Flag = setting(
        False,
        "Draw prompts by their recent pass rate p, with weights max(curriculum_floor, 4 p (1 - p)). Off: every "
        "prompt once per epoch.",
    )
    curriculum_floor: PositiveShare = setting(
        0.1, "Smallest weight of a prompt, above 0 and at most 1 (1: all are drawn alike)."
    )
    curriculum_rate: PositiveShare = setting(
        0.5, "Weight of a prompt's newest group in its pass rate, above 0 and at most 1 (1: no memory)."
    )


GROUPS = {"sampling": SamplingSettings}

"""The setting `echo`: the watch for collapsing runs, and what the guard does about them.

Source: RAGEN (arXiv 2504.20073, section 4) and RAGEN-2 (arXiv 2604.06268).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from agent_r1_trl.settings import Count, Flag, Number, SettingsGroup, SomeOf, setting

ACTIONS = {"filter": 1, "clip": 2, "learning_rate": 3, "rollback": 4, "stop": 5}
"""Actions of the echo guard: name -> its number in the metric `echo/action`."""
ALL = "all"
"""Stands in `echo.actions` for every action that the run can take."""


@dataclass(kw_only=True)
class EchoSettings(SettingsGroup):
    """After every optimizer step: whether the run is collapsing (metrics echo/*) and, with `actions`, what is done."""

    may_be_off: ClassVar[bool] = True

    thresholds: dict[str, Any] | None = setting(
        None,
        "Fields of agent_r1_trl.features.echo_trap.Thresholds, for example {solved_reward: 0.95}.",
    )
    actions: Annotated[list[str], SomeOf(*ACTIONS, ALL)] | None = setting(
        None,
        "Actions of the guard, in their order: 'filter', 'clip', 'learning_rate', 'rollback', 'stop'; 'all' for "
        "those that this run can take. None: there is no guard.",
    )
    dry_run: Flag = setting(False, "Only report what the guard would do.")
    patience: Count = setting(
        10,
        "Optimizer steps that an action gets to work before the next one. 'filter' and 'clip' are undone after as "
        "many healthy steps.",
    )
    max_rollbacks: Count = setting(2, "Maximum number of rollbacks.")
    rate_factor: Annotated[float, Number(above=0, below=1)] = setting(
        0.5, "Factor of all learning rates, the critic's included, under 'learning_rate'."
    )
    rate_steps: Count = setting(20, "Optimizer steps for which 'learning_rate' holds.")


GROUPS = {"echo": EchoSettings}

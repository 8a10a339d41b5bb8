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
        "Fields of agent_r1_trl.features.echo_trap.Thresholds that differ from their defaults, for example "
        "{solved_reward: 0.95} or {repetition: [0.6, 0.95]}.",
    )
    actions: Annotated[list[str], SomeOf(*ACTIONS, ALL)] | None = setting(
        None,
        "What the guard does, and in which order, when the run collapses: 'filter', 'clip', "
        "'learning_rate', 'rollback', 'stop'; 'all' for those that this run can take. None: there is no guard.",
    )
    dry_run: Flag = setting(False, "The guard only says what it would do. Nothing about the training changes.")
    patience: Count = setting(
        10,
        "Number of optimizer steps that an action of the guard gets to work before the next one. 'filter' and "
        "'clip' are undone after as many healthy steps.",
    )
    max_rollbacks: Count = setting(2, "How often the guard's 'rollback' goes back to a healthy checkpoint at most.")
    rate_factor: Annotated[float, Number(above=0, below=1)] = setting(
        0.5, "What the guard's 'learning_rate' multiplies all learning rates by, the critic's included."
    )
    rate_steps: Count = setting(20, "Number of optimizer steps for which the guard's 'learning_rate' holds.")


GROUPS = {"echo": EchoSettings}

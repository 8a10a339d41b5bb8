"""The echo trap: signals of a collapsing run, and the judgement on them. Pure functions; nothing here needs torch.

Source: RAGEN (arXiv 2504.20073, section 4) and RAGEN-2 (arXiv 2604.06268).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent_r1_trl.features.echo_trap.judgement import KEYS, EchoTrapJudge, judge
from agent_r1_trl.features.echo_trap.verdict import STATES, Signal, Thresholds, Verdict

if TYPE_CHECKING:
    from agent_r1_trl.trainers.construction import TrainRows

__all__ = ["KEYS", "STATES", "EchoTrapJudge", "Signal", "Thresholds", "Verdict", "judge"]


def make_callbacks(config: Any, train_dataset: TrainRows) -> list[Any]:
    """The watch where it is asked for and where something acts on its verdict, and the guard that acts."""
    from agent_r1_trl.features.echo_trap.feature import EchoSignals
    from agent_r1_trl.features.echo_trap.guard import EchoGuard

    if config.echo is None:
        return []
    return [EchoSignals(config)] if config.echo.actions is None else [EchoSignals(config), EchoGuard()]

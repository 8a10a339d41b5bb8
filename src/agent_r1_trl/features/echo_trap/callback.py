"""`EchoTrapCallback`: the judgement on the echo trap for a plain `trl.GRPOTrainer`, from what that trainer logs.

TRL logs neither the in-group standard deviation nor what the turns said, so the callback sees less than our trainers
do (`feature.py`); `docs/echo-trap.md` has the table.

transformers 5.17 names that this file touches: `TrainerState.stateful_callbacks` and `log_history`,
`callback_handler.callbacks`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from agent_r1_trl.features.echo_trap import EchoTrapJudge, Thresholds, Verdict
from agent_r1_trl.features.echo_trap.verdict import STATES, say_change

logger = logging.getLogger(__name__)

LOGGED_AS = {
    "reward": ("reward",),
    "reward_std": ("group/reward_std", "reward_std"),
    "zero_std_share": ("group/zero_variance_share", "frac_reward_zero_std"),
    "entropy": ("entropy",),
    "grad_norm": ("grad_norm",),
    "response_length": ("completions/mean_length",),
    "kl": ("kl",),
}
"""Key of the judgement -> names of the log line, the first known one counts."""
STOPS = ("collapsing", "collapsed")


class EchoTrapCallback(TrainerCallback, ExportableState):
    """Judges a run after each of its log lines, says when the verdict changes, and can end the run.

    One log line is one step of the judgement: its baselines are the means of the first ten lines.

    Args:
        stop_on: end the run at this state, "collapsing" or "collapsed"; None only watches.
        thresholds: a `Thresholds` or its fields that differ from the defaults.

    Raises:
        ValueError: `stop_on` is another state, or a threshold makes no sense.

    >>> callback = EchoTrapCallback(stop_on="collapsed", thresholds={"solved_reward": 0.95})
    >>> callback.verdict.state
    'healthy'
    """

    def __init__(self, stop_on: str | None = None, thresholds: Thresholds | Mapping[str, Any] | None = None) -> None:
        if stop_on is not None and stop_on not in STOPS:
            raise ValueError(
                f"stop_on={stop_on!r} must be one of {', '.join(map(repr, STOPS))}, or None to watch only. A warning "
                "passes in healthy runs as well."
            )
        self.stop_on = stop_on
        self.judge = EchoTrapJudge(thresholds)
        self.has_stopped = False
        """Whether the callback has ended the run."""

    @property
    def verdict(self) -> Verdict:
        """On the last log line."""
        return self.judge.verdict

    def attach(self, trainer: Any) -> EchoTrapCallback:
        """Add the callback in front of all others, so that trackers such as W&B log `echo/*` as well.

        With `callbacks=[...]` it stands behind them; `echo/*` then reaches the terminal and `trainer_state.json`.
        """
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin anew, or go on as the run did that has written the checkpoint."""
        self.judge.reset()
        self.has_stopped = False
        saved: Any = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        saved = saved[0] if isinstance(saved, list) else saved
        if saved is not None:
            self.judge.load_state_dict(saved["attributes"]["judged"])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Judge a line of training."""
        step = read_log(logs or {})
        if not step:
            return
        before = self.verdict
        verdict = self.judge.update(step)
        values = {"echo/state": float(verdict.severity)}
        values |= {f"echo/compared/{name}": value for name, value in verdict.measures.items() if math.isfinite(value)}
        for place in (logs, state.log_history[-1] if state.log_history else None):
            if place is not None:
                place.update(values)
        if state.is_world_process_zero:
            say_change(state.global_step, before, verdict)
        if self.stop_on is not None and verdict.state in STATES[STATES.index(self.stop_on) :]:  # type: ignore[arg-type]
            self.has_stopped = control.should_training_stop = True
            if state.is_world_process_zero:
                logger.error(
                    "echo_trap: the run ends at step %d, which is %s (stop_on=%r). %s",
                    state.global_step, verdict.state, self.stop_on, verdict.reason,
                )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the callback."""
        settings = {"stop_on": self.stop_on, "thresholds": asdict(self.judge.thresholds)}
        return {"args": settings, "attributes": {"judged": self.judge.state_dict()}}


def read_log(logs: Mapping[str, Any]) -> dict[str, float]:
    """The keys of `judge`'s history that a log line of training holds; a gradient norm that is NaN is infinite."""
    step = {}
    for key, names in LOGGED_AS.items():
        values = [logs[name] for name in names if isinstance(logs.get(name), int | float)]
        if values:
            step[key] = float(values[0])
    if math.isnan(step.get("grad_norm", 0.0)):
        step["grad_norm"] = math.inf
    return step

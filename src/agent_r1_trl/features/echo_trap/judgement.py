"""`judge`: the state of a run, from one dictionary of numbers per step.

Three questions make a verdict, in this order:

1. Which signals are beyond a threshold for long enough, and by more than chance (`signals.py`)?
2. What does the reward say? Variety that is lost while the reward gains is learning, not a trap: where the task is
   solved such signals do not count, and while the reward is at its best, above where it began, they count one level
   less.
3. What do the signals that are left amount to together (`_target`)? A better state has to last before it is believed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from agent_r1_trl.features.echo_trap.signals import (
    SIGNS,
    VARIETY,
    Alarm,
    Norms,
    Series,
    crossings,
    drops,
    reward_scale,
    signs_of_change,
    signs_of_death,
)
from agent_r1_trl.features.echo_trap.verdict import PROGRESS, STATES, Signal, State, Thresholds, Verdict

JUDGED = ("reward", "reward_std", "zero_std_share", "entropy", "grad_norm", "repetition", "inaction")
"""Keys that have thresholds."""
HELPING = ("success", "reward_max", "reward_min", "return_with_call", "return_without_call")
"""Keys that say how to read the others."""
KEYS = frozenset((*JUDGED, *HELPING))
"""The keys of a step's dictionary. A missing key, None and NaN all mean "unknown"."""
_KIND = {"zero_std_share": "reward_std", "success": "reward"}
"""Signals that measure the same loss, and count once."""
_SAVED = ("range", "at_best", "is_solved", "is_dead", "better_for")
"""Names of what is saved as it is, without its underscore."""
_HELD_SPREAD = 0.75
"""Share of its baseline that in-group spread keeps where data got harder."""


def _known(key: str, value: float | None) -> float | None:
    """The value, None if it is unknown; infinity says something of a gradient norm alone."""
    if value is None or math.isnan(value):
        return None
    if key == "grad_norm":
        return abs(float(value))
    return None if math.isinf(value) else float(value)


def judge(
    history: Sequence[Mapping[str, float | None]], thresholds: Thresholds | Mapping[str, Any] | None = None
) -> Verdict:
    """The verdict on a run after the last step of `history`; a pure function.

    Args:
        history: one dictionary per optimizer step; its keys are some of `KEYS`. A step without a new rollout knows
            fewer keys than one with it.
        thresholds: or those that differ from the defaults.

    Raises:
        ValueError: a key is not in `KEYS`: a misspelt one would be a signal that nobody ever judges.
    """
    judge = EchoTrapJudge(thresholds)
    for step in history:
        judge.update(step)
    return judge.verdict


class EchoTrapJudge:
    """Gives the verdicts of `judge` step by step, in constant time and memory per step.

    Args:
        thresholds: or those that differ from the defaults.

    Raises:
        ValueError: one of them is unknown or out of its range.
    """

    def __init__(self, thresholds: Thresholds | Mapping[str, Any] | None = None) -> None:
        self.thresholds: Thresholds = Thresholds.read("thresholds", thresholds)  # type: ignore[assignment]
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        limits = self.thresholds
        self.verdict = Verdict(state="healthy", step=0, reason="Nothing was judged yet.")
        """After the last `update`."""
        self._series = {
            key: Series(limits.window, limits.ema_decay, needs_nonzero=key == "reward_std", is_good=key in PROGRESS)
            for key in (*JUDGED, *HELPING)
            if key != "grad_norm"
        }
        self._alarms: dict[str, Alarm] = {}
        self.forget_norms()
        self._range = [math.inf, -math.inf]
        """Smallest and largest return of any trajectory."""
        self._at_best: dict[str, float] = {}
        """Averages of `SIGNS` when success (else the reward) was at its best."""
        self._is_solved = False
        self._is_dead = False
        """Whether the run died before there was a baseline to tell."""
        self._better_for = 0
        """Number of steps in a row that look better than the state."""

    def forget_norms(self) -> None:
        """Measure gradient norms anew, because something else than the policy has changed how large they are."""
        self._norms = Norms(self.thresholds.median_window, self.thresholds.critical_steps)
        self._alarms.pop("grad_norm", None)

    def update(self, step: Mapping[str, float | None]) -> Verdict:
        """Judge one more step, whose keys are some of `KEYS`.

        Raises:
            ValueError: a key is not.
        """
        unknown = sorted(set(step) - KEYS)
        if unknown:
            raise ValueError(
                f"echo_trap: a step has the unknown key {unknown[0]!r}, which nothing would judge. Use some of "
                f"{', '.join(sorted(KEYS))}."
            )
        values = {key: _known(key, step.get(key)) for key in KEYS}
        fresh = {key for key, series in self._series.items() if series.take(values[key])}
        if self._norms.take(values["grad_norm"], at_least=self.thresholds.window):
            fresh.add("grad_norm")
        for place, (key, most) in enumerate((("reward_min", min), ("reward_max", max))):
            if (value := values[key]) is not None:
                self._range[place] = most(self._range[place], value)
        self._remember_best()
        found, measures = self._raise_alarms(fresh)
        counted, excused = self._weigh(found)
        return self._resolve(counted | self._deaths(), excused, measures)

    # ---------------------------------------------------------------- 1. signals

    def _raise_alarms(self, fresh: set[str]) -> tuple[dict[str, Signal], dict[str, float]]:
        """Signals that are beyond a threshold, of which unknown ones stay for a while; and what all compare."""
        limits = self.thresholds
        found = {}
        measures = {}
        for crossing in crossings(self._series, self._norms, limits):
            name = f"{crossing.key}:falls" if crossing.falls else crossing.key  # the entropy has thresholds both ways
            alarm = self._alarms.setdefault(name, Alarm())
            if crossing.key in fresh:
                warning, critical = map(crossing.is_beyond, crossing.pair)
                alarm.take((warning, critical), crossing.patience(limits))
            if self._is_stale(crossing.key):
                self._alarms[name] = Alarm()
                continue
            measures[crossing.key] = crossing.value
            if alarm.level:
                found[crossing.key] = crossing.signal("critical" if alarm.level == 2 else "warning")
        return found, measures

    def _is_stale(self, key: str) -> bool:
        return key in self._series and self._series[key].age > self.thresholds.stale_steps

    def _deaths(self) -> dict[str, Signal]:
        """Two signs at least that the run has died before a baseline could tell, for as long as they last."""
        signs = signs_of_death(self._series)
        is_early = any(self._series[key].num < self.thresholds.window + 2 for key in signs)
        self._is_dead = len(signs) > 1 and (self._is_dead or is_early)
        return signs if self._is_dead else {}

    # ---------------------------------------------------------------- 2. what the reward says

    def _first_known(self, *keys: str) -> str | None:
        known = (key for key in keys if self._series[key].has_baseline and not self._is_stale(key))
        return next(known, None)

    @property
    def _progress(self) -> Series | None:
        """The reward, else the success rate; None if both are unknown."""
        key = self._first_known("reward", "success")
        return None if key is None else self._series[key]

    @property
    def _goal(self) -> str | None:
        """Success, else the reward; None if both are unknown."""
        return self._first_known("success", "reward")

    def _weigh(self, found: Mapping[str, Signal]) -> tuple[dict[str, Signal], dict[str, Signal]]:
        """The signals that count, some of them one level less, and those that do not."""
        progress = self._progress
        self._is_solved = self._solves(progress)
        has_lost = "success" in found  # whatever the reward says
        is_gaining = progress is not None and self._is_at_best(progress) and self._has_risen(progress) and not has_lost
        counted, excused = {}, {}
        for name, signal in found.items():
            is_lower = name in VARIETY and (is_gaining or (progress is None and signal.level == "critical"))
            is_excused = (name in VARIETY and self._is_solved) or (is_lower and signal.level == "warning")
            if name == "inaction":
                is_excused = not has_lost and (is_gaining or not self._calls_earned(progress))
            if is_excused:
                excused[name] = signal
            else:
                counted[name] = replace(signal, level="warning") if is_lower else signal
        counted = {**self._falls_with(self._moved()), **counted}
        if counted and {*counted} <= {*PROGRESS} and self._is_harder():
            counted, excused = {}, {**excused, **counted}
        return counted, excused

    def _remember_best(self) -> None:
        """Keep `SIGNS` of the best success."""
        goal = None if self._goal is None else self._series[self._goal]
        for key in SIGNS:
            series = self._series[key]
            if series.has_baseline and (key not in self._at_best or goal is None or goal.ema >= goal.best):
                self._at_best[key] = series.ema

    def _moved(self) -> dict[str, Signal]:
        """Changes in the policy's behaviour since success was at its best."""
        signs = signs_of_change(self._series, self._at_best, self.thresholds)
        found = {signal.name: signal for signal in signs if not self._is_stale(signal.name)}
        if "inaction" in found and not self._calls_earned(self._progress):
            del found["inaction"]
        return found

    def _falls_with(self, moved: dict[str, Signal]) -> dict[str, Signal]:
        """A fall of success together with a policy that has changed: neither has to be as far as it must alone."""
        if not moved:
            return {}
        for drop in drops(self._series, self.thresholds, self.thresholds.noise):
            if drop.key == self._goal and drop.is_beyond(drop.pair[0]):
                return {drop.key: drop.signal("warning"), **moved}
        return {}

    def _is_harder(self) -> bool:
        """Whether a drop, the only signal, is the task's: the policy samples as it did, and its groups still differ.

        Success that falls without the reward is a reward that is gamed.
        """
        spread, reward, success = (self._series[key] for key in ("reward_std", "reward", "success"))
        is_known = all(self._first_known(key) for key in ("entropy", "reward_std"))
        is_near = 2 * (reward.best - reward.ema) <= self._least_drop(reward)
        is_gamed = is_near and success.has_baseline and not self._is_at_best(success)
        has_lost = spread.mean - spread.ema > max(
            (1 - _HELD_SPREAD) * spread.mean, self.thresholds.noise * spread.noise
        )
        return is_known and reward.has_baseline and not is_gamed and not has_lost

    def _is_at_best(self, progress: Series) -> bool:
        """Whether it is no further from its best than chance and the threshold of a drop allow."""
        return progress.best - progress.ema <= self._least_drop(progress)

    def _least_drop(self, progress: Series) -> float:
        limits = self.thresholds
        return max(limits.reward_drop[0] * self._scale(progress), limits.reward_noise * progress.noise)

    def _has_risen(self, progress: Series) -> bool:
        """Whether it is above its baseline by more than chance, and by a quarter of what groups differed by."""
        spread = self._series["reward_std"]
        least = 0.25 * (spread.mean if spread.has_baseline else abs(progress.mean))
        return progress.ema - progress.mean > max(least, self.thresholds.noise * progress.noise)

    def _scale(self, progress: Series) -> float:
        spread = self._series["reward_std"]
        return reward_scale(progress, spread if progress is self._series["reward"] else None)

    def _solves(self, progress: Series | None) -> bool:
        """Whether the task counts as solved; once it does, a tenth of the scale is left to chance."""
        if progress is None or not self._is_at_best(progress):
            return False
        success, limits = self._series["success"], self.thresholds
        slack = 0.1 if self._is_solved else 0.0
        if success.has_baseline:
            return success.ema >= limits.solved_success - slack
        low, high = self._range
        if limits.solved_reward is not None:
            return progress.ema >= limits.solved_reward - slack * self._scale(progress)
        if high > low:
            return progress.ema >= high - (0.1 + slack) * (high - low)
        return 0.9 <= progress.best <= 1.0 and progress.ema >= 0.9 - slack  # the scale that most rewards have

    def _calls_earned(self, progress: Series | None) -> bool:
        """Whether trajectories with calls had the higher mean return at first, by more than chance.

        Where that is unknown, a reward that has left its best without them says so.
        """
        with_call = self._series["return_with_call"]
        without = self._series["return_without_call"]
        if with_call.num < 2 or without.num < 2:
            return progress is None or not self._is_at_best(progress)
        return with_call.mean - without.mean > 3 * math.hypot(with_call.error, without.error)

    # ---------------------------------------------------------------- 3. the state

    def _resolve(self, counted: dict[str, Signal], excused: dict[str, Signal], measures: dict[str, float]) -> Verdict:
        """The verdict: a worse state at once, because its signals have been patient; a better one after a while."""
        target, state = self._target(counted), self.verdict.state
        is_better = STATES.index(target) < STATES.index(state)
        self._better_for = self._better_for + 1 if is_better else 0
        if not is_better or self._better_for >= self.thresholds.recovery_steps or state == "converged":
            state, self._better_for = target, 0
        self.verdict = Verdict(
            state=state,
            step=self.verdict.step + 1,
            signals=counted,
            measures=measures,
            reason=self._reason(state, target, counted, excused),
            num_kinds=self._num_kinds(counted),
            is_recovering=self._is_recovering(),
            is_entropy_high=self._is_entropy_high(),
        )
        return self.verdict

    def _num_kinds(self, counted: Mapping[str, Signal]) -> int:
        """Groups in which nobody succeeds have no spread either, which is no second kind."""
        kinds = {_KIND.get(name, name) for name in counted}
        last_successes = self._series["success"].raw[-3:]
        nobody_succeeds = bool(last_successes) and not any(last_successes)
        if nobody_succeeds and kinds == {"reward", "reward_std"}:
            return 1
        return len(kinds)

    def _is_entropy_high(self) -> bool:
        """Whether it is above its first threshold now, measured by the first steps while there is no baseline."""
        entropy = self._series["entropy"]
        usual = entropy.mean if entropy.has_baseline else sum(entropy.first) / max(len(entropy.first), 1)
        now = max(entropy.ema, min(entropy.raw[-2:], default=0.0))
        threshold = self.thresholds.entropy_high[0] * usual
        return now > threshold > 0

    def _is_recovering(self) -> bool:
        """Whether a third of a drop that was more than chance is made up."""
        if self._goal is None:
            return False
        goal = self._series[self._goal]
        lost, made_up = goal.best - goal.worst, goal.ema - goal.worst
        return lost > self.thresholds.reward_noise * goal.noise and made_up > lost / 3

    def _target(self, signals: Mapping[str, Signal]) -> State:
        """The judgement of this step's signals.

        Entropy alone is a warning: a policy that was trained on demonstrations begins with almost none, which healthy
        exploration multiplies.
        """
        critical = {_KIND.get(name, name) for name, signal in signals.items() if signal.level == "critical"}
        kinds = {_KIND.get(name, name) for name in signals}
        others = kinds - {"reward"}
        if ("reward" in critical and others) or len(critical) >= (2 if "reward" in kinds else 3):
            return "collapsed"
        if critical - {"entropy"} or (critical and len(kinds) > 1) or ("reward" in kinds and others):
            return "collapsing"
        if signals:
            return "warning"
        return "converged" if self._is_solved and self._has_little_variety() else "healthy"

    def _has_little_variety(self) -> bool:
        std = self._series["reward_std"]
        share = self._series["zero_std_share"]
        has_low_std = std.has_baseline and std.ema < self.thresholds.reward_std[0] * std.mean
        has_high_share = share.has_baseline and share.ema > self.thresholds.zero_std_share[0]
        return has_low_std or has_high_share

    def _reason(
        self, state: State, target: State, counted: Mapping[str, Signal], excused: Mapping[str, Signal]
    ) -> str:
        if counted:
            text = " ".join(signal.reason for signal in counted.values())
            return text if state == target else f"{text} It looks better than before, but not for long enough."
        if state not in ("healthy", "converged"):
            return "No signal is beyond its threshold any more, but not for long enough."
        learnt = " ".join(signal.reason for signal in excused.values())
        if state == "converged":
            return f"The task is solved, and groups differ little: this is convergence. {learnt}".strip()
        if learnt:
            why = "Groups still differ, and the entropy is as it was, so this is a task that got harder."
            return f"{learnt} {why if {*excused} & {*PROGRESS} else 'The reward has gained, so this is learning.'}"
        return "No signal is beyond its threshold."

    # ---------------------------------------------------------------- saving

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next verdict depends on, in values that JSON can hold."""
        state: dict[str, Any] = {name: copy.copy(getattr(self, f"_{name}")) for name in _SAVED}
        state["step"] = self.verdict.step
        state["state"] = self.verdict.state
        state["norms"] = asdict(self._norms)
        state["series"] = {key: asdict(item) for key, item in self._series.items()}
        state["alarms"] = {key: asdict(item) for key, item in self._alarms.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: after a resumption, or after a rollback to an earlier checkpoint."""
        self.verdict = Verdict(state=state["state"], step=state["step"], reason="The run goes on from here.")
        for name in _SAVED:
            setattr(self, f"_{name}", copy.copy(state[name]))
        self._norms = Norms(**state["norms"])
        self._series = {key: Series(**item) for key, item in state["series"].items()}
        self._alarms = {key: Alarm(**item) for key, item in state["alarms"].items()}

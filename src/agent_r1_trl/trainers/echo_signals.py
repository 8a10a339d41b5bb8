"""The signals of the echo trap in our trainers: gathered over all ranks, judged after every optimizer step, logged.

`agent_r1_trl.echo_trap` holds the formulas and the judgement; here is only where the numbers come from. A step that
trains on an earlier rollout again has no new rollout signals, which the judgement takes as unknown.

transformers 5.17 names that this file touches: `state` and its `stateful_callbacks`; of TRL `_metrics`.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import fields
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from agent_r1_trl.echo_trap import EchoTrapJudge, Thresholds, group_keys, rollout_signals, signal_record
from agent_r1_trl.echo_trap.rollout import entropy_factor
from agent_r1_trl.rollout.limits import check_whole_number
from agent_r1_trl.trainers.failures import is_main_process
from agent_r1_trl.trainers.prompt_scores import prompt_dependence
from agent_r1_trl.trajectory import Trajectory

logger = logging.getLogger(__name__)

SAVED_AS = "echo_trap"
"""Entry of `trainer_state.json` that a resumed run goes on from."""
_OF_THE_UPDATE = ("entropy", "kl")
"""Metrics of TRL, one value per micro-batch, that are signals."""


def make_echo_signals(trainer: Any) -> EchoSignals | None:
    """The monitor of a trainer, if its settings ask for one."""
    return EchoSignals(trainer) if is_watched(trainer.args) else None


def is_watched(config: Any) -> bool:
    """Whether a run is judged: where that is asked for, and where something acts on the verdict."""
    return bool(config.echo_trap or getattr(config, "echo_actions", None))


class EchoSignals(TrainerCallback):
    """Judges every optimizer step of a trainer; see `docs/echo-trap.md`.

    Args:
        trainer: a multi-turn trainer with an environment.
    """

    def __init__(self, trainer: Any) -> None:
        self.judge = EchoTrapJudge(Thresholds(**(trainer.args.echo_thresholds or {})))
        """Has the `verdict` on the last step, the same on all ranks."""
        self._trainer = trainer
        self._rollout: dict[str, float] = {}
        """Signals of the rollouts since the last optimizer step."""
        self._records: list[dict[str, Any]] = []
        """Of `signal_record`, the trajectories of these rollouts."""
        self._groups: list[Hashable] = []
        """Which group each belongs to."""
        self._is_chosen = [False, False]
        """Whether groups were filtered, and replaced, in the rollout that is trained on."""
        self._entropy_factor = 1.0
        """Entropy over everything that was sampled for that rollout / entropy over what is trained on."""
        self._conditions: list[Any] | None = None
        """What the last gradient norm depended on besides the policy."""
        self._seen: dict[str, tuple[Any, int]] = {}
        """TRL's lists of metrics, and how many of their values were read."""
        self._has_called = False
        """Whether any trajectory has called a tool; without tools there is no inaction."""
        self._num_nonfinite = 0
        self._last_scoring: int | None = None
        """Optimizer step of the last mutual information."""
        trainer.add_callback(self)

    # ---------------------------------------------------------------- a rollout

    def take(
        self,
        trajectories: Sequence[Trajectory],
        group_size: int,
        replaced: Sequence[Trajectory] = (),
        is_kept: torch.Tensor | None = None,
    ) -> None:
        """Take the signals of a rollout of training, once it is scored. All ranks must call it.

        Args:
            trajectories: this rank's, in data order; groups are consecutive over all ranks.
            group_size: trajectories of one prompt.
            replaced: this rank's trajectories that were sampled and are not trained on, because their groups had no
                signal. The signals are those of everything that was sampled.
            is_kept: (B,) bool, which of the trajectories the filter leaves in the update; None for all.
        """
        kept = [True] * len(trajectories) if is_kept is None else is_kept.tolist()
        records = gather_object([signal_record(item) for item in trajectories])
        is_trained = gather_object(kept)
        others = gather_object([signal_record(item) for item in replaced])
        first = len(self._records)  # tells the groups of two rollouts in one optimizer step apart
        self._groups += [(first, place // group_size) for place in range(len(records))]
        self._groups += [(first, key) for key in group_keys(others)]
        records += others
        is_trained += [False] * len(others)
        drawn = self._trainer.resampling.draw_weights
        for record in records:
            record["weight"] = drawn.get(record["example_id"], 1.0)
        self._entropy_factor = 1.0 if all(is_trained) else entropy_factor(records, is_trained)
        trainer = self._trainer
        self._is_chosen = [trainer.group_filter.settings.rule is not None, trainer.resampling.rounds > 0]
        self._records += records
        self._has_called = self._has_called or any(record["has_call"] for record in records)
        self._rollout |= rollout_signals(self._records, self._groups)
        if not self._has_called:
            self._rollout.pop("inaction", None)
        every, step = trainer.args.mutual_information_every, trainer.state.global_step
        if every and (self._last_scoring is None or step - self._last_scoring >= every):
            self._last_scoring, start = step, time.perf_counter()
            self._rollout |= prompt_dependence(trainer, trajectories, group_size)
            seconds = time.perf_counter() - start
            trainer._rollout_s += seconds  # it is no part of the update either
            trainer._add_metrics({"time/mutual_information_s": seconds})

    # ---------------------------------------------------------------- the Trainer's events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin anew, or go on as the run did that has written the checkpoint."""
        self.judge.reset()
        self._rollout, self._records, self._groups, self._seen, self._has_called = {}, [], [], {}, False
        self._is_chosen, self._entropy_factor, self._conditions = [False, False], 1.0, None
        self._num_nonfinite, self._last_scoring = self._trainer.numbers.num_skipped, None
        saved = state.stateful_callbacks.get(SAVED_AS)
        if state.global_step and saved:
            self.judge.load_state_dict(saved["judge"])
            self._has_called, self._last_scoring = saved["has_called"], saved["last_scoring"]
            self._conditions = saved.get("conditions")
            self._is_chosen = (self._conditions or self._is_chosen)[:2]
            self._entropy_factor = saved.get("entropy_factor", 1.0)
        elif state.global_step and is_main_process():
            logger.warning("The checkpoint holds nothing of echo_trap, whose baselines are measured anew.")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Judge the step, log what was judged, and say so when the state changes."""
        step = self._rollout | {name: self._of_the_update(name) for name in _OF_THE_UPDATE}
        step["entropy"] *= self._entropy_factor
        step["grad_norm"] = self._norm()
        self._rollout, self._records, self._groups = {}, [], []
        conditions = self._now()
        if self._conditions not in (None, conditions):
            self.judge.forget_norms()
        self._conditions = conditions
        before = self.judge.verdict
        verdict = self.judge.update(step)
        metrics = self._trainer._metrics["train"]
        for name, value in step.items():
            if math.isfinite(value):
                metrics[f"echo/{name}"].append(value)
        for name, value in verdict.measures.items():
            if math.isfinite(value):
                metrics[f"echo/compared/{name}"].append(value)
        metrics["echo/state"] = [float(verdict.severity)]
        state.stateful_callbacks[SAVED_AS] = {
            "judge": self.judge.state_dict(),
            "has_called": self._has_called,
            "last_scoring": self._last_scoring,
            "conditions": conditions,
            "entropy_factor": self._entropy_factor,
        }
        if verdict.state != before.state and is_main_process():
            logger.warning(
                "echo_trap: step %d is %s, after %s. %s",
                state.global_step,
                verdict.state,
                before.state,
                verdict.reason,
            )

    def _now(self) -> list[Any]:
        """What gradient norms depend on besides the policy; the guard's actions change it, and the user may."""
        trainer = self._trainer
        bonus = 0.0 if trainer.args.use_adaptive_entropy else trainer.entropy_coef
        return [*self._is_chosen, trainer.epsilon_low, trainer.epsilon_high, trainer.beta != 0, bonus]

    def _of_the_update(self, name: str) -> float:
        """Mean of TRL's metric over the micro-batches of this step; NaN if it has none."""
        values = self._trainer._metrics["train"].get(name, [])
        seen, num = self._seen.get(name, (None, 0))
        new = values[num:] if seen is values else values  # a log begins new lists
        self._seen[name] = (values, len(values))
        known = [value for value in new if not math.isnan(value)]
        return math.fsum(known) / len(known) if known else math.nan

    def _norm(self) -> float:
        """The policy's gradient norm; infinite if the step was skipped for it, NaN if there is none."""
        trainer = self._trainer
        has_broken = trainer.numbers.num_skipped > self._num_nonfinite
        self._num_nonfinite = trainer.numbers.num_skipped
        norm = float(trainer.last_norms[0]) if trainer.last_norms and trainer.last_norms[0] is not None else math.nan
        return math.inf if has_broken else norm if math.isfinite(norm) else math.nan


def check_echo_signals(config: Any) -> None:
    """Check the settings of the monitor.

    Raises:
        ValueError: names the option, its value, the rule and the cure.
    """
    check_whole_number("mutual_information_every", config.mutual_information_every, minimum=0)
    for name in ("echo_thresholds", "mutual_information_every"):
        if getattr(config, name) and not is_watched(config):
            raise ValueError(
                f"{name}={getattr(config, name)} with echo_trap=False has no effect. Set echo_trap=True, or remove "
                f"{name}."
            )
    config.echo_thresholds = values = _mapping(config.echo_thresholds)
    names = [item.name for item in fields(Thresholds)]
    unknown = [name for name in values or {} if name not in names]
    if unknown:
        raise ValueError(f"echo_thresholds has no {unknown[0]!r}. Remove it, or use some of {', '.join(names)}.")
    try:
        Thresholds(**(values or {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"echo_thresholds={config.echo_thresholds}: {error} Correct or remove that entry.") from error


def _mapping(value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """The thresholds as a dictionary; a command line holds JSON."""
    try:
        values = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        values = value
    if values is not None and not isinstance(values, dict):
        raise ValueError(
            f"echo_thresholds={value!r} is no mapping of names to values. Write it as {{solved_reward: 0.95}} in a "
            "recipe, or as '{\"solved_reward\": 0.95}' on the command line."
        )
    return values

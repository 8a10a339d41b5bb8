"""The signals of the echo trap in our trainers: gathered over all ranks, judged after every optimizer step, logged.

Here is where the numbers come from; the other modules hold the judgement on them. A step that trains on an earlier
rollout again has no new rollout signals, which the judgement takes as unknown. Only trajectories in the baseline
count: an infrastructure failure is not the policy's silence.

transformers 5.17 names that this file touches: `state` and its `stateful_callbacks`; of TRL `_metrics`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import operator
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object

from agent_r1_trl.features.echo_trap.judgement import EchoTrapJudge
from agent_r1_trl.trainers.callbacks import RolloutCallback, is_main_process
from agent_r1_trl.trainers.log_means import logged_mean
from agent_r1_trl.trainers.metrics import spread
from agent_r1_trl.trainers.rollout_batch import UpdateBatch
from agent_r1_trl.trainers.saving import describe_rows
from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.entries import Inputs

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


logger = logging.getLogger(__name__)

SAVED_AS = "echo_trap"
"""Entry of `trainer_state.json` that a resumed run goes on from."""


class EchoSignals(RolloutCallback):
    """Judges every optimizer step of a trainer; see `docs/echo-trap.md`."""

    name = "echo_signals"

    def __init__(self, args: Any) -> None:
        self.judge = EchoTrapJudge(args.echo.thresholds)
        """Has the `verdict` on the last step, the same on all ranks."""
        self._begin()

    def _begin(self) -> None:
        self.judge.reset()
        self._records: list[dict[str, Any]] = []
        """The `signal_record` of each trajectory of the rollouts since the last optimizer step."""
        self._groups: list[Hashable] = []
        """Which group each belongs to."""
        self._is_chosen = [False, False]
        """Whether groups were filtered, and replaced, in the rollout that is trained on."""
        self._entropy_factor = 1.0
        """Entropy over everything that was sampled for that rollout / entropy over what is trained on."""
        self._conditions: list[Any] | None = None
        """The state behind the last gradient norm besides the policy."""
        self._seen: tuple[Any, int] = (None, 0)
        """TRL's list of entropies, and how many of its values were read."""
        self._has_called = False
        """Whether any trajectory has called a tool; without tools there is no inaction."""
        self._rows: dict[str, int] | None = None
        """Number and checksum of the rows that the run trains on; None where they cannot be counted."""
        self._num_broken = 0
        """Optimizer steps skipped so far because their numbers were not finite."""

    # ---------------------------------------------------------------- a rollout

    def rollout_end(self, batch: UpdateBatch, output: Inputs) -> None:
        """Take the signals of everything that was sampled, what was replaced or is not kept included."""
        trainer = self.trainer
        trajectories = batch.trajectories
        group_size = batch.position.group_size
        kept = [True] * len(trajectories) if batch.is_kept is None else batch.is_kept.tolist()
        records = gather_object(signal_records(trajectories, trainer.compared_returns(trajectories)))
        others = gather_object(signal_records(batch.replaced, trainer.compared_returns(batch.replaced)))
        is_trained = gather_object(kept) + [False] * len(others)
        first = len(self._records)  # tells the groups of two rollouts in one optimizer step apart
        self._groups += [(first, place // group_size) for place in range(len(records))]
        self._groups += [(first, key) for key in group_keys(others)]
        records += others
        for record in records:
            record["weight"] = batch.draw_weights.get(record["example_id"], 1.0)
        self._entropy_factor = 1.0 if all(is_trained) else entropy_factor(records, is_trained)
        filtering, resampling = (trainer.features.get(name) for name in ("group_filter", "resampling"))
        is_filtered = filtering is not None and filtering.settings.filter_groups is not None
        self._is_chosen = [is_filtered, resampling is not None and resampling.rounds > 0]
        self._records += records
        self._has_called = self._has_called or any(record["has_call"] for record in records)

    # ---------------------------------------------------------------- the Trainer's events

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Begin anew, or go on as the run did that has written the checkpoint."""
        self._begin()
        self._num_broken = self._num_broken_steps()
        self._rows = describe_rows(self.trainer.train_dataset)
        saved = state.stateful_callbacks.get(SAVED_AS)
        if state.global_step and saved and saved.get("rows", self._rows) != self._rows:
            if is_main_process():
                logger.warning(
                    "The checkpoint's baselines of echo_trap are those of other rows, on which rewards and entropy "
                    "may be others. They are measured anew."
                )
        elif state.global_step and saved:
            self.judge.load_state_dict(saved["judge"])
            self._has_called = saved["has_called"]
            self._conditions = saved["conditions"]
            self._is_chosen = self._conditions[:2]
            self._entropy_factor = saved["entropy_factor"]
        elif state.global_step and is_main_process():
            logger.warning("The checkpoint holds nothing of echo_trap, whose baselines are measured anew.")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Judge the step, log what was judged, and say so when the state changes."""
        step = rollout_signals(self._records, self._groups)
        if not self._has_called:
            step.pop("inaction", None)
        step |= {"entropy": self._entropy() * self._entropy_factor, "grad_norm": self._norm()}
        self._records, self._groups = [], []
        conditions = self._now()
        if self._conditions not in (None, conditions):
            self.judge.forget_norms()
        self._conditions = conditions
        before = self.judge.verdict
        verdict = self.judge.update(step)
        metrics = self.trainer._metrics["train"]
        for name, value in [*step.items(), *((f"compared/{name}", item) for name, item in verdict.measures.items())]:
            if math.isfinite(value):
                metrics[f"echo/{name}"].append(value)
        metrics["echo/state"] = [float(verdict.severity)]
        state.stateful_callbacks[SAVED_AS] = {
            "judge": self.judge.state_dict(),
            "has_called": self._has_called,
            "conditions": conditions,
            "rows": self._rows,
            "entropy_factor": self._entropy_factor,
        }
        if is_main_process() and verdict.state != before.state:
            text = "echo_trap: step %d is %s, after %s. %s"
            logger.warning(text, state.global_step, verdict.state, before.state, verdict.reason)

    def _now(self) -> list[Any]:
        """The state behind gradient norms besides the policy; the guard's actions change it, and the user may."""
        trainer = self.trainer
        bonus = 0.0 if trainer.args.use_adaptive_entropy else trainer.entropy_coef
        return [*self._is_chosen, trainer.epsilon_low, trainer.epsilon_high, trainer.beta != 0, bonus]

    def _entropy(self) -> float:
        """Mean of TRL's metric over the tokens of this step; NaN if it has none."""
        values = self.trainer._metrics["train"].get("entropy", [])
        seen, num = self._seen
        new = values[num:] if seen is values else values  # a log begins new lists
        self._seen = (values, len(values))
        return logged_mean(new)

    def _num_broken_steps(self) -> int:
        numbers = self.trainer.features.get("numbers")
        return 0 if numbers is None else numbers.num_skipped

    def _norm(self) -> float:
        """The policy's gradient norm; infinite if the step was skipped for it, NaN if there is none."""
        before, self._num_broken = self._num_broken, self._num_broken_steps()
        if self._num_broken > before:
            return math.inf
        norm = (self.trainer.last_norms or (None,))[0]
        return math.nan if norm is None or not math.isfinite(norm) else float(norm)


# ---------------------------------------------------------------- what one rollout says


def signal_records(trajectories: Sequence[Trajectory], returns: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """`signal_record` of each, with the returns that it is compared by in training."""
    records = [signal_record(item) for item in trajectories]
    for record, compared in zip(records, returns, strict=True):
        record["compared"] = compared
    return records


def signal_record(trajectory: Trajectory) -> dict[str, Any]:
    """Facts about one scored trajectory for the signals: small enough to gather over ranks."""
    num_actions = trajectory.numbers.get("num_actions", 0)  # of a game, whose moves need not be tool calls
    return {
        "in_baseline": trajectory.in_baseline,
        "return": trajectory.total_reward - trajectory.truncation_penalty,
        "has_call": bool(trajectory.tool_results) or num_actions > 0,
        "turns": [_digest(trajectory.completion_ids[turn.start : turn.end]) for turn in trajectory.env_turns],
        "length": trajectory.num_action_tokens,
        "log_prob": math.fsum(trajectory.logprobs),
        "success": trajectory.numbers.get("success"),
        "example_id": trajectory.example_id,
        "generation": trajectory.generation,
        "weight": 1.0,
    }


def _digest(ids: Sequence[int]) -> str:
    return hashlib.blake2b(repr([*ids]).encode(), digest_size=8).hexdigest()


def group_keys(records: Sequence[dict[str, Any]]) -> list[Hashable]:
    """Which group each trajectory belongs to; an example that was sampled more than once has several groups."""
    seen: Counter[tuple[str, int]] = Counter()
    keys: list[Hashable] = []
    for record in records:
        member = (record["example_id"], record["generation"])
        keys.append((record["example_id"], seen[member]))
        seen[member] += 1
    return keys


def rollout_signals(records: Sequence[dict[str, Any]], groups: Sequence[Hashable]) -> dict[str, float]:
    """The signals of N trajectories of all ranks; `docs/echo-trap.md` has each formula.

    Each counts with its `weight`: what a curriculum draws more often counts less, so that the signals are those of a
    uniform draw.

    Args:
        records: of `signal_record`.
        groups: which group each belongs to, in any order.

    Returns:
        Keys of `judge`'s history. What these trajectories do not say is left out: `zero_std_share` where no group has
        two members, `success` where environments report none, `return_with_call` where nobody called.
    """
    kept = [(record, group) for record, group in zip(records, groups, strict=True) if record["in_baseline"]]
    if not kept:
        return {}
    returns = [record["return"] for record, _ in kept]
    weights = [record["weight"] for record, _ in kept]
    signals = {
        "reward": _mean(returns, weights),
        "reward_min": min(returns),
        "reward_max": max(returns),
        "inaction": _mean([not record["has_call"] for record, _ in kept], weights),
    }
    for name, key, some in (
        ("return_with_call", "return", [record for record, _ in kept if record["has_call"]]),
        ("return_without_call", "return", [record for record, _ in kept if not record["has_call"]]),
        ("success", "success", [record for record, _ in kept if record["success"] is not None]),
    ):
        if some:
            signals[name] = _mean([record[key] for record in some], [record["weight"] for record in some])
    members: dict[Hashable, list[dict[str, Any]]] = defaultdict(list)
    for record, group in kept:
        members[group].append(record)
    return signals | _group_signals([group for group in members.values() if len(group) > 1])


def _group_signals(groups: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    """Signals of groups of at least two trajectories."""
    if not groups:
        return {}
    stds = [_spread([record["return"] for record in group]) for group in groups]
    weights = [group[0]["weight"] for group in groups]
    compared = [[record.get("compared", [record["return"]]) for record in group] for group in groups]
    is_flat = [not spread(returns)[1] for returns in compared]  # as they are trained on
    signals = {
        "reward_std": _mean(stds, weights),
        "zero_std_share": _mean(is_flat, weights),
    }
    num_turns = [sum(len(record["turns"]) for record in group) for group in groups]
    if any(num_turns):
        repeated = math.fsum(map(operator.mul, map(_num_repeated, groups), weights))
        signals["repetition"] = repeated / math.fsum(map(operator.mul, num_turns, weights))
    return signals


def entropy_factor(records: Sequence[dict[str, Any]], is_trained: Sequence[bool]) -> float:
    """The factor from the entropy over the trained trajectories to that over all of them.

    The mean negative log-prob of sampled tokens estimates their entropy, and is known for tokens that cost no forward
    pass. 1 where the sampler gave no log-probs, or nothing is trained on.
    """
    kept = [(record, trained) for record, trained in zip(records, is_trained, strict=True) if record["in_baseline"]]
    everything = _mean_log_prob([record for record, _ in kept])
    trained = _mean_log_prob([record for record, trained in kept if trained])
    factor = everything / trained if trained else math.nan
    return factor if math.isfinite(factor) and factor > 0 else 1.0


def _mean_log_prob(records: Sequence[dict[str, Any]]) -> float:
    return math.fsum(record["log_prob"] for record in records) / max(1, sum(record["length"] for record in records))


def _num_repeated(group: Sequence[dict[str, Any]]) -> int:
    """Number of turns that another trajectory of the group says as well, at whatever place."""
    num_speakers = Counter[str]()
    for record in group:
        num_speakers.update(set(record["turns"]))
    num_repeated = 0
    for record in group:
        num_repeated += sum(num_speakers[turn] > 1 for turn in record["turns"])
    return num_repeated


def _spread(returns: Sequence[float]) -> float:
    """Bessel-corrected standard deviation; 0 for what is no more than the noise of floats."""
    std = statistics.stdev(returns)
    return std if std > 1e-6 * max(abs(value) for value in returns) else 0.0


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(map(operator.mul, values, weights)) / math.fsum(weights)

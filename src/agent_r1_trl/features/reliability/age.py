"""Old weights (`rollouts_ahead`): how many rollouts may run ahead at the present learning rate.

The effective share of a batch is Kish's effective sample size of its tokens' importance weights before any bound,
(sum w)^2 / (n sum w^2): 1 where the policy is the one that sampled them. 1 / share - 1 is the relative variance of the
weights. It grows with the square of the distance between the two policies, and the sum of the learning rates of the
updates between them measures this distance. So the share of a batch that is not yet sampled can be expected from those
that are known.

No importance weight repairs a policy that has moved too far, and a batch whose own share is small comes too late: the
updates behind it are made. So a rollout begins ahead only while a share near 1 is expected of it. A batch whose
share turns out below `failures.min_effective_share` is not trained on, as if a filter had left nothing of it, and the
run ends after `MAX_FRESH` such batches in a row whose weights were those of the update: age is not the cause.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from agent_r1_trl.errors import RunError
from agent_r1_trl.trainers.callbacks import OptimizerStep, RolloutCallback, is_main_process
from agent_r1_trl.trainers.dropout import noise_rates
from agent_r1_trl.trainers.rollout_batch import UpdateBatch
from agent_r1_trl.trainers.scoring import score_again
from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.batches import take_rows
from agent_r1_trl.update.entries import COUNT_OF, EFFECTIVE_SHARE, EXTRA_TOKENS, IS_KEPT, KEPT_IDS, Inputs
from agent_r1_trl.update.importance import effective_share

logger = logging.getLogger(__name__)

MAX_FRESH = 3
"""Batches in a row that the update's own weights have sampled and that are off-policy all the same."""
EXPECTED_LOSS = 0.2
"""What a batch may be expected to lose of its share, as a part of what `failures.min_effective_share` lets it lose.

Where .98 was expected, runs learned; where .96 was, they were ruined (docs/running-ahead.md)."""
LEAST_MEASURED = 1 / 3
"""The warning waits until a distance was measured of this part of what one rollout moves at the rate it is about.

At a warm-up's first rates a measurement is mostly noise, and so is what follows from it for the schedule's top."""
MEMORY = 0.7
"""The weight of all earlier measurements beside the next one."""
PROBE_ROWS = 32
"""Rows of each rank that are scored once more to see how far an update has moved the policy."""
_PROBED = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    KEPT_IDS,
)


class OffPolicyError(RunError):
    """The sampler's policy is not the trainer's, though the weights are of the same step."""


class Drift:
    """How far the policy moves: the variance of importance weights by the distance that learning rates add up to."""

    def __init__(self) -> None:
        self.noise = 0.0
        """The variance at distance 0: sampler and trainer round differently."""
        self.farthest = 0.0
        """The largest distance that was measured."""
        self._variance = self._square = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._square > 0.0

    def add(self, share: float, square: float, *, has_noise: bool = True) -> None:
        """A measurement.

        Args:
            share: the effective share.
            square: the mean over the tokens of the squared sum of the learning rates since they were sampled.
            has_noise: whether another program than the trainer has given one of the two log-probabilities.
        """
        variance = 1 / max(share, 1e-9) - 1
        if square == 0.0:
            self.noise = variance
            return
        variance = max(variance - (self.noise if has_noise else 0.0), 0.0)
        self._variance = MEMORY * self._variance + variance
        self._square = MEMORY * self._square + square
        self.farthest = max(self.farthest, math.sqrt(square))

    def expected_share(self, distance: float) -> float:
        """The share of tokens that are `distance` old, in added learning rates; 1 where nothing is known."""
        return 1 / (1 + self._coefficient * distance**2)

    def reach(self, share: float) -> float:
        """The distance at which `share` is expected."""
        if self._coefficient == 0.0 or share == 0.0:
            return math.inf
        return math.sqrt((1 / share - 1) / self._coefficient)

    @property
    def _coefficient(self) -> float:
        return self._variance / self._square if self.is_known else 0.0

    def state_dict(self) -> dict[str, float]:
        """What was measured."""
        return {
            "noise": self.noise, "variance": self._variance, "square": self._square, "farthest": self.farthest,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on with it."""
        self.noise, self._variance, self._square = state["noise"], state["variance"], state["square"]
        self.farthest = state.get("farthest", math.sqrt(self._square))


class AgeGuard(RolloutCallback):
    """Lets as many rollouts run ahead as the learning rate allows.

    Args:
        min_share: the effective share below which a batch is not trained on. A rollout begins ahead while a share of
            1 - `EXPECTED_LOSS` (1 - `min_share`) is expected of it. 0: all begin.
    """

    name = "age"

    def __init__(self, min_share: float) -> None:
        self._min_share = min_share
        self._least_expected = 1 - EXPECTED_LOSS * (1 - min_share) if min_share else 0.0
        self._forget()

    def _forget(self) -> None:
        self._drift = Drift()
        self._rates: dict[int, float] = {}
        """Optimizer step -> its learning rate, of the last steps."""
        self._said: set[str] = set()
        self._has_gradient = False
        """Whether the policy has had a gradient: later, an optimizer with a memory moves it without one."""
        self.go_back(0, 0)

    def begin_run(self) -> None:
        """Forget an earlier run. Until an update has shown how far it moves the policy, nothing begins ahead."""
        self._forget()
        can_move = self._min_share > 0.0 and self.trainer.args.learning_rate > 0.0
        self.trainer.rollouts.ahead.limit = 0 if can_move else None

    def go_back(self, step: int, micro_step: int) -> None:
        """Other rollouts follow the checkpoint."""
        self._num_fresh = 0
        self._last: tuple[int, Inputs, torch.Tensor] | None = None
        """The optimizer steps before the last batch, some of its rows, and their log-probs then."""

    # ---------------------------------------------------------------- a batch

    def rollout_end(self, batch: UpdateBatch, output: Inputs) -> None:
        """Measure, choose how many rollouts may run ahead, and leave out a batch whose share is too small.

        Raises:
            OffPolicyError: three batches in a row of the update's own weights are below the minimum.
        """
        share = float(output.pop(EFFECTIVE_SHARE, math.nan))
        step = batch.position.optimizer_step
        self._probe(step)
        if not math.isnan(share):  # else no token in it says by which probability it was drawn
            self._drift.add(share, self._mean_square(batch.trajectories, step))
        self._keep_rows(step, output)
        is_too_old = share < self._min_share
        if self._min_share and self.trainer.optimizer is not None:  # there is none outside `train`
            self._limit(is_too_old=is_too_old)
        if is_too_old:
            batch.is_kept = torch.zeros_like(batch.in_loss)  # for the record, which is yet to be written
            taught = self.trainer._metrics["train"]["group/taught_share"]
            taught[-1:] = [0.0] * len(taught[-1:])  # it is logged already
            output[IS_KEPT] = torch.zeros_like(output["in_baseline"])
            terms = [name for name in output if name.startswith(EXTRA_TOKENS)]  # which a filter would leave alone
            for name in [*terms, *(COUNT_OF + term for term in terms)]:
                output[name] = torch.zeros_like(output[name])
            self.trainer.features.leave_out = ["failures.min_effective_share"]
            self._say_skipped(share, batch)
        age = batch.metrics.get("sampling/staleness_max", 0.0)
        self._num_fresh = self._num_fresh + 1 if is_too_old and age == 0 else 0
        if self._num_fresh == MAX_FRESH:
            raise OffPolicyError(
                f"sampling/effective_share={share:.3g} is below failures.min_effective_share={self._min_share:g} for "
                f"{MAX_FRESH} batches in a row, none of which was sampled ahead: the sampler computes another policy "
                "than the trainer, whatever the age. Look at sampling/sync_logprob_gap, at the numbers that both "
                "compute in (vllm_dtype, bf16) and at quantised weights; or lower failures.min_effective_share."
            )

    def before_step(self, step: OptimizerStep) -> None:
        """Note the learning rate; before the first gradient no step moves anything."""
        norm = step.norms[0] if step.norms else None
        self._has_gradient = self._has_gradient or norm is None or float(norm) != 0.0
        rests = step.lacks_tokens or not self._has_gradient
        self._rates[step.number] = 0.0 if rests else self._rate
        oldest = step.number - (self.trainer.args.rollouts_ahead + 1) * self._num_updates
        self._rates = {number: rate for number, rate in self._rates.items() if number >= oldest}

    def state_dict(self) -> dict[str, Any]:
        """What was measured, and what followed from it."""
        limit = self.trainer.rollouts.ahead.limit
        return {
            "drift": self._drift.state_dict(),
            "rates": self._rates,
            "limit": limit,
            "has_gradient": self._has_gradient,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with it."""
        self._drift.load_state_dict(state["drift"])
        self._rates = state["rates"]
        self._has_gradient = state.get("has_gradient", True)
        self.trainer.rollouts.ahead.limit = state["limit"]

    # ---------------------------------------------------------------- measuring

    @property
    def _num_updates(self) -> int:
        """Optimizer steps on one rollout."""
        args = self.trainer.args
        return int(args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps)

    @property
    def _rate(self) -> float:
        """The learning rate of the next update of the policy."""
        return float(self.trainer._get_learning_rate())

    def _distance(self, version: int, step: int) -> float:
        """What the learning rates of the updates between two sets of weights add up to."""
        return sum(self._rates.get(number, 0.0) for number in range(version, step))

    def _mean_square(self, trajectories: Sequence[Trajectory], step: int) -> float:
        """The mean over the tokens of all ranks of their squared distance to the weights of `step`."""
        stamps = [stamp for item in trajectories for turn in item.turns for stamp in turn.versions]
        squares = sum(num * self._distance(version, step) ** 2 for version, num in stamps)
        own = torch.tensor([squares, sum(num for _, num in stamps)], dtype=torch.float64)
        total, num = self.trainer.accelerator.reduce(own.to(self._device), reduction="sum").tolist()
        return total / num if num else 0.0

    @property
    def _device(self) -> torch.device:
        return self.trainer.accelerator.device

    def _keep_rows(self, step: int, output: Inputs) -> None:
        """Keep some rows of a batch until the next one, where nothing else will say how far the update moves."""
        self._last = None
        if "old_per_token_logps" in output:
            every = max(len(output["completion_ids"]) // PROBE_ROWS, 1)
            rows = {name: output[name] for name in _PROBED if name in output}
            probed = take_rows(rows, slice(None, None, every))
            log_probs = probed["old_per_token_logps"]
            if noise_rates(self.trainer.model):  # they have its noise, which no rate takes away
                log_probs = score_again(self.trainer, probed)
            self._last = step, probed, log_probs

    def _probe(self, step: int) -> None:
        """Score rows of the last batch once more, unless rollouts that run ahead tell the same."""
        if self._last is None or not self._min_share or (self._drift.is_known and self.trainer.rollouts.ahead.limit):
            return
        version, rows, log_probs = self._last
        if (distance := self._distance(version, step)) == 0.0:
            return
        difference = score_again(self.trainer, rows) - log_probs
        in_loss = (rows["completion_mask"] * rows["tool_mask"]).bool()
        share = effective_share(difference, in_loss, self.trainer.accelerator)
        if not math.isnan(share):
            self._drift.add(share, distance**2, has_noise=False)

    # ---------------------------------------------------------------- what follows

    def _limit(self, *, is_too_old: bool) -> None:
        """Choose how many rollouts may run ahead; the same on all ranks."""
        trainer = self.trainer
        args, ahead = trainer.args, trainer.rollouts.ahead
        rate = self._rate_ahead()
        of_rollout = rate * self._num_updates
        limit = args.rollouts_ahead
        if rate > 0.0 and not self._drift.is_known:
            limit = 0
        while limit and self._drift.expected_share(limit * of_rollout) < self._least_expected:
            limit -= 1
        ahead.limit = 0 if is_too_old else limit
        expected = self._drift.expected_share(args.rollouts_ahead * of_rollout)
        trainer.add_metrics({"sampling/rollouts_ahead": float(ahead.limit), "sampling/expected_share": expected})
        if limit < args.rollouts_ahead and self._drift.farthest >= LEAST_MEASURED * of_rollout > 0.0:
            self._say_limited(rate, expected, limit)

    def _rate_ahead(self) -> float:
        """The largest learning rate to reckon with: the present one once it falls, else that of the schedule's top."""
        group = self.trainer.optimizer.param_groups[0]
        top = max(float(group.get("initial_lr", 0.0)), self._rate)
        last = self._rates[max(self._rates)] if self._rates else 0.0
        return self._rate if self._rate < last else top

    # ---------------------------------------------------------------- what is said

    def _say_limited(self, rate: float, expected: float, limit: int) -> None:
        if "limited" in self._said or not is_main_process():
            return
        self._said.add("limited")
        args = self.trainer.args
        logger.warning(
            "Step %d: learning_rate=%.3g moves the policy so far that a batch of rollouts_ahead=%d would have an "
            "effective share of about %.3g (sampling/expected_share). Below %.3g (a fifth of the way to "
            "failures.min_effective_share=%g) no correction for the age is to be trusted. So %d run ahead until "
            "more is expected, as when the rate falls. For all of them lower learning_rate to about %.1g. Reported "
            "once; sampling/rollouts_ahead goes on.",
            self.trainer.state.global_step + 1,
            rate,
            args.rollouts_ahead,
            expected,
            self._least_expected,
            self._min_share,
            limit,
            self._drift.reach(self._least_expected) / (args.rollouts_ahead * self._num_updates),
        )

    def _say_skipped(self, share: float, batch: UpdateBatch) -> None:
        if "skipped" in self._said or not is_main_process():
            return
        self._said.add("skipped")
        args, age = self.trainer.args, batch.metrics.get("sampling/staleness_max", 0.0)
        cause = "the sampler computes another policy than the trainer, though no token of this batch is old"
        if age:
            cause = (
                f"at learning_rate={args.learning_rate:g} the policy has moved too far in the {age:g} optimizer steps "
                "since the oldest tokens of this batch were sampled. What the updates before it have done stays: if "
                "the reward falls, begin again from a checkpoint before it, with a lower learning_rate or a smaller "
                f"rollouts_ahead={args.rollouts_ahead}"
            )
        logger.warning(
            "Step %d is not trained on: sampling/effective_share=%.3g is below failures.min_effective_share=%g: %s. "
            "Reported once; filter/skipped_steps counts on.",
            self.trainer.state.global_step + 1,
            share,
            self._min_share,
            cause,
        )

"""Old weights (`rollouts_ahead`): how far the policy has moved from those that sampled a batch, and what follows.

The share is Kish's effective sample size of the tokens' importance weights, (sum w)^2 / (n sum w^2), before any bound:
1 where the policy is the one that sampled them. What lowers it is the learning rate times the age. No importance
weight repairs a policy that has moved too far, and the share says so one update late. While it is below
`failures.min_effective_share`:

- no further rollout begins ahead, so the next ones are younger, down to the synchronous run's,
- such a batch is not trained on, as if a filter had left nothing of it,
- the run ends after `MAX_FRESH` such batches in a row whose weights were those of the update: age is not the cause.
"""

from __future__ import annotations

import logging
import math

import torch

from agent_r1_trl.errors import RunError
from agent_r1_trl.trainers.callbacks import RolloutCallback, is_main_process
from agent_r1_trl.trainers.rollout_batch import UpdateBatch
from agent_r1_trl.update.entries import COUNT_OF, EFFECTIVE_SHARE, EXTRA_TOKENS, IS_KEPT, Inputs

logger = logging.getLogger(__name__)

MAX_FRESH = 3
"""Batches in a row that the update's own weights have sampled and that are off-policy all the same."""


class OffPolicyError(RunError):
    """The sampler's policy is not the trainer's, though the weights are of the same step."""


class AgeGuard(RolloutCallback):
    """Holds the rollouts that would run ahead while batches come out too far off-policy.

    Args:
        min_share: the effective share below which they do.
    """

    name = "age"

    def __init__(self, min_share: float) -> None:
        self._min_share = min_share
        self.begin_run()

    def begin_run(self) -> None:
        """Forget an earlier run."""
        self.go_back(0, 0)
        self._has_said = False

    def go_back(self, step: int, micro_step: int) -> None:
        """Other rollouts follow the checkpoint."""
        self._num_fresh = 0

    def rollout_end(self, batch: UpdateBatch, output: Inputs) -> None:
        """Look at the share of a batch, the same number on all ranks, and leave the batch out if it is too small.

        Raises:
            OffPolicyError: three batches in a row of the update's own weights are below the minimum.
        """
        share = float(output.pop(EFFECTIVE_SHARE, math.nan))
        if math.isnan(share):  # no token in it says by which probability it was drawn
            return
        ahead, age = self.trainer.rollouts.ahead, batch.metrics.get("sampling/staleness_max", 0.0)
        ahead.is_held = share < self._min_share
        self.trainer.add_metrics({"sampling/is_held": float(ahead.is_held)})
        if ahead.is_held:
            batch.is_kept = torch.zeros_like(batch.in_loss)  # for the record, which is yet to be written
            taught = self.trainer._metrics["train"]["group/taught_share"]
            taught[-1:] = [0.0] * len(taught[-1:])  # it is logged already
            output[IS_KEPT] = torch.zeros_like(output["in_baseline"])
            terms = [name for name in output if name.startswith(EXTRA_TOKENS)]  # which a filter would leave alone
            for name in [*terms, *(COUNT_OF + term for term in terms)]:
                output[name] = torch.zeros_like(output[name])
            self.trainer.features.leave_out = ["failures.min_effective_share"]
        self._num_fresh = self._num_fresh + 1 if ahead.is_held and age == 0 else 0
        if ahead.is_held and not self._has_said:
            self._has_said = True
            self._say(share, age)
        if self._num_fresh == MAX_FRESH:
            raise OffPolicyError(
                f"sampling/effective_share={share:.3g} is below failures.min_effective_share={self._min_share:g} for "
                f"{MAX_FRESH} batches in a row, none of which was sampled ahead: the sampler computes another policy "
                "than the trainer, whatever the age. Look at sampling/sync_logprob_gap, at the numbers that both "
                "compute in (vllm_dtype, bf16) and at quantised weights; or lower failures.min_effective_share."
            )

    def _say(self, share: float, age: float) -> None:
        if is_main_process():
            args = self.trainer.args
            logger.warning(
                "Step %d: sampling/effective_share=%.3g is below failures.min_effective_share=%g: at learning_rate=%g "
                "the policy has moved too far in the %g optimizer steps since the oldest tokens of this batch were "
                "sampled. It is not trained on, and nothing begins ahead until the share is above again. What the "
                "updates before it have done stays: begin again from a checkpoint before it, with a lower "
                "learning_rate or a smaller rollouts_ahead=%d. Reported once; sampling/is_held counts on.",
                self.trainer.state.global_step + 1,
                share,
                self._min_share,
                args.learning_rate,
                age,
                args.rollouts_ahead,
            )

"""The policy's loss: TRL's, over masked tokens in this run's layout, with the user's own term.

TRL names that this file touches: `_compute_loss` and `_get_per_token_logps_and_entropies` (overridden), `beta` (set
for a while), `entropy_coef` and `_last_world_entropy` (taken back), `_metrics`, `accelerator`, `args`, `model`,
`current_gradient_accumulation_steps`.
"""

from __future__ import annotations

from typing import Any

import torch

from agent_r1_trl.trainers.group_filter import of_scored_rows
from agent_r1_trl.trainers.nonfinite import LOG_PROBS
from agent_r1_trl.trainers.own_loss import OwnLossTrainer, advantages_of, for_own_loss, is_own_loss
from agent_r1_trl.trainers.passes import PassesTrainer
from agent_r1_trl.trainers.row_batches import policy_weights
from agent_r1_trl.trainers.run_state import RunStateTrainer
from agent_r1_trl.trainers.trl_logs import drop_token_means
from agent_r1_trl.update.batching import loss_masks
from agent_r1_trl.update.layout import Plan, UpdateLayout
from agent_r1_trl.update.losses import LossPass


class LossTrainer(RunStateTrainer, PassesTrainer, OwnLossTrainer):
    """TRL's trainer with the loss of the multi-turn trainers."""

    layout: UpdateLayout
    _loss_pass: LossPass | None = None
    """Set while `_compute_loss` runs."""
    # TRL's own, declared because they are set here.
    beta: float
    entropy_coef: float
    _last_world_entropy: float

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's loss, plus `extra_loss`; a KL term that stands in the rewards does not enter it a second time."""
        mask, scored = loss_masks(inputs)  # (B, T)
        if self.env_factory is not None:  # a loss around this one may have been given other advantages, or given them
            inputs = {**inputs, "advantages": advantages_of(inputs, mask)}
        scale, weighted_beta = policy_weights(inputs, self)
        inputs = self.layout.mask_log_probs(inputs, mask)
        plan, entropy_scale = self.layout.plan_of(inputs), float(inputs.get("micro_batch_scale", 1.0))
        beta, self._loss_pass = self.beta, LossPass(mask, scored, entropy_scale, plan)
        entropy_control = self.entropy_coef, self._last_world_entropy
        in_rewards = self.env_factory is not None and self.args.kl_placement == "reward"
        self.beta = 0.0 if in_rewards else weighted_beta  # TRL reads it here, and elsewhere for the reference
        try:
            weighted = {**inputs, "advantages": inputs["advantages"] * scale}
            if self.env_factory is not None and is_own_loss(super()._compute_loss):
                weighted = for_own_loss(weighted, self)
            loss = super()._compute_loss(model, weighted)
            self._take_back_entropy_control(*entropy_control)
            if self.env_factory is not None and not self._has_loss(plan, mask):
                drop_token_means(self._metrics[self._mode], in_rewards=in_rewards)
            if type(self).extra_loss is LossTrainer.extra_loss:
                return loss
            term, metrics = self._loss_pass.extra_term(self.extra_loss, inputs, self.accelerator)
            self._add_metrics(metrics)
            return loss + term / self._normaliser(inputs["num_items_in_batch"])
        finally:
            self.beta, self._loss_pass = beta, None

    def _has_loss(self, plan: Plan | None, mask: torch.Tensor) -> bool:
        """Whether a token of the micro-batch is in the policy's loss, on any rank as far as all of them can ask.

        Args:
            plan: None in an evaluation, and where a subclass has put other masks into a micro-batch of this rank.
            mask: (B, T) tokens in the loss.
        """
        if plan is not None:
            return plan.has_loss
        if self.model.training:  # the other ranks may have plans: nobody would answer a collective call
            return bool(mask.any())
        return bool(self.accelerator.reduce(mask.sum(), reduction="sum"))

    def _take_back_entropy_control(self, coefficient: float, entropy: float) -> None:
        """Leave TRL's adaptive entropy bonus as it was before a step that is skipped.

        To TRL the entropy of a step without tokens is 0, and that of numbers that are not finite NaN.
        """
        if self.env_factory is None or self._last_world_entropy > 0:
            return
        self.entropy_coef, self._last_world_entropy = coefficient, entropy
        if values := self._metrics["train"].get("entropy_coef"):
            values[-1] = coefficient

    @of_scored_rows
    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> tuple:
        """TRL's log-probs and entropies, (B, T) each; in the loss, packed layouts leave 0 outside its mask."""
        loss_pass = self._loss_pass
        if self.layout.is_packed:
            scored = attention_mask[:, -logits_to_keep:] if loss_pass is None else loss_pass.scored
            size: int | None = kwargs.get("batch_size") or len(input_ids)
            size = self.layout.scoring_size(size) if loss_pass is None else size
            rows = (model, input_ids, attention_mask, scored)
            plan = None if loss_pass is None else loss_pass.plan
            both: Any = self.layout.log_probs(*rows, accelerator=self.accelerator, batch_size=size, plan=plan)
            both = both if loss_pass is None else loss_pass.masked(*both)
            result: tuple = (*both, None)
        else:
            result = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        if loss_pass is not None:
            loss_pass.take(*result[:2])
            self._watch_numbers(LOG_PROBS, result[0], loss_pass.mask)
        return result

    def extra_loss(self, inputs: dict[str, Any], log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        """A loss term of your own: override this method in a subclass.

        The trainer divides what it returns by the number of loss tokens in the whole optimizer step, on all ranks, and
        adds it to the policy loss. A sum over tokens therefore means the same in every layout, on any number of ranks.

        Args:
            inputs: TRL's micro-batch of B rows: `advantages` (B, T), `completion_ids` (B, T), `old_per_token_logps`
                (B, T) or None, and so on.
            log_probs: (B, T) the policy's log-probs of the completion tokens, with gradients; 0 outside `mask`.
            mask: (B, T) bool, the tokens that enter the loss.

        Returns:
            A scalar, the term summed over the tokens of `mask`; None for no term.
        """
        return None

    def _normaliser(self, num_tokens: torch.Tensor) -> torch.Tensor:
        """What a micro-batch's sum over tokens is divided by, so that an optimizer step is a mean over its tokens.

        Args:
            num_tokens: of the generation batch, on all ranks.
        """
        normaliser = num_tokens.clamp(min=1.0) / self.accelerator.num_processes
        if self.model.training:  # in evaluation the batch is neither split nor accumulated
            normaliser = normaliser * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return normaliser

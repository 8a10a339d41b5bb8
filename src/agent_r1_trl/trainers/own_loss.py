"""What a loss written for TRL's trainer reads of our micro-batches: advantages of (B,), one number for each row.

Such a loss is a `_compute_loss` that a subclass, a mix-in, an attribute or a patch brings along. Advantages of (B, T)
would broadcast in it to (B, B, T), and something else would be trained in silence.
"""

from __future__ import annotations

from typing import Any

import torch
from trl import GRPOTrainer

from agent_r1_trl.trainers.group_filter import HAS_SIGNAL
from agent_r1_trl.trainers.row_batches import NUM_TOKENS
from agent_r1_trl.update.batching import loss_masks
from agent_r1_trl.update.rows import Inputs

TOKEN_ADVANTAGES = "token_advantages"
"""Entry of a micro-batch that such a loss gets where `advantages` cannot be (B,): they are (B, T)."""


class OwnLossTrainer(GRPOTrainer):
    """TRL's trainer, which calls a `_compute_loss` of the user's own with the batches that it was written for."""

    env_factory: Any

    def compute_loss(self, model: Any, inputs: Inputs, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's, which calls `_compute_loss`."""
        if self.env_factory is not None and is_own_loss(self._compute_loss):
            inputs = for_own_loss(inputs, self)
        return super().compute_loss(model, inputs, *args, **kwargs)


def is_own_loss(compute_loss: Any) -> bool:
    """Whether a `_compute_loss` is neither ours nor TRL's."""
    module = getattr(compute_loss, "__module__", None) or ""
    return module != GRPOTrainer.__module__ and not module.startswith(__name__.partition(".")[0] + ".")


def for_own_loss(inputs: Inputs, trainer: Any) -> Inputs:
    """A micro-batch whose advantages are (B,), or that says why they cannot be as soon as they are read.

    A loss that leaves them to ours, by `super()._compute_loss`, gets along with any.
    """
    token_advantages = inputs["advantages"]  # (B, T)
    if token_advantages.dim() == 1:  # a subclass has put others there
        return inputs
    mask = loss_masks(inputs)[0].bool()
    numbers = token_advantages.gather(1, mask.int().argmax(dim=1, keepdim=True))  # (B, 1)
    reason = _why_not(inputs, trainer)
    differs = mask & (token_advantages != numbers) & ~token_advantages.isnan()
    if reason is None and bool(differs.any()):
        estimator = str(trainer.args.advantage_estimator)
        reason = f"advantage_estimator={estimator!r} gives the tokens of a row different ones"
    if reason is None:
        return {**inputs, "advantages": torch.where(mask.any(dim=1), numbers.squeeze(1), 0.0)}
    rest = {name: value for name, value in inputs.items() if name != "advantages"}
    return _TokenAdvantages(rest | {TOKEN_ADVANTAGES: token_advantages}, reason)


def advantages_of(inputs: Inputs, mask: torch.Tensor) -> torch.Tensor:
    """The advantages that a micro-batch has for our loss, whichever form they are in; (B, T), or (B, 1).

    Args:
        inputs: of B rows.
        mask: (B, T) tokens of the loss.
    """
    advantages = dict.get(inputs, "advantages")
    advantages = inputs[TOKEN_ADVANTAGES] if advantages is None else advantages
    return advantages.unsqueeze(1) * mask if advantages.dim() == 1 else advantages


class _TokenAdvantages(dict):
    """A micro-batch without `advantages`."""

    def __init__(self, inputs: Inputs, reason: str) -> None:
        super().__init__(inputs)
        self._reason = reason

    def __missing__(self, name: str) -> Any:
        if name != "advantages":
            raise KeyError(name)
        raise ValueError(
            "A _compute_loss written for TRL reads inputs['advantages'], one number for each row, and there is none: "
            f"{self._reason}. Read inputs['{TOKEN_ADVANTAGES}'], (B, T) as the log-probs are; or leave the advantages "
            "to super()._compute_loss(model, inputs) and add a term, or override extra_loss."
        )

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self or name == "advantages" else default


def _why_not(inputs: Inputs, trainer: Any) -> str | None:
    """Why a loss over rows would be another one here, whatever the advantages are."""
    args = trainer.args
    if "value_mask" in inputs:
        return "with a critic every token has its own, and the critic's loss stands in super()._compute_loss"
    if NUM_TOKENS in inputs:
        settings = f"context_policy={args.context_policy!r}, loss_unit={args.loss_unit!r}"
        return f"a trajectory may have several rows ({settings})"
    if HAS_SIGNAL in inputs:
        return "filter_groups leaves micro-batches with different numbers of rows"
    if args.max_tokens_per_micro_batch is not None:
        return (
            f"max_tokens_per_micro_batch={args.max_tokens_per_micro_batch} makes micro-batches with different numbers "
            "of rows"
        )
    if args.kl_placement == "reward" and trainer.beta != 0:
        return "kl_placement='reward' has the KL term in them already, which a loss that reads self.beta adds again"
    return None

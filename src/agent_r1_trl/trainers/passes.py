"""A micro-step of the Trainer that is several forward and backward passes, or none (`max_tokens_per_micro_batch`).

transformers' Trainer and accelerate names that this file touches: `compute_loss`, `accelerator`.
"""

from __future__ import annotations

from typing import Any

import torch

from agent_r1_trl.trainers.nonfinite import NumberWatchingTrainer
from agent_r1_trl.update.micro_batches import PASSES, run_passes


class PassesTrainer(NumberWatchingTrainer):
    """TRL's trainer, whose micro-batches may be a list of passes."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's; of several passes the sum, all but the last of which are backpropagated when this returns."""
        if PASSES not in inputs:
            return super().compute_loss(model, inputs, *args, **kwargs)
        self._metrics["train"]["update/passes"].append(float(len(inputs[PASSES])))
        compute_loss = super().compute_loss
        return run_passes(
            lambda one: compute_loss(model, one, *args, **kwargs), model, inputs[PASSES], self.accelerator
        )

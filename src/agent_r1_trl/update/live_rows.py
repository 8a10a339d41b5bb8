"""Keeps the size of a gradient when rows are lost (infrastructure failures, rows that nobody scored, filtered groups).

Some of TRL's loss types divide by the number of rows or of micro-batches, and would count lost rows as rows of loss 0.
Their gradient is scaled to that of a batch without the lost rows. The other loss types divide by the number of loss
tokens, which lost rows do not have. Rows that `truncated_trajectories="mask"` takes out of the loss are not lost: they
stay in these denominators, as in TRL.
"""

from __future__ import annotations

from typing import Any

import torch

MEANS_OVER_ROWS = ("grpo", "dr_grpo", "sapo", "luspo")
"""TRL's loss types that divide by the number of rows."""
MEANS_OVER_MICRO_BATCHES = ("bnpo",)
"""TRL's loss types that average over tokens inside each micro-batch, and then over micro-batches."""


def set_live_scales(buffer: list[dict[str, Any]], *, steps_per_update: int, accelerator: Any) -> None:
    """Put `row_scale` and `micro_batch_scale` into micro-batches: rows, or micro-batches, per live one.

    They are counted over the micro-batches of each optimizer step on all ranks (over the whole buffer if the steps do
    not divide it), so all ranks must call this. A micro-batch is live if it holds a row in the baseline.

    Args:
        buffer: TRL's micro-batches, in the order of training.
        steps_per_update: micro-batches of one optimizer step.
        accelerator: of the trainer.
    """
    width = steps_per_update if len(buffer) % steps_per_update == 0 else len(buffer)
    live = torch.stack([inputs["in_baseline"].sum() for inputs in buffer]).float().view(-1, width)  # (steps, width)
    counts = torch.stack([live.sum(dim=1), (live > 0).float().sum(dim=1)], dim=1)  # (steps, 2)
    counts = accelerator.reduce(counts, reduction="sum").clamp(min=1)
    for step, (live_rows, live_batches) in enumerate(counts.tolist()):
        window = buffer[step * width : (step + 1) * width]
        num_batches = width * accelerator.num_processes
        for inputs in window:  # filtered ones may differ in size, but not between ranks
            inputs["row_scale"] = torch.tensor(len(inputs["in_baseline"]) * num_batches / live_rows)
            inputs["micro_batch_scale"] = torch.tensor(num_batches / live_batches)


def policy_scale(inputs: dict[str, Any], loss_type: str) -> float:
    """What the policy's loss (KL term included) of a micro-batch is multiplied by; 1 where no row is lost."""
    if loss_type in MEANS_OVER_ROWS:
        return float(inputs.get("row_scale", 1.0))
    return float(inputs.get("micro_batch_scale", 1.0)) if loss_type in MEANS_OVER_MICRO_BATCHES else 1.0

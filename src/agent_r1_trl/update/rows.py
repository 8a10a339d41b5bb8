"""TRL's batch as rows: taking some, joining, cutting padding off."""

from __future__ import annotations

from typing import Any

import torch

Inputs = dict[str, Any]
"""TRL's batch: tensors of B rows, scalars, None."""
_CRITIC_PREFIX = ("privileged_ids", "privileged_mask")
"""Padded on the left, and by chance perhaps as wide as the completions."""


def trim_padding(inputs: Inputs) -> Inputs:
    """Drop the columns of prompts (left) and completions (right) that are padding in every row."""
    prompt, completion = inputs["prompt_mask"], inputs["completion_mask"]
    first = int(prompt.any(dim=0).int().argmax())
    last = completion.shape[1] - int(completion.any(dim=0).flip(0).int().argmax())
    trimmed = {}
    for name, value in inputs.items():
        if name in ("prompt_ids", "prompt_mask"):
            value = value[:, first:]
        elif (
            name not in _CRITIC_PREFIX
            and has_rows(value)
            and value.dim() == 2
            and value.shape[1] == completion.shape[1]
        ):
            value = value[:, :last]
        trimmed[name] = value
    return trimmed


def has_rows(value: Any) -> bool:
    """Whether an entry of TRL's batch has an element per row."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def join_rows(parts: list[Inputs]) -> Inputs:
    """The rows of several micro-batches of the same widths in one; what has no rows is that of the first."""
    return {
        name: torch.cat([part[name] for part in parts]) if has_rows(value) else value
        for name, value in parts[0].items()
    }


def take_rows(rows: Inputs, index: Any) -> Inputs:
    """Some rows of a batch; what has no rows stays."""
    return {name: value[index] if has_rows(value) else value for name, value in rows.items()}

"""Operations on batches and micro-batches (`entries.py`): joining, choosing, padding and moving rows; their masks.

An entry with rows is a tensor, or `SamplingMasks`, whose first dimension is that of the rows. Everything here finds
entries by that, and needs no change for a new one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from agent_r1_trl.update.entries import EXTRA_TOKENS, Inputs
from agent_r1_trl.update.sampling_masks import SamplingMasks

MIN_COLUMNS = 2
"""Fewest columns of completions, (R, T). TRL takes (R, 1) for one number per row, and counts rows, not tokens."""
_PADDED_LEFT = ("prompt_ids", "prompt_mask")
_RATIOS = "importance_sampling_ratio"


# -------------------------------------------------------------------- rows


def has_rows(value: object) -> bool:
    """Whether an entry has an element per row."""
    return isinstance(value, torch.Tensor | SamplingMasks) and value.dim() > 0


def join_rows(parts: list[Inputs]) -> Inputs:
    """The rows of several micro-batches of the same widths in one; an entry without rows is that of the first."""
    joined = {}
    for name, value in parts[0].items():
        values = [part[name] for part in parts]
        if isinstance(value, list):  # an entry of a subclass
            value = [item for one in values for item in one]
        elif isinstance(value, SamplingMasks):
            value = SamplingMasks.cat(values)
        elif has_rows(value):
            value = torch.cat(values)
        joined[name] = value
    return joined


def take_rows(rows: Inputs, index: torch.Tensor | slice) -> Inputs:
    """Some rows of a batch; an entry without rows stays.

    An entry of a subclass may be a list, or lie on the host: there an index from a GPU is refused.
    """
    taken = {}
    for name, value in rows.items():
        if isinstance(value, list):
            places = torch.arange(len(value))[_beside(index, "cpu")]
            value = [value[place] for place in places.tolist()]
        elif has_rows(value):
            value = value[_beside(index, value.device)]
        taken[name] = value
    return taken


def _beside(index: torch.Tensor | slice, device: torch.device | str) -> Any:
    """The index on the device of the rows that it chooses."""
    return index.to(device) if isinstance(index, torch.Tensor) else index


def trim_padding(inputs: Inputs) -> Inputs:
    """Drop the columns of prompts (left) and completions (right) that are padding in every row.

    `MIN_COLUMNS` of the completions stay.
    """
    has_prompt = inputs["prompt_mask"].any(dim=0)  # (P,)
    has_completion = inputs["completion_mask"].any(dim=0)  # (T,)
    width = len(has_completion)
    first = int(has_prompt.int().argmax())
    num_empty = int(has_completion.flip(0).int().argmax())  # columns on the right
    last = max(width - num_empty, MIN_COLUMNS)
    trimmed = dict(inputs)
    for name, value in inputs.items():
        if name in _PADDED_LEFT:
            trimmed[name] = value[:, first:]
        elif has_rows(value) and value.dim() >= 2 and value.shape[1] == width:
            trimmed[name] = value[:, :last]
    return trimmed


def pad_rows(rows: Inputs, widths: dict[str, int]) -> Inputs:
    """The rows with this number of columns in each entry named, none of which is smaller than theirs."""
    padded = dict(rows)
    for name, width in widths.items():
        value = rows[name]
        missing = width - value.shape[1]
        if isinstance(value, SamplingMasks):
            padded[name] = value.pad(right=missing)
            continue
        sides = (missing, 0) if name in _PADDED_LEFT else (0, missing)
        further_dimensions = [0, 0] * (value.dim() - 2)  # `pad` begins with the last dimension
        padded[name] = functional.pad(value, (*further_dimensions, *sides))
    return padded


def dummy_row(row: Inputs) -> Inputs:
    """One row of two tokens that no loss, no statistic and no critic counts."""
    dummy = {}
    for name, value in row.items():
        if name == _RATIOS:
            value = torch.ones_like(value)
        elif has_rows(value) and not name.endswith("_ids"):
            value = torch.zeros_like(value)
        dummy[name] = value
    dummy["prompt_mask"][:, -1] = 1
    dummy["completion_mask"][:, 0] = 1
    return dummy


def to_device(rows: Inputs, device: torch.device) -> Inputs:
    """The rows on a device."""
    moved = {}
    for name, value in rows.items():
        moved[name] = value.to(device) if has_rows(value) else value
    return moved


# -------------------------------------------------------------------- ids and masks


def whole_rows(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, (R, P + T) each, of prompts and completions."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    return ids, mask


def with_one_more(inputs: Inputs, has_more: torch.Tensor) -> Inputs:
    """The entries with a completion token of id 0 behind the last one of rows that `has_more`, (R,).

    All completions, (R, T), become (R, T + 1).
    """
    ids = functional.pad(inputs["completion_ids"], (0, 1))
    mask = functional.pad(inputs["completion_mask"], (0, 1))
    ends = mask.sum(dim=1, keepdim=True)  # (R, 1)
    mask = mask.scatter(1, ends, has_more.to(mask).unsqueeze(1))
    return {**inputs, "completion_ids": ids, "completion_mask": mask}


def loss_masks(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(R, T) the tokens of the policy's loss, and these with those of the critic's and of all loss terms."""
    policy = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    together = policy.bool()
    for name in other_masks(inputs):
        together = together.logical_or(inputs[name])
    return policy, together


def other_masks(inputs: Inputs) -> list[str]:
    """Names of the (R, T) masks, besides the policy's, whose tokens a forward pass must compute."""
    return [name for name in inputs if name == "value_mask" or name.startswith(EXTRA_TOKENS)]


def neutral_outside(inputs: Inputs, mask: torch.Tensor) -> Inputs:
    """A micro-batch that is read at its loss mask, (R, T), alone: elsewhere ratios are 1, log-probs and advantages 0.

    It goes with log-probs of the policy that are 0 there (`LossPass.masked`).
    """
    in_loss = mask.bool()
    neutral = dict(inputs)
    for name, value in inputs.items():
        if value is None:
            continue
        if name == _RATIOS:
            neutral[name] = torch.where(in_loss, value, 1.0)
        elif name == "advantages" or name.endswith("per_token_logps"):
            neutral[name] = torch.where(in_loss, value, 0.0)
    return neutral


def row_means(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of each row over its masked entries, (R, T) -> (R,); 0 for a row without any.

    >>> row_means(torch.tensor([[1.0, 9.0, 2.0], [9.0, 9.0, 9.0]]), torch.tensor([[1, 0, 1], [0, 0, 0]])).tolist()
    [1.5, 0.0]
    """
    keep = mask.bool()
    total = torch.where(keep, x, 0.0).sum(dim=1)
    return total / keep.sum(dim=1).clamp(min=1)

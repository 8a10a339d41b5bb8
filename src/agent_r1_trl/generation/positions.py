"""Positions of tokens in padded rows, counted from each row's own first token.

A model that is given no `position_ids` counts from the first column, padding included. With rotary positions only
distances matter, so that is the same function; with learned or sinusoidal positions, with queries that are scaled by
their position, or with frequencies that depend on it, a row that is padded on the left becomes another one. The
sampler and packed rows count from the first token, so padded passes must as well.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def positions_of(attention_mask: torch.Tensor) -> torch.Tensor:
    """(B, L) positions for a (B, L) mask that is 1 at tokens; padding repeats a neighbour's and is never read.

    >>> positions_of(torch.tensor([[0, 0, 1, 1, 0]]))
    tensor([[0, 0, 0, 1, 1]])
    """
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether a causal LM or backbone, or the one inside a PeftModel, names `position_ids` among its arguments.

    Models without (Mamba, and those with ALiBi) read the mask or have no positions.
    """
    plain = getattr(model, "get_base_model", lambda: model)()  # a PeftModel's forward takes anything
    return "position_ids" in inspect.signature(type(plain).forward).parameters

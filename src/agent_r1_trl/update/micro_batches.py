"""Micro-batches of rows that belong together, without columns that nobody fills.

prompt -> environment reset -> rollout (policy <-> tools) -> Trajectory -> rewards on tokens -> filter
       -> batch -> advantages -> [loss] -> step -> sync weights -> next rollout

TRL shuffles the rows of a rollout and cuts them into micro-batches that all stay as wide as the longest trajectory.
Rows are moved here only between micro-batches of one optimizer step, whose gradients are added up anyway.
"""

from __future__ import annotations

from typing import Any

import torch

Inputs = dict[str, Any]
"""TRL's batch: tensors of B rows, scalars, None."""
_CRITIC_PREFIX = ("privileged_ids", "privileged_mask")
"""Padded on the left, and by chance perhaps as wide as the completions."""


def regroup(buffer: list[Inputs], *, steps_per_update: int, by_prompt: bool) -> list[Inputs]:
    """Sort the rows of each optimizer step, so that every micro-batch holds rows of like length or of one prompt.

    Args:
        buffer: the micro-batches of a rollout, of the same number of rows each.
        steps_per_update: micro-batches of one optimizer step.
        by_prompt: rows with the same prompt together; otherwise rows of like length.
    """
    regrouped: list[Inputs] = []
    for start in range(0, len(buffer), steps_per_update):
        window = buffer[start : start + steps_per_update]
        sizes = [len(inputs["completion_ids"]) for inputs in window]
        joined = {name: _join([inputs[name] for inputs in window]) for name in window[0]}
        order = _order_by_prompt(joined) if by_prompt else _order_by_length(joined)
        for rows in order.split(sizes):
            regrouped.append({name: value[rows] if _has_rows(value) else value for name, value in joined.items()})
    return regrouped


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
            and _has_rows(value)
            and value.dim() == 2
            and value.shape[1] == completion.shape[1]
        ):
            value = value[:, :last]
        trimmed[name] = value
    return trimmed


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _join(values: list[Any]) -> Any:
    return torch.cat(values) if _has_rows(values[0]) else values[0]


def _order_by_length(inputs: Inputs) -> torch.Tensor:
    """(B,) longest first: a batch that does not fit into memory fails at once."""
    lengths = inputs["completion_mask"].sum(dim=1) + inputs["prompt_mask"].sum(dim=1)
    return lengths.argsort(descending=True, stable=True)


def _order_by_prompt(inputs: Inputs) -> torch.Tensor:
    """(B,) rows with equal prompts together."""
    prompts = torch.cat([inputs["prompt_ids"], inputs["prompt_mask"]], dim=1)
    return prompts.unique(dim=0, return_inverse=True)[1].argsort(stable=True)

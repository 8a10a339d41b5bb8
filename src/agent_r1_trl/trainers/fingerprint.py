"""Digests of a model's weights: the trained ones of a step, and the frozen ones of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

CHUNK = 2**22
"""Elements that are summed at once, so that the fingerprint needs no memory to speak of."""


def fingerprint(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of the trained parameters, of this process's part of them where they are sharded.

    The bits of each tensor are added up as whole numbers: exact in any order, at the speed of reading them.
    """
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    return _digest([name for name, _ in trained], _bit_sums([parameter for _, parameter in trained]))


def base_fingerprint(model: nn.Module, accelerator: Any) -> str | None:
    """A digest of the frozen weights below an adapter, the same on any number of processes. All ranks must call it.

    Args:
        model: of the trainer, not wrapped.
        accelerator: of the trainer.

    Returns:
        None without an adapter: then a checkpoint holds all weights. Adapters count as none of the base: TRL's "ref"
        is a copy of the one that is trained.
    """
    marks = [f".{name}." for name in getattr(model, "peft_config", None) or ()]
    if not marks:
        return None
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    frozen = {name: value for name, value in frozen.items() if not any(mark in f"{name}." for mark in marks)}
    sums = _bit_sums(list(frozen.values()))
    if any(hasattr(value, "ds_tensor") for value in frozen.values()):  # the parts of the ranks add up
        sums = accelerator.reduce(sums.to(accelerator.device), "sum")
    return _digest([*frozen], sums)


def _digest(names: list[str], sums: torch.Tensor) -> str:
    return hashlib.blake2b(json.dumps([names, sums.tolist()]).encode(), digest_size=8).hexdigest()


def _bit_sums(parameters: list[torch.Tensor]) -> torch.Tensor:
    """(N,) on the device of the first, so that one copy brings them to the host."""
    sums = [_bit_sum(_local(parameter)) for parameter in parameters]
    return torch.stack([item.to(sums[0].device) for item in sums]) if sums else torch.zeros(0, dtype=torch.int64)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """The values that this process holds, under DeepSpeed ZeRO-3 and FSDP2 as well."""
    if hasattr(parameter, "to_local"):
        return parameter.to_local()
    if parameter.numel() == 0 and hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor
    return parameter


def _bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(-1).view(whole)
    return torch.stack([chunk.sum(dtype=torch.int64) for chunk in bits.split(CHUNK)]).sum()

"""Deep copies of the policy that compute with their own weights.

TRL gives the policy another forward pass, and with `cast_lm_head_to_fp32` its output layer one, both of which have
closed over the module that they were made for. A copy takes them along, so it would compute with the weights that are
trained: a generator that samples from a copy beside the update would sample from a policy in the middle of its step,
and in training mode without its cache. Here both belong to whichever module they are called on.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from agent_r1_trl.critic.attach import base_causal_lm


def let_copies_compute(model: nn.Module) -> None:
    """Have a deep copy of a policy that TRL has prepared compute with its own weights."""
    base: Any = base_causal_lm(model)
    forward = vars(base).get("forward")
    if inspect.ismethod(forward) and _original_in(forward.__func__, base) is not None:
        base.forward = types.MethodType(_on_its_own(forward.__func__, type(base).forward), base)
    head = base.get_output_embeddings()
    if head is not None and inspect.isfunction(vars(head).get("forward")):
        head.forward = types.MethodType(_in_float32, head)


def _original_in(fused: Callable[..., Any], base: nn.Module) -> object:
    """What TRL's forward calls where its fused head is not asked for, if that is the model's own forward."""
    for value in inspect.getclosurevars(fused).nonlocals.values():
        if inspect.ismethod(value) and value.__self__ is base and value.__func__ is type(base).forward:
            return value
    return None


def _on_its_own(fused: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fused)
    def forward(self: nn.Module, *args: object, fused_lm_head: bool = False, **kwargs: object) -> Any:
        if fused_lm_head:  # which looks up all that it needs at the model that it is called on
            return fused(self, *args, fused_lm_head=True, **kwargs)
        return original(self, *args, **kwargs)

    return forward


def _in_float32(self: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """An output layer's forward pass in float32, as TRL's."""
    bias: Any = self.bias  # None where the layer has none
    bias = None if bias is None else bias.to(torch.float32)
    return nn.functional.linear(hidden.to(torch.float32), self.weight.to(torch.float32), bias)

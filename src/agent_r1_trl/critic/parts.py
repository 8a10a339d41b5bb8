"""Which parts of a model belong to the critic, and which of them are trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

CRITIC_ADAPTER = "critic"
_CRITIC_SUBMODULES = ("value_head", "critic_backbone")


def base_causal_lm(model: Any) -> Any:
    """The causal LM inside a PeftModel, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_critic_name(name: str) -> bool:
    """Whether a parameter's dotted name belongs to the critic."""
    parts = name.split(".")
    return CRITIC_ADAPTER in parts or any(part in _CRITIC_SUBMODULES for part in parts)


def critic_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of everything that belongs to the critic."""
    return {name: parameter for name, parameter in model.named_parameters() if is_critic_name(name)}


def enable_critic_gradients(model: nn.Module) -> None:
    """Mark the critic as trainable again, except for what was frozen when it was attached. Call after every rollout.

    peft's `disable_adapter` (TRL's reference pass) hands requires_grad back to the active adapter only, so the critic
    would be frozen after the first rollout with beta != 0, without an error.
    """
    base = base_causal_lm(model)
    for name, parameter in critic_parameters(base).items():
        if name not in base.critic_frozen:
            parameter.requires_grad_(True)


def set_detached(model: nn.Module, detached: bool) -> None:
    """For `kind="head"`: whether the value loss stops at the value head.

    During critic warm-up it must, because the policy is held.
    """
    base_causal_lm(model).critic_detached = detached


@contextlib.contextmanager
def gathered(parameters: list[nn.Parameter], *, modifier_rank: int | None = 0) -> Iterator[None]:
    """ZeRO-3 shards gathered; nothing to do elsewhere. What `modifier_rank` changes in them is kept on all ranks."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier_rank):
        yield

"""Gives a policy its critic: what is added to the model, and the forward pass that returns values."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from agent_r1_trl.critic.adapter import add_critic_adapter, frozen_twins, use_critic_adapter, wrap_checkpointing
from agent_r1_trl.critic.backbone import check_critic_model, copy_backbone, prepare_critic_model
from agent_r1_trl.critic.parts import base_causal_lm, critic_parameters, enable_critic_gradients
from agent_r1_trl.critic.saving import wrap_save_pretrained

CRITIC_KINDS = ("adapter", "head", "model")


class ValueHead(nn.Linear):
    """Hidden states (B, L, H) to values (B, L) in float32; starts at zero, so that the first values are neutral."""

    def __init__(self, hidden_size: int, **kwargs: Any):
        super().__init__(hidden_size, 1, bias=True, **kwargs)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(B, L, H) -> (B, L)."""
        with torch.autocast(hidden.device.type, enabled=False):  # which would compute a linear layer in bfloat16
            values = nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())
        return values.squeeze(-1)


@dataclass
class ActorCriticOutput(ModelOutput):
    """What TRL's fused head returns, plus the values. (A field called `values` would shadow dict.values().)"""

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    state_values: torch.Tensor | None = None
    """(B, L): the value of the state after token l, that is, V of token l + 1. Of a packed row (1, S)."""


# -------------------------------------------------------------------- attaching


def attach_critic(model: Any, kind: str, *, critic_model: nn.Module | None = None, detach: bool = False) -> None:
    """Give `model` a critic, before it is wrapped by accelerate.

    Args:
        model: a causal LM, or a PeftModel around one (needed for `kind="adapter"`).
        kind: `adapter`, `head` or `model`.
        critic_model: for `kind="model"`, a backbone (`AutoModel`) with the policy's tokenizer; None copies the
            policy's current backbone.
        detach: start with the policy's hidden states detached (see `set_detached`).

    Raises:
        ValueError: for an unknown kind, an adapter that cannot have a critic beside it, or a `critic_model` that the
            kind does not use.
    """
    if kind not in CRITIC_KINDS:
        raise ValueError(
            f"critic={kind!r} is not one of {', '.join(map(repr, CRITIC_KINDS))}. Set critic to one of them."
        )
    base = base_causal_lm(model)
    _check_prompt_learning(model)
    check_critic_model(critic_model, kind, base)
    parameter = next(iter(base.parameters()))
    hidden_size = base.config.get_text_config().hidden_size
    base.critic_frozen = frozenset()
    if kind == "adapter":
        base.critic_frozen = frozen_twins(base, add_critic_adapter(model))
        wrap_checkpointing(base)
    elif kind == "model":
        base.critic_backbone = copy_backbone(base) if critic_model is None else critic_model.to(parameter.device)
        prepare_critic_model(base.critic_backbone)
        hidden_size = base.critic_backbone.config.get_text_config().hidden_size
        base.critic_frozen = frozenset(
            name for name, item in critic_parameters(base).items() if not item.requires_grad
        )
    # ZeRO-3 trains one dtype only, and keeps a float32 copy of what it trains.
    dtype = parameter.dtype if hasattr(parameter, "ds_id") else torch.float32
    base.value_head = ValueHead(hidden_size, device=parameter.device, dtype=dtype)
    base.critic_kind = kind
    base.critic_detached = detach
    enable_critic_gradients(model)
    _wrap_forward(base)
    wrap_save_pretrained(model)


def _check_prompt_learning(model: Any) -> None:
    """Refuse adapters that add tokens to the input: the critic reads the ids or hidden states of the rows alone."""
    for config in getattr(model, "peft_config", {}).values():
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise ValueError(
                f"peft_config={type(config).__name__}(...) learns a prompt, which the critic (critic=) cannot read. "
                "Pass an adapter of weights, such as peft_config=LoraConfig(...)."
            )


# -------------------------------------------------------------------- the forward


def _wrap_forward(base: Any) -> None:
    inner = base.forward

    @functools.wraps(inner)
    def forward(
        self: Any,
        *args: Any,
        compute_values: bool = False,
        values_only: bool = False,
        critic_inputs: dict[str, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        if values_only:
            return ActorCriticOutput(state_values=_values(self, kwargs))
        if not compute_values:
            return inner(*args, **kwargs)
        with _captured_hidden_states(self) as hidden:
            output = inner(*args, **kwargs)
        values = _values(self, critic_inputs or kwargs, hidden[-1] if self.critic_kind == "head" else None)
        return ActorCriticOutput(
            loss=output.loss,
            log_probs=output.log_probs,
            entropy=output.entropy,
            aux_loss=output.aux_loss,
            state_values=values,
        )

    base.forward = types.MethodType(forward, base)


_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_INPUTS = ("input_ids", "attention_mask", "position_ids", "packed_layout", *_LENGTHS)


def _values(base: Any, inputs: dict[str, Any], hidden: torch.Tensor | None = None) -> torch.Tensor:
    """(B, L) values, of a packed row (1, S); `hidden` spares the policy's backbone a second pass."""
    inputs = {name: inputs[name] for name in _INPUTS if name in inputs}
    if base.critic_kind == "model":
        hidden = _hidden_states(base.critic_backbone, inputs)
    elif base.critic_kind == "adapter":
        with use_critic_adapter(base):
            hidden = _hidden_states(base.base_model, inputs)
    else:
        if hidden is None:  # as the policy's own pass computes them in the loss: without positions from the mask
            hidden = _run(base.base_model, inputs)
        if base.critic_detached:
            hidden = hidden.detach()
    return base.value_head(hidden)


def _hidden_states(backbone: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """(B, L, H) of the last layer. Positions are counted without padding, so that no other row's length matters."""
    mask = inputs.get("attention_mask")
    if mask is not None and "position_ids" not in inputs and _takes_positions(backbone):
        inputs = {**inputs, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}
    return _run(backbone, inputs)


def _run(backbone: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """(B, L, H) of the last layer, of a packed row (`update/packing.py`) only where it is read, (1, S, H)."""
    hidden = backbone(**inputs, use_cache=False).last_hidden_state
    layout = inputs.get("packed_layout")
    return hidden if layout is None else hidden[:, layout.sources]


def _takes_positions(backbone: Any) -> bool:
    plain = getattr(backbone, "get_base_model", lambda: backbone)()  # a PeftModel's forward takes anything
    return "position_ids" in inspect.signature(plain.forward).parameters


@contextlib.contextmanager
def _captured_hidden_states(base: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the backbone's last hidden states while TRL's fused head runs it."""
    captured: list[torch.Tensor] = []
    handle = base.base_model.register_forward_hook(lambda module, args, output: captured.append(output[0]))
    try:
        yield captured
    finally:
        handle.remove()

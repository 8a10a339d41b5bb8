"""Gives a policy its critic: what is added to the model, and the forward pass that returns values."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from agent_r1_trl.critic.adapter import (
    add_critic_adapter,
    base_causal_lm,
    critic_parameters,
    enable_critic_gradients,
    frozen_twins,
    gathered,
    is_critic_name,
    use_critic_adapter,
    wrap_checkpointing,
)


def copy_backbone(base: Any) -> Any:
    """The backbone of the policy (without a PeftModel) as it computes now: adapters merged, every weight trained.

    Raises:
        ValueError: the weights are quantised, so that they can be neither merged nor trained.
    """
    weights = list(base.base_model.parameters())
    if getattr(base, "is_quantized", False) or not all(weight.is_floating_point() for weight in weights):
        raise ValueError(
            "critic='model' on a quantised policy: its copy could not be trained. Set critic='adapter' or "
            "critic='head', or pass critic_model=AutoModel.from_pretrained(...), loaded without quantisation."
        )
    with gathered(weights, modifier_rank=None):  # else shards are copied as empty tensors
        backbone = copy.deepcopy(base.base_model)
        _merge_adapters(backbone)
    return backbone.requires_grad_(True)


def _merge_adapters(backbone: nn.Module) -> None:
    """Replace every adapted layer by a plain one that computes the same."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    for name, module in list(backbone.named_modules()):
        if isinstance(module, AuxiliaryTrainingWrapper):
            plain = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        elif isinstance(module, BaseTunerLayer):
            module.merge()
            plain = module.get_base_layer()
        else:
            continue
        parent, _, child = name.rpartition(".")
        setattr(backbone.get_submodule(parent) if parent else backbone, child, plain)


def check_critic_model(critic_model: Any, kind: str, base: Any) -> None:
    """Refuse a `critic_model` that would not be used, or could not.

    Raises:
        ValueError: names the argument, the rule and the fix.
    """
    if critic_model is None:
        return
    is_loaded = not isinstance(critic_model, str) and hasattr(critic_model, "config")
    given = f"critic_model={repr(critic_model) if isinstance(critic_model, str) else type(critic_model).__name__}"
    needed = base.get_input_embeddings().weight.shape[0]
    own = critic_model.get_input_embeddings().weight.shape[0] if is_loaded else 0
    rules = {
        f" with critic={kind!r}, which has no model of its own. Set critic='model'.": kind != "model",
        " is not a loaded model. Pass critic_model=AutoModel.from_pretrained(...).": not is_loaded,
        " has an output layer, and the critic reads hidden states. Pass critic_model=AutoModel.from_pretrained(...), "
        "or the base_model of this one.": (
            hasattr(critic_model, "get_output_embeddings") and critic_model.get_output_embeddings() is not None
        ),
        f" knows {own} tokens and the policy {needed}: the critic reads the policy's token ids. Pass a model with the "
        "policy's tokenizer.": 0 < own < needed,
    }
    for rule, is_broken in rules.items():
        if is_broken:
            raise ValueError(f"{given}{rule}")


CRITIC_FILE = Path("critic") / "critic.safetensors"
"""Where a checkpoint keeps the critic. Not `adapter_model.safetensors`: resuming would then load only that folder."""


def wrap_save_pretrained(model: Any) -> None:
    """Make `save_pretrained` write the policy alone: whoever loads it finds a plain model or a plain adapter."""
    original = model.save_pretrained
    adapters = list(model.active_adapters) if hasattr(model, "peft_config") else None

    @functools.wraps(original)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        if adapters is not None:
            kwargs.setdefault("selected_adapters", adapters)
        state_dict = kwargs.get("state_dict")
        if state_dict is None and adapters is None:
            state_dict = model.state_dict()
        if state_dict is not None:
            kwargs["state_dict"] = {name: value for name, value in state_dict.items() if not is_critic_name(name)}
        return original(*args, **kwargs)

    model.save_pretrained = save_pretrained


def save_critic(model: nn.Module, folder: str | Path, *, is_main_process: bool = True) -> None:
    """Write the critic's weights below `folder`. Collective under ZeRO-3: call on every rank."""
    from safetensors.torch import save_file

    parameters = critic_parameters(model)
    with gathered(list(parameters.values())):
        if is_main_process:
            path = Path(folder) / CRITIC_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: value.detach().cpu().contiguous() for name, value in parameters.items()}, str(path))


def load_critic(model: nn.Module, folder: str | Path) -> None:
    """Load what `save_critic` wrote to a checkpoint.

    Raises:
        ValueError: if the file is missing or belongs to another kind of critic.
    """
    from safetensors.torch import load_file

    path = Path(folder) / CRITIC_FILE
    if not path.exists():
        raise ValueError(
            f"The checkpoint {folder} has no {CRITIC_FILE}: it was not made by a PPO run. Set resume_from_checkpoint "
            "to a checkpoint of a PPO run, or start anew with that model as the policy."
        )
    saved, parameters = load_file(str(path)), critic_parameters(model)
    if set(saved) != set(parameters):
        raise ValueError(
            f"{path} holds another kind of critic ({len(saved)} tensors, this run's critic has {len(parameters)}). "
            "Resume with the same critic= and LoRA settings as the run that wrote it."
        )
    with gathered(list(parameters.values())), torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


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


def attach_critic(model: Any, kind: str, *, critic_model: nn.Module | None = None) -> None:
    """Give `model` a critic, before it is wrapped by accelerate.

    Args:
        model: a causal LM, or a PeftModel around one (needed for `kind="adapter"`).
        kind: `adapter`, `head` or `model`.
        critic_model: for `kind="model"`, a backbone (`AutoModel`) with the policy's tokenizer; None copies the
            policy's current backbone.

    Raises:
        ValueError: for an unknown kind, an adapter that cannot have a critic beside it, or a `critic_model` that the
            kind does not use.
    """
    if kind not in CRITIC_KINDS:
        raise ValueError(
            f"critic={kind!r} is not one of {', '.join(map(repr, CRITIC_KINDS))}. Set critic to one of them."
        )
    base = base_causal_lm(model)
    for config in getattr(model, "peft_config", {}).values():  # the critic reads ids or hidden states of rows alone
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise ValueError(
                f"peft_config={type(config).__name__}(...) learns a prompt, which the critic (critic=) cannot read. "
                "Pass an adapter of weights, such as peft_config=LoraConfig(...)."
            )
    check_critic_model(critic_model, kind, base)
    parameter = next(iter(base.parameters()))
    hidden_size = base.config.get_text_config().hidden_size
    base.critic_frozen = frozenset()
    if kind == "adapter":
        base.critic_frozen = frozen_twins(base, add_critic_adapter(model))
        wrap_checkpointing(base)
    elif kind == "model":
        base.critic_backbone = copy_backbone(base) if critic_model is None else critic_model.to(parameter.device)
        if not any(weight.requires_grad for weight in base.critic_backbone.get_input_embeddings().parameters()):
            base.critic_backbone.enable_input_require_grads()  # for reentrant checkpointing of what the user froze
        hidden_size = base.critic_backbone.config.get_text_config().hidden_size
        base.critic_frozen = frozenset(
            name for name, item in critic_parameters(base).items() if not item.requires_grad
        )
    # ZeRO-3 trains one dtype only, and keeps a float32 copy of what it trains.
    dtype = parameter.dtype if hasattr(parameter, "ds_id") else torch.float32
    base.value_head = ValueHead(hidden_size, device=parameter.device, dtype=dtype)
    base.critic_kind = kind
    base.critic_detached = False
    enable_critic_gradients(model)
    _wrap_forward(base)
    wrap_save_pretrained(model)


# -------------------------------------------------------------------- the forward


def _wrap_forward(base: Any) -> None:
    inner = base.forward

    @functools.wraps(inner)
    def forward(
        self: Any,
        *args: Any,
        compute_values: bool = False,
        values_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        if values_only:
            return ActorCriticOutput(state_values=_values(self, kwargs))
        if not compute_values:
            return inner(*args, **kwargs)
        with _captured_hidden_states(self) as hidden:
            output = inner(*args, **kwargs)
        values = _values(self, kwargs, hidden[-1] if self.critic_kind == "head" else None)
        taken = {name: getattr(output, name) for name in ("loss", "log_probs", "entropy", "aux_loss")}
        return ActorCriticOutput(**taken, state_values=values)

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

"""The critic: state values out of the same wrapped forward that DDP, ZeRO and FSDP see.

Three shapes, one interface:

- `adapter`: a second LoRA adapter on the policy's own base model, with a value head. For LoRA runs.
- `head`: a value head on the policy's hidden states. No second pass.
- `model`: a backbone of its own (a submodule of the policy, so that every wrapper sees it).

`attach_critic` wraps the base model's forward once more: with `compute_values=True` (or `values_only=True`) one
outer forward holds policy and critic, so that one loss and one backward are all that DDP or DeepSpeed see. Two outer
forwards fail under DDP, two backwards are silently wrong under ZeRO-3.

Covered here: attaching, value forward, adapter switching, checkpointing, saving. Not covered: losses and schedules.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

CRITIC_KINDS = ("adapter", "head", "model")
CRITIC_ADAPTER = "critic"
CRITIC_FILE = Path("critic") / "critic.safetensors"
"""Where a checkpoint keeps the critic. Not `adapter_model.safetensors`: resuming would then load only that folder."""
_CRITIC_SUBMODULES = ("value_head", "critic_backbone")


class ValueHead(nn.Linear):
    """Hidden states (B, L, H) to values (B, L) in float32; starts at zero, so that the first values are neutral."""

    def __init__(self, hidden_size: int, **kwargs: Any):
        super().__init__(hidden_size, 1, bias=True, **kwargs)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(B, L, H) -> (B, L)."""
        return super().forward(hidden.to(self.weight.dtype)).squeeze(-1).float()


@dataclass
class ActorCriticOutput(ModelOutput):
    """What TRL's fused head returns, plus the values. (A field called `values` would shadow dict.values().)"""

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    state_values: torch.Tensor | None = None
    """(B, L): the value of the state after token l, that is, V of token l + 1."""


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
        ValueError: for an unknown kind, or an adapter critic without LoRA.
    """
    if kind not in CRITIC_KINDS:
        raise ValueError(
            f"critic={kind!r} is not one of {', '.join(map(repr, CRITIC_KINDS))}. Set critic to one of them."
        )
    base = base_causal_lm(model)
    parameter = next(iter(base.parameters()))
    hidden_size = base.config.get_text_config().hidden_size
    trainable = _trainable_parameters(model)
    if kind == "adapter":
        _add_critic_adapter(model)
    elif kind == "model":
        base.critic_backbone = critic_model if critic_model is not None else _copy_backbone(base)
        hidden_size = base.critic_backbone.config.get_text_config().hidden_size
        base.critic_backbone.requires_grad_(True)
    base.value_head = ValueHead(hidden_size, device=parameter.device, dtype=torch.float32)
    base.critic_kind = kind
    base.critic_detached = detach
    _restore_requires_grad(trainable)
    enable_critic_gradients(model)
    _wrap_forward(base)
    _wrap_checkpointing(base)
    _wrap_save_pretrained(model)


def base_causal_lm(model: Any) -> Any:
    """The causal LM inside a PeftModel, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _restore_requires_grad(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(True)


def _add_critic_adapter(model: Any) -> None:
    config = getattr(model, "peft_config", {}).get("default")
    if config is None:
        raise ValueError(
            "critic='adapter' needs a LoRA policy: the critic is a second adapter on the same base model. Pass "
            "peft_config=LoraConfig(...), or set critic='head' or critic='model'."
        )
    model.add_adapter(CRITIC_ADAPTER, copy.deepcopy(config))
    model.set_adapter("default")


def _copy_backbone(base: Any) -> Any:
    """A copy of the policy's backbone with any LoRA layer replaced by its frozen base: a full critic of its own."""
    with _gathered(list(base.base_model.parameters()), modifier_rank=None):  # else shards are copied as empty tensors
        backbone = copy.deepcopy(base.base_model)
    for name, module in list(backbone.named_modules()):
        if hasattr(module, "get_base_layer") and hasattr(module, "lora_A"):
            parent, _, child = name.rpartition(".")
            setattr(backbone.get_submodule(parent) if parent else backbone, child, module.get_base_layer())
    return backbone


def critic_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of everything that belongs to the critic."""
    return {name: parameter for name, parameter in model.named_parameters() if is_critic_name(name)}


def is_critic_name(name: str) -> bool:
    """Whether a parameter's dotted name belongs to the critic."""
    parts = name.split(".")
    return CRITIC_ADAPTER in parts or any(part in _CRITIC_SUBMODULES for part in parts)


def enable_critic_gradients(model: nn.Module) -> None:
    """Mark the critic as trainable again. Call after every rollout.

    peft's `disable_adapter` (TRL's reference pass) hands requires_grad back to the active adapter only, so the critic
    would be frozen after the first rollout with beta != 0, without an error.
    """
    for parameter in critic_parameters(model).values():
        parameter.requires_grad_(True)


def set_detached(model: nn.Module, detached: bool) -> None:
    """For `kind="head"`: whether the value loss stops at the value head.

    During critic warm-up it must, or it would move Adam's moments of the frozen policy.
    """
    base_causal_lm(model).critic_detached = detached


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


def _values(base: Any, inputs: dict[str, Any], hidden: torch.Tensor | None = None) -> torch.Tensor:
    """(B, L) values; `hidden` spares the policy's backbone a second pass."""
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids") if name in inputs}
    if base.critic_kind == "model":
        hidden = base.critic_backbone(**inputs, use_cache=False).last_hidden_state
    elif base.critic_kind == "adapter":
        with use_critic_adapter(base):
            hidden = base.base_model(**inputs, use_cache=False).last_hidden_state
    else:
        if hidden is None:
            hidden = base.base_model(**inputs, use_cache=False).last_hidden_state
        if base.critic_detached:
            hidden = hidden.detach()
    return base.value_head(hidden)


@contextlib.contextmanager
def _captured_hidden_states(base: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the backbone's last hidden states while TRL's fused head runs it."""
    captured: list[torch.Tensor] = []
    handle = base.base_model.register_forward_hook(lambda module, args, output: captured.append(output[0]))
    try:
        yield captured
    finally:
        handle.remove()


# -------------------------------------------------------------------- adapters and checkpointing


def _tuner_layers(model: nn.Module) -> Iterator[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return (module for module in model.modules() if isinstance(module, BaseTunerLayer))


def _active_adapters(model: nn.Module) -> list[tuple[Any, Any]]:
    return [(layer, layer._active_adapter) for layer in _tuner_layers(model)]


@contextlib.contextmanager
def use_critic_adapter(model: nn.Module) -> Iterator[None]:
    """Run the base model under the critic's adapter.

    peft's `set_adapter` would freeze the other adapter on every call; this touches no requires_grad. The private
    attribute is guarded by a contract test.
    """
    before = [(layer, layer._active_adapter, layer._disable_adapters) for layer in _tuner_layers(model)]
    for layer, _, _ in before:
        layer._active_adapter = [CRITIC_ADAPTER]
        layer._disable_adapters = False
    try:
        yield
    finally:
        for layer, adapter, is_disabled in before:
            layer._active_adapter = adapter
            layer._disable_adapters = is_disabled


@contextlib.contextmanager
def _adapters_as(state: list[tuple[Any, Any]]) -> Iterator[None]:
    now = [(layer, layer._active_adapter) for layer, _ in state]
    for layer, adapter in state:
        layer._active_adapter = adapter
    try:
        yield
    finally:
        for layer, adapter in now:
            layer._active_adapter = adapter


def _wrap_checkpointing(base: Any) -> None:
    """Recompute every checkpointed block under the adapter that its forward ran with.

    Without this, gradient checkpointing silently recomputes the critic's pass under the policy's adapter. Wrapping the
    checkpoint function (not `context_fn`) serves both reentrant modes. Enabling checkpointing again replaces the
    function in every block, so the method that does so is wrapped as well.
    """
    if base.critic_kind != "adapter":
        return
    original = base._set_gradient_checkpointing

    def set_gradient_checkpointing(
        enable: bool = True, gradient_checkpointing_func: Callable = torch.utils.checkpoint.checkpoint, **kwargs: Any
    ) -> None:
        original(enable, _with_adapter_of_forward(gradient_checkpointing_func), **kwargs)

    base._set_gradient_checkpointing = set_gradient_checkpointing
    for module in base.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = _with_adapter_of_forward(module._gradient_checkpointing_func)


def _with_adapter_of_forward(checkpoint: Callable) -> Callable:
    def checkpoint_with_adapter(block: Callable, *args: Any, **kwargs: Any) -> Any:
        module = getattr(getattr(block, "func", block), "__self__", None)
        state = _active_adapters(module) if module is not None else []

        def run(*inputs: Any, **options: Any) -> Any:
            with _adapters_as(state):
                return block(*inputs, **options)

        return checkpoint(run, *args, **kwargs)

    return checkpoint_with_adapter


# -------------------------------------------------------------------- saving


def _wrap_save_pretrained(model: Any) -> None:
    """Make `save_pretrained` write the policy alone: whoever loads it finds a plain model or a plain adapter."""
    original = model.save_pretrained

    @functools.wraps(original)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        if hasattr(model, "peft_config"):
            kwargs.setdefault("selected_adapters", ["default"])
        state_dict = kwargs.get("state_dict")
        if state_dict is None and not hasattr(model, "peft_config"):
            state_dict = model.state_dict()
        if state_dict is not None:
            kwargs["state_dict"] = {name: value for name, value in state_dict.items() if not is_critic_name(name)}
        return original(*args, **kwargs)

    model.save_pretrained = save_pretrained


@contextlib.contextmanager
def _gathered(parameters: list[nn.Parameter], *, modifier_rank: int | None = 0) -> Iterator[None]:
    """ZeRO-3 shards gathered; nothing to do elsewhere. What `modifier_rank` changes in them is kept on all ranks."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier_rank):
        yield


def save_critic(model: nn.Module, folder: str | Path, *, is_main_process: bool = True) -> None:
    """Write the critic's weights below `folder`. Collective under ZeRO-3: call on every rank."""
    from safetensors.torch import save_file

    parameters = critic_parameters(model)
    with _gathered(list(parameters.values())):
        if is_main_process:
            path = Path(folder) / CRITIC_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: value.detach().cpu().contiguous() for name, value in parameters.items()}, str(path))


def load_critic(model: nn.Module, folder: str | Path) -> None:
    """Load what `save_critic` wrote.

    Raises:
        ValueError: if the file is missing or belongs to another kind of critic.
    """
    from safetensors.torch import load_file

    path = Path(folder) / CRITIC_FILE
    if not path.exists():
        raise ValueError(
            f"resume_from_checkpoint={folder} has no {CRITIC_FILE}: it was not made by a PPO run. Resume from a PPO "
            "checkpoint, or start anew with that model as the policy."
        )
    saved, parameters = load_file(str(path)), critic_parameters(model)
    if set(saved) != set(parameters):
        raise ValueError(
            f"{path} holds another kind of critic ({len(saved)} tensors, this run's critic has {len(parameters)}). "
            "Resume with the same critic= and LoRA settings as the run that wrote it."
        )
    with _gathered(list(parameters.values())), torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])

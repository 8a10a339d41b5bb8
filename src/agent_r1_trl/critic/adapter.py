"""The critic as a second adapter: adding it to the policy's model, switching to it, recomputing under it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
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

    peft's `disable_adapter` (TRL's reference pass) hands requires_grad back to the active adapter alone, silently.
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


ADAPTER_KINDS = (
    "LORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "HRA", "VERA", "RANDLORA", "FOURIERFT", "C3A", "HIRA", "GRALORA",
    "MISS", "ROAD", "DELORA", "LN_TUNING",
)  # fmt: skip
"""peft's names of the kinds of which a model takes two that are trained; a test runs each."""
_INSTEAD = "set critic='head' or critic='model'"


# -------------------------------------------------------------------- adding


def add_critic_adapter(model: Any) -> str:
    """Add the critic's adapter: the policy's once more, with the same weights, so that both begin as one function.

    A base model alone may be a broken one: `init_lora_weights="pissa"` and its like move a part of its weights into
    the adapter. So the copy starts from the policy's adapter and not from zero, and no such initialisation runs again.
    Returns the name of the policy's adapter; ValueError where the model has none that can stand twice.
    """
    name = _checked_policy_adapter(model)
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    config = copy.deepcopy(model.peft_config[name])
    if getattr(config, "init_lora_weights", "mica") != "mica":  # a way of training, too, and it leaves the base alone
        config.init_lora_weights = True
    if getattr(config, "layer_replication", None):
        config.layer_replication = None  # the layers are there already
    try:
        model.add_adapter(CRITIC_ADAPTER, config)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"critic='adapter': peft cannot add a second adapter like the policy's ({error}). Change peft_config, or "
            f"{_INSTEAD}."
        ) from error
    _drop_copies_outside(model.get_base_model())
    _copy_adapter(model, name)
    model.set_adapter(name)
    for parameter, is_trained in before.items():
        parameter.requires_grad_(is_trained)
    return name


def _checked_policy_adapter(model: Any) -> str:
    """Name of the policy's adapter; ValueError for one that cannot stand twice in a model."""
    from peft import PeftModel

    names = model.active_adapters if isinstance(model, PeftModel) else []
    config = model.peft_config[names[0]] if names else None
    kind = str(getattr(getattr(config, "peft_type", None), "value", getattr(config, "peft_type", None)))
    bias = getattr(config, "bias", "none")
    rules = [
        (
            config is None,
            " needs a LoRA policy: the critic is a second adapter on the same base model. Pass "
            "peft_config=LoraConfig(...)",
        ),
        (
            len(names) > 1,
            f" with several active adapters ({', '.join(names)}): the critic's follows the policy's one. Merge the "
            "others into the base model (merge_and_unload)",
        ),
        (
            kind not in ADAPTER_KINDS,
            f" with an adapter of kind {kind}: the critic is a second adapter of the policy's kind, which works with "
            f"{', '.join(ADAPTER_KINDS)}. Use one of them",
        ),
        (
            bias != "none",
            f" with bias={bias!r} in peft_config: those biases are the base model's own, which policy and critic "
            "share. Set bias='none'",
        ),
    ]
    for is_broken, rule in rules:
        if is_broken:
            raise ValueError(f"critic='adapter'{rule}, or {_INSTEAD}.")
    return str(names[0])


def _drop_copies_outside(base: Any) -> None:
    """Take away the critic's copies of modules that values do not pass through, such as an output layer.

    They would never get a gradient, on which DDP fails.
    """
    from peft.utils import AuxiliaryTrainingWrapper

    inside = set(base.base_model.modules())
    for module in base.modules():
        if isinstance(module, AuxiliaryTrainingWrapper) and module not in inside:
            tokens = getattr(module, "token_adapter", None)
            if tokens is None or not tokens.tied_adapter:  # a tied one has no copy of its own
                module.delete_adapter(CRITIC_ADAPTER, list(module.active_adapters))


def _twins(tensors: dict[str, Any], name: str) -> Iterator[tuple[str, Any, Any]]:
    """Each tensor of the critic's adapter: its name, itself, and its twin in adapter `name`."""
    for own_name, own in tensors.items():
        parts = own_name.split(".")
        if CRITIC_ADAPTER in parts:
            yield own_name, own, tensors[".".join(name if part == CRITIC_ADAPTER else part for part in parts)]


def _copy_adapter(model: nn.Module, name: str) -> None:
    """Give the critic's adapter the values of adapter `name`, in the same dtype."""
    for _, own, twin in _twins({**dict(model.named_parameters()), **dict(model.named_buffers())}, name):
        own.data = own.data.to(twin.dtype)
        with gathered([item for item in (own, twin) if isinstance(item, nn.Parameter)]), torch.no_grad():
            own.copy_(twin)


def frozen_twins(model: nn.Module, name: str) -> frozenset[str]:
    """Names of the critic's adapter parameters whose twins in adapter `name` are not trained."""
    twins = _twins(dict(model.named_parameters()), name)
    return frozenset(own_name for own_name, _, twin in twins if not twin.requires_grad)


# -------------------------------------------------------------------- switching


_State = list[tuple[Any, Any, bool]]
"""Layer, its active adapters, whether they are disabled."""


def _adapter_state(model: nn.Module) -> _State:
    """Adapter states of every layer that switches between them, those of `modules_to_save` and the like included."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    layers = (module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper))
    return [(layer, layer._active_adapter, layer._disable_adapters) for layer in layers]


def _set_adapter_state(state: _State) -> None:
    for layer, adapter, is_disabled in state:
        layer._active_adapter, layer._disable_adapters = adapter, is_disabled


@contextlib.contextmanager
def _adapters_as(state: _State) -> Iterator[None]:
    before = [(layer, layer._active_adapter, layer._disable_adapters) for layer, _, _ in state]
    _set_adapter_state(state)
    try:
        yield
    finally:
        _set_adapter_state(before)


def use_critic_adapter(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Run the base model under the critic's adapter.

    peft's `set_adapter` would freeze the other adapter on every call; this touches no requires_grad. The private
    attributes are guarded by a contract test.
    """
    return _adapters_as([(layer, [CRITIC_ADAPTER], False) for layer, _, _ in _adapter_state(model)])


# -------------------------------------------------------------------- checkpointing


def wrap_checkpointing(base: Any) -> None:
    """Recompute every checkpointed block under the adapter that its forward ran with.

    Without this, gradient checkpointing silently recomputes the critic's pass under the policy's adapter. Wrapping the
    checkpoint function (not `context_fn`) serves both reentrant modes. Enabling checkpointing again replaces the
    function in every block, so the method that does so is wrapped as well.
    """
    original = base._set_gradient_checkpointing

    def set_gradient_checkpointing(
        enable: bool = True, gradient_checkpointing_func: Callable = torch.utils.checkpoint.checkpoint, **kwargs: Any
    ) -> None:
        original(enable, _with_adapter_of_forward(gradient_checkpointing_func, base), **kwargs)

    base._set_gradient_checkpointing = set_gradient_checkpointing
    for module in base.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = _with_adapter_of_forward(module._gradient_checkpointing_func, base)


def _with_adapter_of_forward(checkpoint: Callable, base: nn.Module) -> Callable:
    def checkpoint_with_adapter(block: Callable, *args: Any, **kwargs: Any) -> Any:
        state = _adapter_state(_module_of(block) or base)

        def run(*inputs: Any, **options: Any) -> Any:
            with _adapters_as(state):
                return block(*inputs, **options)

        return checkpoint(run, *args, **kwargs)

    return checkpoint_with_adapter


def _module_of(block: Callable) -> nn.Module | None:
    """The module whose forward is checkpointed; None if it cannot be told.

    Transformers 5.17 passes `partial(layer.__call__, ...)`, 5.23 `partial(Layer.forward, layer, ...)`.
    """
    owner = getattr(getattr(block, "func", block), "__self__", None)
    candidates = (owner, *getattr(block, "args", ()))
    return next((item for item in candidates if isinstance(item, nn.Module)), None)

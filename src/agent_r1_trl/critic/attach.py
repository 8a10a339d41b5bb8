"""The critic: state values out of the same wrapped forward that DDP and ZeRO see.

Three shapes, one interface:

- `adapter`: a second adapter on the policy's own base model, with a value head. For runs with an adapter.
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
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.utils import ModelOutput

from agent_r1_trl.generation import fsdp2
from agent_r1_trl.generation.positions import positions_of, takes_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CRITIC_ADAPTER = "critic"
_CRITIC_SUBMODULES = ("value_head", "critic_backbone")


def base_causal_lm(model: PreTrainedModel) -> Any:
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


CRITIC_KINDS = ("adapter", "head", "model")


class ValueHead(nn.Linear):
    """Hidden states (B, L, H) to values (B, L) in float32; starts at zero, so that the first values are neutral."""

    def __init__(self, hidden_size: int, **kwargs: object):
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
    """The result of TRL's fused head, plus the values. (A field called `values` would shadow dict.values().)"""

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    state_values: torch.Tensor | None = None
    """(B, L): the value of the state after token l, that is, V of token l + 1. Of a packed row (1, S)."""


# -------------------------------------------------------------------- attaching


def attach_critic(model: PreTrainedModel, kind: str, *, critic_model: nn.Module | None = None) -> None:
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


def _wrap_forward(base: PreTrainedModel) -> None:
    bound = base.forward
    # Called on whichever model this is called on: a deep copy computes with its own weights.
    inner = bound.__func__ if inspect.ismethod(bound) else lambda _, *args, **kwargs: bound(*args, **kwargs)

    @functools.wraps(bound)
    def forward(
        self: Any,
        *args: object,
        compute_values: bool = False,
        values_only: bool = False,
        **kwargs: object,
    ) -> Any:
        if values_only:
            return ActorCriticOutput(state_values=_values(self, kwargs))
        if not compute_values:
            return inner(self, *args, **kwargs)
        with _captured_hidden_states(self) as hidden:
            output = inner(self, *args, **kwargs)
        values = _values(self, kwargs, hidden[-1] if self.critic_kind == "head" else None)
        taken = {name: getattr(output, name) for name in ("loss", "log_probs", "entropy", "aux_loss")}
        return ActorCriticOutput(**taken, state_values=values)

    base.forward = types.MethodType(forward, base)


_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_INPUTS = ("input_ids", "attention_mask", "position_ids", "packed_layout", *_LENGTHS)


def _values(base: PreTrainedModel, inputs: dict[str, Any], hidden: torch.Tensor | None = None) -> torch.Tensor:
    """(B, L) values, of a packed row (1, S); `hidden` spares the policy's backbone a second pass."""
    inputs = {name: inputs[name] for name in _INPUTS if name in inputs}
    if base.critic_kind == "model":
        hidden = _hidden_states(base.critic_backbone, inputs)
    elif base.critic_kind == "adapter":
        with use_critic_adapter(base):
            hidden = _hidden_states(base.base_model, inputs)
    else:
        if hidden is None:
            hidden = _hidden_states(base.base_model, inputs)
        if base.critic_detached:
            hidden = hidden.detach()
    return base.value_head(hidden)


def _hidden_states(backbone: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    """(B, L, H) of the last layer, of a packed row (`update/packing.py`) only where it is read, (1, S, H).

    Positions are counted without padding, so that no other row's length matters.
    """
    mask = inputs.get("attention_mask")
    if mask is not None and "position_ids" not in inputs and takes_positions(backbone):
        inputs = {**inputs, "position_ids": positions_of(mask)}
    hidden = backbone(**inputs, use_cache=False).last_hidden_state
    layout = inputs.get("packed_layout")
    return hidden if layout is None else hidden[:, layout.sources]


@contextlib.contextmanager
def _captured_hidden_states(base: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Collect the backbone's last hidden states while TRL's fused head runs it."""
    captured: list[torch.Tensor] = []
    handle = base.base_model.register_forward_hook(lambda module, args, output: captured.append(output[0]))
    try:
        yield captured
    finally:
        handle.remove()


# -------------------------------------------------------------------- a model of its own


def copy_backbone(base: PreTrainedModel) -> Any:
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
    done: tuple[str, ...] = ()  # what lay below these names went with the adapter
    for name, module in list(backbone.named_modules()):
        if name.startswith(done):
            continue
        # Also of LoRA on single parameters, which puts one wrapper around another.
        if hasattr(module, "unload_and_optionally_merge_module"):
            plain = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        elif isinstance(module, BaseTunerLayer):
            module.merge()
            plain = module.get_base_layer()
        else:
            continue
        done += (f"{name}.",)
        parent, _, child = name.rpartition(".")
        setattr(backbone.get_submodule(parent) if parent else backbone, child, plain)


def check_critic_model(critic_model: PreTrainedModel | None, kind: str, base: PreTrainedModel) -> None:
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
        " and the policy share weights that are trained. Leave critic_model out, which copies the policy's own.": (
            is_loaded and any(a is b for a in critic_model.parameters() if a.requires_grad for b in base.parameters())
        ),
        f" knows {own} tokens and the policy {needed}: the critic reads the policy's token ids. Pass a model with the "
        "policy's tokenizer.": 0 < own < needed,
    }
    for rule, is_broken in rules.items():
        if is_broken:
            raise ValueError(f"{given}{rule}")


# -------------------------------------------------------------------- a second adapter


ADAPTER_KINDS = (
    "LORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "HRA", "VERA", "RANDLORA", "FOURIERFT", "C3A", "HIRA", "GRALORA",
    "MISS", "ROAD", "DELORA", "LN_TUNING",
)  # fmt: skip
"""peft's names of the kinds of which a model takes two that are trained; a test runs each."""
_INSTEAD = "set critic='head' or critic='model'"


def add_critic_adapter(model: PreTrainedModel) -> str:
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


def _checked_policy_adapter(model: PreTrainedModel) -> str:
    """Name of the policy's adapter; ValueError for one that cannot stand twice in a model."""
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


def _drop_copies_outside(base: PreTrainedModel) -> None:
    """Take away the critic's copies of modules that values do not pass through, such as an output layer.

    They would never get a gradient, on which DDP fails.
    """
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


def wrap_checkpointing(base: PreTrainedModel) -> None:
    """Recompute every checkpointed block under the adapter that its forward ran with.

    Without this, gradient checkpointing silently recomputes the critic's pass under the policy's adapter. Wrapping the
    checkpoint function (not `context_fn`) serves both reentrant modes. Enabling checkpointing again replaces the
    function in every block, so the method that does so is wrapped as well.
    """
    original = base._set_gradient_checkpointing

    def set_gradient_checkpointing(
        enable: bool = True,
        gradient_checkpointing_func: Callable = torch.utils.checkpoint.checkpoint,
        **kwargs: object,
    ) -> None:
        original(enable, _with_adapter_of_forward(gradient_checkpointing_func, base), **kwargs)

    base._set_gradient_checkpointing = set_gradient_checkpointing
    for module in base.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = _with_adapter_of_forward(module._gradient_checkpointing_func, base)


def _with_adapter_of_forward(checkpoint: Callable, base: nn.Module) -> Callable:
    def checkpoint_with_adapter(block: Callable, *args: object, **kwargs: object) -> Any:
        state = _adapter_state(_module_of(block) or base)

        def run(*inputs: object, **options: object) -> Any:
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


# -------------------------------------------------------------------- saving


CRITIC_FILE = Path("critic") / "critic.safetensors"
"""Where a checkpoint keeps the critic. Not `adapter_model.safetensors`: resuming would then load only that folder."""


def wrap_save_pretrained(model: PreTrainedModel) -> None:
    """Make `save_pretrained` write the policy alone: whoever loads it finds a plain model or a plain adapter."""
    original = model.save_pretrained
    adapters = list(model.active_adapters) if hasattr(model, "peft_config") else None

    @functools.wraps(original)
    def save_pretrained(*args: object, **kwargs: Any) -> Any:
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
    """Write the critic's weights below `folder`. Collective under ZeRO-3 and FSDP2: call on every rank."""
    parameters = critic_parameters(model)
    with gathered(list(parameters.values())):
        tensors = {}
        for name, value in parameters.items():
            whole = fsdp2.full(value.detach())
            if is_main_process:
                tensors[name] = whole.cpu().contiguous()
        if is_main_process:
            path = Path(folder) / CRITIC_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, str(path))


def load_critic(model: nn.Module, folder: str | Path) -> None:
    """Load what `save_critic` wrote to a checkpoint.

    Raises:
        ValueError: if the file is missing or belongs to another kind of critic.
    """
    path = Path(folder) / CRITIC_FILE
    if not path.exists():
        raise ValueError(
            f"The checkpoint {folder} has no {CRITIC_FILE}: it was not made by a PPO run. Set resume_from_checkpoint "
            "to a checkpoint of a PPO run, or start anew with that model as the policy."
        )
    fsdp2.reshard(model)
    saved, parameters = load_file(str(path)), critic_parameters(model)
    if set(saved) != set(parameters):
        raise ValueError(
            f"{path} holds another kind of critic ({len(saved)} tensors, this run's critic has {len(parameters)}). "
            "Resume with the same critic= and LoRA settings as the run that wrote it."
        )
    with gathered(list(parameters.values())), torch.no_grad():
        for name, parameter in parameters.items():
            fsdp2.write(parameter, saved[name])

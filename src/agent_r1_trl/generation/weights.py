"""The policy's weights under the names of a plain checkpoint, with adapters merged, or the adapter alone.

Adapters are merged into copies, one layer at a time. Merging into the live weights and subtracting again, step after
step, would let low-precision weights drift.

A base in 4 bits (QLoRA) is dequantised, one layer at a time too: what comes out are the weights that the trainer
computes with, and the sampler needs no quantisation.

Where parameters are in parts on the ranks (DeepSpeed ZeRO-3, FSDP2), all ranks walk together, and one module is whole
at a time. A PPO critic inside the policy is left out. Not covered: other quantised weights, FSDP1.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from agent_r1_trl.generation.fsdp2 import full, gathered_module, has_parts, plain_class

if TYPE_CHECKING:
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper
    from transformers import PreTrainedModel

Gather = Callable[[list[nn.Parameter]], AbstractContextManager[Any]]

_CRITIC_MODULES = ("value_head", "critic_backbone")
CRITIC_ADAPTER = "critic"
"""A PPO critic lives inside the policy (see `agent_r1_trl.critic`); a sampler has no place for it."""


def is_sharded(model: nn.Module) -> bool:
    """Whether this rank holds only parts of some parameters now (ZeRO-3, FSDP2)."""
    return is_sharded_by_zero(model) or has_parts(model)


def is_sharded_by_zero(model: nn.Module) -> bool:
    """Whether this rank holds only parts of ZeRO-3 parameters now."""
    return any(parameter.numel() < getattr(parameter, "ds_numel", 0) for parameter in model.parameters())


def gather_for(model: nn.Module) -> Gather:
    """Context in which parameters of the model are whole; FSDP2 has its own (`gathered_module`)."""
    if not is_sharded_by_zero(model):
        return nullcontext
    import deepspeed

    return deepspeed.zero.GatheredParameters


def policy_weights(model: nn.Module, *, only_trainable: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that the model computes with, active adapters included.

    Where parameters are sharded (DeepSpeed ZeRO-3, FSDP2) this is a collective call, and every rank must iterate.

    `only_trainable` leaves out what training cannot change: frozen weights without an adapter.

    Yields:
        Checkpoint name and weight, each shared weight once. Adapted weights and those of FSDP2 are copies, the others
        are the live ones.

    Raises:
        ValueError: an adapter sits on a quantised weight.
    """
    base: Any = getattr(model, "get_base_model", lambda: model)()
    walk = _Walk(only_trainable=only_trainable, gather=gather_for(model))
    if are_ends_tied(base):
        walk.done.add(id(_output_layer(base)))
    named = _copies(model, walk.weights("", base)) if has_parts(model) else walk.weights("", base)
    if not _is_stored_differently(base):
        yield from named
        return
    from transformers.core_model_loading import revert_weight_conversion

    # The conversion may join or split tensors (experts of a mixture, say), so it needs all of them.
    yield from revert_weight_conversion(base, dict(named)).items()


def _copies(model: nn.Module, named: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of weights that lose their memory as soon as FSDP2 has them in parts again."""
    with gathered_module(model):  # a PeftModel may hold parameters of the model inside
        for name, weight in named:
            yield name, weight.clone()


def _is_stored_differently(base: nn.Module) -> bool:
    """Whether transformers converts names or shapes between the checkpoint and the model in memory."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = getattr(base, "_weight_conversions", None)
    return bool(get_model_conversion_mapping(base, add_legacy=False) if conversions is None else conversions)


@dataclass
class _Walk:
    """Context of a walk over the policy's modules, in each of them."""

    only_trainable: bool
    gather: Gather
    done: set[int] = field(default_factory=set)
    """Ids of the parameters that have been given already, and of modules whose weight another one gives."""

    def weights(self, name: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of a module and of everything in it; `name` is its own in the checkpoint."""
        if name.split(".")[-1] in _CRITIC_MODULES or id(module) in self.done:
            return
        with gathered_module(module):
            yield from self._inside(name, module)

    def _inside(self, name: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        from peft.tuners.lora.layer import ParamWrapper
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper

        if isinstance(module, ParamWrapper):
            yield from self._adapted_parameters(name, module)
        elif isinstance(module, (BaseTunerLayer, TrainableTokensWrapper)):
            with self.gather(list(module.parameters())):
                yield from _merged(name, getattr(module, "token_adapter", module))
        elif isinstance(module, ModulesToSaveWrapper):
            yield from self._own(name, _saved_module(module), recurse=True)
        else:
            yield from self._own(name, module, recurse=False)
            for child_name, child in module.named_children():
                yield from self.weights(_joined(name, child_name), child)

    def _own(self, name: str, module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters without an adapter: the live ones."""
        for parameter_name, parameter in module.named_parameters(recurse=recurse):
            if id(parameter) in self.done or (self.only_trainable and not parameter.requires_grad):
                continue
            self.done.add(id(parameter))
            with self.gather([parameter]):
                path = _joined(name, parameter_name)
                yield path, _plain(path, module, parameter_name, parameter)

    def _adapted_parameters(self, name: str, module: ParamWrapper) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of a module of which LoRA adapts single parameters (`target_parameters`), such as experts.

        peft puts one wrapper around it for each parameter, and these around one another.
        """
        from peft.tuners.lora.layer import ParamWrapper

        wrappers: dict[str, Any] = {}
        inner = module
        while isinstance(inner, ParamWrapper):
            wrappers[_joined(name, inner.parameter_name)] = inner
            inner = inner.base_layer
        with self.gather(list(module.parameters())):
            # Frozen ones as well: a checkpoint may store several parameters of the module as one tensor.
            whole = _Walk(only_trainable=False, gather=nullcontext, done=self.done)
            for path, weight in whole.weights(name, inner):
                wrapper = wrappers.get(path)
                yield path, weight if wrapper is None else _with_deltas(weight, wrapper, _adapters_to_merge(wrapper))


def _joined(name: str, inner_name: str) -> str:
    return f"{name}.{inner_name}" if name else inner_name


def _saved_module(wrapper: ModulesToSaveWrapper) -> nn.Module:
    """The module that computes in place of one of `modules_to_save`."""
    saved = dict(wrapper.modules_to_save.items())
    names = [] if wrapper.disable_adapters else [name for name in wrapper.active_adapters if name in saved]
    return saved[names[0]] if names else wrapper.original_module


def _adapters_to_merge(layer: BaseTunerLayer) -> list[str]:
    """Names of the policy's adapters that a layer adds in every pass."""
    if layer.disable_adapters:
        return []
    return [name for name in layer.active_adapters if name not in (*layer.merged_adapters, CRITIC_ADAPTER)]


def _with_deltas(weight: torch.Tensor, layer: LoraLayer, adapters: Sequence[str]) -> torch.Tensor:
    """A weight with LoRA's part added, in float32 and rounded once; itself if there is none."""
    adapters = [adapter for adapter in adapters if adapter in layer.scaling]
    if not adapters:
        return weight
    merged = weight.float()
    for adapter in adapters:
        merged = merged + layer.get_delta_weight(adapter).to(merged)
    return merged.to(weight.dtype)


def _merged(name: str, layer: BaseTunerLayer) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of one adapted layer, merged in float32 and rounded once."""
    base = layer.get_base_layer()
    adapters = _adapters_to_merge(layer)
    if not adapters or _is_plain_lora(layer, adapters):
        for parameter_name, parameter in base.named_parameters():
            weight = _plain(f"{name}.{parameter_name}", base, parameter_name, parameter)
            if parameter_name == "weight" and adapters:
                weight = _with_deltas(weight, layer, adapters)
            yield f"{name}.{parameter_name}", weight
        return
    if any(is_quantised(parameter) for parameter in base.parameters()):
        raise _unsendable(f"{name} has an adapter on quantised weights that is not plain LoRA (DoRA, say)")
    dtypes = {parameter_name: parameter.dtype for parameter_name, parameter in base.named_parameters()}
    duplicate = copy.deepcopy(layer).float()
    for inner in duplicate.modules():
        if hasattr(inner, "merge"):
            inner.merge(adapter_names=adapters)
    for parameter_name, parameter in duplicate.get_base_layer().named_parameters():
        yield f"{name}.{parameter_name}", parameter.data.to(dtypes[parameter_name])


def is_quantised(parameter: torch.Tensor) -> bool:
    """Whether it holds codes, not numbers."""
    return not parameter.is_floating_point()


def is_4bit(parameter: torch.Tensor) -> bool:
    """Whether bitsandbytes holds it in 4 bits, as QLoRA does; these can be dequantised."""
    return type(parameter).__name__ == "Params4bit"


def _plain(path: str, module: nn.Module, name: str, parameter: nn.Parameter) -> torch.Tensor:
    """The numbers that the module computes with; a copy where they are stored in 4 bits."""
    if is_4bit(parameter):
        from peft.utils.integrations import dequantize_module_weight

        owner: Any = module.get_submodule(name.rpartition(".")[0])
        if getattr(getattr(parameter, "quant_state", None), "packing_format_for_cpu", False):
            raise _unsendable(f"{path} was repacked by bitsandbytes for this processor, not for a GPU")
        numbers = dequantize_module_weight(owner).detach()
        return numbers if owner.compute_dtype is None else numbers.to(owner.compute_dtype)
    if is_quantised(parameter):
        raise _unsendable(f"{path} is quantised in another way than by load_in_4bit ({parameter.dtype})")
    return parameter.data


def _unsendable(problem: str) -> ValueError:
    return ValueError(
        f"{problem}: it cannot be sent to another engine. Load the base model without quantisation, or with "
        "load_in_4bit on a GPU and plain LoRA, or generate with transformers (use_vllm=False)."
    )


def _is_plain_lora(layer: LoraLayer, adapters: Sequence[str]) -> bool:
    """Whether the layer computes base + delta and nothing else (no DoRA, no bias of its own)."""
    from peft.tuners.lora import Embedding, Linear

    is_linear = plain_class(layer) in (Embedding, Linear) or is_4bit(layer.get_base_layer().weight)
    return is_linear and not any(
        layer.lora_bias.get(adapter) or adapter in getattr(layer, "lora_variant", {}) for adapter in adapters
    )


# -------------------------------------------------------------------- tied embeddings


def _weight_of(layer: nn.Module) -> set[int]:
    """Origins of the weight at an end of the model (embeddings or output layer): ids of memory, adapter's too.

    Two layers with the same ids have one weight, and keep having one in training.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    layer = getattr(layer, "token_adapter", layer)
    if isinstance(layer, ModulesToSaveWrapper):
        layer = _saved_module(layer)
    if not isinstance(layer, BaseTunerLayer):
        weight = getattr(layer, "weight", None)
        return {_memory_of(weight) if isinstance(weight, torch.Tensor) else id(layer)}
    adapters = set(layer.active_adapters)
    ids = {_memory_of(layer.get_base_layer().weight)}
    for name, parameter in layer.named_parameters():
        if adapters.intersection(name.split(".")):
            ids.add(_memory_of(parameter))
    return ids


def _memory_of(parameter: torch.Tensor) -> int:
    """Names the memory of a parameter; a transposed view has that of the parameter that it is a view of.

    Where it begins, not its storage: ZeRO-1 and 2 put all parameters into one.
    """
    number = getattr(parameter, "ds_id", None)  # of ZeRO-3, where a rank holds no whole parameters
    if number is not None:
        return int(number)
    return parameter.data_ptr() or id(parameter)  # 0: of a meta tensor


def are_ends_tied(base: PreTrainedModel) -> bool:
    """Whether input embeddings and output layer of a model (without a PeftModel) compute with one weight."""
    output = _output_layer(base)
    return output is not None and _weight_of(base.get_input_embeddings()) == _weight_of(output)


def _output_layer(base: PreTrainedModel) -> nn.Module | None:
    """The output layer of a model; None for one without, or for any other module."""
    return base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None


def check_tied_embeddings(model: PreTrainedModel) -> None:
    """Refuse two weights where the model's configuration promises one (tie_word_embeddings).

    vLLM goes by the configuration: it would load one of them for both ends, and say nothing.
    """
    base = getattr(model, "get_base_model", lambda: model)()
    if _output_layer(base) is None or not base.config.get_text_config().tie_word_embeddings or are_ends_tied(base):
        return
    problem = (
        "its two ends are two weights. Set model.config.tie_word_embeddings = False, save the model and load it from "
        "there, or set use_vllm=False."
    )
    if hasattr(model, "peft_config"):
        problem = (
            "the adapter holds one of the two ends alone, or each of them apart (embed_tokens, lm_head in "
            "lora_target_modules, lora_modules_to_save or trainable_token_indices), so that they differ after an "
            "update. Remove both from it, or set use_vllm=False; in a script, "
            "LoraConfig(modules_to_save=['embed_tokens'], ensure_weight_tying=True) trains them as one."
        )
    raise ValueError(
        "use_vllm=True: this model shares one weight between input embeddings and output layer (tie_word_embeddings), "
        f"as vLLM does then, but {problem}"
    )


# -------------------------------------------------------------------- which adapters a sampler can follow
# Those whose tokens are computed one by one, as a cache does. Most kinds adapt single layers, and a token's hidden
# states depend on the tokens before it alone: sampler and trainer then agree. Some read more than that.

_READS_MORE = {
    "LILY": "its router averages over all tokens of a forward pass",
    "POLY": "its router needs task_ids with every call",
    "SHADOW": "its shadow network keeps a cache of its own",
    "XLORA": "its gate reads the whole sequence in a pass of its own",
}
"""Kind of adapter -> why a sampler with a cache is not the policy that the trainer scores."""
_NOT_PLAIN = (
    "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "rank_pattern", "alpha_pattern",
    "target_parameters", "layer_replication",
)  # fmt: skip


def check_adapters(model: nn.Module, *, is_merged: bool = False) -> None:
    """Refuse adapters with which the sampler would not be the policy that is trained.

    `is_merged` says that the sampler receives the adapter merged into the weights (vLLM).
    """
    for config in getattr(model, "peft_config", {}).values():
        kind = getattr(config.peft_type, "value", config.peft_type)
        reason = _READS_MORE.get(kind)
        if config.is_prompt_learning:
            reason = "its virtual tokens stand before every sequence, where the rollout's cache has no place for them"
        if getattr(config, "alora_invocation_tokens", None) is not None:
            kind, reason = "activated LoRA", "it is switched on by tokens that a continued turn does not show it"
        if is_merged and kind == "ADAPTION_PROMPT":
            reason = "it cannot be merged into the weights that vLLM receives"
        if is_merged and getattr(config, "layer_replication", None):
            kind, reason = "layer_replication", "vLLM cannot be given layers that share their weights"
        if reason is not None:
            raise ValueError(
                f"peft_config={type(config).__name__} ({kind}): {reason}, so the sampler would not be the policy that "
                "is trained. Use an adapter of the model's layers, such as peft_config=LoraConfig(), or train the "
                "whole model."
            )
    _check_adapted_layers(model, is_merged=is_merged)
    if is_merged:
        check_tied_embeddings(model)


def _check_adapted_layers(model: nn.Module, *, is_merged: bool) -> None:
    """Refuse what peft adapts, and then can neither compute nor merge."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    plain: Any = getattr(model, "get_base_model", lambda: model)()
    of_ends = _weight_of(plain.get_input_embeddings()) if _output_layer(plain) is not None else set()
    adapted: dict[int, str] = {}
    """Memory of the weight of an adapted layer -> name of the first one that has it."""
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        base: Any = layer.get_base_layer()
        first = name
        if isinstance(getattr(base, "weight", None), torch.Tensor) and _memory_of(base.weight) not in of_ends:
            first = adapted.setdefault(_memory_of(base.weight), name)
        has_bias = getattr(base, "bias", None) is not None
        is_of_tokens = isinstance(layer, TrainableTokensLayer)
        problem = None
        if is_of_tokens and not isinstance(base, (nn.Embedding, nn.Linear)):
            problem = (
                f"trainable_token_indices and modules_to_save both hold {name} (with tie_word_embeddings the tokens "
                "are trained in lm_head as well), which peft cannot compute. Remove it from modules_to_save, or set "
                "trainable_token_indices=None."
            )
        elif is_of_tokens and has_bias:
            problem = (
                f"trainable_token_indices holds {name}, whose bias peft leaves out. Set trainable_token_indices=None; "
                "modules_to_save trains such a layer whole."
            )
        elif is_merged and not has_bias and any(getattr(layer, "lora_bias", {}).values()):
            problem = (
                f"lora_bias=True, and {name} has no bias that LoRA's could be merged into for vLLM. Set "
                "lora_bias=False, or use_vllm=False."
            )
        elif is_merged and not name.startswith(first):  # wrappers of one layer are inside one another
            problem = (
                f"{first} and {name} share one weight, and the adapter adds something else to each; vLLM would load "
                "one for both. Remove these layers from lora_target_modules, or set use_vllm=False."
            )
        if problem is not None:
            raise ValueError(f"peft_config: {problem}")


# -------------------------------------------------------------------- an adapter as the files that vLLM servers load


def served_adapter(model: PreTrainedModel) -> str | None:
    """Name of the policy's adapter if vLLM can serve it next to the base weights, else None.

    vLLM serves plain LoRA on linear layers and embeddings: no DoRA or other variants, no biases, no whole modules
    trained with it.
    """
    active = model.active_adapters if hasattr(model, "peft_config") else []
    names = [name for name in active if name != CRITIC_ADAPTER]
    if len(names) != 1:
        return None
    config = model.peft_config[names[0]]
    if getattr(config.peft_type, "value", config.peft_type) != "LORA" or config.bias != "none":
        return None
    has_more = any(getattr(config, option, None) for option in _NOT_PLAIN)
    has_variant = any(names[0] in getattr(module, "lora_variant", {}) for module in model.modules())
    return None if has_more or has_variant else names[0]


def adapter_tensors(model: nn.Module, adapter: str) -> dict[str, torch.Tensor]:
    """Copies of the adapter's tensors under the names of a saved adapter, on the CPU; a collective call if sharded."""
    part, gather = re.compile(rf"\.{re.escape(adapter)}(?=\.|$)"), gather_for(model)  # at the end: of embeddings
    tensors = {}
    for name, parameter in model.named_parameters():
        if "lora_" in name and part.search(name):
            with gather([parameter]):
                tensors[part.sub("", name)] = full(parameter.detach()).cpu().clone().contiguous()
    return tensors


def write_adapter(model: PreTrainedModel, adapter: str, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = copy.copy(model.peft_config[adapter])
    config.inference_mode = True
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors")

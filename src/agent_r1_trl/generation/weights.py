"""The policy's weights under the names of a plain checkpoint, with adapters merged, or the adapter alone.

Adapters are merged into copies, one layer at a time. Merging into the live weights and subtracting again, step after
step, would let low-precision weights drift.

A base in 4 bits (QLoRA) is dequantised, one layer at a time too: what comes out are the weights that the trainer
computes with, and the sampler needs no quantisation.

A PPO critic inside the policy is left out. Not covered: other quantised weights, FSDP shards.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)
Gather = Callable[[list[nn.Parameter]], AbstractContextManager[Any]]

_CRITIC_MODULES = ("value_head", "critic_backbone")
CRITIC_ADAPTER = "critic"
"""A PPO critic lives inside the policy (see `agent_r1_trl.critic`); a sampler has no place for it."""


def is_sharded(model: nn.Module) -> bool:
    """Whether this rank holds only parts of ZeRO-3 parameters now."""
    return any(parameter.numel() < getattr(parameter, "ds_numel", 0) for parameter in model.parameters())


def gather_for(model: nn.Module) -> Gather:
    """Context in which parameters of the model are whole."""
    if not is_sharded(model):
        return nullcontext
    import deepspeed

    return deepspeed.zero.GatheredParameters


def check_tied_embeddings(model: Any) -> None:
    """Refuse an adapter on one of two layers that share their weight: vLLM has one weight for both."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    base = getattr(model, "get_base_model", lambda: model)()
    if not base.config.get_text_config().tie_word_embeddings:
        return
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    is_adapted = [isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper)) for layer in ends]
    if is_adapted[0] != is_adapted[1]:
        raise ValueError(
            "The adapter holds only one of input embeddings and output layer (embed_tokens, lm_head), and this model "
            "shares one weight between them (tie_word_embeddings): after training they would differ, and vLLM cannot "
            "run that. Remove it from lora_target_modules and lora_modules_to_save, or set use_vllm=False."
        )


def policy_weights(model: nn.Module, *, only_trainable: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that the model computes with, active adapters included.

    Where parameters are sharded (DeepSpeed ZeRO-3) this is a collective call, and every rank must iterate.

    `only_trainable` leaves out what training cannot change: frozen weights without an adapter.

    Yields:
        Checkpoint name and weight, each shared weight once. Adapted weights are copies, the others are the live ones.

    Raises:
        ValueError: an adapter sits on a quantised weight.
    """
    base: Any = getattr(model, "get_base_model", lambda: model)()
    named = _in_memory_weights(base, only_trainable=only_trainable, gather=gather_for(model))
    if not _is_stored_differently(base):
        yield from named
        return
    from transformers.core_model_loading import revert_weight_conversion

    # The conversion may join or split tensors (experts of a mixture, say), so it needs all of them.
    yield from revert_weight_conversion(base, dict(named)).items()


def _is_stored_differently(base: nn.Module) -> bool:
    """Whether transformers converts names or shapes between the checkpoint and the model in memory."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = getattr(base, "_weight_conversions", None)
    return bool(get_model_conversion_mapping(base, add_legacy=False) if conversions is None else conversions)


def _in_memory_weights(base: nn.Module, *, only_trainable: bool, gather: Gather) -> Iterator[tuple[str, torch.Tensor]]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper

    done: set[int] = set()
    inside: tuple[str, ...] = ()  # what lies below these names has been dealt with
    for name, module in base.named_modules():
        if name.startswith(inside):
            continue
        if name.split(".")[-1] in _CRITIC_MODULES:
            inside += (f"{name}.",)
            continue
        if isinstance(module, (BaseTunerLayer, TrainableTokensWrapper)):
            inside += (f"{name}.",)
            with gather(list(module.parameters())):
                yield from _merged(name, getattr(module, "token_adapter", module))
            continue
        own: nn.Module = module
        if isinstance(module, ModulesToSaveWrapper):
            inside += (f"{name}.",)
            saved = dict(module.modules_to_save.items())
            own = saved.get(module.active_adapters[0], module.original_module)
        for parameter_name, parameter in own.named_parameters(recurse=own is not module):
            if id(parameter) in done or (only_trainable and not parameter.requires_grad):
                continue
            done.add(id(parameter))
            with gather([parameter]):
                path = f"{name}.{parameter_name}" if name else parameter_name
                yield path, _plain(path, own, parameter_name, parameter)


def _merged(name: str, layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of one adapted layer, merged in float32 and rounded once."""
    base = layer.get_base_layer()
    adapters = [name for name in layer.active_adapters if name not in (*layer.merged_adapters, CRITIC_ADAPTER)]
    if layer.disable_adapters:
        adapters = []
    if not adapters or _is_plain_lora(layer, adapters):
        for parameter_name, parameter in base.named_parameters():
            merged = _plain(f"{name}.{parameter_name}", base, parameter_name, parameter)
            dtype = merged.dtype
            if parameter_name == "weight" and adapters:
                merged = merged.float()
                for adapter in adapters:
                    if adapter in layer.scaling:
                        merged = merged + layer.get_delta_weight(adapter).to(merged)
                merged = merged.to(dtype)
            yield f"{name}.{parameter_name}", merged
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


def _is_plain_lora(layer: Any, adapters: Sequence[str]) -> bool:
    """Whether the layer computes base + delta and nothing else (no DoRA, no bias of its own)."""
    from peft.tuners.lora import Embedding, Linear

    is_linear = type(layer) in (Embedding, Linear) or is_4bit(layer.get_base_layer().weight)
    return is_linear and not any(
        layer.lora_bias.get(adapter) or adapter in getattr(layer, "lora_variant", {}) for adapter in adapters
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
        if reason is not None:
            raise ValueError(
                f"peft_config={type(config).__name__} ({kind}): {reason}, so the sampler would not be the policy that "
                "is trained. Use an adapter of the model's layers, such as peft_config=LoraConfig(), or train the "
                "whole model."
            )


def warn_of_dropout(model: nn.Module) -> None:
    """Say so if the update would compute log-probs of another policy than the one that sampled, because of dropout."""
    rates = {module.p for module in model.modules() if isinstance(module, nn.Dropout) and module.p > 0}
    if rates:
        logger.warning(
            "The model has dropout (%s), which is on in the update and off in the rollout: the log-probs of a sampled "
            "token differ between them although the weights are the same. Set lora_dropout: 0.0 if it is the "
            "adapter's, or disable_dropout: true.",
            ", ".join(f"{rate:g}" for rate in sorted(rates)),
        )


# -------------------------------------------------------------------- an adapter as the files that vLLM servers load


def served_adapter(model: Any) -> str | None:
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
                tensors[part.sub("", name)] = parameter.detach().cpu().clone().contiguous()
    return tensors


def write_adapter(model: Any, adapter: str, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = copy.copy(model.peft_config[adapter])
    config.inference_mode = True
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors")

"""Which PEFT adapters a sampler can follow: those whose tokens are computed one by one, as a cache does.

Most kinds adapt single layers, and a token's hidden states depend on the tokens before it alone: sampler and trainer
then agree. Some read more than that, and a sampler that continues from a cache would silently be another policy.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agent_r1_trl.generation.weights import CRITIC_ADAPTER, gather_for

logger = logging.getLogger(__name__)

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

    Raises:
        ValueError: names the kind of adapter, the reason and the fix.
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
    part, gather = f".{adapter}.", gather_for(model)
    tensors = {}
    for name, parameter in model.named_parameters():
        if "lora_" in name and part in name:
            with gather([parameter]):
                tensors[name.replace(part, ".")] = parameter.detach().cpu().clone().contiguous()
    return tensors


def write_adapter(model: Any, adapter: str, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = copy.copy(model.peft_config[adapter])
    config.inference_mode = True
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors")

"""A LoRA adapter as the files that vLLM loads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agent_r1_trl.generation.weights import CRITIC_ADAPTER, gather_for


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
    is_plain = (
        getattr(config.peft_type, "value", config.peft_type) == "LORA"
        and config.bias == "none"
        and not any(
            getattr(config, option, None)
            for option in (
                "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "rank_pattern",
                "alpha_pattern", "target_parameters", "layer_replication",
            )
        )
        and not any(names[0] in getattr(module, "lora_variant", {}) for module in model.modules())
    )  # fmt: skip
    return names[0] if is_plain else None


def adapter_tensors(model: nn.Module, adapter: str) -> dict[str, torch.Tensor]:
    """Copies of the adapter's tensors under the names of a saved adapter, on the CPU.

    A collective call where parameters are sharded.
    """
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

"""The sizes of a model that memory depends on, counted on the meta device: no weight is read or allocated.

Covered: dense decoders, with and without LoRA. For mixtures of experts and vision towers the parameters are counted
correctly, but the activations are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agent_r1_trl.rollout.limits import context_length


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model and of its adapters."""

    num_parameters: int
    """Of the base model; tied weights count once."""
    num_linear_parameters: int
    """Weights of the linear layers without the head, which a quantised base keeps in 4 or 8 bits."""
    num_head_parameters: int
    """Weights of the head; 0 if it is tied to the embedding."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    has_head_norms: bool = False
    """Whether queries and keys are normalised per head (Qwen3)."""
    max_positions: int | None = None
    """Tokens that a context of the model can hold; None if its configuration does not say."""
    num_adapter_parameters: int = 0
    """Parameters that LoRA adds and trains; 0: the whole model is trained."""
    num_whole_parameters: int = 0
    """Parameters of modules that are trained in full besides the adapters (`lora_modules_to_save`)."""
    num_adapted_layers: int = 0
    num_adapter_inputs: int = 0
    """Sum of the input features of all adapted layers."""

    @property
    def num_matmul_parameters(self) -> int:
        """Weights in matrix products: those of linear layers and of the head, tied or not."""
        return self.num_linear_parameters + self.vocab_size * self.hidden_size


def read_shape(config: Any, peft_config: Any = None) -> ModelShape:
    """Read the sizes of a model from its configuration.

    Args:
        config: transformers' configuration of a causal language model.
        peft_config: configuration of LoRA; None: the whole model is trained.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head]
    is_tied = head.weight is model.get_input_embeddings().weight
    text = config.get_text_config()
    sizes = {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_linear_parameters": sum(module.weight.numel() for module in linear),
        "num_head_parameters": 0 if is_tied else head.weight.numel(),
    }
    return ModelShape(
        **sizes,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocab_size=text.vocab_size,
        max_positions=context_length(text),
        has_head_norms=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        **(_adapter_sizes(model, peft_config) if peft_config is not None else {}),
    )


def _adapter_sizes(model: Any, peft_config: Any) -> dict[str, int]:
    """Sizes of the adapters, which peft itself attaches, so that all of its options count."""
    from peft import get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = get_peft_model(model, peft_config, low_cpu_mem_usage=True)  # keeps the adapters on the meta device too
    layers = [module for module in adapted.modules() if isinstance(module, BaseTunerLayer)]
    trained = {name: item.numel() for name, item in adapted.named_parameters() if item.requires_grad}
    whole = sum(count for name, count in trained.items() if ".modules_to_save." in name)
    return {
        "num_adapter_parameters": sum(trained.values()) - whole,
        "num_whole_parameters": whole,
        "num_adapted_layers": len(layers),
        "num_adapter_inputs": sum(getattr(layer, "in_features", 0) for layer in layers),
    }

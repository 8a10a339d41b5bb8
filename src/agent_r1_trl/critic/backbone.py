"""The critic as a model of its own: a copy of the policy's backbone, or one that the user brought."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from agent_r1_trl.critic.parts import gathered


def copy_backbone(base: Any) -> Any:
    """The policy's backbone as it computes now, its adapters merged, every weight to be trained.

    Args:
        base: the policy, without a PeftModel around it.

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
        ValueError: names the argument, the rule and the cure.
    """
    if critic_model is None:
        return
    given = (
        f"critic_model={critic_model!r}" if isinstance(critic_model, str) else f"critic_model={_type(critic_model)}"
    )
    if kind != "model":
        raise ValueError(f"{given} with critic={kind!r}, which has no model of its own. Set critic='model'.")
    if isinstance(critic_model, str) or not hasattr(critic_model, "config"):
        raise ValueError(f"{given} is not a loaded model. Pass critic_model=AutoModel.from_pretrained(...).")
    if hasattr(critic_model, "get_output_embeddings") and critic_model.get_output_embeddings() is not None:
        raise ValueError(
            f"{given} has an output layer, and the critic reads hidden states. Pass critic_model=AutoModel."
            "from_pretrained(...), or the base_model of this one."
        )
    own, needed = (model.get_input_embeddings().weight.shape[0] for model in (critic_model, base))
    if 0 < own < needed:
        raise ValueError(
            f"{given} knows {own} tokens and the policy {needed}: the critic reads the policy's token ids. Pass a "
            "model with the policy's tokenizer."
        )


def prepare_critic_model(critic_model: Any) -> None:
    """Let reentrant checkpointing work where the user froze the input embeddings."""
    if not any(parameter.requires_grad for parameter in critic_model.get_input_embeddings().parameters()):
        critic_model.enable_input_require_grads()


def _type(value: Any) -> str:
    return type(value).__name__

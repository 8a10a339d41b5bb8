"""Whether a run trains anything: checked when the trainer is made, and again when its optimizer is.

A policy that no optimizer moves cannot be seen in the log: rewards and advantages are those of a real run, and TRL's
reference pass switches `requires_grad` of an adapter on, so that even the gradient's norm is above 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOTrainer

from agent_r1_trl.critic.attach import base_causal_lm, is_critic_name
from agent_r1_trl.trainers.sharding import check_not_quantised


def check_policy(trainer: GRPOTrainer) -> None:
    """Refuse a policy of which nothing would be trained: now, and again when training begins with its optimizer.

    Raises:
        ValueError: says what to load or to pass.
    """
    check_trainable(trainer.model)
    if trainer.is_fsdp_enabled:
        check_not_quantised(trainer.model)
    if trainer.optimizer is not None:
        check_optimizer(trainer.model, trainer.optimizer)
    trainer.add_callback(OptimizerCheck(is_visible=not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)))
    show_bias_of_output_layer(trainer.model)


class OptimizerCheck(TrainerCallback):
    """Looks at an optimizer that was made, or set, after the trainer.

    Args:
        is_visible: whether an optimizer holds the model's own parameters; DeepSpeed and FSDP put others into it.
    """

    def __init__(self, *, is_visible: bool) -> None:
        self._is_visible = is_visible

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        **kwargs: object,
    ) -> None:
        """Refuse an optimizer that holds nothing of the policy."""
        if self._is_visible:
            check_optimizer(model, optimizer)


def policy_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trainable parts of the policy: not a critic, and no adapter that is not active, such as TRL's copy `ref`."""
    wrapped: Any = model
    inactive: set[str] = set()
    if hasattr(model, "peft_config"):
        active = wrapped.active_adapters
        inactive = set(wrapped.peft_config).difference(active() if callable(active) else active)
    found = []
    for name, parameter in model.named_parameters():
        is_active = not inactive.intersection(name.split("."))
        if parameter.requires_grad and is_active and not is_critic_name(name):
            found.append(parameter)
    return found


def adapter_weights(model: nn.Module) -> list[nn.Parameter]:
    """What is trained of the policy's adapters in single layers; not whole modules (`modules_to_save`)."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    of_layers: set[int] = set()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            of_layers.update(id(parameter) for parameter in module.parameters())
    return [parameter for parameter in policy_parameters(model) if id(parameter) in of_layers]


def check_trainable(model: nn.Module) -> None:
    """Refuse a model that is frozen as a whole.

    Raises:
        ValueError: says how to load it, or what to set.
    """
    if policy_parameters(model):
        _check_merged(model)
        return
    fix = (
        "Call model.requires_grad_(True), on the whole model or on what is to be trained, or pass "
        "peft_config=LoraConfig()."
    )
    if hasattr(model, "peft_config"):
        fix = (
            "peft loads adapters frozen: load it with is_trainable=True, as in PeftModel.from_pretrained(base_model, "
            "folder, is_trainable=True). Leave inference_mode=True out of a peft_config, and after "
            "disable_adapter_layers() call model.enable_adapter_layers()."
        )
    num = len(list(model.parameters()))
    raise ValueError(
        f"model={type(model).__name__}: none of its {num} parameters is trained (requires_grad=False), so the run "
        f"would change nothing. {fix}"
    )


def _check_merged(model: nn.Module) -> None:
    """Refuse adapters that are merged: their layers compute with the base alone, and no gradient reaches them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and module.merged:
            raise ValueError(
                f"model={type(model).__name__}: the adapter of {name} is merged into its base, so it would not be "
                "trained. Call model.unmerge_adapter(), or model.merge_and_unload() to train the whole model."
            )


def check_gradient(trainer: GRPOTrainer) -> None:
    """Refuse a policy of which no trained weight has a gradient, behind the first backward pass.

    Raises:
        ValueError: names one of them, and says what to train.
    """
    is_used_up = "layerwise" in trainer.args.optim or "lomo" in trainer.args.optim  # in the backward pass
    if is_used_up or trainer.is_deepspeed_enabled:
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    trained = policy_parameters(model)
    if any(parameter.grad is not None for parameter in trained):
        return
    ids = {id(parameter) for parameter in trained}
    first = next(name for name, parameter in model.named_parameters() if id(parameter) in ids)
    raise ValueError(
        f"model={type(model).__name__}: no gradient reaches the {len(trained)} parameters that are trained ({first}, "
        "...), so the run would change nothing. The forward pass does not use them, or a layer before the loss cuts "
        "the gradient off. Call requires_grad_(True) on layers that it uses."
    )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that holds nothing of the policy.

    Raises:
        ValueError: says from which parameters to make it.
    """
    held = _parameters_of(optimizer)
    if held is None:
        return
    ids = {id(parameter) for parameter in held}
    trained = policy_parameters(model)
    if any(id(parameter) in ids for parameter in trained):
        return
    raise ValueError(
        f"optimizers=({type(optimizer).__name__}, ...): none of its {len(ids)} parameters is one of the "
        f"{len(trained)} that the policy trains, so the run would change nothing. It was made from another model, or "
        "before peft_config= gave this one its adapter. Leave it out, or set it once the trainer is made: "
        "trainer.optimizer = torch.optim.AdamW([p for p in trainer.model.parameters() if p.requires_grad])."
    )


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter] | None:
    """The parameters that an optimizer moves; None for one that does not say."""
    by_parameter = getattr(optimizer, "optimizer_dict", None)  # transformers' stand-in for one optimizer a layer
    if by_parameter is not None:
        return list(by_parameter)
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:  # accelerate's stand-in for DeepSpeed's own
        return None
    found = []
    for group in groups:
        found.extend(group["params"])
    return found


def show_bias_of_output_layer(model: nn.Module) -> None:
    """Let TRL's loss read the bias of an output layer of which peft trains single tokens.

    The loss computes with `weight` and `bias` of the layer, and peft's wrapper has no `bias` while its adapter is
    active. `check_adapters` refuses a layer that has one, so that it is always None.
    """
    from peft.utils import TrainableTokensWrapper

    output = base_causal_lm(model).get_output_embeddings()
    if isinstance(output, TrainableTokensWrapper):
        output.bias = None

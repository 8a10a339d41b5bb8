"""Training with FSDP2 (`fully_shard`): which settings go with it, and in which precision it computes.

accelerate applies FSDP2 to the model; rollouts, weight syncs, critics and checkpoints know about it where they read
weights (`agent_r1_trl.generation.fsdp2`). Whatever has not been tried with it is refused here by name.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from agent_r1_trl.generation.weights import is_quantised

if TYPE_CHECKING:
    from accelerate import Accelerator

    from agent_r1_trl.trainers.config import MultiTurnConfig

FSDP2_CONFIG = "recipes/accelerate_configs/fsdp2.yaml"
_ZERO3 = "use DeepSpeed instead (recipes/accelerate_configs/zero3.yaml)"
_TRUE = ("1", "true", "yes", "on")


def is_launched_with_fsdp() -> bool:
    """Whether `accelerate launch` was told to use FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() in _TRUE


def find_fsdp_problems(config: MultiTurnConfig) -> Iterator[str]:
    """Settings that FSDP, asked for in the recipe or at the launch, does not go with."""
    shown = f"fsdp={config.fsdp!r}"
    if not config.fsdp:
        if not is_launched_with_fsdp():
            return
        variable = f"ACCELERATE_USE_FSDP={os.environ['ACCELERATE_USE_FSDP']}"
        shown = f"fsdp=True ({variable}: accelerate launch sets it for `--use_fsdp` or `distributed_type: FSDP`)"
    if torch.device(config.device).type == "cpu":
        yield (
            f"{shown} on a CPU: accelerate silently drops FSDP there, so each process would hold the whole model. "
            "For DDP remove it and start with torchrun; to split the model over CPU processes take "
            "recipes/accelerate_configs/cpu_2proc_zero3.yaml."
        )
        return
    if _setting(config, "fsdp_version", "VERSION", "1") != "2":
        yield (
            f"{shown} with version 1: only FSDP2 is supported. Set fsdp_version: 2 for accelerate, "
            f"as in {FSDP2_CONFIG} (version: 2 in the recipe's fsdp_config)."
        )
        return
    if _setting(config, "state_dict_type", "STATE_DICT_TYPE", "SHARDED_STATE_DICT") != "FULL_STATE_DICT":
        yield (
            f"{shown} with state_dict_type SHARDED_STATE_DICT: checkpoints would hold no model that can be loaded, "
            f"merged or served. Set fsdp_state_dict_type: FULL_STATE_DICT, as in {FSDP2_CONFIG}."
        )
    if _setting(config, "activation_checkpointing", "ACTIVATION_CHECKPOINTING", "false").lower() in _TRUE:
        yield (
            f"{shown} with activation_checkpointing: it renames the model's layers. Remove it from the configuration "
            "of accelerate, and set gradient_checkpointing: true in the recipe."
        )
    if _setting(config, "cpu_ram_efficient_loading", "CPU_RAM_EFFICIENT_LOADING", "false").lower() in _TRUE:
        yield (
            f"{shown} with cpu_ram_efficient_loading is not covered yet. Set fsdp_cpu_ram_efficient_loading: false, "
            f"as in {FSDP2_CONFIG}, or {_ZERO3}."
        )
    for what, is_set, fix in _not_covered(config):
        if is_set:
            yield f"{what} with FSDP2 is not covered yet. {fix}, or {_ZERO3}."


def _setting(config: MultiTurnConfig, name: str, variable: str, default: str) -> str:
    """A setting of FSDP: of the recipe, or else of the launcher, as text."""
    plugin_args: Any = getattr(config, "fsdp_plugin_args", None) or {}
    return str(plugin_args.get(name, os.environ.get(f"FSDP_{variable}", default)))


def _not_covered(config: MultiTurnConfig) -> Iterator[tuple[str, bool, str]]:
    """What is not covered, whether it is set, and what to set instead."""
    checkpointing: Any = config.gradient_checkpointing_kwargs or {}
    yield (
        "gradient_checkpointing_kwargs={'use_reentrant': True}",
        bool(config.gradient_checkpointing and checkpointing.get("use_reentrant")),
        "Set use_reentrant: false",
    )
    yield (
        f"steps_per_generation={config.steps_per_generation}, no multiple of "
        f"gradient_accumulation_steps={config.gradient_accumulation_steps},",
        bool(config.steps_per_generation % config.gradient_accumulation_steps),
        "Set steps_per_generation to a multiple of it",
    )
    yield "fp16=True", bool(config.fp16), "Set bf16: true"
    yield "torch_compile=True", bool(config.torch_compile), "Remove torch_compile"
    yield "use_liger_kernel=True", bool(config.use_liger_kernel), "Remove use_liger_kernel"
    yield "load_best_model_at_end=True", bool(config.load_best_model_at_end), "Remove load_best_model_at_end"


def keep_log_probs_exact(accelerator: Accelerator) -> None:
    """Have FSDP2 compute in 16 bits and hand over what the model returns as it is, with gradients summed in float32.

    accelerate would round everything that the model returns to 16 bits, log-probabilities and values among it.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy = None if plugin is None else plugin.mixed_precision_policy
    if isinstance(policy, MixedPrecisionPolicy):
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=policy.param_dtype, reduce_dtype=torch.float32, output_dtype=None
        )


def check_not_quantised(model: nn.Module) -> None:
    """Refuse quantised weights, which FSDP2 would not split.

    Raises:
        ValueError: says what to set instead.
    """
    if any(is_quantised(parameter) for parameter in model.parameters()):
        raise ValueError(
            "load_in_4bit or load_in_8bit with FSDP2 is not covered yet. Use recipes/accelerate_configs/ddp.yaml: "
            "there such a model nearly always fits. Or load the model in 16 bits (dtype: bfloat16)."
        )


@contextlib.contextmanager
def sampling_alone(model: nn.Module) -> Iterator[None]:
    """Inside it no forward pass of a model under DeepSpeed ZeRO-3 waits for the other ranks.

    DeepSpeed notes in which order modules are used, and compares it among ranks at the start of a forward pass. TRL
    removes its other hooks while rows are sampled, but not this one. Ranks that sample different numbers of tokens, or
    one that samples none, would wait for each other in it.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    offload = getattr(optimizer, "parameter_offload", optimizer)
    handle = getattr(offload, "fwd_pre_hook", None)
    if handle is None:  # another engine, or none
        yield
        return
    hooks = offload.module._forward_pre_hooks
    hook = hooks.pop(handle.id)
    try:
        yield
    finally:
        hooks[handle.id] = hook
        hooks.move_to_end(handle.id, last=False)

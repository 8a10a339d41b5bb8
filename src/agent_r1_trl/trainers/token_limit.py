"""`max_tokens_per_micro_batch: auto`: as many tokens as fit on the GPU, by the formulas of `agent-r1-trl memory`.

On a CPU and in layouts with padding there is no limit, nor where the memory cannot be estimated. The user is told why.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import DistributedType, gather_object
from torch.distributed.fsdp import CPUOffloadPolicy

from agent_r1_trl.critic.attach import base_causal_lm
from agent_r1_trl.generation.weights import is_4bit
from agent_r1_trl.trainers.config_checks import layout_problem
from agent_r1_trl.trainers.memory import (
    GIB,
    LEAST_TOKENS,
    MOST_TOKENS,
    MemorySetup,
    TokenLimit,
    estimate_memory,
    find_token_limit,
    is_checkpointing_needless,
    shape_of,
)
from agent_r1_trl.trainers.policy_loss import is_own_loss
from agent_r1_trl.update import layout as layouts

if TYPE_CHECKING:
    from accelerate import Accelerator

    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

logger = logging.getLogger(__name__)

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names for the number of experts in transformers' configurations."""


CHECKPOINTING_HINT = (
    "gradient_checkpointing is on, and by formula the update fits on the GPU without it. Without it, forward passes "
    "are not computed twice: set gradient_checkpointing: false."
)


class GpuMemory(NamedTuple):
    """Bytes of a GPU."""

    total: int
    occupied: int
    """By tensors and contexts of this process and of others."""


def read_gpu_memory(device: torch.device) -> GpuMemory:
    """Read the memory of a GPU; what PyTorch keeps for new tensors is not occupied."""
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return GpuMemory(total=total, occupied=total - free - cached)


def choose_token_limit(trainer: MultiTurnTrainer) -> None:
    """Set the limit of the trainer's layout where it is left to us, once all models are loaded; and say so.

    All ranks must call it: the smallest limit of all ranks holds for each, and none where a rank has none.
    """
    args, layout = trainer.args, trainer.layout
    if not layouts.is_on_cuda(args) or layout.notes:  # the second is so in a further call of `train`
        return
    if args.update_layout == layouts.AUTO:
        _note(trainer, f"update_layout: auto takes {layout.name!r}, the fastest that settings and model allow.")
    setup, other_bytes, problem = None, 0.0, ""
    try:
        setup, other_bytes = _read_setup(trainer)
    except Exception as error:  # another optimizer than Adam, a model without attention: never a reason to end a run
        problem = f"the memory is not estimated: {error}"
    if args.max_tokens_per_micro_batch == layouts.AUTO:
        problem = _find_obstacle(trainer) or problem
        limit = None if setup is None or problem else find_token_limit(setup, other_bytes)
        _use(trainer, limit, problem)
    if setup is not None:
        setup = replace(setup, max_tokens_per_micro_batch=layout.max_tokens)
        if is_checkpointing_needless(setup, other_bytes):
            _note(trainer, CHECKPOINTING_HINT)


def _note(trainer: MultiTurnTrainer, text: str) -> None:
    trainer.layout.notes.append(text)
    if trainer.accelerator.is_main_process:
        logger.info("%s", text)


def _find_obstacle(trainer: MultiTurnTrainer) -> str:
    """Why this run has no limit, whatever its memory; "" if there is no reason."""
    layout = trainer.layout
    if not layout.is_packed:
        return f"update_layout={layout.name!r} keeps micro-batches of per_device_train_batch_size rows."
    if is_own_loss(trainer._compute_loss):
        return "the trainer has a _compute_loss of its own, which may expect micro-batches of equal size."
    return layout_problem(trainer.args, layout.name, LEAST_TOKENS)


def _use(trainer: MultiTurnTrainer, limit: TokenLimit | None, problem: str) -> None:
    """Give the layout the limit on which all ranks agree."""
    everywhere = gather_object([limit])
    if None in everywhere:
        problem = problem or "another rank has none."
        _note(trainer, f"max_tokens_per_micro_batch: auto takes none, since {problem}")
        return
    tokens, peak, fits = min(everywhere)
    trainer.layout.max_tokens = tokens
    needed = f"by formula the update then needs {peak / GIB:.1f} GiB of the GPU"
    if not fits:
        logger.warning(
            "max_tokens_per_micro_batch: auto takes %s, the least, and %s, which is too much. agent-r1-trl memory "
            "lists what needs it and what would lower it.",
            f"{tokens:,}",
            needed,
        )
        return
    cause = "the most that it takes" if tokens == MOST_TOKENS else "the most that fits"
    _note(trainer, f"max_tokens_per_micro_batch: auto takes {tokens:,}, {cause}: {needed}.")


def _read_setup(trainer: MultiTurnTrainer) -> tuple[MemorySetup, float]:
    """What the estimate depends on, and the bytes that are occupied on the GPU without a line in it.

    Raises:
        ValueError: the run cannot be estimated; says why.
        AttributeError: the model's configuration lacks a size.
    """
    args, accelerator = trainer.args, trainer.accelerator
    model = accelerator.unwrap_model(trainer.model)
    base = base_causal_lm(model)
    text_config = base.config.get_text_config()
    if any((getattr(text_config, name, None) or 0) > 1 for name in _EXPERTS):
        raise ValueError("the formulas do not cover mixtures of experts. Set max_tokens_per_micro_batch to a number.")
    shape = shape_of(model)
    memory = read_gpu_memory(args.device)
    dtype = str(base.get_input_embeddings().weight.dtype).removeprefix("torch.")
    is_quantised = any(map(is_4bit, base.parameters()))
    setup = MemorySetup(
        shape=shape,
        dtype=dtype,
        mixed_precision=accelerator.mixed_precision in ("bf16", "fp16"),
        load_in_4bit=is_quantised,
        load_in_8bit=not is_quantised and getattr(base, "is_loaded_in_8bit", False),
        optim=str(getattr(args.optim, "value", args.optim)),
        num_processes=accelerator.num_processes,
        per_device_train_batch_size=args.per_device_train_batch_size,
        max_completion_length=args.max_completion_length or shape.max_positions or MOST_TOKENS,
        update_layout=trainer.layout.name,
        gradient_checkpointing=args.gradient_checkpointing,
        beta=0.0 if trainer.ref_model is None else args.beta,
        critic=getattr(trainer, "critic_kind", None),
        use_vllm=args.use_vllm,
        vllm_mode=args.vllm_mode,
        vllm_gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        vllm_enable_sleep_mode=args.vllm_enable_sleep_mode,
        gpu_memory_gb=memory.total / GIB,
        **_read_sharding(accelerator),
    )
    known = sum(line.bytes for line in estimate_memory(setup) if line.is_loaded)
    return setup, max(0.0, memory.occupied - known)


def _read_sharding(accelerator: Accelerator) -> dict[str, Any]:
    """What DeepSpeed or FSDP2 split and offload."""
    if accelerator.distributed_type == DistributedType.FSDP:
        offloads = isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
        return {"is_fsdp": True, "offload_optimizer": offloads, "offload_parameters": offloads}
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return {}
    plugin = accelerator.state.deepspeed_plugin
    optimizer, parameters = plugin.offload_optimizer_device, plugin.offload_param_device
    return {
        "zero_stage": plugin.zero_stage,
        "offload_optimizer": optimizer not in (None, "none"),
        "offload_parameters": parameters not in (None, "none"),
    }

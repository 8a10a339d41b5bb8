"""Changes that make a run smaller, each tried alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from agent_r1_trl.memory.estimate import estimate_memory
from agent_r1_trl.memory.setup import MemorySetup
from agent_r1_trl.memory.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A change of the recipe or of the launch."""

    change: str
    peak: float
    """Maximum number of bytes on one GPU after the change."""


def find_savings(shape: ModelShape, setup: MemorySetup) -> list[Saving]:
    """Find the changes that lower the peak, the largest saving first.

    LoRA is not among them, because it changes the model: estimate it with --use_peft.
    """
    now = estimate_memory(shape, setup).peak
    found = []
    for change, values in _changes(shape, setup).items():
        peak = estimate_memory(shape, replace(setup, **values)).peak
        if peak < now:
            found.append(Saving(change=change, peak=peak))
    return sorted(found, key=lambda saving: saving.peak)


def _changes(shape: ModelShape, setup: MemorySetup) -> dict[str, dict[str, Any]]:
    changes: dict[str, dict[str, Any]] = {
        "per_device_train_batch_size: 1, with more gradient_accumulation_steps": {"micro_batch": 1},
        "gradient_checkpointing: true": {"gradient_checkpointing": True},
        "optim: adamw_bnb_8bit": {"optimizer_bytes": 2},
        "attn_implementation: flash_attention_2": {"saves_attention_mask": False},
        "a vLLM server on other GPUs": {"generator": "server"},
        "vllm_enable_sleep_mode: true": {"vllm_sleeps": True},
    }
    if setup.max_tokens_per_micro_batch is None or setup.max_tokens_per_micro_batch > setup.longest_row:
        layout = "" if setup.is_packed else "update_layout: shared, "
        limit = setup.longest_row + setup.critic_prefix
        changes[f"{layout}max_tokens_per_micro_batch: {limit}"] = {
            "is_packed": True,
            "max_tokens_per_micro_batch": limit,
        }
    if setup.num_processes > 1:
        changes |= {f"zero{stage}.yaml": {"zero_stage": stage} for stage in (1, 2, 3) if stage > setup.zero_stage}
    if shape.num_adapter_parameters and not setup.quantization:
        changes["load_in_4bit: true"] = {"quantization": "4bit"}
        changes["dtype: bfloat16 (of the frozen base)"] = {"dtype": "bfloat16"}
    if setup.critic in ("model", "adapter"):
        changes["critic: head"] = {"critic": "head"}
    return changes

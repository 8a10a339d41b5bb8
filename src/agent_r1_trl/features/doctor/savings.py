"""Changes of a recipe that lower the memory it needs at its peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agent_r1_trl.trainers.memory import MemorySetup, estimate_memory, find_peak


def find_savings(setup: MemorySetup) -> dict[str, float]:
    """The changes that lower the peak, each tried alone, with the peak after it; the largest saving first.

    LoRA is not among them, because it changes the model: estimate it with --use_peft.
    """
    layout = {} if setup.is_packed else {"update_layout": "packed"}
    changes: list[dict[str, Any]] = [
        {"per_device_train_batch_size": 1},
        {"gradient_checkpointing": True},
        {"optim": "adamw_bnb_8bit"},
        {"attn_implementation": "flash_attention_2"},
        {"use_vllm": True, "vllm_mode": "server"},
        {"vllm_enable_sleep_mode": True},
        {**layout, "max_tokens_per_micro_batch": setup.row_tokens},
    ]
    if setup.num_processes > 1 and not setup.is_fsdp:
        changes += [{"zero_stage": stage} for stage in (1, 2, 3) if stage > setup.zero_stage]
    if setup.shape.num_adapter_parameters and not setup.weight_bits:
        changes += [{"dtype": "bfloat16"}] if setup.is_fsdp else [{"load_in_4bit": True}, {"dtype": "bfloat16"}]
    if setup.critic is not None:
        changes.append({"critic": "head"})

    peaks = {_in_recipe(change): find_peak(estimate_memory(replace(setup, **change))) for change in changes}
    now = find_peak(estimate_memory(setup))
    return {text: peak for text, peak in sorted(peaks.items(), key=lambda item: item[1]) if peak < now}


def _in_recipe(change: dict[str, Any]) -> str:
    """A change as a recipe says it: the stage of ZeRO is that of the launcher's file."""
    settings = []
    for name, value in change.items():
        if name == "zero_stage":
            settings.append(f"accelerate_config: zero{value}")
        else:
            settings.append(f"{name}: {value}")
    return ", ".join(settings)

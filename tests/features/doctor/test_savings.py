"""What would lower the memory of a run, beside its estimate."""

from __future__ import annotations

from agent_r1_trl.features.doctor.savings import find_savings
from agent_r1_trl.trainers.memory import MemorySetup, estimate_memory, find_peak
from tests.trainers.test_memory import BILLION, FSDP2, LORA_BILLION


def test_savings_are_real_and_sorted():
    sizes = {"num_processes": 4, "gradient_checkpointing": False, "per_device_train_batch_size": 8}
    savings = find_savings(setup := MemorySetup(shape=BILLION, critic="model", **sizes))
    assert list(savings.values()) == sorted(savings.values())
    assert max(savings.values()) < find_peak(estimate_memory(setup))
    assert {"accelerate_config: zero3", "critic: head", "update_layout: packed, max_tokens_per_micro_batch: 1024"} <= {
        *savings
    }
    assert {"load_in_4bit: True", "dtype: bfloat16"} <= {*find_savings(MemorySetup(shape=LORA_BILLION))}
    with_fsdp2 = {*find_savings(MemorySetup(shape=LORA_BILLION, **FSDP2))}
    assert "dtype: bfloat16" in with_fsdp2 and not any("zero" in name or "4bit" in name for name in with_fsdp2)

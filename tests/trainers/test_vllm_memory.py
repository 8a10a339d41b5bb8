"""The estimate's line for vLLM is what the installed vLLM asks for, by its own functions.

Not covered: what the engine takes of that for weights, activations and CUDA graphs; the rest is its cache.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from agent_r1_trl.trainers.memory import GIB, MemorySetup, estimate_memory, find_peak, judge
from tests.trainers.test_memory import BILLION, LORA_BILLION

pytestmark = pytest.mark.vllm

IN_PROCESS = MemorySetup(shape=LORA_BILLION, dtype="bfloat16", mixed_precision=True, use_vllm=True)
ENGINE = "vLLM: its weights and KV cache"


def requested_by_vllm(setup, *, free):
    """Bytes that vLLM takes at its start on such a GPU; it refuses to start where fewer are free."""
    from vllm.v1.worker.utils import request_memory

    gpu = SimpleNamespace(total_memory=int(setup.gpu_memory_gb * GIB), free_memory=free, device_="cuda:0")
    return request_memory(gpu, SimpleNamespace(gpu_memory_utilization=setup.vllm_gpu_memory_utilization))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.45, 0.9])
@pytest.mark.parametrize("memory", [24.0, 79.1, 139.7])
def test_the_share_of_the_gpu_is_the_one_that_vllm_takes(share, memory):
    setup = replace(IN_PROCESS, vllm_gpu_memory_utilization=share, gpu_memory_gb=memory)
    (line,) = (line for line in estimate_memory(setup) if line.name == ENGINE)
    assert line.bytes == pytest.approx(requested_by_vllm(setup, free=int(memory * GIB)), abs=2)


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("shape", [BILLION, LORA_BILLION], ids=["whole", "adapter"])
def test_a_run_that_fits_leaves_vllm_enough_to_start_with(shape, sleeps):
    """The trained model is loaded before the engine, which counts what is free then."""
    setup = replace(IN_PROCESS, shape=shape, dtype="float32", beta=0.1, vllm_enable_sleep_mode=sleeps)
    sizes = (16.0, 24.0, 40.0, 80.0)
    fitting = [size for size in sizes if judge_peak(replace(setup, gpu_memory_gb=size)) == "fits"]
    setup = replace(setup, gpu_memory_gb=fitting[0])
    before = sum(line.bytes for line in estimate_memory(setup) if line.is_loaded and line.name != ENGINE)
    assert before > 4 * GIB
    requested_by_vllm(setup, free=int(setup.gpu_memory_gb * GIB - before))
    with pytest.raises(ValueError, match="Free memory"):
        requested_by_vllm(setup, free=int(setup.vllm_bytes) - GIB)


def judge_peak(setup):
    return judge(find_peak(estimate_memory(setup)), setup.gpu_memory_gb)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_a_token_takes_as_much_of_vllms_cache_as_of_ours(dtype, size):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    block = FullAttentionSpec(
        block_size=16, num_kv_heads=BILLION.num_kv_heads, head_size=BILLION.head_dim, dtype=getattr(torch, dtype)
    )
    setup = MemorySetup(
        shape=BILLION, dtype=dtype, generation_batch_rows=1, prompt_tokens=1, max_completion_length=255
    )
    (line,) = (line for line in estimate_memory(setup) if line.name.startswith("KV cache"))
    assert setup.compute_bytes == size
    columns = 256 + 64  # with spare ones
    assert line.bytes == columns / 16 * BILLION.num_layers * block.page_size_bytes

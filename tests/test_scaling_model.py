"""The page about scaling shows what its program computes, and the program computes what the page's formulas say."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def model():
    """The program, as a module."""
    spec = importlib.util.spec_from_file_location("scaling_model", ROOT / "benchmarks" / "scaling_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


@pytest.mark.parametrize("name", ["assumptions", "split", "growth"])
def test_the_page_has_the_tables_of_the_program(model, name):
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    table = getattr(model, f"{name}_table")()
    assert f"<!-- {name} -->\n{table}\n<!-- end -->" in page, f"run benchmarks/scaling_model.py:\n{table}"


def test_parts_of_a_step_by_hand(model):
    """Numbers for which the formulas can be done in the head."""
    hardware = model.Hardware(flops=1e6, hbm_bytes=1000, hbm_rate=100, nvlink_rate=50, nic_rate=10)
    assumed = model.Assumptions(
        update_mfu=0.5, prefill_mfu=0.5, decode_hbm_share=0.5, link_share=0.5, decode_overhead_s=1.0, tail=3.0,
        tool_s=2.0, server_memory_share=1.0, tokens_per_micro_batch=6,
    )  # fmt: skip
    policy = model.Policy(name="toy", params=100, layers=1, kv_heads=1, head_dim=5, gpus_per_server=1)
    batch = model.Batch(trajectories=16, turns=2, prompt=1, sampled=2, observed=6)
    cluster = model.Cluster(machines=2, sampling_gpus=8, hardware=hardware, assumed=assumed)
    assert (policy.weight_bytes, policy.kv_bytes, batch.length) == (200, 20, 9)
    # Two rows a server: 200 bytes of weights and 2 x 5 x 20 of cache, at 50 bytes a second; one row: 300 bytes.
    assert model.decode_step_s(policy, batch, cluster, 2) == pytest.approx(8 + 1)
    assert model.decode_step_s(policy, batch, cluster, 1) == pytest.approx(6 + 1)
    # Decoding 2 tokens, the tail of 4 more alone, 16 x 7 tokens read by 8 GPUs, two turns of tools.
    assert model.rollout_s(policy, batch, cluster) == pytest.approx(2 * 9 + 4 * 7 + 200 * 112 / 4e6 + 4)
    assert model.transfer_s(policy, cluster) == pytest.approx(8 * 200 / 5)
    # One machine trains: no traffic across machines, 7/8 of 200 bytes at 25 a second.
    assert model.gather_s(policy, cluster) == pytest.approx(7)
    # 144 tokens on 8 GPUs of 6 tokens a micro-batch: three micro-batches.
    assert model.update_s(policy, batch, cluster) == pytest.approx((10 * 100 * 144 / 4e6, 4 * 3 * 7))
    found = model.step(policy, batch, cluster)
    assert found["overlapped"] == pytest.approx(max(found["rollout"], found["update"]) + 320)
    assert found["longest"] == "transfer"


def test_rows_that_the_cache_cannot_hold_are_rolled_out_in_waves(model):
    few = model.Cluster(sampling_gpus=8)
    found = model.rollout_s(model.QWEN_32B, model.Batch(), few)
    room = model.Cluster(sampling_gpus=8, hardware=model.Hardware(hbm_bytes=800e9))
    assert found > model.rollout_s(model.QWEN_32B, model.Batch(), room)

"""Two ranks under FSDP2 sample from whole weights, each at its own pace, and read them whole."""

import pytest
import torch
from transformers import AutoConfig

from agent_r1_trl.trainers.memory import MemorySetup, estimate_memory, read_shape
from tests.distributed import sharded_sampling
from tests.distributed.critics import POLICY_FOLDER, save_policy
from tests.distributed.launch import launch
from tests.distributed.sharded_sampling import CASES, FILE, sampled

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = save_policy(tmp_path_factory.mktemp("fsdp2"))
    launch("fsdp2", sharded_sampling.__name__, folder)
    return torch.load(folder / FILE)


@pytest.mark.parametrize("case", CASES)
def test_ranks_sample_at_their_own_pace_what_one_process_samples(results, case, tmp_path):
    two, one = results[case], sampled(case, save_policy(tmp_path))
    assert len({*two["turns"]}) == 2, "both ranks need as many forward passes"
    assert sorted(two["ids"]) == sorted(one["ids"])
    for step, reference in zip(two["steps"], one["steps"], strict=True):
        assert step == pytest.approx(reference, abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_read_whole_and_stay_in_parts(results, case, tmp_path):
    two, one = results[case], sampled(case, save_policy(tmp_path))
    assert two["was_sharded"] and two["is_sharded"]
    assert not two["parts"]
    assert two["weights"].keys() == one["weights"].keys()
    for name, weight in two["weights"].items():
        torch.testing.assert_close(weight, one["weights"][name].detach(), atol=1e-5, rtol=1e-4)


def test_the_estimate_of_the_memory_is_that_of_a_real_run(results, tmp_path):
    shape = read_shape(AutoConfig.from_pretrained(save_policy(tmp_path) / POLICY_FOLDER))
    setup = MemorySetup(shape=shape, is_fsdp=True, num_processes=2)
    lines = {line.name: line.bytes for line in estimate_memory(setup)}
    found = results["full"]["bytes"]
    for name in ("weights", "policy: gradients", "policy: Adam"):
        assert found[name] == pytest.approx(lines[name], rel=0.02), "rows of a weight are not halved"
    ends = shape.vocab_size * shape.hidden_size  # more than two of the tiny layers
    gradients = ends * (4 + 4)
    weights = lines["FSDP2: weights gathered at a time"] - gradients
    assert found["gathered"] == pytest.approx(weights, rel=0.01)
    assert weights < 0.8 * shape.num_parameters * 4, "never all of it"


def test_log_probs_are_not_rounded_to_16_bits(results):
    log_probs = results["bf16"]["log_probs"]
    assert log_probs.dtype == torch.float32
    assert (log_probs != log_probs.bfloat16()).float().mean() > 0.5

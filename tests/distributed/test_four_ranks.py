"""Four ranks train as one process does when everything is uneven, and go on from a checkpoint as if nothing had been.

Covered: GRPO whose trajectories have several rows and whose groups are filtered, and PPO with a critic, both with lost
rows on one rank and with the next rollout in flight during the update. Not covered: more machines than one
(`test_two_machines.py`), which options are right for which model.
"""

import pytest
import torch

from tests.distributed import four_ranks
from tests.distributed.critics import save_policy
from tests.distributed.four_ranks import CASES, GROUP_SIZE, NUM_RANKS, NUM_STEPS, SAVED_STEP
from tests.distributed.launch import CONFIGS, launch
from tests.effort import short

pytestmark = pytest.mark.release


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The runs of this process alone."""
    return four_ranks.compute(save_policy(tmp_path_factory.mktemp("one")), is_resumed=False)


@pytest.fixture(scope="module", params=short(("ddp", *CONFIGS, "fsdp2"), "ddp", "fsdp2"))
def four(request, tmp_path_factory):
    """The name of a launch and what its four ranks found."""
    folder = save_policy(tmp_path_factory.mktemp(request.param))
    launch(request.param, four_ranks.__name__, folder, num_processes=NUM_RANKS)
    return request.param, torch.load(folder / four_ranks.FOUND_FILE)


def assert_same_steps(found, expected, tolerance, without=()):
    """What is logged after each step, but for some names."""
    assert len(found) == len(expected)
    for step, reference in zip(found, expected, strict=True):
        assert step.keys() == reference.keys()
        names = step.keys() - {*without}
        assert {"loss", "reward"} <= names
        wanted = {name: reference[name] for name in names}
        assert {name: step[name] for name in names} == pytest.approx(wanted, abs=tolerance, rel=tolerance)


def assert_same_weights(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], atol=1e-4, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("case", CASES)
def test_four_ranks_train_as_one_process_does(four, one, case):
    kind, found = four
    ranks, (alone,) = found[case]["straight"]["ranks"], one[case]["straight"]["ranks"]
    assert len(ranks) == NUM_RANKS
    expected = alone["logged"]
    assert len({step["loss"] for step in expected}) == NUM_STEPS and min(abs(s["loss"]) for s in expected) > 1e-3
    without = ["grad_norm"] if kind in CONFIGS and case == "ppo" else ()  # DeepSpeed's is of policy and critic
    for rank in ranks:
        assert_same_steps(rank["logged"], expected, 1e-4, without)
    assert_same_weights(found[case]["straight"]["weights"], one[case]["straight"]["weights"])


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_make_the_same_micro_batches_and_end_with_the_same_weights(four, case):
    ranks = four[1][case]["straight"]["ranks"]
    assert len({rank["digest"] for rank in ranks}) == 1
    assert all(rank["rows"] == ranks[0]["rows"] for rank in ranks)
    if case == "grpo":
        assert len({len(micro_batches) for micro_batches in ranks[0]["rows"]}) > 1, "rows are uneven"


@pytest.mark.parametrize("case", CASES)
def test_rows_are_lost_on_one_rank_alone_and_rollouts_overlap_on_all(four, case):
    ranks = four[1][case]["straight"]["ranks"]
    assert [rank["lost"] for rank in ranks] == [[0] * NUM_STEPS] * (NUM_RANKS - 1) + [[GROUP_SIZE] * NUM_STEPS]
    for rank in ranks:
        assert rank["under_way"] == [True] * 2 * (NUM_STEPS - 1) + [False] * 2, "two micro-batches a step"


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_has_the_steps_and_weights_of_one_that_never_stopped(four, case):
    straight, resumed = four[1][case]["straight"], four[1][case]["resumed"]
    for before, after in zip(straight["ranks"], resumed["ranks"], strict=True):
        assert len(after["lost"]) == NUM_STEPS - SAVED_STEP, "it did not begin anew"
        assert after["rows"] == before["rows"][2 * SAVED_STEP :]
        assert_same_steps(after["logged"], before["logged"], 1e-6)
    assert_same_weights(resumed["weights"], straight["weights"])

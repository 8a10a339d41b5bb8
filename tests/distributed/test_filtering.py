"""Groups that several ranks share are filtered as on one; kept rows are spread over the ranks."""

import pytest

from tests.distributed.filtering import CASES, FLAT_STEP
from tests.distributed.launch import LAUNCHES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("launches")]  # they share the launches of conftest.py


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_two_ranks_train_on_the_kept_groups_as_one_process_does(results, launch, case):
    ranks, (one,) = results(launch)["filtered"][case], results("one")["filtered"][case]
    assert len(ranks) == 2
    for step in (0, 2):
        (loss, norm), (expected_loss, expected_norm) = ranks[0]["logged"][step], one["logged"][step]
        assert loss == pytest.approx(expected_loss, abs=1e-4)
        if case == "grpo" or launch in ("ddp", "fsdp2"):  # DeepSpeed has one norm over policy and critic
            assert norm == pytest.approx(expected_norm, abs=1e-4)
        kept = [sum(rank["rows"][2 * step + index][1] for rank in ranks) for index in (0, 1)]
        assert sum(kept) == sum(count for _, count in one["rows"][2 * step : 2 * step + 2])
        assert abs(kept[0] - kept[1]) <= 2, "both micro-batches of both ranks have as many, but for one"
    assert [size for size, _ in ranks[0]["rows"]] == [size for size, _ in ranks[1]["rows"]]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("launch", ["one", *LAUNCHES])
def test_a_step_without_signal_is_skipped_on_all_ranks_whoever_makes_the_step(results, launch, case):
    for rank in results(launch)["filtered"][case]:
        assert rank["logged"][FLAT_STEP][1] is None, "what was not done has no gradient norm"
        assert rank["changed"] == [index != FLAT_STEP for index in range(3)]
        assert rank["rows"][2 * FLAT_STEP : 2 * FLAT_STEP + 2] == [(1, 0), (1, 0)]

"""Rows of one trajectory may lie on different ranks; they are trained as the trajectory was in one process."""

import pytest

from tests.distributed.launch import LAUNCHES
from tests.distributed.rows import CASES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("launches")]  # they share the launches of conftest.py


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_two_ranks_train_on_rows_as_one_process_does_on_whole_trajectories(results, launch, case):
    ranks, (one,) = results(launch)["rows"][case], results("one")["whole"][case]
    assert len(ranks) == 2 and max(rank["most"] for rank in ranks) > 1 == one["most"]
    for (loss, norm), (expected_loss, expected_norm) in zip(ranks[0]["logged"], one["logged"], strict=True):
        assert loss == pytest.approx(expected_loss, abs=1e-4)
        if case != "ppo" or launch == "ddp":  # DeepSpeed has one norm over policy and critic
            assert norm == pytest.approx(expected_norm, abs=1e-4)
    assert ranks[0]["sizes"] == ranks[1]["sizes"], "every rank makes the same forward passes"

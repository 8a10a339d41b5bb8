"""Groups that several ranks share are replaced as on one, in the same rounds and with the same prompts."""

from collections import Counter

import pytest
import torch

from tests.distributed.launch import LAUNCHES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("launches")]  # they share the launches of conftest.py


@pytest.mark.parametrize("launch", LAUNCHES)
def test_two_ranks_make_the_batch_of_one(results, launch):
    """In some batch one of them has more to replace than the other."""
    ranks, (expected,) = results(launch)["resampled"], results("one")["resampled"]
    nums = [Counter(step for step, *_ in rank["replaced"]) for rank in ranks]
    assert nums[0] != nums[1]
    assert sorted(ranks[0]["trained"] + ranks[1]["trained"], key=lambda item: item[0]) == expected["trained"]
    assert sorted(ranks[0]["replaced"] + ranks[1]["replaced"]) == sorted(expected["replaced"])
    advantages = torch.cat([rank["advantages"] for rank in ranks], dim=1)
    torch.testing.assert_close(advantages, expected["advantages"])
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(expected["metrics"])
        assert rank["shares"] == expected["shares"]
        assert rank["losses"] == pytest.approx(expected["losses"], abs=1e-4)
    assert ranks[0]["extra"] == expected["extra"]

"""All ranks skip a step that is not finite on one of them, whoever makes the step, and end the run together."""

import pytest

from tests.distributed.launch import LAUNCHES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("launches")]  # they share the launches of conftest.py


@pytest.mark.parametrize("launch", ["one", *LAUNCHES])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(results, launch):
    ranks = results(launch)["nonfinite"]
    assert len(ranks) == (1 if launch == "one" else 2)
    for rank in ranks:
        assert rank["changed"] == [True, False, True, False, False, False]
        assert rank["finite"]
        assert rank["error"] == ranks[0]["error"]
        assert rank["error"].startswith("NonFiniteError: 3 optimizer steps in a row had numbers that are not finite")
    assert "First: the advantages of example 'q" in ranks[0]["warnings"][0], "process 0 names another rank's row"
    assert all(not rank["warnings"] for rank in ranks[1:])

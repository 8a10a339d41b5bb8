"""All ranks go back to the same checkpoint in the same step, although only one of them saw the collapse."""

import pytest

from tests.distributed.launch import LAUNCHES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("launches")]  # they share the launches of conftest.py


@pytest.mark.parametrize("launch", ["one", *LAUNCHES])
def test_all_ranks_go_back_together_and_go_on_with_the_weights_of_the_checkpoint(results, launch):
    ranks, (one,) = results(launch)["gone_back"], results("one")["gone_back"]
    for rank in ranks:
        assert [step for step, _ in rank["seen"]] == [0, 1, 2, 3, 2, 3, 4]
        assert rank["seen"][2] == rank["seen"][4] != rank["seen"][1], "the weights of the checkpoint"
        assert rank["events"] == [(4, "clip", "collapsed"), (4, "rollback", "collapsed")]
        assert rank["beta"] == 0.0, "what was done before the rollback holds after it"
        assert rank["seed"] == one["seed"] != 7, "other draws than those of the run"
        assert (rank["ended"] is None) == (launch in ("one", "ddp"))
        assert launch in ("one", "ddp") or "resume_from_checkpoint: true" in rank["ended"]
        assert rank["losses"] == pytest.approx(one["losses"], abs=1e-4)

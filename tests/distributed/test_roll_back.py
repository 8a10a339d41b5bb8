"""Two ranks go back to the same checkpoint in the same step, although only one of them saw the collapse."""

import json

import pytest

from tests.distributed import roll_back
from tests.distributed.launch import launch


@pytest.mark.slow
def test_both_ranks_go_back_together(tmp_path):
    launch("ddp", roll_back.__name__, tmp_path)
    first, second = json.loads((tmp_path / roll_back.RESULTS_FILE).read_text(encoding="utf-8"))
    assert first == second
    assert [step for step, _ in first["seen"]] == [0, 1, 2, 2, 3]
    assert first["seen"][2] == first["seen"][3], "the weights of the checkpoint"
    assert first["events"] == [[3, "learning_rate", "collapsed"], [3, "roll_back", "collapsed"]]
    assert first["seed"] != 7, "that of the run"

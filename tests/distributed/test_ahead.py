"""With rollouts ahead on two ranks, no rank's weights are taken away while the other one samples with them."""

import json

import pytest

from tests.distributed import ahead, named_weights
from tests.distributed.launch import launch
from tests.effort import nightly

pytestmark = pytest.mark.release


def test_an_adapter_is_unloaded_only_when_every_rank_has_sampled_its_last_turn(tmp_path):
    launch("ddp", ahead.__name__, tmp_path, timeout_s=180)
    ranks = [json.loads((tmp_path / f"rank_{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]
    for rank in ranks:
        assert rank["ends"] == [["max_completion_length"] * 2] * ahead.NUM_STEPS  # and no "generation_error"
        assert [entry["sampling/staleness_max"] for entry in rank["steps"]] == [0, 1, 1]

    events = ranks[0]["events"]
    names = [name for what, name in events if what == "loaded"]
    assert len(names) == len(set(names)) >= ahead.NUM_STEPS
    pending = dict.fromkeys(names, 0)
    is_loaded = dict.fromkeys(names, False)
    for what, name in events:
        assert what != "refused", (name, events)
        if what in ("loaded", "unloaded"):
            is_loaded[name] = what == "loaded"
            assert pending[name] == 0, (what, name, events)
        elif what == "asked":
            assert is_loaded[name], (name, events)
            pending[name] += 1
        else:
            pending[name] -= 1


@pytest.mark.parametrize("kind", ["zero3", *nightly("ddp", "zero2", "fsdp2")])
def test_every_turn_of_every_rank_comes_from_the_weights_that_it_names(tmp_path, kind):
    launch(kind, named_weights.__name__, tmp_path)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank_{rank}.json").read_text(encoding="utf-8"))
        assert found["num_batches"] == named_weights.NUM_STEPS and max(found["ages"]) in (1, 2)
        assert max(found["gaps"]) < 1e-5 and max(found["others"]) > 1e-3

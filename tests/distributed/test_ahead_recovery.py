"""Two ranks with rollouts in flight go back to a checkpoint, and wait for a tool, as one process does."""

import json

import pytest

from tests.distributed import ahead_recovery
from tests.distributed.launch import launch

pytestmark = pytest.mark.release


def test_two_ranks_throw_away_together_what_ran_ahead(tmp_path):
    launch("ddp", ahead_recovery.__name__, tmp_path, timeout_s=300)
    ranks = [json.loads((tmp_path / f"rank_{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]
    seeds = {"before": set(), "after": set()}
    for rank in ranks:
        gone_back = rank["rollback"]
        before, after = gone_back["stamps"]
        assert len(before) == ahead_recovery.NUM_BEFORE and len(after) == 5
        assert any(min(versions) < step for step, versions in enumerate(before)), "rollouts ran ahead"
        assert after[0] == [2], "the weights of the checkpoint alone"
        assert all(min(versions) >= 2 and max(versions) <= step for step, versions in enumerate(after, start=2))
        assert gone_back["gap"] < 1e-5 and len(gone_back["events"]) == 1 and "checkpoint-2," in gone_back["events"][0]
        seeds["before"].update(gone_back["seeds"][0]), seeds["after"].update(gone_back["seeds"][1])

        outage = rank["outage"]
        assert outage["begun"] == [0, 1, 2, 3, 1, 2, 3, 4], "what ran ahead begins again, in its order"
        assert outage["is_equal"] and outage["recorded"] == 0, "the outage leaves no trace"
        assert outage["replayed"] == [0, 1, 0, 0, 0]
    assert not seeds["before"] & seeds["after"], "other draws"
    assert len(seeds["after"]) == 2 * 5 * 4, "and other ones on each rank"
    assert ranks[0]["outage"]["num_failed"] == 0 < ranks[1]["outage"]["num_failed"]

"""Ranks whose trajectories differ in length neither wait for each other for ever nor mix up whose tokens are whose."""

import json

import pytest

from tests.distributed import echo_worker
from tests.distributed.critics import save_policy
from tests.distributed.echo_worker import NUM_CALLS, NUM_ROLLOUTS, NUM_ROWS
from tests.distributed.launch import launch
from tests.effort import short

pytestmark = pytest.mark.release


@pytest.mark.parametrize("kind", short(NUM_ROLLOUTS, "ddp"))
def test_every_trajectory_keeps_its_own_tokens_while_ranks_take_no_turns_and_six(tmp_path, kind):
    folder = save_policy(tmp_path)
    launch(kind, echo_worker.__name__, folder)
    words = []
    for rank, num_calls in enumerate(NUM_CALLS):
        entries = json.loads((folder / f"echo_{rank}.json").read_text(encoding="utf-8"))
        assert len(entries) == NUM_ROLLOUTS[kind] * NUM_ROWS
        for entry in entries:
            assert entry["stop"] == "done", entry
            assert len(entry["heard"]) == num_calls, entry
            assert entry["said"][:-1] == entry["heard"], entry  # the last text is the answer
            assert entry["answers"] == [f"{text} {entry['word']}" for text in entry["heard"]], entry
            assert entry["words"] == [entry["word"]] * num_calls, entry
        words += [entry["word"] for entry in entries]
    assert len(set(words)) == len(words)

"""What is free goes back to the system."""

import gc

import psutil

from agent_r1_trl.trainers import rollouts
from agent_r1_trl.trainers.rollouts import release_free_memory
from tests.trainers.helpers import make_trainer


def resident_mb():
    return psutil.Process().memory_info().rss / 2**20


def test_holes_between_live_blocks_are_given_back():
    blocks = [bytes([1]) * 100_000 for _ in range(3_000)]  # 300 MB, each too small for a mapping of its own
    live = blocks[::100]
    del blocks
    gc.collect()
    before = resident_mb()
    release_free_memory()
    assert len(live) == 30 and before - resident_mb() > 200


def test_every_rollout_on_a_cpu_gives_back(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(rollouts, "release_free_memory", lambda: calls.append(None))
    make_trainer(tmp_path, max_steps=4, num_iterations=2).train()
    assert len(calls) == 2

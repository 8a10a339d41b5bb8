"""SIGKILL at random moments: the run ends with the weights of one that was never killed, and repeats almost nothing.

JOURNAL_KILLS=30 pytest tests/features/journal/test_journal_kills.py -m "slow or release or matrix"  # `make kills`
"""

import collections
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import free_port
from tests.effort import for_release, nightly
from tests.features.journal import journal_run
from tests.features.journal.journal_run import SAMPLED_FILE, WEIGHTS_FILE

ROOT = Path(__file__).resolve().parents[3]
NUM_KILLS = int(os.environ.get("JOURNAL_KILLS", "4"))
SEED = int(os.environ.get("JOURNAL_SEED", "0"))
TIMEOUT_S = 240 if NUM_KILLS < 10 else 1200


@pytest.fixture
def start(monkeypatch):
    """`start(world, *arguments)` starts a run in processes of its own, forked from one that has all imports."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TESTS_WITHOUT_VLLM", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([journal_run.__name__])
    started = []

    def start(world, *arguments, **options):
        port = free_port() if world > 1 else 0
        run = [
            context.Process(
                target=journal_run.run, args=arguments, kwargs={"rank": rank, "world": world, "port": port, **options}
            )
            for rank in range(world)
        ]
        for process in run:
            process.start()
        started.extend(run)
        return run

    yield start
    for process in started:
        process.kill()
        process.join()


def finish(run):
    for process in run:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0


def notes(folder, world):
    """(process, what, seed) of each request for a turn, in order, of all ranks."""
    lines = []
    for rank in range(world):
        path = folder / SAMPLED_FILE.format(rank=rank)
        lines += path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [tuple(json.loads(line)) for line in lines]


def kill_at_random_moments(start, folder, world, algorithm, num_steps, rng):
    """Start, kill and start again; returns the numbers of kills that met a run in flight."""
    num_kills = 0
    while num_kills < NUM_KILLS:
        begun, run = len(notes(folder, world)), start(world, folder, algorithm, num_steps)
        while len(notes(folder, world)) == begun and all(process.is_alive() for process in run):
            time.sleep(0.01)  # it imports, builds and loads; a kill there costs nothing
        time.sleep(journal_run.sleep_before_kill(rng, 1.0))
        is_over = all(process.exitcode == 0 for process in run)
        for process in run:
            process.kill()
            process.join()
        if is_over:
            break
        assert any(process.exitcode == -signal.SIGKILL for process in run), [process.exitcode for process in run]
        num_kills += 1
    return num_kills


CASES = [
    pytest.param("grpo", 1, marks=pytest.mark.slow),
    *for_release(("rows", 1)),
    *nightly(("ahead", 1), ("ppo", 1), ("grpo", 2), ("ppo", 2), ("resampled", 1), ("resampled", 2), ("ahead", 2)),
]


@pytest.mark.parametrize(("algorithm", "world"), CASES)
def test_a_run_that_is_killed_again_and_again_ends_like_one_that_never_was(tmp_path, start, algorithm, world):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    num_steps = 6 + NUM_KILLS
    finish(start(world, whole, algorithm, num_steps))
    num_kills = kill_at_random_moments(start, killed, world, algorithm, num_steps, random.Random(SEED))
    finish(start(world, killed, algorithm, num_steps))
    assert num_kills > NUM_KILLS // 2, "the run was over too soon to be killed"

    expected, actual = torch.load(whole / WEIGHTS_FILE), torch.load(killed / WEIGHTS_FILE)
    assert expected.keys() == actual.keys()
    assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []

    once, again = notes(whole, world), notes(killed, world)
    assert {seed for _, _, seed in again} == {seed for _, _, seed in once}, "the same turns were sampled"
    sampled = collections.Counter(seed for _, what, seed in again if what == "sampled")
    # A turn that was sampled but for the last moment: between the generator's answer and the journal's record.
    twice = sum(count - 1 for count in sampled.values())
    print(f"{num_kills} kills, {len(sampled)} turns, {twice} of them sampled again")
    if algorithm != "ahead":  # turns of weights that came behind the checkpoint are sampled anew
        assert twice <= num_kills

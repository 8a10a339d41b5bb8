"""On two ranks, however the policy is sharded, every rank's sampler has the trainer's weights after every sync."""

import json
import math

import pytest

from tests.distributed import vllm_ranks
from tests.distributed.launch import launch
from tests.distributed.vllm_ranks import CELLS, CELLS_FILE, NUM_STEPS, POLICY_FOLDER, save_policy
from tests.effort import short

pytestmark = [pytest.mark.vllm, pytest.mark.release, pytest.mark.xdist_group("policy_server")]

ALWAYS = {"ddp": "grpo-lora-in_process", "zero2": "grpo-full-server", "zero3": "grpo-full-in_process"}
"""One cell per launch."""


@pytest.fixture
def server(policy_server):
    """Has other weights than the trainers start from."""
    return policy_server


def run(kind, cells, folder, url=None):
    """Per cell, the results of both ranks."""
    save_policy(folder / POLICY_FOLDER, seed=0)
    (folder / CELLS_FILE).write_text(json.dumps({"cells": cells, "url": url}), encoding="utf-8")
    launch(kind, vllm_ranks.__name__, folder, timeout_s=240 + 60 * len(cells), needs_vllm=True)
    ranks = [json.loads((folder / f"rank_{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]
    return {cell: [rank[cell] for rank in ranks] for cell in cells}


def check(ranks):
    """Two steps on both ranks, each after a sync that brought the trainer's weights."""
    for rank in ranks:
        assert len(rank["steps"]) == NUM_STEPS
        for entry in rank["steps"]:
            assert math.isfinite(entry["loss"])
            assert entry["grad_norm"] > 1e-3, "nothing was learned, so nothing had to be synced"
            assert entry["sampling/sync_logprob_gap"] < 1e-4
            assert entry["sampling/sampling_logp_difference/max"] < 1e-4
            for part in ("min", "mean", "max"):
                assert entry[f"sampling/importance_sampling_ratio/{part}"] == pytest.approx(1.0, abs=1e-3)
    losses = [[entry["loss"] for entry in rank["steps"]] for rank in ranks]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6), "what is logged is of all ranks"


@pytest.mark.parametrize("kind", short(ALWAYS, "zero2"))
def test_both_ranks_sample_from_the_trainers_weights(tmp_path, request, kind):
    cell = ALWAYS[kind]
    url = request.getfixturevalue("server") if cell.endswith("server") else None
    check(run(kind, [cell], tmp_path, url)[cell])


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ALWAYS)
def test_so_do_they_with_every_algorithm_policy_and_sampler(tmp_path, server, kind):
    results = run(kind, [cell for cell in CELLS if cell != ALWAYS[kind]], tmp_path, server)
    for cell, ranks in results.items():
        print(f"{kind} {cell}: {max(rank['seconds'] for rank in ranks):.0f} s")
        check(ranks)

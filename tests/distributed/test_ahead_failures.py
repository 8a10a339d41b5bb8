"""Two ranks with rollouts in flight: one loses its event loop, or is told to end; nothing is lost or doubled."""

import json
import multiprocessing
import time

import pytest

from tests.distributed import ahead_failures
from tests.distributed.launch import ROOT, free_port

TIMEOUT_S = 120

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`run(what)`: exit codes, logs, and the batches of each rank, step by step; both processes have ended."""
    folder = tmp_path_factory.mktemp("ahead")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([ahead_failures.__name__, "tests.trainers.helpers"])
    started = []

    def ended(what):
        port = free_port()
        ranks = [context.Process(target=ahead_failures.run_rank, args=(folder, rank, port, what)) for rank in range(2)]
        started.extend(ranks)
        for process in ranks:
            process.start()
        deadline = time.monotonic() + TIMEOUT_S
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        logs = [(folder / f"{what}-{rank}.txt").read_text(encoding="utf-8") for rank in range(2)]
        assert not any(process.is_alive() for process in ranks), logs
        assert list(folder.glob("open-*")) == [], "every environment is closed"
        batches = [json.loads((folder / f"{what}_{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
        return [process.exitcode for process in ranks], logs, batches

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TESTS_WITHOUT_VLLM", "1")
        yield ended
    for process in started:
        process.kill()


@pytest.fixture(scope="module")
def expected(run):
    """The batches of the synchronous run."""
    codes, logs, batches = run("synchronous")
    assert codes == [0, 0], logs
    assert [[*of_rank] for of_rank in batches] == [["1", "2", "3", "4"]] * 2
    return batches


def test_a_rank_that_loses_its_event_loop_samples_its_part_again_while_the_other_one_waits(run, expected):
    codes, logs, batches = run("held")
    assert codes == [0, 0], logs
    assert "The event loop is given up" in logs[1] and "The event loop is given up" not in logs[0]
    assert batches == expected


def test_a_signal_in_mid_flight_saves_ends_both_and_the_resumed_run_is_the_synchronous_one(run, expected):
    codes, logs, batches = run("signal")
    assert codes == [143, 143], logs
    assert batches == [{"1": of_rank["1"]} for of_rank in expected]
    codes, logs, batches = run("resume")
    assert codes == [0, 0], logs
    assert batches == [{step: of_rank[step] for step in "234"} for of_rank in expected]

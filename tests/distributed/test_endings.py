"""However one rank ends, the others end as well: soon, for a reason that they name, with everything closed."""

import multiprocessing
import os
import signal
import time

import psutil
import pytest

from tests.distributed import endings
from tests.distributed.launch import ROOT, free_port

TIMEOUT_S = 90


@pytest.fixture
def processes(monkeypatch):
    """`start(function, *arguments)` in a process forked from a server that has imported everything."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TESTS_WITHOUT_VLLM", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([endings.__name__, "tests.trainers.helpers"])
    started = []

    def start(function, *arguments):
        started.append(context.Process(target=function, args=arguments))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.fixture
def end(processes, tmp_path):
    """`end(ending)`: exit codes and messages of two ranks, and the seconds until the second one had ended, too.

    As a launcher does, it ends the others with SIGTERM once a rank was killed.
    """

    def run(ending):
        port = free_port()
        ranks = [processes(endings.run_rank, tmp_path, rank, ending, 2, port) for rank in range(2)]
        deadline = time.monotonic() + TIMEOUT_S
        ended = {}
        while len(ended) < len(ranks) and time.monotonic() < deadline:
            for process in ranks:
                if not process.is_alive() and process.pid not in ended:
                    ended[process.pid] = time.monotonic()
                    if process.exitcode == -signal.SIGKILL:
                        ranks[0].terminate()
            time.sleep(0.05)
        logs = [(tmp_path / f"log-{rank}.txt").read_text(encoding="utf-8") for rank in range(2)]
        assert len(ended) == len(ranks), "\n".join(logs)
        apart = max(ended.values()) - min(ended.values())
        return [process.exitcode for process in ranks], logs, apart

    return run


def still_open(folder, rank="*"):
    return len(list(folder.glob(f"open-{rank}-*")))


@pytest.mark.slow
def test_a_signal_to_one_rank_saves_a_whole_checkpoint_and_ends_both(end, tmp_path):
    codes, logs, _ = end("signal")
    assert codes == [143, 143], logs
    assert {path.name for path in (tmp_path / "run" / "checkpoint-1").glob("rollout_state*")} == {
        "rollout_state_rank0.pt", "rollout_state_rank1.pt",
    }  # fmt: skip
    assert "rank 1 received it" in logs[0]
    assert still_open(tmp_path) == 0
    assert [(tmp_path / f"finally-{rank}").read_text() for rank in range(2)] == ["77.0"] * 2, "ddp_timeout"


@pytest.mark.release
def test_an_error_of_one_ranks_environment_ends_both_and_is_named_once(end, tmp_path):
    codes, logs, apart = end("environment")
    assert codes[1] == 2 and codes[0] in (2, 3), logs
    assert "Rank 1 has stopped all others: ProtocolError: Env.step returned 'nonsense'" in logs[0]
    assert apart < 15
    assert still_open(tmp_path) == 0


@pytest.mark.release
def test_an_error_of_one_ranks_reward_function_ends_both_and_is_named_once(end, tmp_path):
    codes, logs, apart = end("reward")
    assert codes == [2, 2], logs
    assert "error:" not in logs[1], "a mistake of the user is printed once, by the main process"
    stopped = logs[0].partition("Rank 1 has stopped all others: RewardError: ")[2]
    assert "raised LookupError: a mistake of the reward function" in stopped
    assert apart < 15
    assert still_open(tmp_path) == 0


@pytest.mark.release
@pytest.mark.parametrize("ending", ["disk", "full"])
def test_a_checkpoint_that_one_rank_cannot_write_ends_both_and_is_none_of_theirs(end, tmp_path, ending):
    codes, logs, apart = end(ending)
    assert codes == [3, 3], logs
    assert "SaveError: " in logs[0] and "checkpoint-1 cannot be written: OSError: [Errno 28]" in logs[0]
    assert apart < 15
    assert not (tmp_path / "run" / "checkpoint-1").exists() and still_open(tmp_path) == 0


@pytest.mark.release
def test_the_survivor_of_a_killed_rank_says_so_closes_everything_and_ends(end, tmp_path):
    codes, logs, apart = end("kill")
    assert codes == [3, -signal.SIGKILL], logs
    assert "Another rank is gone: killed" in logs[0]
    assert apart < 15
    assert still_open(tmp_path, rank=0) == 0


@pytest.mark.release
def test_a_rank_hears_signals_while_the_one_that_keeps_the_store_stands_still(processes, tmp_path):
    port = free_port()
    silent, rank = (processes(endings.run_rank, tmp_path, rank, "hang", 2, port) for rank in range(2))
    log, deadline = tmp_path / "log-1.txt", time.monotonic() + TIMEOUT_S
    while len(list(tmp_path.glob("open-*"))) < 8:
        assert time.monotonic() < deadline and rank.is_alive()
        time.sleep(0.05)
    os.kill(silent.pid, signal.SIGSTOP)
    time.sleep(1.5)  # by now the thread of the other rank waits for the store
    rank.terminate()
    time.sleep(3)
    assert "SIGTERM: the update in flight is finished" in log.read_text(encoding="utf-8")
    rank.terminate()
    rank.join(10)
    assert rank.exitcode == 143 and "SIGTERM for the second time" in log.read_text(encoding="utf-8")


@pytest.mark.release
def test_a_second_signal_ends_at_once(processes, tmp_path):
    process = processes(endings.two_signals, tmp_path)
    start = time.monotonic()
    process.join(30)
    assert process.exitcode == 143
    assert (tmp_path / "first").read_text() == "15"
    assert time.monotonic() - start < 20


@pytest.mark.release
def test_a_worker_whose_launcher_was_killed_saves_and_ends(processes, tmp_path):
    launcher = processes(endings.run_under_a_launcher, tmp_path, 0, "hang")
    deadline = time.monotonic() + TIMEOUT_S
    while min(len(list(tmp_path.glob(f"{state}-*"))) for state in ("closed", "open")) < 4:  # in the second rollout
        assert time.monotonic() < deadline and launcher.is_alive()
        time.sleep(0.05)
    worker = psutil.Process(int((tmp_path / "pid").read_text()))
    try:
        os.kill(launcher.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        if worker.is_running():
            worker.kill()
    log = (tmp_path / "log-0.txt").read_text(encoding="utf-8")
    assert "its launcher is gone" in log
    assert (tmp_path / "run" / "checkpoint-1" / "trainer_state.json").exists(), log
    assert (tmp_path / "finally-0").exists() and still_open(tmp_path) == 0

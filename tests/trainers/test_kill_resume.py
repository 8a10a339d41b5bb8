"""What SIGKILL (no handler, no clean-up) leaves of a run.

A PPO run goes on from its checkpoint as if never stopped, and a killed save leaves the checkpoint before it.
"""

import json
import multiprocessing
import signal
import time
from pathlib import Path

import pytest

from agent_r1_trl.critic.attach import CRITIC_FILE
from tests.effort import nightly
from tests.trainers import killed_saves
from tests.trainers.ppo_run import run

ROOT = Path(__file__).resolve().parents[2]
SAVED_STEP, NUM_STEPS = 3, 6
KILLED_AFTER = 5
"""The step that the run has logged when it is killed: two steps behind its last checkpoint."""
TIMEOUT_S = 240


@pytest.fixture
def processes(monkeypatch):
    """`start(*arguments)` runs `run` in a process of its own; whatever still lives at the end is killed.

    The processes are forked from a server that has imported everything and computed nothing, which saves most of
    their time.
    """
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")  # where the server finds what it preloads
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TESTS_WITHOUT_VLLM", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run.__module__])
    started = []

    def start(*arguments, target=run):
        started.append(context.Process(target=target, args=arguments, daemon=True))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.join()


def finish(process):
    process.join(TIMEOUT_S)
    assert process.exitcode == 0


def kill(process, folder):
    """Send SIGKILL when the run has finished `KILLED_AFTER` steps."""
    deadline = time.monotonic() + TIMEOUT_S
    while len(steps(folder)) < KILLED_AFTER:
        assert process.is_alive(), process.exitcode
        assert time.monotonic() < deadline, "the run never got that far"
        time.sleep(0.02)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def steps(folder):
    """What was logged so far, one entry per step; a line that is being written does not count."""
    path = folder / "steps.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


@pytest.mark.release
@pytest.mark.parametrize("kind", ["adapter", *nightly("head", "model")])
def test_a_killed_ppo_run_goes_on_where_its_checkpoint_stands(tmp_path, processes, kind):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    reference_run, doomed_run = processes(whole, kind, NUM_STEPS), processes(killed, kind, 10_000)
    kill(doomed_run, killed)
    finish(reference_run)
    expected = steps(whole)
    assert [entry["step"] for entry in expected] == list(range(1, NUM_STEPS + 1))
    assert len({entry["loss"] for entry in expected}) == NUM_STEPS
    assert len({tuple(entry["weights"]) for entry in expected}) == NUM_STEPS
    assert expected[-1].keys() >= {"loss", "critic/value_loss", "grad_norm"}

    checkpoint = killed / f"checkpoint-{SAVED_STEP}"
    assert (checkpoint / CRITIC_FILE).exists()
    (killed / "steps.jsonl").unlink()
    finish(processes(killed, kind, NUM_STEPS, str(checkpoint)))

    resumed = steps(killed)
    assert [entry["step"] for entry in resumed] == list(range(SAVED_STEP + 1, NUM_STEPS + 1))
    for entry, reference in zip(resumed, expected[SAVED_STEP:], strict=True):
        assert entry.keys() == reference.keys()
        assert entry["prompts"] == reference["prompts"]  # data order
        assert entry["completions"] == reference["completions"]  # policy, generator, random state
        for name in reference.keys() - {"prompts", "completions"}:  # losses, gradient norm, weights, values
            if "time" not in name:
                assert entry[name] == pytest.approx(reference[name], rel=1e-5, abs=1e-5), (entry["step"], name)


@pytest.mark.release
@pytest.mark.parametrize("kind", ["ppo", *nightly("grpo")])
def test_a_save_that_is_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path, processes, kind):
    finish(processes(tmp_path, kind, target=killed_saves.run))
    *killed, last = json.loads((tmp_path / "killed.json").read_text(encoding="utf-8"))
    assert last == [0, "checkpoint-2"]
    assert len(killed) > 10 and {code for code, _ in killed} == {-signal.SIGKILL}
    names = [name for _, name in killed]
    assert names == sorted(names) and set(names) == {"checkpoint-1", "checkpoint-2"}

"""TRL's makers of environments, HarborSpec and OpenRewardSpec, train as they are.

Harbor's sandboxes need Docker and Python 3.12: here a folder is the sandbox, and the rest is TRL's code. OpenReward's
server is real; the package needs sse-starlette 2, which does not go with what the other tests use.
"""

import contextlib
import gc
import json
import socket
import subprocess
import sys
import tempfile
import time
import types
import urllib.request
from pathlib import Path

import pytest
from trl.experimental.harbor import HarborBashEnv, HarborSpec
from trl.experimental.openreward import OpenRewardSpec

from agent_r1_trl.testing import call, make_policy, make_tokenizer, say
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from tests.trainers.helpers import make_args, scripted

BOTH = pytest.mark.parametrize("trainer", [MultiTurnGRPOTrainer, MultiTurnPPOTrainer])


def train(folder, spec, script, trainer):
    """Two steps with the three properties of a spec, as TRL's documentation passes them."""
    tokenizer = make_tokenizer("qwen3")
    run = trainer(
        model=make_policy(tokenizer),
        args=make_args(folder, trainer.config_class, max_steps=2),
        train_dataset=spec.train_dataset,
        environment_factory=spec.environment_factory,
        reward_funcs=spec.reward_funcs,
        processing_class=tokenizer,
        generator=scripted(tokenizer, script),
    )
    run.train()
    return run


def check_rewards(run):
    """The last step trained on what its environments say."""
    rewards = [env.reward for env in run.environments]
    assert len(rewards) == len(run.last_trajectories) == 8 and {*rewards} == {0.0, 1.0}
    logged = [entry["reward"] for entry in run.state.log_history if "reward" in entry]
    assert len(logged) == 2 and logged[-1] == pytest.approx(sum(rewards) / 8)


# -------------------------------------------------------------------- Harbor


class FolderEnv(HarborBashEnv):
    """Harbor's environment with a folder in place of a sandbox; its verifier compares the answer with the task's."""

    events: list  # of a subclass for each test: what another test left is stopped whenever it is collected

    async def _start(self, task_dir):
        await self._stop()
        self._task = Path(task_dir)
        self._env = types.SimpleNamespace(folder=tempfile.TemporaryDirectory(), exec=self._run_in_folder)
        self.events.append("start")
        return (self._task / "instruction.md").read_text()

    async def _run_in_folder(self, command, timeout_sec):
        done = subprocess.run(command, shell=True, cwd=self._env.folder.name, capture_output=True, text=True)
        return types.SimpleNamespace(stdout=done.stdout, stderr=done.stderr, return_code=done.returncode)

    async def _verify(self):
        self.events.append("verify")
        with contextlib.suppress(OSError):
            return float((Path(self._env.folder.name) / "answer.txt").read_text() == self._task.name)
        return 0.0

    async def _stop(self):
        if self._env is not None:
            self._env = self._env.folder.cleanup()
            self.events.append("stop")


def bash_turns(rng, turn):
    return call("bash", command=f"echo -n task-{rng.randrange(2)} > answer.txt") if turn == 0 else say("done")


@BOTH
def test_harbors_verifier_is_asked_when_the_reward_function_reads_the_reward(tmp_path, trainer):
    for number in range(2):
        (task := tmp_path / "suite" / "tasks" / f"task-{number}").mkdir(parents=True)
        (task / "instruction.md").write_text(f"Write task-{number}.")
        (task / "task.toml").write_text('[metadata]\ndifficulty_level = "easy"\n')
    agent = type("Agent", (FolderEnv,), {"events": (events := [])})
    spec = HarborSpec(str(tmp_path / "suite"), agent=agent)
    run = train(tmp_path / "out", spec, bash_turns, trainer)
    check_rewards(run)
    assert run.last_trajectories[0].messages[0]["content"].startswith("Write task-")
    started = events.count("start")
    assert started == events.count("verify") == 16
    gc.collect()
    assert events.count("stop") == started - len(run.environments)  # those of the last step may still be read


# -------------------------------------------------------------------- OpenReward


@pytest.fixture(scope="module")
def url():
    """Address of the server, which is the one of the sessions as well."""
    pytest.importorskip("openreward", reason="needs the package openreward")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, Path(__file__).parent / "openreward_server.py", str(port)])
    address = f"http://127.0.0.1:{port}"
    for _ in range(1800):
        with contextlib.suppress(OSError):
            get(f"{address}/health")
            break
        assert process.poll() is None, "the server ended"
        time.sleep(0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENREWARD_SESSION_URL", address)
        yield address
    process.kill()
    process.wait()


def get(address):
    with urllib.request.urlopen(address) as answer:
        return json.load(answer)


def answers(rng, turn):
    return call("answer", number=2 * rng.randrange(4)) if turn == 0 else say("done")


@BOTH
def test_openreward_trains_on_what_its_server_paid_and_leaves_no_session(tmp_path, url, trainer):
    run = train(tmp_path, OpenRewardSpec(url, num_tasks=4), answers, trainer)
    check_rewards(run)
    prompt = run.last_trajectories[0].messages[0]["content"]
    assert prompt.startswith("What is ") and prompt.endswith("?")
    assert get(f"{url}/health") == 0

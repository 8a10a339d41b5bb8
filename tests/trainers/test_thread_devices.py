"""CUDA keeps the current GPU per thread: a user's code runs on threads, and finds its rank's there."""

import threading

import pytest
import torch

from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.testing import calls, say
from agent_r1_trl.tools import pool, tool
from agent_r1_trl.trainers.construction import use_gpu_in_threads
from tests.trainers.helpers import make_trainer


@pytest.fixture
def current(monkeypatch):
    """The GPU of each thread, as `torch.cuda.set_device` left it; one of a name that was never set is the first."""
    found = {}

    def set_device(device):
        if isinstance(device, torch.device) and device.index is None:
            raise ValueError("Expected a torch.device with a specified index or an integer, but got:cuda")
        found[threading.get_ident()] = device if isinstance(device, int) else device.index

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.get(threading.get_ident(), 0))
    monkeypatch.setattr(pool, "_preparations", [])
    return lambda: f"cuda:{torch.cuda.current_device()}"


def test_tools_environments_and_rewards_find_the_gpu_of_their_rank(tmp_path, current):
    seen = {}

    @tool
    def plain() -> str:
        """Look."""
        seen["tool"] = current()
        return "seen"

    @tool
    async def waiting() -> str:
        """Look."""
        seen["async tool"] = current()
        return "seen"

    class LookingEnv(ToolEnv):
        tools = (plain, waiting)

        def reset(self, example):
            seen["reset"] = current()
            return super().reset(example)

        def outcome_reward(self, trajectory):
            seen["outcome"] = current()
            return 1.0

    async def of_turns(trajectory, **columns):
        seen["async turn reward"] = current()
        return [[0.0] * len(item.turns) for item in trajectory]

    async def of_trl(completions, **columns):
        seen["async reward"] = current()
        return [0.0] * len(completions)

    def look(rng, turn):
        return say("seen") if turn == 2 else calls((("plain", "waiting")[turn], {}))

    trainer = make_trainer(tmp_path, env=LookingEnv, script=look, turn_reward_funcs=[of_turns], reward_funcs=[of_trl])
    use_gpu_in_threads(torch.device("cuda:1"), trainer.async_loop)
    trainer.train()
    assert seen == dict.fromkeys(
        ("tool", "async tool", "reset", "outcome", "async turn reward", "async reward"), "cuda:1"
    )


def test_a_process_alone_whose_device_has_no_index_stays_on_its_gpu(current):
    torch.cuda.set_device(3)
    use_gpu_in_threads(torch.device("cuda"), None)
    other = threading.Thread(target=lambda: seen.append([current(), pool.prepare_thread(), current()]))
    seen = []
    other.start()
    other.join()
    assert seen == [["cuda:0", None, "cuda:3"]]


def test_a_gpu_that_cannot_be_used_is_said_where_the_trainer_is_made(monkeypatch):
    def refuse(index):
        raise RuntimeError("CUDA error: invalid device ordinal")

    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        use_gpu_in_threads(torch.device("cuda:9"), None)


def test_a_rank_without_a_gpu_sets_none(current):
    use_gpu_in_threads(torch.device("cpu"), None)
    pool.prepare_thread()
    assert current() == "cuda:0"

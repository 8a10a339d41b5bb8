"""An agent trains as the environment of the same task does, to the digit, and a killed run repeats nothing."""

import functools

import pytest
import torch

from agent_r1_trl.features.doors import AgentEnv
from agent_r1_trl.testing import AddEchoEnv, call, say
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from tests.features.doors.agents import loop_agent
from tests.trainers.helpers import make_trainer

LOOP = functools.partial(AgentEnv, loop_agent)


class SameTask(AddEchoEnv):
    tool_call_reward = tool_error_reward = failure_reward = 0.0


def some_turns(rng, turn):
    return call(a=rng.randrange(9), b=rng.randrange(9)) if turn < rng.randrange(3) else say("x" * rng.randrange(1, 9))


def train(folder, env, trainer, **options):
    torch.manual_seed(0)
    run = make_trainer(folder, env=env, script=some_turns, trainer=trainer, max_steps=2, **options)
    run.train()
    return run


@pytest.mark.parametrize("trainer", [MultiTurnGRPOTrainer, MultiTurnPPOTrainer])
def test_two_steps_with_an_agent_make_the_weights_that_the_environment_makes(tmp_path, trainer):
    through_door = train(tmp_path / "door", LOOP, trainer, context="agent")
    expected = train(tmp_path / "env", SameTask, trainer, context={"policy": "window", "turns": 99})
    pairs = zip(through_door.model.named_parameters(), expected.model.named_parameters(), strict=True)
    assert all(torch.equal(one, other) for (_, one), (_, other) in pairs)
    logs = [[entry.get("reward") for entry in run.state.log_history] for run in (through_door, expected)]
    assert logs[0] == logs[1] and len({*logs[0]} - {None}) > 1
    assert through_door.state.log_history[0]["env/agent/raised"] == 0.0


async def forgetful(door, example):
    """Rewrites its messages before every call."""
    return await loop_agent(door, example, change=lambda messages: [{"role": "user", "content": str(messages)[-90:]}])


@pytest.mark.parametrize("trainer", [MultiTurnGRPOTrainer, MultiTurnPPOTrainer])
def test_an_agent_that_rewrites_its_messages_trains_with_a_row_per_turn(tmp_path, trainer):
    env = functools.partial(AgentEnv, forgetful)
    run = train(tmp_path, env, trainer, context="agent", max_completion_length=400)
    numbers = [len(item.turns) for item in run.last_trajectories]
    assert [len(item.rows) for item in run.last_trajectories] == numbers and max(numbers) > 1
    assert run.state.log_history[0]["env/drift/user"] > 0

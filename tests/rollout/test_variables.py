"""Context variables: one set of them per trajectory, from the factory to `close`, and none of it seen elsewhere."""

import asyncio
import decimal
import time
from contextvars import ContextVar

import pytest

from agent_r1_trl.environments import ToolEnv, TRLEnvAdapter
from agent_r1_trl.testing import call, calls, say
from agent_r1_trl.tools import tool
from agent_r1_trl.trajectory import StopReason
from tests.rollout.helpers import roll_out

name: ContextVar[str] = ContextVar("name", default="default")


def look():
    """What a call sees: the variable, and the precision of decimals."""
    return f"{name.get()} {decimal.getcontext().prec}"


class Plain(ToolEnv):
    """Sets the variable in the factory, `reset` and a tool; `seen` holds what each method read."""

    def __init__(self):
        super().__init__()
        self.seen = []
        name.set("made")
        decimal.getcontext().prec = 5

    def reset(self, example):
        self.seen.append(look())
        self.token = name.set(f"reset {id(self)}")
        decimal.getcontext().prec = 7
        return super().reset(example)

    @tool
    def rename(self, text: str) -> str:
        """Set the variable.

        Args:
            text: its value.
        """
        self.seen.append(look())
        name.set(text)
        decimal.getcontext().prec = 9
        if text == "raise":
            raise ValueError("no such name")
        return look()

    @tool
    def read(self) -> str:
        """Read the variable."""
        return look()

    def process_reward(self, call, result):
        self.seen.append(look())
        return 0.0

    def next_user_message(self, message):
        self.seen.append(look())

    def render_text(self):
        return look()

    def outcome_reward(self, trajectory):
        self.seen.append(look())
        return 1.0

    def close(self):
        self.seen.append(look())
        name.reset(self.token)
        self.seen.append(look())


class Async(Plain):
    async def reset(self, example):
        await asyncio.sleep(0)
        return super().reset(example)

    @tool
    async def rename(self, text: str) -> str:
        """Set the variable.

        Args:
            text: its value.
        """
        await asyncio.sleep(0)
        return Plain.rename.fn(self, text)

    async def process_reward(self, call, result):
        return super().process_reward(call, result)

    async def next_user_message(self, message):
        return super().next_user_message(message)

    async def outcome_reward(self, trajectory):
        return super().outcome_reward(trajectory)

    async def close(self):
        super().close()


@pytest.mark.parametrize("kind", [Plain, Async])
@pytest.mark.parametrize("text", ["Ann", "raise"])
def test_what_one_method_sets_all_later_ones_see_and_no_other_trajectory_does(kind, text):
    made = []
    token = name.set("caller's")
    turns = [calls(("rename", {"text": text}), ("read", {})), say("done")]
    trajectories, _ = roll_out(turns, env=lambda: made.append(kind()) or made[-1], examples=3)
    for env, trajectory in zip(made, trajectories, strict=True):
        assert trajectory.stop_reason is StopReason.DONE
        assert env.seen[:2] == ["made 5", f"reset {id(env)} 7"]
        num_rewards = 2 if text == "Ann" else 1
        assert env.seen[2:-1] == [f"{text} 9"] * (num_rewards + 3)
        assert env.seen[-1] == "made 9", "a token of reset is good in close"
        assert trajectory.turns[0].observations[1]["content"] == f"{text} 9", "the next call of the turn"
        assert trajectory.turns[0].rendered["text"] == f"{text} 9"
    assert look() == "caller's 28"
    name.reset(token)


class OfTRL:
    def __init__(self):
        name.set("made")

    def reset(self, **row):
        decimal.getcontext().prec = 7

    def rename(self, text: str) -> str:
        """Set the variable.

        Args:
            text: its value.
        """
        before = look()
        name.set(text)
        return before

    def get_reward(self):
        return float(look() == "Ann 7")


def test_the_classes_of_environment_factory_share_them_as_well():
    trajectory, _ = roll_out([call("rename", text="Ann"), say()], env=lambda: TRLEnvAdapter(OfTRL))
    assert trajectory.turns[0].observations[0]["content"] == "made 7"
    assert trajectory.outcome_reward == 1.0


def test_functions_that_run_beside_each_other_read_them_and_each_sets_its_own():
    """They belong to no environment: what they set ends with the call."""
    both = asyncio.Barrier(2)

    async def rename(text: str) -> str:
        """Set the variable.

        Args:
            text: its value.
        """
        before = look()
        name.set(text)
        decimal.getcontext().prec = 3 if text == "Ann" else 4
        await both.wait()
        return f"{before}, {look()}"

    class Env(ToolEnv):
        tools = (rename,)

        def reset(self, example):
            name.set("reset")
            decimal.getcontext().prec = 7
            return super().reset(example)

        def outcome_reward(self, trajectory):
            return float(look() == "reset 7")

    trajectory, _ = roll_out([calls(("rename", {"text": "Ann"}), ("rename", {"text": "Bob"})), say()], env=Env)
    told = [observation["content"] for observation in trajectory.turns[0].observations]
    assert told == ["reset 7, Ann 3", "reset 7, Bob 4"]
    assert trajectory.outcome_reward == 1.0


def test_a_call_that_was_given_up_leaves_nothing_behind():
    class Env(ToolEnv):
        tool_timeout_s = 0.1

        @tool
        def hang(self) -> str:
            """Take too long."""
            name.set("hung")
            time.sleep(0.3)
            return "late"

        @tool
        def read(self) -> str:
            """Read the variable."""
            return look()

    trajectory, _ = roll_out([calls(("hang", {})), calls(("read", {})), say()], env=Env)
    assert trajectory.turns[1].observations[0]["content"] == "default 28"

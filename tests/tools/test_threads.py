"""Code that was written for the main thread: never charged to the model."""

import asyncio
import functools
import signal
import sqlite3

import pytest

from agent_r1_trl import StopReason, ToolEnv, check_env, tool
from agent_r1_trl.environments import FunctionToolsEnv, TRLEnvAdapter
from agent_r1_trl.testing import calls, say
from agent_r1_trl.tools import ToolCall, ToolErrorKind, ToolExecutor
from tests.rollout.helpers import roll_out

CONNECTION = sqlite3.connect(":memory:")  # of the main thread


def with_alarm() -> str:
    """Look."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return "seen"


def of_another_thread() -> str:
    """Look."""
    return str(CONNECTION.execute("select 1").fetchall())


def without_a_loop() -> str:
    """Look."""
    asyncio.get_running_loop()
    return "seen"


def wrapped_error() -> str:
    """Look."""
    try:
        return of_another_thread()
    except sqlite3.Error as error:
        raise KeyError("no such row") from error


WRONG_THREAD = {
    with_alarm: "signal only works in main thread",
    of_another_thread: "SQLite objects created in a thread",
    without_a_loop: "no running event loop",
    wrapped_error: "no such row",
}


@pytest.mark.parametrize("fn", WRONG_THREAD, ids=lambda fn: fn.__name__)
def test_a_tool_on_the_wrong_thread_fails_by_the_infrastructure_and_is_not_called_again(fn):
    count = []

    @tool(name="look", user_errors=(ValueError, KeyError))
    def counted() -> str:
        """Look."""
        count.append(1)
        return fn()

    trajectory, _ = roll_out([calls(("look", {})), say("done")], env=functools.partial(FunctionToolsEnv, [counted]))
    (result,) = trajectory.turns[0].tool_results
    assert result.error is ToolErrorKind.INFRASTRUCTURE and not result.is_charged
    assert WRONG_THREAD[fn] in result.content and "'look'" in result.content and "main thread" in result.content
    assert trajectory.stop_reason is StopReason.TOOL_FAILURE and count == [1]


def test_such_an_error_of_the_models_own_code_and_of_a_text_that_it_wrote_is_the_models():
    @tool
    def run(code: str) -> str:
        """Run code."""
        exec(code, {})
        return "ran"

    @tool
    def find(page: str) -> str:
        """Find a page."""
        raise ValueError(f"no page {page}")

    text = "signal only works in main thread of the main interpreter"
    asked = [
        ToolCall(name="run", arguments={"code": "import signal; signal.signal(14, signal.SIG_DFL)"}),
        ToolCall(name="find", arguments={"page": text}),
    ]
    results = asyncio.run(ToolExecutor([run, find]).execute(asked))
    assert [result.error for result in results] == [ToolErrorKind.EXCEPTION] * 2
    assert all(text in result.content for result in results)


@pytest.mark.parametrize("method", ["get_reward", "process_reward", "outcome_reward"])
def test_a_reward_on_the_wrong_thread_ends_its_trajectory_not_the_run(method):
    def look() -> str:
        """Look."""
        return "seen"

    class OfTRL:
        def reset(self, **row):
            return None

        def look(self) -> str:
            """Look."""
            return "seen"

        def get_reward(self):
            return CONNECTION.execute("select 1").fetchone()[0]

    def reward(self, *args):
        return CONNECTION.execute("select 1").fetchone()[0]

    env = type("Env", (ToolEnv,), {"tools": (look,), method: reward})
    env = functools.partial(TRLEnvAdapter, OfTRL) if method == "get_reward" else env
    trajectory, _ = roll_out([calls(("look", {})), say("done")], env=env)
    assert trajectory.stop_reason.is_infrastructure_failure
    assert "SQLite objects created in a thread" in trajectory.error
    assert ("OfTRL" if method == "get_reward" else f"Env.{method}") in trajectory.error


def test_the_doctor_names_a_tool_that_is_bound_to_a_thread():
    class Env(ToolEnv):
        tools = (of_another_thread,)

        def outcome_reward(self, trajectory):
            return 0.0

    found = [item for item in check_env(Env, [{"prompt": "Look."}]) if "do not run in the main thread" in item.message]
    assert [(item.level, "check_same_thread=False" in item.fix) for item in found] == [("error", True)]

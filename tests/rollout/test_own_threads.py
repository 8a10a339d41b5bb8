"""Every plain call of an environment runs on one thread of its own, as SQLite connections demand."""

import asyncio
import functools
import gc
import sqlite3
import threading
import time

import pytest

from agent_r1_trl.environments import ToolEnv, TRLEnvAdapter
from agent_r1_trl.rollout import EnvSession, RolloutRequest
from agent_r1_trl.testing import call, calls, say
from agent_r1_trl.tools import tool
from agent_r1_trl.trajectory import StopReason
from tests.rollout.helpers import roll_out


class NotesOfTRL:
    """A class for `environment_factory=` that keeps a connection from `__init__` to `get_reward`."""

    def __init__(self):
        self.database = sqlite3.connect(":memory:")

    def reset(self, **row):
        self.database.execute("create table notes (text)")

    def write(self, text: str) -> str:
        """Write a note.

        Args:
            text: What to write.
        """
        self.database.execute("insert into notes values (?)", (text,))
        return f"{len(self._notes())} notes"

    def _notes(self):
        return self.database.execute("select text from notes").fetchall()

    def get_reward(self):
        return float(len(self._notes()))


class Notes(ToolEnv):
    """The same as a `ToolEnv`; `threads` remembers where each method ran."""

    def __init__(self):
        super().__init__()
        self.database = sqlite3.connect(":memory:")
        self.threads = {"__init__": threading.get_ident()}

    def reset(self, example):
        self.threads["reset"] = threading.get_ident()
        self.database.execute("create table notes (text)")
        return super().reset(example)

    @tool
    def write(self, text: str) -> str:
        """Write a note.

        Args:
            text: What to write.
        """
        self.threads["write"] = threading.get_ident()
        self.database.execute("insert into notes values (?)", (text,))
        return "written"

    def process_reward(self, call, result):
        self.threads["process_reward"] = threading.get_ident()
        return float(len(self._notes()))

    def is_done(self, message):
        self.threads["is_done"] = threading.get_ident()
        return super().is_done(message)

    def outcome_reward(self, trajectory):
        self.threads["outcome_reward"] = threading.get_ident()
        return float(len(self._notes()))

    def _notes(self):
        return self.database.execute("select text from notes").fetchall()

    def close(self):
        self.threads["close"] = threading.get_ident()
        self.database.close()


NOTES = [calls(("write", {"text": "a"}), ("write", {"text": "b"})), call("write", text="c"), say("done")]


@pytest.mark.parametrize(
    "env", [functools.partial(TRLEnvAdapter, NotesOfTRL), Notes], ids=["environment_factory", "ToolEnv"]
)
def test_a_database_that_was_opened_at_the_start_serves_all_calls_of_its_environment(env):
    trajectories, _ = roll_out(NOTES, env=env, examples=12)
    for trajectory in trajectories:
        assert trajectory.stop_reason is StopReason.DONE, trajectory.error
        assert [result.is_error for turn in trajectory.turns for result in turn.tool_results] == [False] * 3
        assert trajectory.outcome_reward == 3.0


def test_environments_run_beside_each_other_each_on_a_thread_of_its_own():
    made, together = [], threading.Barrier(4, timeout=20)

    class Meeting(Notes):
        def __init__(self):
            super().__init__()
            made.append(self)

        @tool
        def write(self, text: str) -> str:
            """Wait for the other environments.

            Args:
                text: What to write.
            """
            together.wait()
            return Notes.write.fn(self, text)

    trajectories, _ = roll_out([call("write", text="a"), say("done")], env=Meeting, examples=4)
    assert [item.outcome_reward for item in trajectories] == [1.0] * 4
    methods = {"__init__", "reset", "write", "process_reward", "is_done", "outcome_reward", "close"}
    assert [(set(env.threads), len(set(env.threads.values()))) for env in made] == [(methods, 1)] * 4
    assert len({env.threads["reset"] for env in made}) == 4


def threads_of_environments():
    gc.collect()
    return {thread for thread in threading.enumerate() if thread.name == "environment"}


def wait_until_gone(before):
    deadline = time.monotonic() + 10
    while threads_of_environments() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    return not threads_of_environments() - before


def test_the_threads_end_with_their_environments_also_if_one_was_never_closed():
    before = threads_of_environments()
    roll_out(NOTES, env=Notes, examples=8)
    assert wait_until_gone(before)
    session = EnvSession(Notes, truncate=lambda text, limit: text)
    asyncio.run(session.reset(RolloutRequest(example={"prompt": "hi"})))
    assert len(threads_of_environments() - before) == 1
    del session
    assert wait_until_gone(before)


def test_after_a_call_that_was_given_up_the_environment_goes_on_with_a_fresh_thread():
    free = threading.Event()
    before = threads_of_environments()

    class Hanging(ToolEnv):
        tool_timeout_s = 0.2

        @tool
        def hang(self) -> str:
            """Hang."""
            free.wait(60)
            return "free"

        @tool
        def name(self) -> str:
            """Name the thread."""
            return f"thread {threading.get_ident()}"

    turns = [calls((name, {})) for name in ("name", "hang", "name", "name")] + [say("done")]
    trajectory, _ = roll_out(turns, env=Hanging)
    named, hung, *later = [turn.tool_results[0] for turn in trajectory.turns if turn.tool_results]
    assert hung.error.value == "timeout"
    assert later[0].content == later[1].content != named.content
    free.set()
    assert wait_until_gone(before)


def test_a_call_out_of_a_call_of_the_same_environment_does_not_wait_for_itself():
    class Nested(Notes):
        tool_timeout_s = 5.0

        def step(self, message):  # plain, and runs the tools on an event loop of its own
            return asyncio.run(ToolEnv.step(self, message))

        @tool
        def add(self) -> str:
            """Say so."""
            return "added"

        def process_reward(self, call, result):
            return 0.0

    trajectory, _ = roll_out([calls(("add", {})), say("done")], env=Nested)
    assert trajectory.turns[0].tool_results[0].content == "added"

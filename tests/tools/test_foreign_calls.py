"""A table of packages whose tools people bring, each used in a rollout: calls that fail, state, time, order.

Calls of one turn to a board, a file system or a game come one after another, since these are objects with state; those
to the tools of the other packages run at once, unless they are `sequential`. No cell is left out.
"""

import functools
import time
from pathlib import Path
from typing import Any, NamedTuple

import langchain_core.tools
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from agent_r1_trl import StopReason, Tool, ToolEnv
from tests.rollout.helpers import roll_out
from tests.toys import calls, say

DOCS = Path(__file__).resolve().parents[2] / "docs"


def watched(cls, name, slow):
    """The class, whose method takes its time, half a second for the argument `slow`; `most` run at once."""
    method = getattr(cls, name)

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            time.sleep(0.5 if slow in (*args, *kwargs.values()) else 0.05)
            return method(self, *args, **kwargs)
        finally:
            self.running -= 1

    return type(cls.__name__, (cls,), {name: call, "running": 0, "most": 0})


class Plain:
    def __init__(self):
        self.lines = []

    def write(self, line: str) -> str:
        """Write a line.

        Args:
            line: What to write.
        """
        if not line:
            raise ValueError("no empty lines")
        self.lines.append(line)
        return f"{line} {len(self.lines)}"


Diary = watched(Plain, "write", slow="slow")


def of_langchain(diary):
    return langchain_core.tools.StructuredTool.from_function(diary.write, parse_docstring=True)


def wrapped(wrap):
    """An environment with its own diary, of which another package made a tool."""

    class Env(ToolEnv):
        sequential = None

        def __init__(self):
            self.watched = Diary()
            super().__init__(tools=[Tool(wrap(self.watched), sequential=self.sequential)])

    return Env


def of_fsspec():
    class Env(ToolEnv):
        def __init__(self):
            own = {"store": {}, "pseudo_dirs": [""], "cachable": False}  # else all trajectories see the same files
            self.watched = type("Own", (watched(MemoryFileSystem, "mkdir", slow="/slow"),), own)()
            super().__init__(tools=[self.watched.mkdir, self.watched.find])

    return Env


def of_chess():
    board = watched(pytest.importorskip("chess").Board, "push_san", slow="Nf3")

    class Env(ToolEnv):
        def __init__(self):
            self.watched = board()
            super().__init__(tools=[self.watched.push_san])

    return Env


class Row(NamedTuple):
    make: Any
    tool: str
    argument: str
    good: dict[str, str]  # in this order, each has this in its observation
    bad: tuple[str, str]
    slow: str


def of_line(make):
    return Row(make, "write", "line", {"a": "a 1", "b": "b 2", "c": "c 3"}, ("", "no empty lines"), "slow")


MOVES = {"e4": '"from_square": 12', "e5": '"from_square": 52', "Nc3": '"from_square": 1,'}
PACKAGES = {
    "langchain": of_line(lambda: wrapped(of_langchain)),
    "fsspec": Row(of_fsspec, "mkdir", "path", {"/a": "", "/b": "", "/c": ""}, ("/a", "FileExistsError"), "/slow"),
    "chess": Row(of_chess, "push_san", "san", MOVES, ("Ke5", "IllegalMoveError: illegal san"), "Nf3"),
}


def rollout(row, *turns, examples=1, **settings):
    """What comes of turns that call the row's tool with these arguments; the environments that were made."""
    made = []
    base = row.make()

    def make():
        made.append(type("Env", (base,), settings)())
        return made[-1]

    script = [calls(*((row.tool, {row.argument: text}) for text in turn)) for turn in turns]
    sampled, _ = roll_out([*script, say()], env=make, examples=examples)
    sampled = sampled if isinstance(sampled, list) else [sampled]
    assert [item.stop_reason for item in sampled] == [StopReason.DONE] * examples
    return sampled, made


def told(turn):
    assert not turn.observations or [item["content"] for item in turn.observations] == [
        result.content for result in turn.tool_results
    ]
    return [result.content for result in turn.tool_results]


@pytest.fixture(params=PACKAGES)
def row(request):
    return PACKAGES[request.param]


def test_a_call_that_fails_counts_as_failed_and_the_rollout_goes_on(row):
    first, second, _ = row.good
    (sampled,), _ = rollout(row, [first, row.bad[0]], [second], sequential=True)
    good, bad = sampled.turns[0].tool_results
    assert (good.error, bad.error.value) == (None, "exception") and bad.is_error
    assert row.bad[1] in told(sampled.turns[0])[1]
    assert sampled.turns[0].reward_parts == {"tool_call": 0.5, "tool_error": -0.1}
    assert row.good[second] in told(sampled.turns[1])[0] and not sampled.turns[1].tool_results[0].is_error


def test_trajectories_share_no_state_and_calls_on_one_object_do_not_overlap(row):
    sampled, made = rollout(row, row.good, examples=4, sequential=True)
    for item, env in zip(sampled, made, strict=True):
        contents = told(item.turns[0])
        assert all(part in text for part, text in zip(row.good.values(), contents, strict=True)), contents
        assert env.watched.most == 1 and not any(result.is_error for result in item.turns[0].tool_results)


def test_a_call_that_takes_too_long_is_given_up_and_holds_up_no_other_trajectory(row):
    began = time.perf_counter()
    sampled, _ = rollout(row, [row.slow], [next(iter(row.good))], examples=12, tool_timeout_s=0.2)
    assert time.perf_counter() - began < 4, "one after another they sleep 6 s"
    for item in sampled:
        assert item.turns[0].tool_results[0].error.value == "timeout" and "took longer" in told(item.turns[0])[0]
        assert item.turns[0].reward == -0.1 and len(item.turns) >= 2


def test_the_calls_of_a_turn_are_answered_in_their_order(row):
    (sampled,), (env,) = rollout(row, row.good)
    contents = told(sampled.turns[0])
    if row.tool == "write":  # at once, whichever comes first
        assert env.watched.most == 3 and [text[0] for text in contents] == list(row.good)
    else:
        assert env.watched.most == 1
        assert all(part in text for part, text in zip(row.good.values(), contents, strict=True)), contents

"""A rollout that stands still: who holds it up is said, and it ends within its limits."""

import asyncio
import gc
import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings

import pytest

from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.generation import ScriptedGenerator
from agent_r1_trl.rollout import LoopLostError, RolloutLimits, RolloutRequest, RolloutRunner
from agent_r1_trl.rollout.watchdog import Watchdog, reported
from agent_r1_trl.testing import AddEchoEnv, call, calls, chat_of, say
from agent_r1_trl.tools import tool
from agent_r1_trl.tools.event_loop import LoopThread
from agent_r1_trl.trajectory import StopReason
from tests.rollout.helpers import PROMPT


def requests_for(count):
    return [RolloutRequest(example={"prompt": PROMPT}, example_id=f"q{i}", seed=i) for i in range(count)]


def run_with(tools, *, wait_for=None, count=4, turns=None, **limits):
    """The first trajectory to be asked calls the first tool, the others the last one, then all answer."""
    chat = chat_of()
    names = [item.name for item in tools]

    class Env(ToolEnv):
        def reset(self, example):
            self.closed = False
            return super().reset(example)

        def close(self):
            closed.append(self)

    Env.tools = tuple(tools)
    closed = []

    def script(request):
        if request.turn:
            return chat.encode_reply(say("done"))
        return chat.encode_reply(calls((names[0] if request.index == 0 else names[-1], {})))

    runner = RolloutRunner(
        Env, ScriptedGenerator(script, stop_token_ids=chat.stop_token_ids), chat, RolloutLimits(**limits)
    )
    try:
        return runner.run(requests_for(count)), closed, runner
    finally:
        runner.close()


@tool
async def quick() -> str:
    """Answer at once."""
    await asyncio.sleep(0.01)
    return "ok"


def sleeping(seconds):
    @tool
    async def naps() -> str:
        """Sleep, as no async tool should."""
        time.sleep(seconds)
        return "slept"

    return naps


def test_a_tool_that_blocks_the_event_loop_is_named_with_its_trajectory_and_stack_while_it_does(caplog):
    with caplog.at_level(logging.WARNING):
        trajectories, _, _ = run_with([sleeping(1.2), quick], watchdog_interval=0.3)
    assert {trajectory.stop_reason for trajectory in trajectories} == {StopReason.DONE}
    message = next(text for text in caplog.messages if "has held the event loop" in text)
    assert re.search(r"naps \(.*test_watchdog.py, line \d+\) has held", message) and "time.sleep(seconds)" in message
    assert "make a tool that cannot a plain function" in message


def test_a_loop_that_a_tool_never_gives_back_is_given_up_and_the_next_rollout_has_another(caplog):
    release = threading.Event()

    @tool
    async def stuck() -> str:
        """Never return."""
        release.wait(30)
        return "at last"

    chat = chat_of()
    closed = []

    class Env(AddEchoEnv):
        tools = (*AddEchoEnv.tools, stuck)

        def close(self):
            closed.append(self.example["place"])

    def script(request):
        is_stuck = "number 1" in chat.tokenizer.decode(request.prompt_ids) and not caplog.messages
        return chat.encode_reply(
            calls(("stuck", {})) if is_stuck else say("done") if request.index % 2 == 0 else call()
        )

    limits = RolloutLimits(stall_timeout=0.5, watchdog_interval=None, max_concurrency=2, max_turns=1)
    runner = RolloutRunner(Env, ScriptedGenerator(script, stop_token_ids=chat.stop_token_ids), chat, limits)
    rows = [{"prompt": f"Question number {place}", "place": place} for place in range(3)]
    requests = [RolloutRequest(example=row, example_id=f"q{row['place']}") for row in rows]
    began = time.monotonic()
    trajectories = runner.run(requests)
    assert time.monotonic() - began < 20
    assert trajectories[1].stop_reason is StopReason.ENVIRONMENT_ERROR
    assert "held the event loop" in trajectories[1].error
    assert "stall_timeout=0.5 s" in trajectories[1].error
    assert "release.wait(30)" in caplog.text, "the stack"
    assert {t.stop_reason for t in trajectories} <= {StopReason.ENVIRONMENT_ERROR, StopReason.DONE}
    assert 1 in closed, "the environments of a lost loop are closed"
    again = runner.run(requests)
    assert StopReason.ENVIRONMENT_ERROR not in {trajectory.stop_reason for trajectory in again}
    release.set()
    time.sleep(0.2)
    runner.close()
    assert sorted(closed) == [0, 0, 1, 1, 2, 2][-len(closed) :] or closed.count(1) == 2, "each once per rollout"


def test_what_the_watchdog_says_is_bounded_however_many_wait():
    drafts = [types.SimpleNamespace(phase="turn 0: tools", completion_ids=[], name="q" * 100_000) for _ in range(99)]
    dog = Watchdog(lambda: drafts, None, threading.current_thread(), interval_s=1, stall_timeout_s=None, give_up=print)
    text = dog._names()
    assert text.startswith("99 running: qqq") and text.endswith("...") and len(text) < 1200


@pytest.mark.parametrize(("size", "said"), [("2", "Rank 1 of 2: No trajectory has"), ("1", "No trajectory has")])
def test_the_watchdog_names_the_rank_where_there_are_several(size, said, monkeypatch, caplog):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", size)
    draft = types.SimpleNamespace(phase="turn 0: tools", completion_ids=[], name="q")
    dog = Watchdog(
        lambda: [draft], None, threading.current_thread(), interval_s=1, stall_timeout_s=None, give_up=print
    )
    dog._report(time.monotonic() + 5)
    (message,) = caplog.messages
    assert message.startswith(said)


def test_a_tool_that_stops_the_event_loop_stops_nothing(caplog):
    @tool
    async def stopper() -> str:
        """Stop the loop."""
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        return "stopped"

    trajectories, _, _ = run_with([stopper, quick])
    assert {trajectory.stop_reason for trajectory in trajectories} == {StopReason.DONE}
    assert "stopped the event loop" in caplog.text


def test_a_loop_whose_thread_ends_is_a_named_error_and_what_ran_on_it_goes_in_silence(monkeypatch):
    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # pytest's keeps the frames of the thread

    @tool
    async def closer() -> str:
        """Take the file descriptor of the loop's selector away, as a tool that closes all of them does."""
        null = os.open(os.devnull, os.O_RDONLY)  # a closed one would be handed to the next file, and closed again
        os.dup2(null, asyncio.get_running_loop()._selector.fileno())
        os.close(null)
        await asyncio.sleep(0.01)
        return "closed"

    with pytest.raises(LoopLostError, match="tools closer"):
        run_with([closer], count=1)
    gc.collect()
    assert not said


@pytest.mark.slow
def test_an_interpreter_that_never_gives_up_its_lock_ends_the_process_with_all_stacks(tmp_path):
    script = textwrap.dedent(
        """
        import re
        from agent_r1_trl.rollout import watchdog
        from agent_r1_trl.tools import tool
        from tests.rollout.test_watchdog import run_with

        @tool
        def catastrophic() -> str:
            "Match for ever."
            return str(re.match(r"(a+)+$", "a" * 60 + "b"))

        watchdog.GRACE_S = 0.5
        run_with([catastrophic], count=1, stall_timeout=2.0, watchdog_interval=0.5)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in catastrophic" in done.stderr


def test_reward_functions_that_take_long_are_reported_with_their_stack(caplog):
    with reported("The reward functions have been running", 0.1):
        time.sleep(0.35)
    time.sleep(0.15)
    assert 1 <= len(caplog.messages) <= 3
    assert "The reward functions have been running for 0 s" in caplog.messages[0]
    assert "time.sleep(0.35)" in caplog.messages[0]


def test_a_rollout_that_waits_for_the_sampler_alone_is_reported_less_often(caplog):
    chat = chat_of()
    generator = ScriptedGenerator([chat.encode_reply(say())], stop_token_ids=chat.stop_token_ids, delay_s=2)
    runner = RolloutRunner(AddEchoEnv, generator, chat, RolloutLimits(watchdog_interval=0.6))
    runner.run(requests_for(1))
    runner.close()
    assert caplog.messages == []


def test_a_loop_that_never_gets_free_leaves_no_coroutine_that_nobody_has_awaited(monkeypatch):
    monkeypatch.setattr(LoopThread, "start", lambda self: None)
    thread = LoopThread()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        thread.end()
        thread.loop.close()
        thread.end()  # it is closed
        del thread
        gc.collect()
    assert not [warning for warning in said if "never awaited" in str(warning.message)]


def test_a_loop_that_is_ended_twice_leaves_no_coroutine_that_nobody_has_awaited():
    thread, is_open = LoopThread(), threading.Event()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        thread.loop.call_soon_threadsafe(is_open.wait)
        thread.end()
        thread.loop.call_soon_threadsafe(thread.end)  # its task would be made when the loop has been stopped
        is_open.set()
        thread.join(timeout=10)
        gc.collect()
    assert not thread.is_alive() and not [item for item in said if "never awaited" in str(item.message)]

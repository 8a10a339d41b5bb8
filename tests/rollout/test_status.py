"""`rollout_status` says what a rollout does while it does it, and nothing once it is over."""

import threading
import time

import pytest

from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.generation import ScriptedGenerator
from agent_r1_trl.rollout import Draft, RolloutLimits, RolloutRequest, RolloutRunner, rollout_status
from agent_r1_trl.rollout.watchdog import publish
from agent_r1_trl.testing import calls, chat_of, say
from agent_r1_trl.tools import tool
from tests.rollout.helpers import PROMPT


def requests_for(count):
    return [RolloutRequest(example={"prompt": PROMPT}, example_id=f"q{i}", seed=i) for i in range(count)]


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, str(rollout_status())
        time.sleep(0.01)


def test_done_started_and_waiting_are_counted_while_a_tool_holds_up_some(request):
    release = threading.Event()
    request.addfinalizer(release.set)

    @tool
    def search() -> str:
        """Answer late."""
        release.wait(20)
        return "found"

    class Env(ToolEnv):
        tools = (search,)

    chat = chat_of()

    def script(asked):
        """The first two answer at once, the others search."""
        return chat.encode_reply(say("done") if asked.turn or asked.index < 2 else calls(("search", {})))

    generator = ScriptedGenerator(script, stop_token_ids=chat.stop_token_ids)
    runner = RolloutRunner(Env, generator, chat, RolloutLimits(max_concurrency=3))
    request.addfinalizer(runner.close)
    assert rollout_status() is None
    future = runner.start(requests_for(6))
    # Three at a time: the first two end, and three of the other four wait for their tool.
    wait_until(lambda: rollout_status().waits.get("waiting for search", (0,))[0] == 3)
    time.sleep(1.1)
    status = rollout_status()
    assert (status.num_done, status.num_started, status.num_total) == (2, 5, 6)
    assert 1.0 <= status.waits["waiting for search"][1] < 15
    assert str(status).startswith("2 of 6 done, 3 waiting for search, longest ")
    assert str(status).endswith(" s, 1 not started")
    release.set()
    assert len(future.result(20)) == 6
    wait_until(lambda: rollout_status() is None)


def test_a_rollout_that_is_stopped_is_none_any_more(request):
    release = threading.Event()
    request.addfinalizer(release.set)

    class Env(ToolEnv):
        tools = ()

        def reset(self, example):
            release.wait(20)
            return super().reset(example)

    chat = chat_of()
    runner = RolloutRunner(Env, ScriptedGenerator(lambda _: [], stop_token_ids=chat.stop_token_ids), chat)
    runner.start(requests_for(1))
    wait_until(lambda: str(rollout_status()) == "0 of 1 done, 1 waiting for reset")
    runner.stop()
    wait_until(lambda: rollout_status() is None)


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        (["turn 0: generation", "turn 1: summary", "ended"], "1 of 3 done, 2 generating"),
        (["turn 3: tools search, search, add", "waiting"], "0 of 2 done, 1 waiting for search, add, 1 not started"),
        (["outcome_reward", "waiting for try 2"], "0 of 2 done, 1 waiting for try 2, 1 being scored"),
        (["turn 0: environment step"], "0 of 1 done, 1 waiting for environment step"),
        (["turn 0: tools \n\x1b[2J" + "x" * 100], "0 of 1 done, 1 waiting for ␛[2J" + "x" * 19 + "…"),
    ],
)
def test_what_drafts_wait_for_is_said_in_words_that_steer_no_terminal(phases, expected, request):
    drafts = [Draft(request=each) for each in requests_for(len(phases))]
    for draft, phase in zip(drafts, phases, strict=True):
        draft.enter(phase)
    end = publish(lambda: drafts)
    request.addfinalizer(lambda: end(None))
    assert str(rollout_status()) == expected

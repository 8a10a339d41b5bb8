"""One event loop for the process: clients and locks that a module keeps work in the checks and in every rollout."""

import asyncio
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time

import aiohttp
import httpx
import pytest
from aiohttp import web

from agent_r1_trl.features.doctor import check_env
from agent_r1_trl.rollout import RolloutRequest, RolloutRunner
from agent_r1_trl.testing import AddEchoEnv, ScriptedPolicy, calls, chat_of, say
from agent_r1_trl.tools import tool
from agent_r1_trl.tools.event_loop import LoopThread, give_up_loop, run_on_loop, shared_loop
from agent_r1_trl.trajectory import StopReason
from tests.rollout.helpers import PROMPT, Gate, roll_out
from tests.toys import limits_of


@pytest.fixture(scope="module")
def url():
    """A server on a loop of its own."""
    thread = LoopThread("server")

    async def begin():
        app = web.Application()

        async def answer(request):
            return web.Response(text="found")

        app.add_routes([web.get("/", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = asyncio.run_coroutine_threadsafe(begin(), thread.loop).result(10)
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), thread.loop).result(10)
    thread.end()


@pytest.fixture
def runner_of():
    """Makes a runner for an environment, with limits; closed at the end."""
    made = []

    def make(env, **limits):
        script = ScriptedPolicy([say()], chat_of())
        made.append(RolloutRunner(env, script, script.chat, limits_of(**limits)))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


class Kept:
    """What a module keeps, made when it is first used."""

    session = client = None

    def __init__(self, url):
        self.url, self.lock = url, asyncio.Lock()

    async def aiohttp(self):
        self.session = self.session or aiohttp.ClientSession()
        async with self.session.get(self.url) as answer:
            return await answer.text()

    async def httpx(self):
        self.client = self.client or httpx.AsyncClient()
        return (await self.client.get(self.url)).text

    async def locked(self):
        async with self.lock:  # which binds a lock to a loop only where somebody waits for it
            await asyncio.sleep(0.01)
        return "found"

    async def close(self):
        for each in (self.session and self.session.close(), self.client and self.client.aclose()):
            if each is not None:
                await each


@pytest.mark.parametrize("how", ["aiohttp", "httpx", "locked"])
def test_what_a_module_keeps_works_in_the_checks_and_in_all_rollouts_after_them(url, how):
    kept = Kept(url)

    @tool
    async def search(query: str = "") -> str:
        """Search.

        Args:
            query: What for.
        """
        return await getattr(kept, how)()

    class Env(AddEchoEnv):
        tools = (search,)

    assert [finding for finding in check_env(Env, [{"prompt": PROMPT}]) if finding.check == "tools"] == []
    for _ in range(2):  # each has a runner of its own, which it closes
        turns = [calls(("search", {}), ("search", {})), say()]
        for trajectory in roll_out(turns, env=Env, examples=4)[0]:
            found = [result.content for turn in trajectory.turns for result in turn.tool_results]
            assert found == ["found"] * 2
    run_on_loop(kept.close())


def test_closing_a_runner_cancels_its_own_trajectories_alone(runner_of):
    gate = Gate()
    first, second = runner_of(gate.env), runner_of(gate.env)
    asked = [RolloutRequest(example={"prompt": PROMPT})]
    of_first, of_second = first.start(asked), second.start(asked)
    gate.wait_for(2)
    first.close()
    gate.open()
    assert of_first.cancelled() and of_second.result(30)[0].stop_reason is StopReason.DONE


def test_a_run_goes_on_where_another_runner_gave_the_loop_up(runner_of, own_loop, caplog):
    """It waits longer than the other before it gives up, and the call comes back in time."""
    release, has_begun = threading.Event(), threading.Event()

    class Waits(AddEchoEnv):
        async def step(self, message):
            has_begun.set()
            await asyncio.to_thread(release.wait, 30)
            return await super().step(message)

    class Blocks(AddEchoEnv):
        async def step(self, message):
            release.wait(30)
            return await super().step(message)

    asked = [RolloutRequest(example={"prompt": PROMPT})]
    patient = runner_of(Waits).start(asked)
    assert has_begun.wait(30)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        (lost,) = runner_of(Blocks, stall_timeout=0.3).run(asked)
    assert lost.stop_reason is StopReason.ENVIRONMENT_ERROR and "held the event loop" in lost.error
    assert "is given up" in caplog.text
    assert shared_loop() is not own_loop
    release.set()
    assert patient.result(30)[0].stop_reason is StopReason.DONE
    own_loop.join(10)
    assert not own_loop.is_alive()


def test_code_on_the_loop_that_waits_for_a_loop_gets_another_one():
    async def nested():
        return run_on_loop(asyncio.sleep(0, threading.current_thread().name))

    assert run_on_loop(nested(), 30) == "rollout"
    assert shared_loop().name == "rollout"


def test_a_loop_that_is_given_up_twice_is_one_warning(caplog):
    thread = shared_loop()
    give_up_loop(thread)
    fresh = shared_loop()
    give_up_loop(thread)
    assert fresh is shared_loop() and len([text for text in caplog.messages if "is given up" in text]) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_has_a_loop_of_its_own():
    assert run_on_loop(asyncio.sleep(0, 1)) == 1
    child = os.fork()
    if not child:
        os._exit(run_on_loop(asyncio.sleep(0, 7), 10))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_process_ends_at_once_and_without_a_word_whatever_runs_on_its_loop():
    script = textwrap.dedent(
        """
        import asyncio, time
        from agent_r1_trl.tools.event_loop import run_on_loop, shared_loop

        async def background():
            try:
                await asyncio.sleep(100)
            finally:
                print("ended")

        async def begin():
            global task
            task = asyncio.create_task(background())

        run_on_loop(begin())
        """
    )
    blocked = "shared_loop().loop.call_soon_threadsafe(time.sleep, 30)\n"
    for code, said in ((script, "ended\n"), (script + blocked, "")):
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
        assert time.monotonic() - began < 25

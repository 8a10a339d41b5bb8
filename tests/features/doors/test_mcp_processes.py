"""`MCPToolset` with servers in processes of their own, which are killed, stopped and started again."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from agent_r1_trl.cli.resolve import resolve_env
from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.features.doors import MCPToolset
from agent_r1_trl.testing import ScriptedPolicy, call, calls, say
from agent_r1_trl.tools import InfrastructureError, ToolCall, ToolErrorKind, ToolExecutor
from tests.rollout.helpers import roll_out
from tests.trainers.helpers import make_trainer

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
DESK = [sys.executable, str(HERE / "mcp_server.py")]
BARE = [sys.executable, str(HERE / "mcp_bare_server.py")]


STEP = calls(("step", {}))


def execute(tools, *pairs):
    made = [ToolCall(name=name, arguments=arguments) for name, arguments in pairs]
    return asyncio.run(ToolExecutor(list(tools)).execute(made))


def env_of(toolset):
    class Env(ToolEnv):
        tools = toolset

    return Env


class Site:
    """A server at a URL, which can be killed and started again."""

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/mcp"

    def start(self):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([*DESK, str(self.port)], **quiet)
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.1)
        raise AssertionError("the server does not listen")

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def site():
    made = Site()
    made.start()
    yield made
    made.kill()


def say_in_turn(env, script, examples, **limits):
    """Trajectories that run at once, whose turns are `script(turn)`."""
    said = ScriptedPolicy(lambda request: script(request.turn), delay_s=0.05)
    found, _ = roll_out(said, env=env, examples=examples, limits={"max_concurrency": examples} | limits)
    return found


@pytest.mark.parametrize("session", ["shared", "trajectory"])
def test_a_server_at_a_url_that_is_killed_in_mid_rollout_fails_its_trajectories_and_no_other(site, session):
    env = env_of(MCPToolset(site.url, session=session))
    killer = threading.Timer(2.0, site.kill)

    def script(turn):
        if turn == 1 and not killer.ident:
            killer.start()
        return [call("add", a=1, b=2), call("wait", seconds=60), say()][turn]

    killed = say_in_turn(env, script, 4)
    assert [one.stop_reason.value for one in killed] == ["tool_failure"] * 4
    why = "cannot be reached" if session == "shared" else "The state of the trajectory went with it"
    for one in killed:
        assert [item.error for item in one.tool_results] == [None, ToolErrorKind.INFRASTRUCTURE]
        assert one.tool_results[0].content == "3" and why in one.tool_results[1].content
    site.start()
    again, _ = roll_out([call("add", a=1, b=2), say()] * 2, env=env, examples=2, limits={"max_concurrency": 1})
    assert [one.stop_reason.value for one in again] == ["done"] * 2
    site.kill()  # between two rollouts: nobody notices
    site.start()
    again, _ = roll_out([call("add", a=1, b=2), say()], env=env)
    assert again.stop_reason.value == "done"


LOUD = """
import pathlib, sys
bare, words = sys.argv[1:]
sys.stderr.write("noise " * 500_000)
sys.stderr.write("the last words")
sys.stderr.flush()
if words == "stay":
    exec(pathlib.Path(bare).read_text())
"""


@pytest.mark.parametrize("words", ["stay", "go"])
def test_what_a_command_writes_to_its_error_output_fills_nothing(words, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = [sys.executable, "-c", LOUD, BARE[1], words]
    if words == "go":
        with pytest.raises(InfrastructureError, match=r"it wrote: .*noise the last words\. Start") as caught:
            MCPToolset(command)
        assert len(str(caught.value)) < 5000
        return
    before = psutil.Process().memory_info().rss
    tools = MCPToolset(command)
    assert execute(tools, ("step", {}))[0].content.startswith("1 ")
    targets = [
        os.readlink(f"/proc/self/fd/{number}") for number in range(256) if os.path.exists(f"/proc/self/fd/{number}")
    ]
    assert not [target for target in targets if str(tmp_path) in target]
    assert psutil.Process().memory_info().rss - before < 50 * 2**20


def test_a_call_at_a_url_may_take_longer_than_mcp_waits_by_default(site, monkeypatch):
    monkeypatch.setattr("mcp.shared._httpx_utils.MCP_DEFAULT_SSE_READ_TIMEOUT", 0.5)  # 300 s
    for session in ("shared", "trajectory"):
        (waited,) = execute(MCPToolset(site.url, session=session), ("wait", {"seconds": 2}))
        assert waited.content == "waited" and waited.attempts == 1


def test_a_shared_command_that_dies_is_started_again_and_calls_in_flight_are_repeated():
    toolset = MCPToolset(DESK)
    (first,) = execute(toolset, ("step", {}))
    os.kill(int(first.content.split()[-1]), signal.SIGKILL)
    (second,) = execute(toolset, ("step", {}))
    assert second.content.startswith("1 of") and second.content != first.content and second.attempts == 2

    async def die_meanwhile():
        executor = ToolExecutor(list(toolset))
        waiting = asyncio.create_task(executor.execute([ToolCall(name="wait", arguments={"seconds": 2})]))
        await asyncio.sleep(1.0)
        os.kill(int(second.content.split()[-1]), signal.SIGKILL)
        return await waiting

    (waited,) = asyncio.run(die_meanwhile())
    assert waited.content == "waited" and waited.attempts == 2


@pytest.mark.release
def test_a_server_that_hangs_as_a_whole_is_left_and_a_busy_one_is_not():
    toolset = MCPToolset(DESK, timeout_s=2.0, connect_timeout_s=20.0)
    (first,) = execute(toolset, ("step", {}))
    (busy,) = execute(toolset, ("block", {"seconds": 4}))
    time.sleep(5.0)
    (second,) = execute(toolset, ("step", {}))
    pid = int(first.content.split()[-1])
    assert busy.error is ToolErrorKind.TIMEOUT and second.content == f"2 of {pid}"
    os.kill(pid, signal.SIGSTOP)
    (hanging,) = execute(toolset, ("step", {}))
    assert hanging.error is ToolErrorKind.TIMEOUT
    assert wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 60.0)
    (third,) = execute(toolset, ("step", {}))
    assert third.content.startswith("1 of") and third.attempts == 1


def test_the_state_of_a_trajectory_goes_with_its_server_and_is_never_begun_again_unnoticed():
    env = env_of(MCPToolset(DESK, session="trajectory"))
    lost, _ = roll_out([STEP, calls(("die", {})), STEP, say()], env=env)
    assert lost.stop_reason.value == "tool_failure" and len(lost.turns) == 2
    assert "The state of the trajectory went with it" in lost.tool_results[-1].content


@pytest.mark.parametrize("session", ["shared", "trajectory"])
def test_64_trajectories_at_once_share_a_command_or_have_one_each_which_ends_with_them(session):
    env = env_of(MCPToolset(BARE, session=session))
    rolled_out = say_in_turn(env, lambda turn: [STEP, STEP, say()][turn], 64)
    assert {one.stop_reason.value for one in rolled_out} == {"done"}
    answers = [[item.content.split() for item in one.tool_results] for one in rolled_out]
    pids = {int(pid) for one in answers for _, pid in one}
    if session == "shared":
        assert len(pids) == 1 and sorted(int(number) for one in answers for number, _ in one) == list(range(1, 129))
    else:
        assert len(pids) == 64 and all([number for number, _ in one] == ["1", "2"] for one in answers)
        assert wait_until(lambda: not any(map(psutil.pid_exists, pids)))


def wait_until(is_true, seconds=30.0):
    end = time.monotonic() + seconds
    while not is_true() and time.monotonic() < end:
        time.sleep(0.1)
    return is_true()


LEAVES = """
import asyncio, json, os, signal
from agent_r1_trl.features.doors import MCPToolset
from agent_r1_trl.tools import ToolCall, ToolExecutor

toolsets = [MCPToolset(BARE), MCPToolset(BARE, session="trajectory"), MCPToolset(DESK)]
pids = []
for tools in toolsets:
    (result,) = asyncio.run(ToolExecutor([*tools]).execute([ToolCall(name="step", arguments={})]))
    pids.append(int(result.content.split()[-1]))

async def leave():  # a call in flight
    asyncio.create_task(ToolExecutor([*toolsets[2]]).execute([ToolCall(name="wait", arguments={"seconds": 60})]))
    await asyncio.sleep(0.5)

asyncio.run(leave())
print(json.dumps(pids), flush=True)
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_nothing_is_left_when_the_process_ends(end, tmp_path):
    file = tmp_path / "leaves.py"
    file.write_text(f"BARE, DESK = {BARE!r}, {DESK!r}{LEAVES}{end}")
    ended = subprocess.run([sys.executable, "-W", "error", file], capture_output=True, text=True, timeout=240)
    assert ended.stderr == ""
    assert ended.returncode == {"": 0, "raise SystemExit(3)": 3}.get(end, -9)
    pids = json.loads(ended.stdout)
    assert len(pids) == 3 and wait_until(lambda: not any(map(psutil.pid_exists, pids)))


def length(completions, **columns):
    return [len(one[-1]["content"]) % 3 for one in completions]


def test_the_environment_of_a_recipe_trains_with_a_command(tmp_path):
    server = {"command": BARE[0], "args": BARE[1:], "env": {"PYTHONUNBUFFERED": "1"}}
    kwargs = {"server": server, "toolset": {"include": ["step"], "session": "trajectory"}, "max_calls_per_turn": 2}
    env = resolve_env("agent_r1_trl.features.doors.MCPEnv", kwargs)

    def script(rng, turn):
        return STEP if turn == 0 else say("x" * rng.randrange(1, 9))

    run = make_trainer(tmp_path, env=env, script=script, reward_funcs=[length], max_steps=2)
    run.train()
    assert [item.content.split()[0] for one in run.last_trajectories for item in one.tool_results] == ["1"] * 8
    assert run.state.log_history[0]["reward"] > 0

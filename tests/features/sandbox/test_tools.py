"""The python and shell tools in environments, rollouts and crowds."""

import asyncio
import copy
import threading
import time

import pytest

from agent_r1_trl import PythonTool, SandboxLimits, ShellTool, ToolCall, ToolEnv
from agent_r1_trl.environments.trl_adapters import FunctionToolsEnv
from agent_r1_trl.features.sandbox import SandboxResult
from agent_r1_trl.rollout.env_session import EnvSession
from agent_r1_trl.rollout.requests import RolloutRequest
from agent_r1_trl.tools import ToolErrorKind, ToolExecutor
from tests.features.sandbox.test_sandboxes import wait_until


class CodeEnv(ToolEnv):
    tools = (
        PythonTool(),
        ShellTool(),
    )


def calls(*pairs):
    entries = []
    for name, text in pairs:
        arguments = {"code" if name == "python" else "command": text}
        entries.append({"type": "function", "function": {"name": name, "arguments": arguments}})
    return {"role": "assistant", "content": "", "tool_calls": entries}


def results(env, *pairs):
    return asyncio.run(env.step(calls(*pairs))).info["tool_results"]


def started(env_class=CodeEnv):
    env = env_class()
    env.reset({"prompt": "Compute."})
    return env


class Fake:
    """A sandbox that notes what happens to it."""

    opened = closed = 0

    def __init__(self):
        type(self).opened += 1

    def run(self, code, language="python"):
        time.sleep(0.05)
        return SandboxResult(value=code)

    def close(self):
        type(self).closed += 1


class Broken:
    def run(self, code, language="python"):
        raise ConnectionError("the server is gone")

    def close(self):
        pass


def test_each_environment_has_variables_and_files_of_its_own():
    one, two = started(), started()
    results(one, ("python", "x = 1\nopen('file', 'w').close()"))
    assert results(one, ("python", "x"))[0].content == "1"
    assert "NameError" in results(two, ("python", "x"))[0].content
    assert results(two, ("shell", "ls"))[0].content == "(no output)"


def test_the_calls_of_a_turn_run_in_their_order_in_one_directory():
    found = results(started(), ("python", "open('a', 'w').write('hello')"), ("shell", "cat a"), ("python", "2 * 3"))
    assert [result.content for result in found] == ["5", "hello", "6"]


def test_what_the_code_does_wrong_is_a_failed_call_with_the_whole_story():
    env = started()
    step = asyncio.run(env.step(calls(("python", "print('before')\n1 / 0"))))
    (result,) = step.info["tool_results"]
    assert result.error is ToolErrorKind.EXCEPTION and result.is_charged
    assert result.content.startswith("before\nTraceback") and result.content.endswith("division by zero")
    assert step.reward == env.tool_error_reward
    (failed,) = results(env, ("shell", "echo out; exit 2"))
    assert (failed.content, failed.error) == ("out\nexit code 2", ToolErrorKind.EXCEPTION)


@pytest.mark.parametrize("name", ["python", "shell"])
def test_the_schema_says_what_the_tool_does(name):
    made = PythonTool() if name == "python" else ShellTool()
    assert made.signature == {"python": "python(code: string)", "shell": "shell(command: string)"}[name]
    assert "later" in made.description


def test_the_rollout_closes_the_tools_of_any_environment():
    class Fakes(Fake):
        pass

    class WithOwnClose(ToolEnv):
        tools = (PythonTool(Fakes),)

        def close(self):  # does not call ToolEnv.close
            pass

    async def roll_out(factory):
        session = EnvSession(factory, truncate=lambda text, limit: text)
        await session.reset(RolloutRequest(example={"prompt": "x"}))
        step = await session.step(calls(("python", "7")))
        await session.close()
        return step.info["tool_results"][0].content

    assert asyncio.run(roll_out(WithOwnClose)) == "7"
    assert (Fakes.opened, Fakes.closed) == (1, 1)
    assert asyncio.run(roll_out(lambda: FunctionToolsEnv([PythonTool(Fakes)]))) == "7"
    assert (Fakes.opened, Fakes.closed) == (2, 2)


def test_an_environment_that_nobody_closes_frees_its_sandbox_with_itself():
    class Fakes(Fake):
        pass

    class Env(ToolEnv):
        tools = (PythonTool(Fakes),)

    env = started(Env)
    results(env, ("python", "1"))
    del env
    import gc

    gc.collect()
    assert Fakes.closed == 1


def test_a_copied_environment_is_another_trajectory():
    env = started()
    assert [item.name for item in env.tools] == ["python", "shell"]
    other = copy.deepcopy(env)
    results(env, ("python", "x = 1"))
    results(other, ("python", "x = 2"), ("shell", "touch copied"))
    assert results(env, ("python", "x"))[0].content == "1"
    assert [r.content for r in results(other, ("python", "x"), ("shell", "ls"))] == ["2", "copied"]


def cannot_start():
    raise OSError("no machine")


@pytest.mark.parametrize(
    ("sandbox", "cause"),
    [
        (Broken, "Broken.run raised ConnectionError: the server is gone"),
        (cannot_start, "the sandbox could not be made: OSError: no machine"),
    ],
)
def test_a_sandbox_that_fails_is_the_infrastructures_fault(sandbox, cause):
    env = started(type("Env", (ToolEnv,), {"tools": [PythonTool(sandbox)]}))
    (result,) = results(env, ("python", "1"))
    assert result.is_infrastructure_failure
    assert cause in result.content


def test_64_trajectories_are_kept_busy_at_once():
    """Each sleeps for 0.5 s in its sandbox: one after another would take more than half a minute."""
    pause = "import time\ntime.sleep(0.25)"

    class Env(ToolEnv):
        tools = (PythonTool("limits"),)

    async def roll_out(number):
        env = Env()
        await env.step(calls(("python", f"x = {number}")))
        await env.step(calls(("python", pause)))
        await env.step(calls(("python", pause)))
        step = await env.step(calls(("python", "x")))
        env.tools[0].close()
        return step.observations[0]["content"]

    async def crowd():
        return await asyncio.gather(*[roll_out(number) for number in range(64)])

    began = time.monotonic()
    assert asyncio.run(crowd()) == [str(number) for number in range(64)]
    assert time.monotonic() - began < 16


def test_cancelling_a_trajectory_ends_its_call():
    env = started()
    results(env, ("python", "1"))

    async def scene():
        step = asyncio.create_task(env.step(calls(("python", "import time\ntime.sleep(60)"))))
        await asyncio.sleep(0.2)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step

        for item in env.tools:
            item.close()
        await asyncio.sleep(0.1)  # its task sees the cancellation

    began = time.monotonic()
    asyncio.run(scene())
    assert time.monotonic() - began < 5
    assert wait_until(lambda: results(env, ("python", "2"))[0].content == "2")


def test_a_time_limit_is_a_limit_of_the_sandbox():
    with pytest.raises(ValueError, match=r"timeout_s=5: .*limits=SandboxLimits\(timeout_s=5\)"):
        PythonTool(timeout_s=5)
    made = PythonTool(limits=SandboxLimits(timeout_s=0.3))
    (result,) = asyncio.run(
        ToolExecutor([made], timeout_s=0.01).execute(
            [ToolCall(name="python", arguments={"code": "import time\ntime.sleep(9)"})]
        )
    )
    assert "ran for longer than 0.3 s" in result.content
    made.close()


# -------------------------------------------------------------------- of one's own, by its path


def no_result(self, code, language="python"):
    return code


NoResult = type("NoResult", (Fake,), {"run": no_result})
Lame = type("Lame", (), {"close": Fake.close})


def needs_more(more):
    return Fake()


@pytest.mark.parametrize("mark", [":", "."])
def test_a_path_is_the_class_itself_also_in_the_environments_of_two_ranks(mark):
    path = f"{__name__}{mark}Fake"
    for _ in range(2):  # each rank makes its tools and environments by itself
        kind = type("Env", (ToolEnv,), {"tools": [PythonTool(path), ShellTool(path)]})
        one, two = started(kind), started(kind)
        opened = Fake.opened
        assert [r.content for r in results(one, ("python", "x"), ("shell", "y"))] == ["x", "y"]
        assert [r.content for r in results(two, ("python", "z"))] == ["z"]
        assert Fake.opened == opened + 2, "one for each trajectory, which its tools share"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Fak", r"has no 'Fak'\. Did you mean 'Fake'\?"),
        ("Lame", "sandbox='.*Lame' has no methods run and close"),
        ("needs_more", r"needs_more' takes \(more\): .*Name a class or a function that is called without arguments"),
        ("results", "takes"),
    ],
)
def test_what_makes_no_sandbox_is_refused_when_the_tool_is_made(name, said):
    with pytest.raises(ValueError, match=said):
        PythonTool(f"{__name__}:{name}")
    with pytest.raises(ValueError, match=r"sandbox='sandlok': unknown\. Did you mean 'sandlock'\?"):
        PythonTool("sandlok")


def test_a_sandbox_that_takes_its_time_to_start_holds_up_no_other_trajectory():
    """Two calls of one turn are waiting for it; they share it."""
    goes_on, made = threading.Event(), []

    class Slow(Fake):
        def __init__(self):
            made.append(goes_on.wait(timeout=20))

    async def run():
        executor = ToolExecutor([PythonTool(Slow)])
        two = asyncio.ensure_future(executor.execute([ToolCall(name="python", arguments={"code": x}) for x in "ab"]))
        while not made:
            await asyncio.sleep(0.01)
            goes_on.set()
        return [result.content for result in await two]

    assert asyncio.run(run()) == ["a", "b"] and made == [True]


def test_a_result_of_another_form_is_the_infrastructures_fault_and_names_the_class():
    (result,) = results(started(type("Env", (ToolEnv,), {"tools": [PythonTool(NoResult)]})), ("python", "1"))
    assert result.is_infrastructure_failure and "NoResult.run returned '1'. Return a SandboxResult" in result.content

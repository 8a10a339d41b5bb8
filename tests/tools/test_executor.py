"""The executor: calls run at once, within limits, and every failure is text that helps."""

import asyncio
import contextlib
import functools
import threading
import time

import pytest

from agent_r1_trl import ToolEnv
from agent_r1_trl.environments import FunctionToolsEnv
from agent_r1_trl.tools import Tool, ToolCall, ToolErrorKind, ToolExecutor, tool


def run(tools, *calls, **settings):
    """Execute (name, arguments) pairs or raw calls."""
    read = [ToolCall(name=call[0], arguments=call[1]) if isinstance(call, tuple) else call for call in calls]
    return asyncio.run(ToolExecutor(tools, **settings).execute(read))


@tool
def echo(text: str) -> str:
    """Give the text back.

    Args:
        text: Any text.
    """
    return text


def make_tool(body, **settings) -> Tool:
    """A tool without arguments."""
    schema = {
        "type": "function",
        "function": {"name": "t", "description": "Do it.", "parameters": {"type": "object", "properties": {}}},
    }
    return Tool(body, schema=schema, **settings)


@tool
def wait(seconds: float, label: str = "done") -> str:
    """Wait."""
    time.sleep(seconds)
    return label


@tool
async def wait_async(seconds: float, label: str = "done") -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return label


def warm(*tools):
    for item in tools:
        assert item.schema and item.check_arguments({})


# -------------------------------------------------------------------- order and concurrency


def test_results_come_in_the_order_of_the_calls_whoever_finishes_first():
    calls = [("wait", {"seconds": 0.2, "label": "a"}), ("wait_async", {"seconds": 0.0, "label": "b"}), ("no", {})]
    calls += [("wait", {"seconds": 0.0, "label": "d"}), ("wait_async", {"seconds": 0.1, "label": "e"})]
    results = run([wait, wait_async], *calls)
    assert [result.content for result in results if not result.is_error] == ["a", "b", "d", "e"]
    assert [result.call.name for result in results] == ["wait", "wait_async", "no", "wait", "wait_async"]


def test_all_calls_of_a_turn_run_at_once():
    warm(wait, wait_async)
    for item in (wait, wait_async):
        started = time.perf_counter()
        results = run([item], *[(item.name, {"seconds": 0.3})] * 10)
        assert time.perf_counter() - started < 1.2  # one after another: 3 s
        assert all(not result.is_error and 0.29 < result.latency_s < 2 for result in results)


def test_sequential_tools_run_in_the_order_of_the_calls_beside_the_others():
    seen = []

    @tool(sequential=True)
    def step(name: str) -> str:
        """Do a step."""
        time.sleep(0.05 if name == "slow" else 0)
        seen.append(name)
        return name

    warm(step, wait)
    calls = [("step", {"name": "slow"}), ("wait", {"seconds": 0.3}), ("step", {"name": "fast"})]
    results = run([step, wait], *calls)
    assert seen == ["slow", "fast"]
    assert [result.content for result in results] == ["slow", "done", "fast"]
    assert sum(result.latency_s for result in results) > 0.34


class Account:
    """Loses money if two of its methods run at the same time."""

    def __init__(self):
        self.balance = 0

    def pay_in(self, amount: int) -> str:
        """Pay in."""
        before = self.balance
        time.sleep(0.02)
        self.balance = before + amount
        return f"{self.balance}"

    def draw(self, amount: int, whence: str = "bank") -> str:
        """Draw."""
        return self.pay_in(-amount)

    async def count(self) -> str:
        """Count the money."""
        await asyncio.sleep(0.01)
        return f"{self.balance}"


FORMS = {
    "functions": lambda account: [account.pay_in, functools.partial(account.draw, whence="till"), account.count],
    "of an environment": lambda account: ToolEnv(tools=[account.pay_in, account.draw, account.count]).tools,
    "of a class": lambda account: (
        type("Env", (ToolEnv,), {"tools": [account.pay_in, account.draw, account.count]})().tools
    ),
    "TRL's functions": lambda account: FunctionToolsEnv([account.pay_in, account.draw, account.count]).tools,
}


@pytest.mark.parametrize("form", FORMS)
def test_methods_of_one_object_run_one_after_another_in_the_order_of_the_calls(form):
    account = Account()
    calls = [("pay_in", {"amount": 3}), (" draw ", {"amount": 1}), ("count", {})] * 4
    results = run(FORMS[form](account), *calls)
    assert [result.content for result in results] == [f"{2 * i + add}" for i in range(4) for add in (3, 2, 2)]


def test_context_variables_reach_tools_on_threads():
    import contextvars

    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set")
    assert run([make_tool(lambda: variable.get())], ("t", {}))[0].content == "set"


# -------------------------------------------------------------------- failures


def test_an_unknown_tool_is_answered_with_the_names_there_are():
    (result,) = run([echo], ("ehco", {"text": "a"}))
    assert result.error is ToolErrorKind.UNKNOWN_TOOL
    assert "'ehco'" in result.content and "Did you mean 'echo'?" in result.content
    assert "echo(text: string)" in result.content


def test_wrong_arguments_are_answered_with_what_is_wrong_and_the_schema():
    (result,) = run([echo], ("echo", {"txt": "a"}))
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS
    assert "'text' is a required property" in result.content and "'txt' was unexpected" in result.content
    assert '"properties": {"text": {"type": "string"}}' in result.content


def test_arguments_as_a_json_string_are_read():
    good, broken, no_object = run([echo], *[("echo", text) for text in ('{"text": "a"}', '{"text": "a', "[1]")])
    assert good.content == "a" and not good.is_error
    assert broken.error is ToolErrorKind.MALFORMED and "not valid JSON" in broken.content
    assert no_object.error is ToolErrorKind.INVALID_ARGUMENTS and "JSON object, not list" in no_object.content
    assert run([make_tool(lambda: "x")], ("t", None), ("t", ""))[1].content == "x"


@pytest.mark.parametrize(
    "call", [5, [], None, "search", {}, {"name": 3}, {"function": []}, {"name": ""}, {"name": " "}]
)
def test_what_is_no_call_is_answered_with_how_to_call(call):
    (result,) = run([echo], call)
    assert result.error is ToolErrorKind.MALFORMED
    assert "no tool name" in result.content and "echo(text: string)" in result.content


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "error",
    [
        *(SystemExit(3), KeyboardInterrupt(), StopIteration(1), asyncio.CancelledError(), TimeoutError("inner")),
        *(BaseException("base"), Unprintable()),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_tool_raises_stays_with_its_call(error, is_async):
    def fail():
        raise error

    async def fail_async():
        raise error

    bad = make_tool(fail_async if is_async else fail)
    outcome = []

    def in_thread():  # where the rollout's loop lives; a KeyboardInterrupt on the main thread would be the user's
        outcome.extend(run([bad, echo], ("t", {}), ("echo", {"text": "fine"})))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join(10)
    assert [result.error for result in outcome] == [ToolErrorKind.EXCEPTION, None]
    expected = "RuntimeError" if is_async and isinstance(error, StopIteration) else ""
    assert (expected or type(error).__name__) in outcome[0].content


def test_a_keyboard_interrupt_in_an_async_tool_on_the_main_thread_is_the_users():
    async def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([make_tool(interrupted)], ("t", {}))


def test_a_tool_without_a_usable_schema_fails_its_call_only():
    def look(x: int = "one"):
        """Look."""

    bad, good = run([look, echo], ("look", {"x": 1}), ("echo", {"text": "a"}))
    assert bad.error is ToolErrorKind.INFRASTRUCTURE and "x='one' contradicts its type hint" in bad.content
    assert good.content == "a"


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"tools.*'echo'"):
        ToolExecutor([echo, Tool(echo.fn, name="echo")])


# -------------------------------------------------------------------- time


def test_a_call_that_takes_too_long_is_given_up_and_the_others_are_not():
    release = threading.Event()

    def hang():
        release.wait(30)

    results = run([make_tool(hang), echo], ("t", {}), ("echo", {"text": "a"}), timeout_s=0.2)
    release.set()
    assert results[0].error is ToolErrorKind.TIMEOUT and "took longer than 0.2 s" in results[0].content
    assert 0.2 <= results[0].latency_s < 2
    assert results[1].content == "a"


def test_an_async_tool_that_swallows_its_cancellation_is_given_up_all_the_same():
    async def stubborn():
        for _ in range(100):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    async def main():
        started = time.perf_counter()
        results = await ToolExecutor([make_tool(stubborn)], timeout_s=0.1).execute([ToolCall(name="t", arguments={})])
        return results, time.perf_counter() - started

    loop = asyncio.new_event_loop()
    results, seconds = loop.run_until_complete(main())
    assert results[0].error is ToolErrorKind.TIMEOUT and seconds < 3


def test_the_tools_own_timeout_comes_before_the_executors():
    quick = make_tool(lambda: time.sleep(0.3), timeout_s=0.05)
    assert run([quick], ("t", {}), timeout_s=10)[0].error is ToolErrorKind.TIMEOUT
    slow = make_tool(lambda: time.sleep(0.2) or "x", timeout_s=5)
    assert run([slow], ("t", {}), timeout_s=0.05)[0].content == "x"


def test_waiting_for_a_free_worker_is_not_the_tools_time():
    results = run([make_tool(lambda: time.sleep(0.1))], *[("t", {})] * 6, max_workers=1, timeout_s=0.4)
    assert not any(result.is_error for result in results)
    assert all(0.09 < result.latency_s < 0.4 for result in results), "their own time"
    assert sorted(result.queue_s for result in results)[-1] > 0.45, "and, apart from it, that of five others"


def test_a_call_that_gets_no_thread_is_not_the_models_fault():
    release = threading.Event()
    tools = [make_tool(lambda: release.wait(20)), echo]
    results = run(tools, ("t", {}), ("echo", {"text": "a"}), max_workers=1, queue_timeout_s=0.1, timeout_s=0.5)
    release.set()
    assert [result.error for result in results] == [ToolErrorKind.TIMEOUT, ToolErrorKind.INFRASTRUCTURE]
    assert "could not start: no thread was free for 0.1 s" in results[1].content
    assert results[1].queue_s >= 0.1 and results[1].latency_s == 0.0


def test_cancelling_a_turn_lets_its_calls_go():
    release = threading.Event()
    hang = make_tool(lambda: release.wait(30))
    executor = ToolExecutor([hang, echo], max_workers=1)

    async def main():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(executor.execute([ToolCall(name="t", arguments={})] * 3), timeout=0.1)
        return await asyncio.wait_for(executor.execute([ToolCall(name="echo", arguments={"text": "a"})]), timeout=5)

    results = asyncio.run(main())
    release.set()
    assert results[0].content == "a"


def test_a_plain_function_that_returns_a_coroutine_is_awaited_within_the_time():
    assert run([make_tool(lambda: asyncio.sleep(0.0, "slept"))], ("t", {}))[0].content == "slept"
    late = make_tool(lambda: asyncio.sleep(5), timeout_s=0.05)
    assert run([late], ("t", {}))[0].error is ToolErrorKind.TIMEOUT


# -------------------------------------------------------------------- results


def test_a_long_result_is_cut_and_says_so():
    (result,) = run([Tool(echo.fn, max_result_chars=10)], ("echo", {"text": "0123456789abcdef"}))
    assert result.is_truncated
    assert result.content == "0123456789\n[truncated: the first 10 of 16 characters are shown]"
    (whole,) = run([Tool(echo.fn, max_result_chars=16)], ("echo", {"text": "0123456789abcdef"}))
    assert not whole.is_truncated and whole.content == "0123456789abcdef"


def test_a_result_that_cannot_be_encoded_or_shown_becomes_text():
    class Unshown:
        def __str__(self):
            raise ValueError("cannot be shown")

    async def later():
        return Unshown()

    results = run([make_tool(lambda: "\ud800x")], ("t", {})) + run([make_tool(lambda: Unshown())], ("t", {}))
    results += run([make_tool(later)], ("t", {}))
    for result, text in zip(results, ("?x", "cannot be shown", "cannot be shown"), strict=True):
        assert text in result.content


def test_a_tool_cannot_change_the_recorded_call():
    @tool
    def spoil(items: list[int]) -> str:
        """Empty a list."""
        items.clear()
        return "ok"

    call = ToolCall(name="spoil", arguments={"items": [1, 2]})
    (result,) = run([spoil], call)
    assert result.call.arguments == {"items": [1, 2]} and not result.is_error

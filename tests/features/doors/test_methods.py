"""`tools_from`: the methods of any object as tools, of which no two run at the same time."""

import asyncio
import contextlib
import functools
import threading
import time

import pytest

from agent_r1_trl.features.doors import tools_from
from agent_r1_trl.tools import ToolCall, ToolErrorKind, ToolExecutor, ToolSchemaError, tool


class Stack:
    """Things on top of each other."""

    def __init__(self):
        self.items = []

    def push(self, item: int) -> str:
        """Put a number on top.

        Args:
            item: Any number.
        """
        self.items.append(item)
        return f"{len(self.items)} items"

    def top(self) -> int:
        """The number on top."""
        return self.items[-1]

    @tool(timeout_s=7)
    def peek(self) -> int:
        """Look at the number on top."""
        return self.items[-1]

    @staticmethod
    def double(item: int) -> int:
        """Twice a number.

        Args:
            item: Any number.
        """
        return 2 * item

    @property
    def broken(self):
        raise RuntimeError("properties are not read")

    @functools.cached_property
    def broken_later(self):
        raise RuntimeError("nor those that are read once")

    def _private(self):
        """Nobody's business."""


class Busy:
    """Notices calls that run at the same time."""

    def __init__(self):
        self.inside = self.most = 0

    @contextlib.contextmanager
    def _noticed(self):
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            yield
        finally:
            self.inside -= 1

    def work(self, seconds: float = 0.02) -> str:
        """Work.

        Args:
            seconds: How long.
        """
        with self._noticed():
            time.sleep(seconds)
        return "worked"

    async def nap(self, seconds: float = 0.02) -> str:
        """Sleep.

        Args:
            seconds: How long.
        """
        with self._noticed():
            await asyncio.sleep(seconds)
        return "slept"


def named(tools):
    return {item.name: item for item in tools}


async def run_all(tools, *names, **options):
    """Each call in a turn of its own, all at once, as trajectories make them."""
    executors = [ToolExecutor(tools, **options) for _ in names]
    turns = [item.execute([ToolCall(name=name, arguments={})]) for item, name in zip(executors, names, strict=True)]
    return [results[0] for results in await asyncio.gather(*turns)]


def test_public_methods_are_tools_with_the_hints_docstrings_and_settings_of_their_own():
    found = named(tools_from(Stack()))
    assert list(found) == ["push", "top", "peek", "double"]
    assert found["push"].signature == "push(item: integer)" and found["push"].description == "Put a number on top."
    assert found["peek"].timeout_s == 7 and found["top"].timeout_s is None
    assert all(item.sequential for item in found.values())


def test_include_and_exclude_take_names_and_patterns_and_refuse_what_fits_no_method():
    stack = Stack()
    assert list(named(tools_from(stack, include=["p*", "top"], exclude="peek"))) == ["push", "top"]
    with pytest.raises(
        ValueError, match=r"tools_from\(Stack\): include='pull'.*\['pull'\] fits none of \['push'.*Correct"
    ):
        tools_from(stack, include="pull")
    with pytest.raises(ValueError, match="nothing is left"):
        tools_from(stack, exclude="*")
    with pytest.raises(ValueError, match=r"tools_from: obj=.*an object, and no class"):
        tools_from(Stack)


class Undescribed:
    def move(self, dx: int, how, far=3, *rest):
        return f"{dx + far} {how}"

    async def look(self, at: threading.Lock):
        return f"{at}"


def test_methods_without_hints_or_docstrings_need_lenient_and_keep_what_they_say():
    with pytest.raises(ToolSchemaError, match=r"'how' has no type hint.*exclude=\['move'\], or lenient=True"):
        tools_from(Undescribed(), include="move")
    found = named(tools_from(Undescribed(), lenient=True))
    assert found["move"].signature == "move(dx: integer, how: any, far?: any)" and found["move"].description == "Move."
    assert found["look"].signature == "look(at: any)" and found["look"].is_async
    asked = [ToolCall(name="move", arguments=arguments) for arguments in ({"dx": 1, "how": ["a"]}, {"dx": "x"})]
    good, bad = asyncio.run(ToolExecutor(list(found.values())).execute(asked))
    assert good.content == "4 ['a']" and bad.error is ToolErrorKind.INVALID_ARGUMENTS
    numbers = [1]
    (append,) = tools_from(numbers, include="append", lenient=True)  # positional only
    asyncio.run(ToolExecutor([append]).execute([ToolCall(name="append", arguments={"object": 2})]))
    assert numbers == [1, 2]


@pytest.mark.parametrize("lenient", [False, True])
def test_a_method_that_yields_is_refused_with_the_way_out(lenient):
    class Pages:
        def read(self) -> str:
            """Read."""
            return "all"

        def pages(self):
            """Read page by page."""
            yield "one"

    with pytest.raises(ToolSchemaError, match=r"'pages' yields: .* Or pass exclude=\['pages'\]"):
        tools_from(Pages(), lenient=lenient)
    assert [item.name for item in tools_from(Pages(), exclude="pages", lenient=lenient)] == ["read"]


def test_calls_on_one_object_never_run_at_the_same_time_whoever_makes_them_and_whatever_they_are():
    busy = Busy()
    tools, others = tools_from(busy), tools_from(busy)

    async def both():
        names = ["work", "nap"] * 6
        return [*await asyncio.gather(run_all(tools, *names), run_all(others, *names))]

    results = [item for group in asyncio.run(both()) for item in group]
    assert [item.error for item in results] == [None] * 24 and busy.most == 1
    assert max(item.queue_s for item in results if item.call.name == "work") > 0.1  # the wait is not the tool's time
    asyncio.run(run_all(tools_from(busy, parallel=True), *["work", "nap"] * 6))
    assert busy.most > 1


def test_async_methods_whose_arguments_have_no_names_take_turns_too():
    class Lift:
        num_inside = 0

        async def ride(self, floor, /):
            self.num_inside += 1
            await asyncio.sleep(0.05)
            self.num_inside -= 1
            return f"{floor}, {self.num_inside} others"

    async def both():
        lift, rides = Lift(), [ToolCall(name="ride", arguments={"floor": 2})]
        executors = [ToolExecutor(tools_from(lift, lenient=True)) for _ in range(2)]
        return await asyncio.gather(*(executor.execute(rides) for executor in executors))

    assert [item.content for (item,) in asyncio.run(both())] == ["2, 0 others"] * 2


def test_two_objects_do_not_wait_for_each_other():
    tools = [tools_from(Busy())[0] for _ in range(4)]

    async def all_at_once():
        work = ToolCall(name="work", arguments={"seconds": 0.3})
        began = time.monotonic()
        await asyncio.gather(*(ToolExecutor([item]).execute([work]) for item in tools))
        return time.monotonic() - began

    assert asyncio.run(all_at_once()) < 0.9


@pytest.mark.parametrize("name", ["work", "nap"])
def test_after_a_call_that_was_given_up_the_object_is_free_only_when_it_has_ended(name):
    busy = Busy()
    tools = tools_from(busy)

    async def one_after_another():
        executor = ToolExecutor(tools, timeout_s=0.2)
        (first,) = await executor.execute([ToolCall(name=name, arguments={"seconds": 0.8})])
        (second,) = await executor.execute([ToolCall(name="work", arguments={})])
        await asyncio.sleep(1.0)
        (third,) = await executor.execute([ToolCall(name="nap", arguments={})])
        return first, second, third

    first, second, third = asyncio.run(one_after_another())
    assert first.error is ToolErrorKind.TIMEOUT and third.error is None
    expected = ToolErrorKind.INFRASTRUCTURE if name == "work" else None  # an async call ends when it is cancelled
    assert second.error is expected and busy.most == 1

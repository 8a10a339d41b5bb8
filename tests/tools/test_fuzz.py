"""Whatever a model writes as calls, every call gets one readable result."""

import asyncio
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1_trl.tools import ToolCall, ToolExecutor, ToolResult, read_calls, tool
from tests.effort import examples


@tool
def mix(text: str, number: int = 0, items: list[float] | None = None, table: dict[str, int] | None = None) -> str:
    """Take a bit of everything.

    Args:
        text: Text.
        number: A number.
        items: Numbers.
        table: A table.
    """
    assert isinstance(text, str) and isinstance(number, int) and not isinstance(number, bool)
    assert items is None or isinstance(items, list)
    assert table is None or isinstance(table, dict)
    return f"{text} {number} {items} {table}"


@tool
async def mix_async(text: str) -> str:
    """Take text.

    Args:
        text: Text.
    """
    return text


EXECUTOR = ToolExecutor([mix, mix_async])

surrogates = st.text(alphabet=st.characters(), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | surrogates,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(surrogates, inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from(["mix", "mix_async", "Mix", "mix ", "", "search", "\ud800"]) | surrogates
arguments = (
    st.fixed_dictionaries(
        {},
        optional={
            "text": json_values,
            "number": json_values,
            "items": json_values,
            "table": json_values,
            "x": json_values,
        },
    )
    | json_values
    | json_values.map(lambda value: json.dumps(value))
)
functions = st.fixed_dictionaries({}, optional={"name": names | json_values, "arguments": arguments})
calls = st.fixed_dictionaries(
    {}, optional={"type": json_values, "id": json_values, "function": functions | json_values}
)


def check(results: list[ToolResult], count: int) -> None:
    assert len(results) == count
    for result in results:
        assert isinstance(result.content, str) and result.content
        result.content.encode("utf-8")
        assert result.error is None or result.content.startswith("Error: ")
        assert len(result.content) < 30_000


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(calls | json_values, max_size=4) | json_values)
def test_any_json_as_tool_calls_is_answered_call_by_call(tool_calls):
    read = read_calls({"role": "assistant", "content": "", "tool_calls": tool_calls})
    assert len({call.id for call in read}) == len(read)
    check(asyncio.run(EXECUTOR.execute(read)), len(read))


@settings(max_examples=examples(150), deadline=None)
@given(arguments)
def test_the_function_only_ever_sees_arguments_of_its_types(given_arguments):
    (result,) = asyncio.run(EXECUTOR.execute([ToolCall(name="mix", arguments=given_arguments)]))
    check([result], 1)
    assert "AssertionError" not in result.content


def test_numbers_too_long_to_print_and_nesting_too_deep_are_answered():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    wide = {"text": 10**10_000}
    strange = [deep, wide, {"text": deep}, {"table": {"a": 10**5000}, "text": "x"}, "[" * 100_000, '{"text": 1e999}']
    results = asyncio.run(EXECUTOR.execute([ToolCall(name="mix", arguments=value) for value in strange]))
    check(results, len(strange))

"""The Tool object: still a function, and a method where it was defined as one."""

import functools
import math

import pytest

from agent_r1_trl.tools import Tool, as_tool, tool


@tool
def shout(text: str, times: int = 1) -> str:
    """Repeat a text in capitals.

    Args:
        text: What to shout.
        times: How often.
    """
    return text.upper() * times


def test_a_decorated_function_is_still_called_as_a_function():
    assert shout("a", times=2) == "AA"
    assert shout.__name__ == "shout"
    assert "Repeat a text" in shout.__doc__


def test_the_decorator_takes_settings():
    @tool(timeout_s=5, max_result_chars=7, name="whisper")
    def speak() -> str:
        """Speak."""
        return "x"

    assert (speak.name, speak.timeout_s, speak.max_result_chars) == ("whisper", 5.0, 7)


def test_as_tool_passes_tools_through_and_wraps_functions():
    assert as_tool(shout) is shout
    assert as_tool(shout.fn).name == "shout"
    for wrong, named in ((5, "tools: 5"), (dict, "tools: <class 'dict'>")):
        with pytest.raises(ValueError, match=named):
            as_tool(wrong)


def test_decorating_twice_or_with_a_value_is_refused():
    for wrong, named in ((shout, "'shout'.*@tool"), (5, "tools: 5")):
        with pytest.raises(ValueError, match=named):
            tool(wrong)


def test_limits_out_of_range_are_refused():
    limits = {
        "timeout_s": (0, -1, math.nan, math.inf, True, "3"),
        "max_result_chars": (0, -1, 2.5, True),
    }
    for name, values in limits.items():
        for value in values:
            with pytest.raises(ValueError, match=f"{name}={value!r}"):
                Tool(len, **{name: value})


def test_a_tool_in_a_class_body_binds_to_its_instance():
    class Counter:
        def __init__(self):
            self.value = 0

        @tool
        def add(self, number: int) -> str:
            """Add a number.

            Args:
                number: How much.
            """
            self.value += number
            return str(self.value)

        @tool
        @staticmethod
        def twice(number: int) -> int:
            """Double a number.

            Args:
                number: What.
            """
            return 2 * number

    first, second = Counter(), Counter()
    assert first.add(2) == "2" and first.add(number=3) == "5" and second.value == 0
    assert Counter.add.is_method and not first.add.is_method
    assert first.add.sequential is True and Counter.add.sequential is None
    assert (first.twice(4), Counter.twice(4)) == (8, 8)
    assert first.add.schema["function"]["parameters"]["required"] == ["number"]


def test_arguments_are_checked_against_the_schema_and_never_coerced_silently():
    assert shout.check_arguments({"text": "a"}) == ({"text": "a"}, [])
    for wrong in ({}, {"text": 5}, {"text": "a", "times": "2"}, {"text": "a", "times": True}, {"text": "a", "x": 1}):
        assert shout.check_arguments(wrong)[1], wrong
    for no_object in ([], "a", 5, None, [["text", "a"]]):
        assert "JSON object" in shout.check_arguments(no_object)[1][0]


def test_async_functions_are_recognised_through_partials_and_objects():
    async def fetch():
        """Fetch."""

    class Fetcher:
        async def __call__(self):
            """Fetch."""

    assert Tool(fetch).is_async
    assert Tool(functools.partial(fetch)).is_async
    assert Tool(Fetcher()).is_async
    assert not shout.is_async

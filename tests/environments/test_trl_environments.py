"""What TRL scripts bring along: functions as tools, and environment_factory classes, behaving as in TRL 1.16."""

import asyncio
import functools
import subprocess
import sys
from typing import ClassVar

import pytest

from agent_r1_trl.environments import FunctionToolsEnv, ToolEnv, TRLEnvAdapter
from agent_r1_trl.environments.factory import read_form, users_environments
from agent_r1_trl.tools import Tool, calculator, tool
from agent_r1_trl.trajectory import ToolErrorKind
from tests.environments.helpers import finished, message


def multiply(a: int, b: int) -> dict:
    """Multiply two integers."""
    return {"product": a * b}


class CounterEnv:
    """As in TRL's documentation: public methods are tools."""

    def reset(self, **row) -> str | None:
        self.row = row
        self.value = 0
        return row.get("hint")

    def increment(self, step: int) -> int:
        """Increment the counter."""
        self.value += step
        return self.value

    async def async_double(self) -> str:
        """Double the counter."""
        await asyncio.sleep(0)
        self.value *= 2
        return f"now {self.value}"

    def get_reward(self) -> float:
        return float(self.value)

    def _hidden(self):
        raise AssertionError("private methods are no tools")

    @property
    def expensive(self):
        raise AssertionError("properties are not evaluated")


class SilentEnv:
    def reset(self, **row):
        return None

    def look(self) -> str:
        """Look around."""
        return "nothing"


def contents(env, *calls):
    return [item["content"] for item in asyncio.run(env.step(message(*calls))).observations]


def outcome(env):
    return asyncio.run(env.outcome_reward(finished()))


PROMPT = [{"role": "system", "content": "s"}, {"role": "user", "content": "go"}]


# -------------------------------------------------------------------- tools=[functions]


def test_functions_are_tools_that_earn_nothing():
    env = FunctionToolsEnv([multiply])
    assert env.reset({"prompt": PROMPT}) == PROMPT
    step = asyncio.run(env.step(message(("multiply", {"a": 6, "b": 7}), ("multiply", {"a": 6}))))
    assert step.reward == 0.0 and not FunctionToolsEnv.has_reward
    assert step.observations[0]["content"] == "{'product': 42}"  # str(), as TRL shows it
    assert step.info["tool_results"][1].error is ToolErrorKind.INVALID_ARGUMENTS


def test_a_tool_of_ours_keeps_its_own_settings():
    mine = tool(name="times", timeout_s=3)(multiply)
    assert FunctionToolsEnv([mine]).tools == [mine]


@pytest.mark.parametrize("tools", [[5], [multiply, Tool(calculator.fn, name="multiply")]])
def test_what_is_no_function_and_two_of_one_name_are_refused(tools):
    with pytest.raises(ValueError, match=r"^tools"):
        FunctionToolsEnv(tools)


# -------------------------------------------------------------------- environment_factory


def test_reset_receives_the_row_as_keywords_and_its_text_is_appended_to_the_prompt():
    env = TRLEnvAdapter(CounterEnv)
    row = {"prompt": PROMPT, "hint": " (hurry)", "answer": 3}
    assert env.reset(row) == [PROMPT[0], {"role": "user", "content": "go (hurry)"}]
    assert env.environment.row == row and PROMPT[1]["content"] == "go"


def test_a_row_without_a_prompt_starts_from_what_reset_says():
    assert TRLEnvAdapter(CounterEnv).reset({"hint": "Count."}) == [{"role": "user", "content": "Count."}]


def test_content_blocks_are_appended_as_in_trl():
    class Blocks(SilentEnv):
        def reset(self, **row):
            return row["observation"]

    text = {"type": "text", "text": "b"}
    env = TRLEnvAdapter(Blocks)
    assert env.reset({"prompt": "a", "observation": [text]})[-1]["content"] == [{"type": "text", "text": "a"}, text]
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert env.reset({"prompt": chat, "observation": "b"})[-1]["content"] == [{"type": "text", "text": "a"}, text]
    with pytest.raises(ValueError, match="environment_factory: reset"):
        env.reset({"prompt": "a", "observation": 5})


def test_methods_change_the_state_one_after_another_in_the_order_of_the_calls():
    env = TRLEnvAdapter(CounterEnv)
    env.reset({"prompt": "go"})
    assert contents(env, ("increment", {"step": 2}), ("async_double", {}), ("increment", {"step": 1})) == [
        "2",
        "now 4",
        "5",
    ]
    assert outcome(env) == (5.0, {"CounterEnv": 5.0})


def test_a_reward_that_is_no_number_is_named():
    class Broken(CounterEnv):
        def get_reward(self):
            return "much"

    env = TRLEnvAdapter(Broken)
    env.reset({"prompt": "go"})
    with pytest.raises(ValueError, match=r"Broken\.get_reward"):
        outcome(env)


def test_the_environment_column_chooses_among_factories_and_is_not_passed_on():
    env = TRLEnvAdapter({"count": CounterEnv, "silent": SilentEnv}, [multiply])
    assert [item.name for item in env.tools] == ["multiply", "async_double", "increment", "look"]
    env.reset({"prompt": "go", "environment": "silent"})
    assert [item.name for item in env.tools] == ["multiply", "look"]
    assert contents(env, ("look", {}))[0] == "nothing"
    env.reset({"prompt": "go", "environment": "count"})
    assert "environment" not in env.environment.row
    assert contents(env, ("increment", {"step": 3}))[0] == "3"


def test_only_the_chosen_environment_is_made_for_a_trajectory():
    made = []

    class Heavy(SilentEnv):
        def __init__(self):
            made.append(1)

    env = TRLEnvAdapter({"heavy": Heavy, "silent": SilentEnv})
    env.reset({"prompt": "go", "environment": "silent"})
    assert contents(env, ("look", {})) == ["nothing"] and made == []


def test_an_unknown_environment_lists_the_known_ones():
    env = TRLEnvAdapter({"count": CounterEnv})
    for row in ({"prompt": "go", "environment": "chess"}, {"prompt": "go"}):
        with pytest.raises(ValueError, match=r"environment=.*'count'"):
            env.reset(row)


def test_what_is_not_a_factory_is_refused():
    without_reset = type("NoReset", (), {})
    cases = ((5, "=5"), ({}, "={}"), ({"a": 5}, "={'a': 5}"), (without_reset, r": NoReset.*reset\("))
    for factory, named in cases:
        with pytest.raises(ValueError, match=f"environment_factory{named}"):
            TRLEnvAdapter(factory)


def test_a_method_with_the_name_of_a_function_is_refused():
    def look() -> str:
        """Look elsewhere."""
        return ""

    with pytest.raises(ValueError, match=r"tools.*'look'"):
        TRLEnvAdapter(SilentEnv, [look])


# -------------------------------------------------------------------- what other people's classes look like


def helper(x: int) -> int:
    """Add one."""
    return x + 1


class Manners(SilentEnv):
    """Attributes of every kind beside an inherited tool."""

    limit = 5
    names: ClassVar[list] = []
    shared = staticmethod(helper)

    @property
    def broken(self):
        raise RuntimeError("a property is not evaluated")

    @staticmethod
    def double(x: int) -> int:
        """Double a number."""
        return 2 * x

    @classmethod
    def triple(cls, x: int) -> int:
        """No tool to TRL: a class method is no function of the class."""
        return 3 * x

    def __call__(self, x):
        return x

    def __getattr__(self, name):
        raise AttributeError(name)


class Names(SilentEnv):
    """Tools with the names of what an environment of ours has."""

    def tools(self) -> str:
        """List."""
        return "tools"

    def close(self) -> str:
        """Close the door."""
        return "closed"

    def seed(self) -> str:
        """Sow."""
        return "sown"

    def step(self) -> str:
        """Walk."""
        return "walked"


@pytest.mark.parametrize(
    ("cls", "answers"),
    [
        (Manners, {"double": "4", "look": "nothing", "helper": "3"}),
        (Names, {"close": "closed", "look": "nothing", "seed": "sown", "step": "walked", "tools": "tools"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_tools_of_a_foreign_class_are_those_that_trl_finds(cls, answers):
    env = TRLEnvAdapter(cls)
    env.reset({"prompt": "go"})
    takes_x = {item.name: {"x": 2} if "x" in str(item.schema) else {} for item in env.tools}
    assert {name: contents(env, (name, arguments))[0] for name, arguments in takes_x.items()} == answers
    assert not env.has_reward
    assert read_form(functools.partial(TRLEnvAdapter, cls)).reward_classes == []


def test_a_static_get_reward_scores_and_an_attribute_does_not():
    class Static(SilentEnv):
        @staticmethod
        def get_reward():
            return 0.5

    class Attribute(SilentEnv):
        get_reward = 3.0

    assert read_form(functools.partial(TRLEnvAdapter, {"a": Static, "b": Attribute})).reward_classes == [Static]


def test_reward_functions_receive_the_users_instances_and_no_adapters():
    adapter, mine = TRLEnvAdapter(SilentEnv), ToolEnv()
    mine.environment = "an attribute of the user's"
    assert users_environments([adapter, mine, None], TRLEnvAdapter) == [adapter.environment, mine, None]
    assert users_environments([FunctionToolsEnv([multiply]), None], FunctionToolsEnv) is None


LEFT_TO_THE_EXIT = """
import asyncio, dataclasses, threading
from agent_r1_trl.environments import TRLEnvAdapter

@dataclasses.dataclass  # not hashable
class Sandbox:
    name: str = "sandbox"

    def __post_init__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def reset(self, **row):
        pass

    def look(self) -> str:
        '''Look around.'''

    async def _stop(self):
        print("stopped", flush=True)

    def __del__(self):
        asyncio.run_coroutine_threadsafe(self._stop(), self.loop).result()

dropped, kept = TRLEnvAdapter(Sandbox), TRLEnvAdapter(Sandbox)
del dropped
print("the last line", flush=True)
"""


def test_an_environment_that_ends_by_del_does_not_hold_up_the_end_of_the_script():
    done = subprocess.run([sys.executable, "-c", LEFT_TO_THE_EXIT], capture_output=True, text=True, timeout=60)
    assert (done.stdout.split("\n"), done.stderr) == (["stopped", "the last line", "stopped", ""], "")

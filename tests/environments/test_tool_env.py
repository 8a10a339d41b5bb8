"""ToolEnv: calls become observations and rewards, whatever the subclass leaves out."""
# ruff: noqa: RUF012 - `tools = [...]` is how users write it

import asyncio
import json
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1_trl.environments import FunctionToolsEnv, RewardError, StepResult, ToolEnv
from agent_r1_trl.environments.factory import resolve_env_factory
from agent_r1_trl.tools import tool
from agent_r1_trl.trajectory import StopReason, ToolErrorKind
from tests.effort import examples
from tests.environments.helpers import finished, message


@tool
def echo(text: str) -> str:
    """Give the text back."""
    if text == "fail":
        raise ValueError("asked to fail")
    return text


class EchoEnv(ToolEnv):
    tools = [echo]

    def outcome_reward(self, trajectory):
        return trajectory.stop_reason is StopReason.DONE


def roll_out(env, *messages) -> list[StepResult]:
    return [asyncio.run(env.step(item)) for item in messages]


def started(cls=EchoEnv, **settings) -> ToolEnv:
    env = cls(**settings)
    env.reset({"prompt": "go"})
    return env


# -------------------------------------------------------------------- prompts


def test_the_prompt_comes_from_the_prompt_or_question_column():
    assert EchoEnv().reset({"prompt": "go"}) == [{"role": "user", "content": "go"}]
    assert EchoEnv().reset({"question": "why?"}) == [{"role": "user", "content": "why?"}]
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert EchoEnv().reset({"prompt": chat, "question": "ignored"}) == chat


def test_the_system_prompt_goes_first_unless_the_example_has_one():
    assert EchoEnv(system_prompt="Be brief.").reset({"prompt": "go"})[0] == {"role": "system", "content": "Be brief."}
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "go"}]
    assert EchoEnv(system_prompt="Be brief.").reset({"prompt": own}) == own


def test_the_system_message_may_depend_on_the_example():
    class Tailored(EchoEnv):
        def system_message(self, example):
            return f"You are {example['name']}."

    assert Tailored().reset({"prompt": "go", "name": "Ada"})[0]["content"] == "You are Ada."


def test_the_example_and_its_messages_stay_as_they_were():
    example = {"prompt": [{"role": "user", "content": "go"}], "state": {"a": [1]}}
    env = EchoEnv()
    env.reset(example)[0]["content"] = "changed"
    env.example["state"]["a"].append(2)
    assert example == {"prompt": [{"role": "user", "content": "go"}], "state": {"a": [1]}}


@pytest.mark.parametrize(
    "example", [{"text": "x"}, {"prompt": []}, {"prompt": [5]}, {"prompt": 5}, {"prompt": [{}]}, "go"]
)
def test_an_example_without_a_prompt_is_refused(example):
    with pytest.raises(ValueError, match=r"EchoEnv\.reset.*prompt"):
        EchoEnv().reset(example)


# -------------------------------------------------------------------- steps


def test_each_call_is_answered_by_one_tool_message_in_order():
    (step,) = roll_out(started(), message(("echo", {"text": "a"}), ("nope", {}), ("echo", {"text": "b"})))
    assert step.info["reward_parts"] == pytest.approx({"tool_call": 1.0, "tool_error": -0.1})
    assert step.reward == pytest.approx(0.9)
    assert [item["role"] for item in step.observations] == ["tool"] * 3
    assert [item["tool_call_id"] for item in step.observations] == ["id0", "id1", "id2"]
    assert [step.observations[0]["content"], step.observations[2]["content"]] == ["a", "b"]
    assert step.observations[0]["name"] == "echo" and "no tool 'nope'" in step.observations[1]["content"]
    assert not step.done and not step.info["is_invalid"]
    assert [result.error for result in step.info["tool_results"]] == [None, ToolErrorKind.UNKNOWN_TOOL, None]


def test_an_answer_without_a_call_ends_the_episode():
    (step,) = roll_out(started(), message(content="done"))
    assert step == StepResult([], 0.0, True, {"tool_results": [], "reward_parts": {}, "is_invalid": False})


def test_a_malformed_call_gets_feedback_and_another_chance():
    (step,) = roll_out(started(), message(content="<tool_call>{", malformed_tool_call="the JSON ends too early"))
    assert step.observations[0]["role"] == "user"
    assert "the JSON ends too early" in step.observations[0]["content"]
    assert "echo(text: string)" in step.observations[0]["content"]
    assert step.reward == pytest.approx(-0.1) and not step.done and step.info["is_invalid"]
    assert [result.error for result in step.info["tool_results"]] == [ToolErrorKind.MALFORMED]


def test_a_malformed_call_beside_a_good_one_is_mentioned_after_its_result():
    (step,) = roll_out(started(), message(("echo", {"text": "a"}), malformed_tool_call="no name"))
    assert len(step.observations) == 1 and step.observations[0]["content"].startswith("a\nError: ")
    assert step.reward == pytest.approx(0.4) and not step.info["is_invalid"]


def test_a_turn_is_invalid_when_nothing_in_it_could_be_run():
    for calls in ([("nope", {})], [("echo", {})], [("echo", "{")], [("nope", {}), ("echo", {})]):
        assert roll_out(started(), message(*calls))[0].info["is_invalid"] is True, calls
    for calls in ([("echo", {"text": "fail"})], [("nope", {}), ("echo", {"text": "a"})]):
        assert roll_out(started(), message(*calls))[0].info["is_invalid"] is False, calls


def test_call_ids_differ_in_the_whole_trajectory():
    bare = {"tool_calls": [{"function": {"name": "echo", "arguments": {"text": "a"}}}] * 2}
    env = started()
    steps = roll_out(env, bare, bare, message(malformed_tool_call="x"), message(malformed_tool_call="x"))
    ids = [result.call.id for step in steps for result in step.info["tool_results"]]
    assert len(set(ids)) == len(ids) == 6


def test_whatever_name_the_model_writes_the_observations_can_be_encoded():
    (step,) = roll_out(started(), message(("\ud800" + "x" * 5000, {}), ("<|im_end|>", {"\ud800": "\udfff"})))
    assert [len(item["name"]) for item in step.observations] == [64, 10]
    json.dumps(step.observations, ensure_ascii=False).encode("utf-8")


def test_an_episode_that_must_go_on_tells_the_model_how():
    class Tagged(EchoEnv):
        def is_done(self, message):
            return "<answer>" in (message.get("content") or "")

    env = started(Tagged)
    first, second = roll_out(env, message(content="I think"), message(content="<answer>x</answer>"))
    assert not first.done and first.info["is_invalid"] and "not finished" in first.observations[0]["content"]
    assert second.done


def test_an_episode_may_end_with_a_call():
    class Doors(ToolEnv):
        def reset(self, example):
            self.opened = None
            return super().reset(example)

        @tool
        def open_door(self, number: int) -> str:
            """Open a door."""
            self.opened = number
            return "gold" if number == 3 else "dust"

        def is_done(self, message):
            return self.opened == 3

    env = started(Doors)
    first, second = roll_out(env, message(("open_door", {"number": 1})), message(("open_door", {"number": 3})))
    assert (first.done, second.done) == (False, True)
    assert second.observations[0]["content"] == "gold" and not second.info["is_invalid"]


# -------------------------------------------------------------------- rewards


def test_a_repeated_call_earns_nothing():
    env = started(max_process_reward=math.inf)
    call = message(("echo", {"text": "a"}))
    rewards = [
        step.reward for step in roll_out(env, call, call, message(("echo", {"text": "b"}), ("echo", {"text": "b"})))
    ]
    assert rewards == [0.5, 0.0, 0.5]


def test_positive_process_rewards_are_capped_and_penalties_are_not():
    env = started()
    calls = [message(("echo", {"text": str(number)})) for number in range(4)]
    errors = [message(("nope", {}))] * 3
    rewards = [step.reward for step in roll_out(env, *calls, *errors, message(("echo", {"text": "more"})))]
    assert rewards == pytest.approx([0.5, 0.5, 0, 0, -0.1, -0.1, -0.1, 0])
    env.reset({"prompt": "again"})
    assert roll_out(env, calls[0])[0].reward == 0.5


def test_the_users_process_reward_is_asked_for_calls_that_worked():
    seen = []

    class Custom(EchoEnv):
        max_process_reward = 10.0

        def process_reward(self, call, result):
            seen.append((call.arguments["text"], result.content))
            return len(result.content)

    (step,) = roll_out(started(Custom), message(("echo", {"text": "abc"}), ("echo", {"text": "fail"})))
    assert seen == [("abc", "abc")] and step.reward == pytest.approx(3 - 0.1)


def test_a_process_reward_may_be_async_or_boolean():
    class Async(EchoEnv):
        async def process_reward(self, call, result):
            await asyncio.sleep(0)
            return call.arguments["text"] == "good"

    rewards = [
        step.reward for step in roll_out(started(Async), *[message(("echo", {"text": t})) for t in ("good", "bad")])
    ]
    assert rewards == [0.5, 0.0]


def test_a_slow_process_reward_does_not_stop_other_trajectories():
    class Slow(EchoEnv):
        def process_reward(self, call, result):
            time.sleep(0.3)
            return 0.1

    async def main():
        envs = [started(Slow) for _ in range(8)]
        await asyncio.gather(*[env.step(message(("echo", {"text": "a"}))) for env in envs])

    began = time.perf_counter()
    asyncio.run(main())
    assert time.perf_counter() - began < 1.5


@pytest.mark.parametrize("value", [None, "x", math.nan, math.inf, [1]])
def test_a_process_reward_that_is_not_a_finite_number_is_a_bug_of_the_user(value):
    class Broken(EchoEnv):
        def process_reward(self, call, result):
            return value

    with pytest.raises(RewardError, match=r"Broken\.process_reward"):
        roll_out(started(Broken), message(("echo", {"text": "a"})))


class Returns(ToolEnv):
    """Its outcome is whatever it is given in place of a trajectory."""

    success_reward = 2.0
    failure_reward = -3.0

    def outcome_reward(self, trajectory):
        return trajectory


class ReturnsAsync(Returns):
    async def outcome_reward(self, trajectory):
        return trajectory


def test_an_outcome_is_a_number_a_verdict_or_a_number_with_parts():
    parts = {"a": 0.2, "b": 0.3}
    cases = [(True, 2.0), (False, -3.0), (0.25, 0.25), (1, 1.0), ((0.5, parts), (0.5, parts))]
    scalars = [(np.float32(0.5), 0.5), (np.bool_(True), 2.0), (np.bool_(False), -3.0), (torch.tensor(0.0), 0.0)]
    verdicts = [(torch.tensor(True), 2.0), (torch.tensor([False]), -3.0), (np.array(False), -3.0)]
    for returned, expected in [*cases, *scalars, *verdicts]:
        assert Returns().outcome_reward(returned) == expected
        assert asyncio.run(ReturnsAsync().outcome_reward(returned)) == expected


def test_an_inherited_outcome_can_be_extended():
    class Parent(ToolEnv):
        def outcome_reward(self, trajectory):
            return True

    class Child(Parent):
        def outcome_reward(self, trajectory):
            return super().outcome_reward(trajectory) + 0.5

    assert Child().outcome_reward(finished()) == 1.5


@pytest.mark.parametrize(
    "value", [None, "1", math.nan, (1.0, {"a": 0.5}), (1.0, 2.0, 3.0), (1.0, "x"), (1.0, {"a": None})]
)
def test_an_outcome_that_is_none_of_these_is_a_bug_of_the_user(value):
    with pytest.raises(RewardError, match=r"Returns\.outcome_reward"):
        Returns().outcome_reward(value)


# -------------------------------------------------------------------- settings and subclasses


def test_settings_are_class_attributes_that_arguments_override():
    class Generous(EchoEnv):
        tool_call_reward = 0.9

    for settings_given, reward in (({}, 0.9), ({"tool_call_reward": 0.2}, 0.2)):
        assert roll_out(started(Generous, **settings_given), message(("echo", {"text": "a"})))[0].reward == reward


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"tool_call_reward": math.nan}, "tool_call_reward=nan"),
        ({"tool_error_reward": "x"}, "tool_error_reward='x'"),
        ({"success_reward": -2.0}, "success_reward=-2.0"),
        ({"max_process_reward": -1.0}, "max_process_reward=-1.0"),
        ({"tool_timeout_s": 0}, "tool_timeout_s=0"),
        ({"system_prompt": 5}, "system_prompt=5"),
        ({"tools": "echo"}, "tools='echo'"),
    ],
)
def test_a_setting_out_of_range_is_named(settings, word):
    with pytest.raises(ValueError, match=word):
        _ = EchoEnv(**settings).executor


def test_a_subclass_with_its_own_constructor_and_reset_need_not_call_ours():
    class Stateful(ToolEnv):
        tools = [echo]

        def __init__(self, size=3):
            self.size = size

        def reset(self, example):
            return [{"role": "user", "content": "go"}]

    env = Stateful(size=5)
    env.reset({})
    assert roll_out(env, message(("echo", {"text": "a"})))[0].reward == 0.5 and env.size == 5


def add(self, number: int) -> str:
    """Add a number to the state."""
    self.total += number
    return str(self.total)


class Counting(ToolEnv):
    tools = ["subtract", add, echo]

    def reset(self, example):
        self.total = 0
        return super().reset(example)

    def subtract(self, number: int) -> str:
        """Subtract a number from the state."""
        return add(self, -number)

    @tool
    def double(self) -> str:
        """Double the state."""
        time.sleep(0.02)
        self.total *= 2
        return str(self.total)


def test_tools_are_functions_names_and_decorated_methods_bound_to_the_instance():
    env, other = started(Counting), started(Counting)
    assert [item.name for item in env.tools] == ["subtract", "add", "echo", "double"]
    assert Counting.tools == ["subtract", add, echo]
    (step,) = roll_out(
        env, message(("add", {"number": 3}), ("double", {}), ("subtract", {"number": 1}), ("double", {}))
    )
    assert [item["content"] for item in step.observations] == ["3", "6", "5", "10"]
    assert (env.total, other.total) == (10, 0)
    assert env.tools[1].schema["function"]["parameters"]["required"] == ["number"]


def test_a_decorated_method_is_not_offered_twice_and_can_be_overridden_or_removed():
    class Twice(Counting):
        tools = ["double"]

        @tool
        def double(self) -> str:
            """Quadruple, really."""
            self.total *= 4
            return str(self.total)

    class Without(Counting):
        tools = []
        double = None

    env = started(Twice)
    assert [item.name for item in env.tools] == ["double"]
    env.total = 1
    assert roll_out(env, message(("double", {})))[0].observations[0]["content"] == "4"
    assert Without().tools == []


def test_a_name_that_is_no_method_is_refused():
    class Typo(ToolEnv):
        tools = ["serach"]

    with pytest.raises(ValueError, match=r"Typo\.tools.*'serach'"):
        _ = Typo().tools


def test_tools_can_be_given_to_the_constructor_or_set_on_the_instance():
    assert [item.name for item in ToolEnv(tools=[echo]).tools] == ["echo"]

    class Late(ToolEnv):
        def __init__(self):
            self.tools = [echo, self.shout]

        def shout(self, text: str) -> str:
            """Shout."""
            return text.upper()

    env = Late()
    env.reset({"prompt": "go"})
    assert roll_out(env, message(("shout", {"text": "a"})))[0].observations[0]["content"] == "A"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


def test_calls_above_the_limit_of_a_turn_are_not_made_and_one_error_says_so():
    made = []

    class Counting(ToolEnv):
        @tool
        def note(self, number: int) -> str:
            """Note a number."""
            made.append(number)
            return "noted"

    def turn(count):
        calls = [{"type": "function", "function": {"name": "note", "arguments": {"number": i}}} for i in range(count)]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    for limit, chosen in ((32, {}), (2, {"max_calls_per_turn": 2})):
        env = Counting(max_process_reward=math.inf, **chosen)
        env.reset({"question": "?"})
        assert len(asyncio.run(env.step(turn(limit))).observations) == limit
        made.clear()
        step = asyncio.run(env.step(turn(10_000)))
        assert made == list(range(limit)) and len(step.observations) == limit + 1
        last = step.info["tool_results"][-1]
        assert last.error is ToolErrorKind.TOO_MANY and f"at most {limit} calls per turn" in last.content
        assert step.observations[-1]["tool_call_id"] == last.call.id
        assert step.info["reward_parts"]["tool_error"] == -0.1 and not step.info["is_invalid"]
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match=r"Counting.max_calls_per_turn=.*whole number >= 1"):
            Counting(max_calls_per_turn=wrong)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "malformed_tool_call", "x"]), json_values)
    | st.builds(lambda calls: {"role": "assistant", "tool_calls": calls}, st.lists(json_values, max_size=3))
)
def test_any_json_message_is_a_step(given_message):
    env = started()
    step = asyncio.run(env.step(given_message))
    assert isinstance(step.done, bool) and math.isfinite(step.reward)
    assert step.done or step.observations
    assert all(isinstance(item["content"], str) for item in step.observations)
    assert math.fsum(step.info["reward_parts"].values()) == step.reward


# -------------------------------------------------------------------- several user turns


class Dialogue(ToolEnv):
    """The user says the row's texts, one after the answer to another."""

    def next_user_message(self, message):
        return self.example["texts"].pop(0) if self.example["texts"] else None


class AsyncDialogue(Dialogue):
    async def next_user_message(self, message):
        await asyncio.sleep(0)
        return super().next_user_message(message)


@pytest.mark.parametrize("cls", [Dialogue, AsyncDialogue])
def test_the_user_speaks_again_until_nothing_is_left_to_say(cls):
    env = cls()
    env.reset({"prompt": "Hello.", "texts": ["And then?", "", 5]})
    (called,) = roll_out(env, message(("no_such_tool", {})))
    assert called.info["is_invalid"] and called.observations[0]["role"] == "tool", "not asked while tools are called"
    for expected in ("And then?", ""):
        (step,) = roll_out(env, message(content="An answer."))
        assert step.observations == [{"role": "user", "content": expected}]
        assert not step.done and not step.info["is_invalid"] and step.reward == 0.0
    with pytest.raises(ValueError, match=rf"{cls.__name__}\.next_user_message returned 5"):
        roll_out(env, message(content="An answer."))
    assert roll_out(env, message(content="Goodbye."))[0].done


def test_a_single_tool_in_place_of_a_list_is_one_line_with_the_fix():
    line = r"^\w+\.tools=.*must be a list of functions, Tools or method names\. Write \[add\], also for .*\.$"

    def plain(a: int, b: int) -> int:
        """Add."""

    plain.__name__ = "add"
    for single in (tool(plain), plain):
        with pytest.raises(ValueError, match=line):
            type("Env", (ToolEnv,), {"tools": single})
        with pytest.raises(ValueError, match=line):
            ToolEnv(tools=single)
        with pytest.raises(ValueError, match=line):
            FunctionToolsEnv(single)
        with pytest.raises(ValueError, match=line):
            resolve_env_factory(tools=single)


def test_every_instance_has_the_tools_of_an_iterator():
    def add(a: int, b: int) -> int:
        """Add."""

    env = type("Env", (ToolEnv,), {"tools": iter([add])})
    assert [[item.name for item in env().tools] for _ in range(2)] == [["add"], ["add"]]

"""check_env: good environments pass without a warning, and each kind of broken one is named with a cure."""
# ruff: noqa: RUF012 - mutable class attributes are among the faults

import asyncio
import functools
import itertools
import random
import sqlite3
import time

import pytest

from agent_r1_trl.doctor.environment import check_env
from agent_r1_trl.environments import FunctionToolsEnv, SearchQAEnv, StepResult, ToolEnv, TRLEnvAdapter
from agent_r1_trl.rewards import exact_match, extract_answer
from agent_r1_trl.tools import SearchIndex, calculator, tool

EXAMPLES = [
    {"question": "What is the capital of Norway?", "answer": "Oslo"},
    {"question": "Of Spain?", "answer": "Madrid"},
]


@tool
def lookup(query: str) -> str:
    """Look something up in a small encyclopedia.

    Args:
        query: What to look up.
    """
    return f"Nothing about {query}."


class GoodEnv(ToolEnv):
    tools = [lookup, calculator]

    def outcome_reward(self, trajectory):
        answer = extract_answer(trajectory.final_text) or trajectory.final_text
        return exact_match(answer, self.example["answer"]) == 1.0


def problems(env, examples=EXAMPLES, **settings):
    return [finding for finding in check_env(env, examples, **settings) if finding.level != "ok"]


def assert_finds(env, level, check, word, examples=EXAMPLES, **settings):
    found = problems(env, examples, **settings)
    matching = [item for item in found if item.level == level and item.check == check and word in item.message]
    assert matching, "\n".join(f"{item.level} {item.check}: {item.message}" for item in found) or "nothing found"
    assert all(item.cure for item in found)


# -------------------------------------------------------------------- good environments


class PlainGoodEnv:
    """Without our base class: a guessing game on messages."""

    tools = []

    def __init__(self):
        self.secret = None

    def reset(self, example):
        self.secret = random.Random(example["question"]).randrange(10)
        return [{"role": "user", "content": "Guess a digit."}]

    def step(self, message):
        guess = (message.get("content") or "").strip()
        done = guess == str(self.secret) or (not message.get("tool_calls") and not message.get("malformed_tool_call"))
        return [{"role": "user", "content": "Wrong, guess again."}], 0.0, done, {}

    def outcome_reward(self, trajectory):
        return 1.0 if trajectory.final_text.strip() == str(self.secret) else 0.0

    def close(self):
        self.secret = None


class GoodDoors(ToolEnv):
    """Stateful, with methods as tools."""

    def reset(self, example):
        self.opened = []
        return super().reset(example)

    @tool
    def open_door(self, number: int) -> str:
        """Open one of three doors.

        Args:
            number: Which door, 1 to 3.
        """
        if number not in (1, 2, 3):
            raise ValueError("there are only doors 1 to 3")
        self.opened.append(number)
        return f"door {number} is open"

    def outcome_reward(self, trajectory):
        return 1.0 if 3 in self.opened else 0.0


class GoodAsync(GoodEnv):
    @tool
    async def fetch(self, url: str) -> dict:
        """Fetch a page from the web.

        Args:
            url: Its address.
        """
        await asyncio.sleep(0.01)
        return {"status": 200, "url": url}

    async def outcome_reward(self, trajectory):
        await asyncio.sleep(0)
        return exact_match(trajectory.final_text, self.example["answer"]) if trajectory.final_text else -0.5


class GoodTRL:
    def reset(self, **row):
        self.count = 0
        return None

    def count_up(self, step: int) -> str:
        """Count up by some steps.

        Args:
            step: How many steps.
        """
        self.count += step
        return str(self.count)

    def get_reward(self):
        return float(self.count)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    rows = [{"id": "no", "title": "Norway", "text": "The capital is Oslo."}, {"title": "Spain", "text": "Madrid."}]
    return SearchIndex(rows, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize(
    "env",
    [
        GoodEnv,
        PlainGoodEnv,
        GoodDoors,
        GoodAsync,
        GoodTRL,
        ToolEnv,
        functools.partial(GoodEnv, tool_call_reward=0.1),
        functools.partial(FunctionToolsEnv, [lookup.fn]),
        functools.partial(TRLEnvAdapter, GoodTRL, [lookup.fn]),
        {"a": GoodTRL, "b": GoodTRL},
    ],
    ids=lambda env: getattr(env, "__name__", type(env).__name__),
)
def test_nothing_is_wrong_with_good_environments(env):
    examples = [{**row, "environment": "a"} for row in EXAMPLES] if isinstance(env, dict) else EXAMPLES
    if env in (PlainGoodEnv, GoodDoors):  # games: no text is the right answer
        examples = [{"question": row["question"]} for row in EXAMPLES]
    assert problems(env, examples) == []


def test_nothing_is_wrong_with_the_search_environment(index):
    assert problems(functools.partial(SearchQAEnv, index)) == []
    assert problems(functools.partial(SearchQAEnv, index, answer_tag=False, metric="f1")) == []


def test_every_check_reports_when_it_found_nothing():
    findings = check_env(GoodEnv, EXAMPLES)
    assert {item.check for item in findings} == {
        "construction",
        "methods",
        "tools",
        "reset",
        "step",
        "outcome",
        "state",
        "close",
    }
    assert all(item.level == "ok" and item.message and not item.cure for item in findings)


def test_without_examples_a_question_is_made_up():
    assert problems(GoodEnv, None) == []

    class Picky(GoodEnv):
        def reset(self, example):
            return super().reset({"prompt": example["board"]})

    assert_finds(Picky, "warning", "reset", "made-up example", None)


def test_it_works_inside_a_running_event_loop():
    async def main():
        return problems(GoodEnv)

    assert asyncio.run(main()) == []


def test_it_is_quick():
    check_env(GoodEnv, EXAMPLES)
    began = time.perf_counter()
    check_env(GoodEnv, EXAMPLES)
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize(
    "arguments", [{"examples": []}, {"examples": [5]}, {"examples": {"a": 1}}, {"num_episodes": 0}]
)
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        check_env(GoodEnv, **{"examples": EXAMPLES, **arguments})


# -------------------------------------------------------------------- construction and methods


def test_a_constructor_that_needs_arguments_is_found():
    class Needy(GoodEnv):
        def __init__(self, size):
            self.size = size

    assert_finds(Needy, "error", "construction", "raised TypeError")


def test_a_factory_that_gives_the_same_object_is_found():
    env = GoodEnv()
    assert_finds(lambda: env, "error", "construction", "same object every time")


def test_an_instance_is_checked_with_a_warning():
    found = problems(GoodEnv())
    assert [(item.level, item.check) for item in found] == [("warning", "construction")]


@pytest.mark.parametrize("thing", [5, "MyEnv", None, object()])
def test_what_is_no_environment_is_said_to_be_none(thing):
    assert_finds(thing, "error", "construction", "neither an environment")


def test_a_constructor_that_ends_the_program_is_found():
    class Quits(GoodEnv):
        def __init__(self):
            raise SystemExit(1)

    assert_finds(Quits, "error", "construction", "SystemExit")


@pytest.mark.parametrize("method", ["reset", "step", "close"])
def test_a_missing_method_is_found(method):
    parts = {
        name: value for name, value in vars(PlainGoodEnv).items() if name != method and not name.startswith("__d")
    }
    assert_finds(type("Partial", (), parts), "error", "methods", f"no method {method}")


def test_a_missing_outcome_is_a_warning():
    parts = {name: value for name, value in vars(PlainGoodEnv).items() if name not in ("outcome_reward", "__dict__")}
    assert_finds(type("Partial", (), parts), "warning", "methods", "no outcome_reward")


def test_methods_with_the_wrong_arguments_are_found():
    class Wrong(GoodEnv):
        def outcome_reward(self, prompts, completions):
            return 0.0

        def process_reward(self, call):
            return 0.0

    assert_finds(Wrong, "error", "methods", "outcome_reward does not take 1")
    assert_finds(Wrong, "error", "methods", "process_reward does not take 2")


def test_settings_that_teach_the_wrong_thing_are_found():
    class Unscored(ToolEnv):
        tools = [lookup]

    assert_finds(Unscored, "warning", "methods", "neither outcome_reward nor process_reward")
    assert_finds(functools.partial(GoodEnv, max_process_reward=50.0), "warning", "methods", "more than solving")
    assert_finds(functools.partial(GoodEnv, tool_error_reward=0.3), "warning", "methods", "failing calls are rewarded")
    assert_finds(functools.partial(GoodEnv, tool_timeout_s=float("inf")), "warning", "methods", "no limit")
    bad = type("Bad", (GoodEnv,), {"tool_call_reward": "x", "__init__": lambda self: None})
    assert_finds(bad, "error", "methods", "tool_call_reward='x'")


# -------------------------------------------------------------------- tools


def env_with(*tools) -> type:
    return type("Env", (GoodEnv,), {"tools": list(tools)})


def undocumented(query: str) -> str:
    return query


def untyped(query):
    """Look it up in a book.

    Args:
        query: What.
    """


def undescribed(query: str) -> str:
    """Look it up in a book."""
    return query


def starred(*queries: str) -> str:
    """Look them up in a book.

    Args:
        queries: What.
    """
    return ""


def exotic(data: bytes) -> str:
    """Look it up in a book.

    Args:
        data: What.
    """
    return ""


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (undocumented, "no docstring"),
        (untyped, "no type hint"),
        (undescribed, "no description for the argument 'query'"),
        (starred, "cannot be described"),
        (exotic, "JSON cannot express"),
        (5, "is no tool"),
        ("missing_method", "names 'missing_method'"),
    ],
)
def test_a_tool_that_cannot_be_described_is_found(function, word):
    assert_finds(env_with(function), "error", "tools", word)


def test_tools_of_one_name_are_found():
    assert_finds(env_with(lookup, tool(name="lookup")(calculator.fn)), "error", "tools", "2 tools are called 'lookup'")
    assert_finds(
        env_with(lookup, tool(name="Look_up")(calculator.fn), tool(name="look-up")(lambda: "")),
        "warning",
        "tools",
        "mistaken",
    )


def body_tool(body, is_async=False):
    """A tool with a proper schema around any body."""
    schema = {
        "type": "function",
        "function": {
            "name": "odd",
            "description": "Do something odd.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    return tool(schema=schema)(body)


class Opaque:
    pass


async def blocking():
    time.sleep(0.8)
    return "x"


def raise_(error):
    raise error


@pytest.mark.parametrize(
    ("body", "level", "word"),
    [
        (lambda: None, "warning", "None, which tells"),
        (lambda: b"x", "warning", "bytes"),
        (lambda: Opaque(), "warning", "Opaque object"),
        (lambda: (number for number in range(3)), "warning", "generator"),
        (lambda: float("nan"), "warning", "nan"),
        (lambda: "", "warning", "empty text"),
        (lambda: raise_(RuntimeError("boom")), "warning", "raised RuntimeError: boom"),
        (lambda: undefined_name, "error", "raised NameError"),  # noqa: F821
        (lambda: raise_(SystemExit(2)), "error", "raised SystemExit"),
        (lambda: raise_(NotImplementedError()), "error", "raised NotImplementedError"),
    ],
)
def test_a_tool_that_misbehaves_is_found(body, level, word):
    assert_finds(env_with(body_tool(body)), level, "tools", word)


def test_a_tool_that_hangs_is_found():
    began = time.perf_counter()
    assert_finds(env_with(body_tool(lambda: time.sleep(30))), "error", "tools", "'odd' hangs", timeout_s=0.5)
    assert time.perf_counter() - began < 10


def test_an_async_tool_that_blocks_the_event_loop_is_found():
    assert_finds(env_with(body_tool(blocking)), "error", "step", "blocked the event loop", timeout_s=5)


def test_an_async_tool_that_never_lets_go_of_the_loop_does_not_stop_the_check():
    async def forever():
        time.sleep(4)

    assert_finds(env_with(body_tool(forever)), "error", "step", "blocked the event loop", EXAMPLES[:1], timeout_s=0.5)


def test_a_database_connection_of_another_thread_is_found():
    class Database(GoodEnv):
        def reset(self, example):
            self.connection = sqlite3.connect(":memory:")
            return super().reset(example)

        @tool
        def run_sql(self, query: str) -> str:
            """Run an SQL query on the database.

            Args:
                query: The query.
            """
            return str(self.connection.execute("SELECT 1").fetchall())

    assert_finds(Database, "error", "tools", "ProgrammingError")
    (found,) = (item for item in problems(Database) if "ProgrammingError" in item.message)
    assert "check_same_thread=False" in found.cure


# -------------------------------------------------------------------- reset


@pytest.mark.parametrize(
    ("returned", "word"),
    [
        (None, "not a non-empty list"),
        ([], "not a non-empty list"),
        ("go", "not a non-empty list"),
        ({"role": "user", "content": "go"}, "not a non-empty list"),
        (["go"], "no dict"),
        ([{"content": "go"}], "role None"),
        ([{"role": "user"}], "content is NoneType"),
        ([{"role": "user", "content": 5}], "content is int"),
        ([{"role": "human", "content": "go"}], "role 'human'"),
    ],
)
def test_a_reset_that_returns_no_messages_is_found(returned, word):
    env = type("Env", (GoodEnv,), {"reset": lambda self, example: returned})
    assert_finds(env, "error", "reset", word)


def test_a_reset_that_raises_or_hangs_is_found():
    assert_finds(
        type("Env", (GoodEnv,), {"reset": lambda self, example: example["x"]}), "error", "reset", "KeyError: 'x'"
    )
    hang = type("Env", (GoodEnv,), {"reset": lambda self, example: time.sleep(5)})
    assert_finds(hang, "error", "reset", "did not come back in time", timeout_s=0.2)


def test_a_reset_that_differs_between_members_of_a_group_is_found():
    counter = itertools.count()

    class Random(GoodEnv):
        def reset(self, example):
            return [{"role": "user", "content": f"task {next(counter)}"}]

    assert_finds(Random, "error", "reset", "different prompts for the same example")


def test_a_reset_that_changes_the_example_is_found():
    class Greedy(GoodEnv):
        def reset(self, example):
            messages = super().reset(example)
            example["answer"] = "changed"
            return messages

    assert_finds(Greedy, "error", "reset", "changes the example")


def test_a_prompt_that_ends_with_the_assistant_is_found():
    env = type("Env", (GoodEnv,), {"reset": lambda self, example: [{"role": "assistant", "content": "hello"}]})
    assert_finds(env, "warning", "reset", "ends with an assistant message")


# -------------------------------------------------------------------- step


def plain(**methods) -> type:
    return type("Env", (PlainGoodEnv,), methods)


TOOL_MESSAGE = {"role": "tool", "content": "x"}


@pytest.mark.parametrize(
    ("returned", "word"),
    [
        (None, "not (observations, reward, done, info)"),
        (([], 0.0, True), "not (observations, reward, done, info)"),
        (([], 0.0, True, False, {}), "not (observations, reward, done, info)"),
        (("text", 0.0, False, {}), "not a list of messages"),
        (([{"role": "tool", "content": 5}], 0.0, False, {}), "content is int"),
        (([TOOL_MESSAGE], float("nan"), True, {}), "reward nan"),
        (([TOOL_MESSAGE], None, True, {}), "reward None"),
        (([TOOL_MESSAGE], True, True, {}), "reward True"),
        (([TOOL_MESSAGE], 0.0, "yes", {}), "done='yes'"),
        (([TOOL_MESSAGE], 0.0, True, None), "info=None"),
        (([TOOL_MESSAGE], 0.0, True, {"when": object()}), "info is not JSON"),
        (([TOOL_MESSAGE], 0.0, True, {"score": float("inf")}), "info is not JSON"),
        (([TOOL_MESSAGE], 1.0, True, {"reward_parts": {"a": 0.5}}), "does not add up"),
        (([TOOL_MESSAGE], 1.0, True, {"tool_results": ["x"]}), "no list of ToolResult"),
        (([], 0.0, False, {}), "returned no observation"),
    ],
)
def test_a_step_that_breaks_its_contract_is_found(returned, word):
    assert_finds(plain(step=lambda self, message: returned), "error", "step", word)


def test_a_step_that_raises_on_what_models_write_is_found():
    def fragile(self, message):
        for call in message.get("tool_calls", []):
            call["function"]["arguments"]["query"]
        return [], 0.0, True, {}

    assert_finds(plain(step=fragile), "error", "step", "a call that is a number")

    def no_none(self, message):
        return [], 0.0, bool(message["content"].strip()) or True, {}

    assert_finds(plain(step=no_none), "error", "step", "missing (None)")


def test_a_step_that_hangs_is_found():
    assert_finds(plain(step=lambda self, message: time.sleep(5)), "error", "step", "did not come back", timeout_s=0.2)


def test_an_episode_that_never_ends_is_found():
    endless = plain(step=lambda self, message: StepResult([TOOL_MESSAGE], 0.0, False, {}))
    assert_finds(endless, "warning", "step", "No episode ended")


def test_broken_calls_that_end_the_episode_or_earn_are_found():
    assert_finds(plain(step=lambda self, message: ([], 1.0, True, {})), "warning", "step", "no chance to repair")
    assert_finds(plain(step=lambda self, message: ([], 1.0, True, {})), "warning", "step", "earns 1")


def test_calls_that_are_not_answered_one_by_one_are_found():
    def one_for_all(self, message):
        return [TOOL_MESSAGE], 0.0, not message.get("tool_calls"), {}

    env = plain(step=one_for_all, tools=[lookup, calculator])
    assert_finds(env, "warning", "step", "2 calls were answered by 1")


def test_a_step_that_changes_its_message_is_found():
    def changing(self, message):
        message["content"] = "mine"
        return [], 0.0, True, {}

    assert_finds(plain(step=changing), "warning", "step", "changes the message")


def test_observations_in_the_models_name_are_found():
    def speaking(self, message):
        return [{"role": "assistant", "content": "I think"}], 0.0, False, {}

    assert_finds(plain(step=speaking), "warning", "step", "role 'assistant'")


def test_a_bug_in_process_reward_is_found():
    class Broken(GoodEnv):
        def process_reward(self, call, result):
            return result["content"]

    assert_finds(Broken, "error", "step", "process_reward raised TypeError")


# -------------------------------------------------------------------- outcome


@pytest.mark.parametrize(
    ("outcome", "level", "word"),
    [
        (lambda self, t: None, "error", "returned None"),
        (lambda self, t: float("nan"), "error", "nan"),
        (lambda self, t: "1.0", "error", "'1.0'"),
        (lambda self, t: (1.0, {"a": 0.5}), "error", "must add up"),
        (lambda self, t: t.turns[-1].message["content"] == "x", "error", "empty trajectory"),
        (lambda self, t: float(t.final_text.strip()[0] == "x"), "error", "IndexError"),
        (lambda self, t: float(len(t.turns[-1].message["content"])) if t.turns else 0.0, "error", "without content"),
        (lambda self, t: t.info.update(x=object()) or 0.0, "error", "not JSON"),
        (lambda self, t: random.random(), "warning", "differently each time"),
        (lambda self, t: 0.0, "warning", "earns 0, nonsense 0"),
        (lambda self, t: -1.0 if t.stop_reason.value == "done" else 0.0, "warning", "Never answering earns 0"),
    ],
)
def test_an_outcome_that_misbehaves_is_found(outcome, level, word):
    assert_finds(type("Env", (GoodEnv,), {"outcome_reward": outcome}), level, "outcome", word)


def test_a_verdict_from_a_plain_environment_is_a_warning():
    assert_finds(plain(outcome_reward=lambda self, t: True), "warning", "outcome", "counts as 1 and 0")


def test_an_outcome_that_reads_the_wrong_column_is_found():
    class WrongColumn(GoodEnv):
        def outcome_reward(self, trajectory):
            return float(trajectory.final_text == self.example["question"])

    assert_finds(WrongColumn, "warning", "outcome", "column 'answer'")


# -------------------------------------------------------------------- shared state and close


def test_a_list_on_the_class_that_episodes_append_to_is_found():
    class Leaky(GoodEnv):
        history = []

        @tool
        def remember(self, text: str) -> str:
            """Remember a text for later.

            Args:
                text: The text.
            """
            self.history.append(text)
            return "remembered"

    assert_finds(Leaky, "error", "state", "Leaky.history")


def test_an_object_that_instances_share_is_found():
    class World:
        def __init__(self):
            self.position = 0

    world = World()

    class Walker(GoodEnv):
        def __init__(self):
            self.world = world

        @tool
        def walk(self, steps: int) -> str:
            """Walk some steps.

            Args:
                steps: How many.
            """
            self.world.position += steps
            return str(self.world.position)

    assert_finds(Walker, "error", "state", "world")


def test_shared_state_of_a_trl_class_is_found():
    class LeakyTRL(GoodTRL):
        log = []

        def note(self, text: str) -> str:
            """Note a text down.

            Args:
                text: The text.
            """
            self.log.append(text)
            return "noted"

    assert_finds(LeakyTRL, "error", "state", "LeakyTRL.log")


def test_a_cache_may_be_shared():
    class Cached(GoodEnv):
        page_cache = {}

        @tool
        def read(self, page: str) -> str:
            """Read a page of the book.

            Args:
                page: Which.
            """
            return self.page_cache.setdefault(page, "text")

    assert problems(Cached) == []


def test_a_close_that_fails_is_found():
    class NeedsReset(GoodEnv):
        def reset(self, example):
            self.handle = ["open"]
            return super().reset(example)

        def close(self):
            self.handle.pop()

    assert_finds(NeedsReset, "error", "close", "when reset had not run")
    assert_finds(NeedsReset, "warning", "close", "a second time")


def test_findings_are_not_repeated():
    found = problems(env_with(body_tool(lambda: None)), EXAMPLES * 3)
    assert len({(item.level, item.check, item.message) for item in found}) == len(found)

"""check_env: good environments pass without a warning, and each kind of broken one is named with a fix.

Most tests are rows of tables: what is broken, and the level, the check and a word of the finding that must appear.
"""
# ruff: noqa: RUF012 - mutable class attributes are among the faults

import asyncio
import contextlib
import functools
import random
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from agent_r1_trl.environments import FunctionToolsEnv, SearchQAEnv, ToolEnv, TRLEnvAdapter
from agent_r1_trl.features.doctor import episodes as caller_module
from agent_r1_trl.features.doctor.environment import check_env, examine_env
from agent_r1_trl.rewards import exact_match, extract_answer
from agent_r1_trl.tools import InfrastructureError, SearchIndex, calculator, tool
from agent_r1_trl.tools.event_loop import shared_loop
from tests.toys import counted

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
    return check_env(env, examples, **{"timeout_s": 60.0, **settings})  # a busy machine is slow to import


def assert_finds(env, level, check, word, examples=EXAMPLES, **settings):
    found = problems(env, examples, **settings)
    matching = [item for item in found if item.level == level and item.check == check and word in item.message]
    assert matching, "\n".join(f"{item.level} {item.check}: {item.message}" for item in found) or "nothing found"
    assert all(item.fix for item in found)
    return matching[0]


def env_like(base=None, **parts) -> type:
    """A good environment with one part replaced; None removes it."""
    base = base or GoodEnv
    if None in parts.values():
        kept = {name: part for name, part in vars(base).items() if not name.startswith("__") or name == "__init__"}
        return type("Broken", (), {name: part for name, part in {**kept, **parts}.items() if part is not None})
    return type("Broken", (base,), parts)


def raise_(error):
    raise error


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


@tool
def refusing(number: int) -> str:
    """Open a door, and tell the model that there is none.

    Args:
        number: Which door.
    """
    raise ValueError("no such door")


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
        env_like(ToolEnv, tools=[lookup], tool_call_reward=0.0),  # the fix for one that pays for calls alone
        env_like(tools=[refusing]),
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


def test_every_check_tells_the_doctor_that_it_found_nothing():
    findings = examine_env(GoodEnv, EXAMPLES)
    assert [item.check for item in findings] == ["construction", "reset", "step", "tools", "state", "outcome"]
    assert all(item.level == "ok" and item.message and not item.fix for item in findings)


def test_without_examples_a_question_is_made_up():
    assert problems(GoodEnv, None) == []

    class Picky(GoodEnv):
        def reset(self, example):
            return super().reset({"prompt": example["board"]})

    assert_finds(Picky, "warning", "reset", "made-up example", None)


@pytest.mark.parametrize(
    ("broken", "looked_at"),
    [
        ({"reset": lambda self, example: raise_(KeyError("x"))}, {"construction"}),
        ({"tools": [5]}, {"construction"}),
        ({"step": lambda self, message: raise_(KeyError("x"))}, {"construction", "reset"}),
        ({"__init__": lambda self: raise_(KeyError("x"))}, set()),
    ],
    ids=["reset", "tools", "step", "init"],
)
def test_a_check_that_could_not_look_is_not_ok(broken, looked_at):
    assert {item.check for item in examine_env(env_like(**broken), EXAMPLES) if item.level == "ok"} == looked_at


def test_a_tool_is_called_once_only_where_its_schema_was_met():
    odd = tool_of(lambda x="": "fine", x={"type": "string", "pattern": "^[A-Z]{9}$"})
    found = [item for item in examine_env(env_like(tools=[odd]), EXAMPLES, timeout_s=60.0) if item.check == "tools"]
    assert [(item.level, item.message) for item in found] == [
        ("skipped", "Tool 'odd': no arguments that fit its schema were found.")
    ]


def test_a_tool_whose_schema_has_branches_is_called_by_one_of_them():
    seen = []
    ways = [{"properties": {"content": {"type": "string"}}, "required": ["content"]}, {"properties": {"url": {}}}]
    parameters = {"type": "object", "anyOf": ways}
    function = {"name": "attach", "description": "Attach.", "parameters": parameters}
    attach = tool(schema={"type": "function", "function": function})(lambda **given: seen.append(given) or "done")
    found = examine_env(env_like(tools=[attach]), EXAMPLES, timeout_s=60.0)
    assert {"content": "test"} in seen and not [item for item in found if item.level in ("error", "skipped")]


def test_an_outcome_is_ok_only_where_it_was_looked_at():
    def outcome(env, examples=EXAMPLES):
        (found,) = (item for item in examine_env(env, examples) if item.check == "outcome")
        return found

    assert outcome(functools.partial(FunctionToolsEnv, [lookup.fn])).level == "skipped"
    assert "the right answer earns more" in outcome(GoodEnv).message
    assert "was not tried" in outcome(GoodDoors, [{"question": "Which?"}]).message
    says_zero = scoring(lambda self, t: float(t.final_text == "0"))
    assert "the right answer earns more" in outcome(says_zero, [{"question": "1 - 1?", "answer": 0}]).message
    squad = {"question": "Which?", "answers": {"text": ["Oslo"], "answer_start": [3]}}
    assert "was not tried" in outcome(says_zero, [squad]).message


def test_every_tool_is_called_even_if_the_first_one_ends_the_episode():
    class Ending(GoodEnv):
        tools = [lookup, tool_of(lambda: undefined_name)]  # noqa: F821

        def is_done(self, message):
            return not message.get("malformed_tool_call")

    assert_finds(Ending, "error", "tools", "NameError")


def test_an_episode_may_end_with_the_last_of_some_guesses():
    class Guessing(GoodEnv):
        def reset(self, example):
            self.num_calls = 0
            return super().reset(example)

        def process_reward(self, call, result):
            self.num_calls += 1
            return super().process_reward(call, result)

        def is_done(self, message):
            return self.num_calls >= 6

    assert not [item.message for item in problems(Guessing) if "No episode ended" in item.message]


def test_it_works_inside_a_running_event_loop():
    async def main():
        return problems(GoodEnv)

    assert asyncio.run(main()) == []


@pytest.mark.parametrize(
    "arguments", [{"examples": []}, {"examples": [5]}, {"examples": {"a": 1}}, {"num_episodes": 0}]
)
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        check_env(GoodEnv, **{"examples": EXAMPLES, **arguments})


# -------------------------------------------------------------------- what is broken

ONE_ENV = GoodEnv()


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


def exotic(data: "Opaque") -> str:
    """Look it up in a book.

    Args:
        data: What.
    """
    return ""


def tool_of(body, **properties):
    """A tool with a proper schema around any body."""
    parameters = {"type": "object", "properties": properties}
    function = {"name": "odd", "description": "Do something odd.", "parameters": parameters}
    return tool(schema={"type": "function", "function": function})(body)


def unreachable():
    """A tool whose back end is down, which is asked again at once."""
    found = tool_of(lambda: raise_(InfrastructureError("no route to it")))
    found.retry_wait_s = 0.0
    return found


class Opaque:
    pass


def choose_tools(self, example):
    self.tools = [lookup]
    return ToolEnv.reset(self, example)


def one_for_all(self, message):
    return [ANSWER], 0.0, not message.get("tool_calls"), {}


def prompt(text, role="user"):
    return [{"role": role, "content": text}]


ANSWER = {"role": "tool", "content": "x"}


def read_query(self, message):
    for call in message.get("tool_calls", []):
        call["function"]["arguments"]["query"]
    return [], 0.0, True, {}


def remember(self, text: str) -> str:
    """Remember a text for later.

    Args:
        text: The text.
    """
    self.memory.append(text)
    return "remembered"


class World:
    def __init__(self):
        self.seen = {(0, 0): [1]}

    def append(self, text):
        self.seen[0, 0].append(text)


def count_on_the_class(self, text: str) -> str:
    """Count how many texts there are.

    Args:
        text: The text.
    """
    type(self).memory += 1
    return "counted"


def stepping(step):
    return env_like(PlainGoodEnv, step=step)


def scoring(outcome):
    return env_like(outcome_reward=outcome)


def resetting(returned):
    return env_like(reset=lambda self, example: returned)


def slow(self, *arguments):
    time.sleep(5)


async def block_the_loop():
    time.sleep(5)


FOUND = {
    ("error", "construction"): [
        (env_like(__init__=lambda self, size: None), "TypeError"),
        (env_like(__init__=lambda self: raise_(SystemExit(1))), "SystemExit"),
        (lambda: ONE_ENV, "same object every time"),
        *((thing, "is no class or function") for thing in (5, "MyEnv", GoodEnv())),
        ({"a": 5}, "environment_factory={'a': 5}"),
    ],
    ("error", "tools"): [
        (env_like(tools=[tool_of(lambda: Opaque())]), "an object of type Opaque"),
        (env_like(tools=[tool_of(lambda: (number for number in range(3)))]), "an object of type generator"),
        (env_like(tools=5), "must be a list"),
        (env_like(tools=[5]), "is no tool"),
        (env_like(tools=["missing_method"]), "names 'missing_method'"),
        (env_like(tools=[lookup, tool(name="lookup")(calculator.fn)]), "2 tools are called 'lookup'"),
        (env_like(tools=[tool_of(lambda: undefined_name)]), "NameError"),  # noqa: F821
        *(
            (env_like(tools=[tool_of(lambda x: raise_(NotImplementedError()), x=bounded)]), "NotImplementedError")
            for bounded in (
                {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                {"type": "integer", "maximum": -3},
                {"type": "number", "minimum": 0.2, "maximum": 0.5},
            )
        ),
        (env_like(tools=[tool_of(lambda: raise_(SystemExit(2)))]), "SystemExit"),
        (env_like(tools=[tool_of(lambda: raise_(NotImplementedError()))]), "NotImplementedError"),
        (env_like(tools=[unreachable()]), "no route to it"),
        # The list of a class is checked where the class is defined; these are made by the constructor.
        (functools.partial(GoodEnv, tools=[undocumented]), "no docstring"),
        (functools.partial(GoodEnv, tools=[untyped]), "no type hint"),
        (functools.partial(GoodEnv, tools=[starred]), "cannot be described"),
        (functools.partial(GoodEnv, tools=[exotic]), "JSON cannot express"),
    ],
    ("warning", "tools"): [
        (env_like(tools=[undescribed]), "no description of 'query'"),
        *((env_like(tools=[tool_of(body)]), "tells the model nothing") for body in (lambda: None, lambda: "")),
        (env_like(tools=[tool_of(lambda: float("nan"))]), "tells the model nothing"),
        (env_like(tools=[tool_of(lambda: raise_(RuntimeError("boom")))]), "RuntimeError: boom"),
    ],
    ("error", "reset"): [
        *((env_like(PlainGoodEnv, **{missing: None}), f"without {missing}") for missing in ("reset", "step")),
        (resetting(None), "reset returned None"),
        (resetting([]), "reset returned []"),
        (resetting("go"), "reset returned 'go'"),
        (resetting({"role": "user", "content": "go"}), "reset returned {'role': 'user', 'content': 'go'}"),
        (resetting(["go"]), "reset returned ['go']"),
        (resetting([{"content": "go"}]), "reset returned [{'content': 'go'}]"),
        (resetting([{"role": "user"}]), "content is NoneType"),
        (resetting([{"role": "user", "content": [5]}]), "content is list"),
        (resetting([{"role": "human", "content": "go"}]), "role 'human'"),
        (resetting([{"role": "user", "content": "go", "when": {1, 2}}]), "not JSON"),
        (env_like(reset=lambda self, example: prompt(example["x"])), "KeyError: 'x'"),
        (env_like(reset=lambda self, example: prompt(f"task {random.random()}")), "different prompts for the same"),
        (env_like(reset=slow), "did not come back"),
    ],
    ("error", "step"): [
        # What no rollout could use.
        (stepping(lambda self, message: None), "step returned None"),
        (stepping(lambda self, message: ([], 0.0, True)), "(observations, reward, done, info)"),
        (stepping(lambda self, message: ([], 0.0, True, False, {})), "(observations, reward, done, info)"),
        (stepping(lambda self, message: ("text", 0.0, False, {})), "observations='text'"),
        (stepping(lambda self, message: ([{"role": "tool", "content": 5}], 0.0, False, {})), "content is int"),
        (stepping(lambda self, message: ([{**ANSWER, "when": {1}}], 0.0, False, {})), "not JSON"),
        (stepping(lambda self, message: ([ANSWER], float("nan"), True, {})), "as reward, returned nan"),
        (stepping(lambda self, message: ([ANSWER], None, True, {})), "as reward, returned None"),
        (stepping(lambda self, message: ([ANSWER], 0.0, True, 5)), "info=5"),
        (stepping(lambda self, message: ([ANSWER], 0.0, True, {"when": object()})), "info is not JSON"),
        (stepping(lambda self, message: ([ANSWER], 0.0, True, {"score": float("inf")})), "info is not JSON"),
        (stepping(slow), "did not come back"),
        (env_like(tools=[tool_of(lambda: time.sleep(5))]), "did not come back"),
        (env_like(tools=[tool_of(block_the_loop)]), "did not come back"),
        (env_like(process_reward=lambda self, call, result: result["content"]), "process_reward raised TypeError"),
        # What models really write.
        (stepping(read_query), "KeyError"),
        (
            stepping(lambda self, message: ([], 0.0, message["content"].strip() != "x", {})),
            "without content (None)",
        ),
        (stepping(lambda self, message: ([], 0.0, False, {})), "returned no observation"),
    ],
    ("warning", "step"): [
        (stepping(lambda self, message: ([ANSWER], 0.0, False, {})), "No episode ended"),
        (stepping(lambda self, message: ([], 1.0, True, {})), "no chance to repair"),
        (stepping(lambda self, message: ([], 1.0, True, {})), "earns 1"),
        (functools.partial(GoodEnv, tool_error_reward=0.3), "earns 0.3"),
        (env_like(PlainGoodEnv, step=one_for_all, tools=[lookup, calculator]), "2 calls were answered by 1"),
    ],
    ("error", "outcome"): [
        (scoring(lambda self, t: None), "returned None"),
        (scoring(lambda self, t: float("nan")), "nan"),
        (scoring(lambda self, t: "1.0"), "'1.0'"),
        (scoring(lambda self, t: (1.0, {"a": 0.5})), "must add up"),
        (scoring(lambda self, t: t.turns[-1].message["content"] == "x"), "empty trajectory"),
        (scoring(lambda self, t: float(t.final_text.strip()[0] == "x")), "IndexError"),
        (
            scoring(lambda self, t: float(len(t.turns[-1].message["content"])) if t.turns else 0.0),
            "without content",
        ),
        (scoring(slow), "did not come back"),
    ],
    ("warning", "outcome"): [
        (env_like(PlainGoodEnv, outcome_reward=None), "no outcome_reward"),
        (scoring(lambda self, t: random.random()), "differently each time"),
        (scoring(lambda self, t: 0.0), "earns 0, nonsense 0"),
        (scoring(lambda self, t: float(t.final_text == self.example["question"])), "column 'answer'"),
        (scoring(lambda self, t: -1.0 if t.stop_reason.value == "done" else 0.0), "Never answering earns 0"),
        (functools.partial(GoodEnv, max_process_reward=50.0), "more than solving"),
        (env_like(ToolEnv, tools=[lookup]), "neither outcome_reward nor process_reward"),
        (env_like(ToolEnv, reset=choose_tools), "neither outcome_reward nor process_reward"),
    ],
    ("error", "state"): [
        (env_like(tools=[remember], memory=[]), "Broken.memory"),
        (env_like(tools=[remember], memory=World()), "Broken.memory"),
        (env_like(tools=[remember], __init__=lambda self, world=World(): setattr(self, "memory", world)), "memory"),  # noqa: B008
        (env_like(tools=[count_on_the_class], memory=0), "Broken.memory"),
        (env_like(GoodTRL, remember=remember, memory=[]), "Broken.memory"),
        (
            env_like(tools=[remember], memory=property(lambda self: self._Broken__memory), _Broken__memory=[]),
            "memory",
        ),
    ],
}


@pytest.mark.parametrize(
    ("level", "check", "env", "word"),
    [(*where, *row) for where, rows in FOUND.items() for row in rows],
)
def test_what_is_broken_is_found(level, check, env, word):
    timeout_s = 0.5 if word == "did not come back" else 60.0
    fix = assert_finds(env, level, check, word, EXAMPLES[: 1 if timeout_s < 1 else 2], timeout_s=timeout_s).fix
    assert "schema=" in fix or not isinstance(env, functools.partial) or check != "tools"


# -------------------------------------------------------------------- tools


def test_a_tool_that_runs_into_its_own_time_limit_is_found():
    hanging = tool_of(lambda: time.sleep(5))
    hanging.timeout_s = 0.2
    assert_finds(env_like(tools=[hanging]), "error", "tools", "'odd' cannot do its work")


def test_a_database_connection_of_another_thread_is_found():
    class Database(GoodEnv):
        connection = sqlite3.connect(":memory:")  # opened in the main thread

        @tool
        def run_sql(self, query: str) -> str:
            """Run an SQL query on the database.

            Args:
                query: The query.
            """
            return str(self.connection.execute("SELECT 1").fetchall())

    assert "check_same_thread=False" in assert_finds(Database, "error", "tools", "ProgrammingError").fix


# -------------------------------------------------------------------- reset


def test_a_reset_that_fails_later_is_found():
    left = [0, 0]
    flaky = env_like(reset=lambda self, example: prompt(f"task {left.pop()}"))
    assert_finds(flaky, "error", "reset", "IndexError", EXAMPLES[:1])


def test_a_reset_may_draw_from_the_seed_that_a_group_shares():
    class Seeded(PlainGoodEnv):
        def seed(self, *, reset_seed, dynamics_seed):
            self.number = random.Random(reset_seed).random()

        def reset(self, example):
            return [*prompt(f"task {self.number}", role="system"), *super().reset(example)]

    assert problems(Seeded, [{"question": "one"}]) == []


def test_an_outcome_that_raises_is_said_once():
    forgetful = env_like(reset=lambda self, example: prompt("What?"))  # no example is kept
    assert len(problems(forgetful)) == 1
    assert_finds(forgetful, "error", "outcome", "no attribute 'example'")


# -------------------------------------------------------------------- shared state and close


def test_an_object_whose_methods_are_tools_and_that_all_trajectories_share_is_found():
    class Memory:
        def __init__(self):
            self.texts = []

        def remember(self, text: str) -> str:
            """Remember a text for later.

            Args:
                text: The text.
            """
            self.texts.append(text)
            return f"{len(self.texts)} texts"

    class Own(GoodEnv):
        def __init__(self, **settings):
            super().__init__(tools=[Memory().remember], **settings)

    class Board(Memory):
        texts = []  # of the class, as the files of fsspec's memory filesystem

        def __init__(self): ...

    class OfItsClass(GoodEnv):
        def __init__(self, **settings):
            super().__init__(tools=[Board().remember], **settings)

    assert_finds(OfItsClass, "warning", "state", "Board of the tool 'remember'")
    shared = env_like(tools=[Memory().remember])
    assert_finds(shared, "warning", "state", "Memory of the tool 'remember'")
    assert problems(Own) == []
    (found,) = (item for item in examine_env(Own, EXAMPLES) if item.check == "tools")
    assert "run one after another (sequential=False lifts that): remember." in found.message


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


@pytest.mark.parametrize("broken", [env_like(tools=[tool_of(lambda: Opaque())]), scoring(lambda self, t: 0.0)])
def test_findings_are_not_repeated(broken):
    found = problems(broken, EXAMPLES * 3)
    assert len({(item.level, item.check) for item in found}) == len(found) == 1


def test_every_environment_is_closed_and_may_come_from_an_async_function():
    Counted, is_open = counted(GoodEnv)

    async def make():
        return Counted()

    for factory in (Counted, make):
        assert problems(factory) == [] and not is_open


def test_no_method_is_blamed_for_what_the_schemas_of_tools_import():
    code = """if True:
        import sys
        from agent_r1_trl import ToolEnv, check_env

        class Looks(ToolEnv):
            def reset(self, example):
                assert "transformers.utils" in sys.modules
                return super().reset(example)

        assert check_env(Looks, timeout_s=60) == []"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_calls_above_the_limit_of_a_turn_need_no_message_each():
    assert problems(env_like(tools=[lookup, calculator, tool_of(lambda: "fine")], max_calls_per_turn=1)) == []


# -------------------------------------------------------------------- tools that reset chooses


def choosing(first, second):
    """An environment whose tools depend on the row, and exist only after `reset`."""
    return env_like(tools=property(lambda self: {"Oslo": first, "Madrid": second}[self.example["answer"]]))


def test_tools_that_reset_chooses_are_checked_and_rolled_out_in_every_row():
    assert problems(choosing([lookup], [])) == []
    assert "schema=" in assert_finds(choosing([lookup], [lambda x: x]), "error", "tools", "<lambda>").fix
    assert_finds(choosing([], [tool_of(lambda: undefined_name)]), "error", "tools", "NameError")  # noqa: F821


def test_a_call_that_is_left_alone_ends_its_event_loop_once_it_lets_go_of_it(monkeypatch, own_loop):
    monkeypatch.setattr(caller_module, "_GRACE_S", 0.0)
    caller, wakes_up = caller_module.Caller(0.1), threading.Event()

    async def block():
        wakes_up.wait(10)

    assert "did not come back" in caller.call("env.reset", block()).failure
    assert shared_loop() is not own_loop and caller.call("env.reset", asyncio.sleep(0, "value")).value == "value"
    wakes_up.set()
    caller.close()
    own_loop.join(10)
    assert own_loop.loop.is_closed() and not shared_loop().loop.is_closed()


def test_a_call_that_cannot_be_cancelled_leaves_the_event_loop_to_the_others(monkeypatch):
    monkeypatch.setattr(caller_module, "_GRACE_S", 0.0)
    caller, thread, is_over = caller_module.Caller(0.05), shared_loop(), threading.Event()

    async def refuse():
        while not is_over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    assert "did not come back" in caller.call("env.reset", refuse()).failure
    is_over.set()
    assert shared_loop() is thread

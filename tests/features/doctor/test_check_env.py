"""check_env: good environments pass without a warning, and each kind of broken one is named with a fix.

Most tests are rows of tables: what is broken, and the level, the check and a word of the finding that must appear.
"""
# ruff: noqa: RUF012 - mutable class attributes are among the faults

import asyncio
import functools
import random
import sqlite3
import threading
import time
import typing

import pytest

from agent_r1_trl.environments import FunctionToolsEnv, SearchQAEnv, ToolEnv, TRLEnvAdapter
from agent_r1_trl.features.doctor import episodes as caller_module
from agent_r1_trl.features.doctor.environment import check_env, examine_env
from agent_r1_trl.rewards import exact_match, extract_answer
from agent_r1_trl.tools import InfrastructureError, SearchIndex, calculator, tool

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
    return check_env(env, examples, **settings)


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


def test_an_outcome_is_ok_only_where_it_was_looked_at():
    def outcome(env, examples=EXAMPLES):
        (found,) = (item for item in examine_env(env, examples) if item.check == "outcome")
        return found

    assert outcome(functools.partial(FunctionToolsEnv, [lookup.fn])).level == "skipped"
    assert "the right answer earns more" in outcome(GoodEnv).message
    assert "was not tried" in outcome(GoodDoors, [{"question": "Which?"}]).message


def test_every_tool_is_called_even_if_the_first_one_ends_the_episode():
    class Ending(GoodEnv):
        tools = [lookup, tool_of(lambda: undefined_name)]  # noqa: F821

        def is_done(self, message):
            return not message.get("malformed_tool_call")

    assert_finds(Ending, "error", "tools", "NameError")


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


# -------------------------------------------------------------------- construction and methods

ONE_ENV = GoodEnv()


@pytest.mark.parametrize(
    ("env", "word"),
    [
        (env_like(__init__=lambda self, size: None), "TypeError"),
        (env_like(__init__=lambda self: raise_(SystemExit(1))), "SystemExit"),
        (lambda: ONE_ENV, "same object every time"),
        *((thing, "is no class or function") for thing in (5, "MyEnv", GoodEnv())),
        ({"a": 5}, "environment_factory['a']=5"),
    ],
)
def test_what_makes_no_environments_is_found(env, word):
    assert_finds(env, "error", "construction", word)


def test_an_environment_needs_reset_and_step():
    for missing in ("reset", "step"):
        assert_finds(env_like(PlainGoodEnv, **{missing: None}), "error", "reset", f"without {missing}")


# -------------------------------------------------------------------- tools


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


def tool_of(body):
    """A tool with a proper schema around any body."""
    function = {"name": "odd", "description": "Do something odd.", "parameters": {"type": "object", "properties": {}}}
    return tool(schema={"type": "function", "function": function})(body)


class Opaque:
    pass


@pytest.mark.parametrize(
    ("tools", "level", "word"),
    [
        (5, "error", "must be a list"),
        ([5], "error", "is no tool"),
        (["missing_method"], "error", "names 'missing_method'"),
        ([lookup, tool(name="lookup")(calculator.fn)], "error", "2 tools are called 'lookup'"),
        ([undescribed], "warning", "no description of 'query'"),
        ([tool_of(lambda: None)], "warning", "tells the model nothing"),
        ([tool_of(lambda: "")], "warning", "tells the model nothing"),
        ([tool_of(lambda: float("nan"))], "warning", "tells the model nothing"),
        ([tool_of(lambda: Opaque())], "warning", "an object of type Opaque"),
        ([tool_of(lambda: (number for number in range(3)))], "warning", "an object of type generator"),
        ([tool_of(lambda: raise_(RuntimeError("boom")))], "warning", "RuntimeError: boom"),
        ([tool_of(lambda: undefined_name)], "error", "NameError"),  # noqa: F821
        ([tool_of(lambda: raise_(SystemExit(2)))], "error", "SystemExit"),
        ([tool_of(lambda: raise_(NotImplementedError()))], "error", "NotImplementedError"),
    ],
)
def test_a_tool_that_misbehaves_is_found(tools, level, word):
    assert_finds(env_like(tools=tools), level, "tools", word)


@pytest.mark.parametrize(
    ("fn", "word"),
    [
        (undocumented, "no docstring"),
        (untyped, "no type hint"),
        (starred, "cannot be described"),
        (exotic, "JSON cannot express"),
    ],
)
def test_a_function_that_cannot_be_described_is_found(fn, word):
    """The list of a class is checked where the class is defined; this one is made by the constructor."""
    assert "schema=" in assert_finds(functools.partial(GoodEnv, tools=[fn]), "error", "tools", word).fix


def test_an_environment_that_pays_for_calls_alone_is_found_also_if_reset_chooses_its_tools():
    def reset(self, example):
        self.tools = [lookup]
        return ToolEnv.reset(self, example)

    for env in (env_like(ToolEnv, tools=[lookup]), env_like(ToolEnv, reset=reset)):
        assert_finds(env, "warning", "outcome", "neither outcome_reward nor process_reward")


def test_a_tool_that_hangs_is_found():
    hanging = tool_of(lambda: time.sleep(5))
    assert_finds(env_like(tools=[hanging]), "error", "step", "did not come back", timeout_s=0.5)
    hanging.timeout_s = 0.2
    assert_finds(env_like(tools=[hanging]), "error", "tools", "'odd' cannot do its work")


def test_a_tool_whose_server_is_down_is_found():
    down = tool_of(lambda: raise_(InfrastructureError("no route to the index")))
    assert_finds(env_like(tools=[down]), "error", "tools", "no route to the index")


@pytest.mark.parametrize(("blocks_s", "timeout_s"), [(0.8, 5), (4, 0.5)], ids=["returns", "never lets go"])
def test_an_async_tool_that_blocks_the_event_loop_is_found(blocks_s, timeout_s):
    async def blocking():
        time.sleep(blocks_s)
        return "x"

    env = env_like(tools=[tool_of(blocking)])
    assert_finds(env, "error", "step", "blocked the event loop", EXAMPLES[:1], timeout_s=timeout_s)


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


@pytest.mark.parametrize(
    ("returned", "word"),
    [
        (None, "reset returned NoneType"),
        ([], "reset returned []"),
        ("go", "reset returned str"),
        ({"role": "user", "content": "go"}, "reset returned dict"),
        (["go"], "reset returned list"),
        ([{"content": "go"}], "reset returned list"),
        ([{"role": "user"}], "content is NoneType"),
        ([{"role": "user", "content": 5}], "content is int"),
        ([{"role": "user", "content": [5]}], "content is list"),
        ([{"role": "human", "content": "go"}], "role 'human'"),
        ([{"role": "user", "content": "go", "when": {1, 2}}], "not JSON"),
    ],
)
def test_a_reset_that_returns_no_messages_is_found(returned, word):
    assert_finds(env_like(reset=lambda self, example: returned), "error", "reset", word)


def prompt(text, role="user"):
    return [{"role": role, "content": text}]


@pytest.mark.parametrize(
    ("reset", "word", "settings"),
    [
        (lambda self, example: prompt(example["x"]), "KeyError: 'x'", {}),
        (lambda self, example: time.sleep(5), "did not come back", {"timeout_s": 0.2}),
        (lambda self, example: prompt(f"task {random.random()}"), "different prompts for the same", {}),
    ],
)
def test_a_reset_that_misbehaves_is_found(reset, word, settings):
    assert_finds(env_like(reset=reset), "error", "reset", word, **settings)


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


# -------------------------------------------------------------------- step

ANSWER = {"role": "tool", "content": "x"}


def read_query(self, message):
    for call in message.get("tool_calls", []):
        call["function"]["arguments"]["query"]
    return [], 0.0, True, {}


@pytest.mark.parametrize(
    ("step", "level", "word"),
    [
        # What no rollout could use.
        (lambda self, message: None, "error", "step returned None"),
        (lambda self, message: ([], 0.0, True), "error", "(observations, reward, done, info)"),
        (lambda self, message: ([], 0.0, True, False, {}), "error", "(observations, reward, done, info)"),
        (lambda self, message: ("text", 0.0, False, {}), "error", "observations='text'"),
        (lambda self, message: ([{"role": "tool", "content": 5}], 0.0, False, {}), "error", "content is int"),
        (lambda self, message: ([{**ANSWER, "when": {1}}], 0.0, False, {}), "error", "not JSON"),
        (lambda self, message: ([ANSWER], float("nan"), True, {}), "error", "reward nan"),
        (lambda self, message: ([ANSWER], None, True, {}), "error", "reward None"),
        (lambda self, message: ([ANSWER], 0.0, True, 5), "error", "info=5"),
        (lambda self, message: ([ANSWER], 0.0, True, {"when": object()}), "error", "info is not JSON"),
        (lambda self, message: ([ANSWER], 0.0, True, {"score": float("inf")}), "error", "info is not JSON"),
        # What models really write.
        (read_query, "error", "KeyError"),
        (lambda self, message: ([], 0.0, message["content"].strip() != "x", {}), "error", "without content (None)"),
        # What teaches the wrong thing.
        (lambda self, message: ([], 0.0, False, {}), "error", "returned no observation"),
        (lambda self, message: ([ANSWER], 0.0, False, {}), "warning", "No episode ended"),
        (lambda self, message: ([], 1.0, True, {}), "warning", "no chance to repair"),
        (lambda self, message: ([], 1.0, True, {}), "warning", "earns 1"),
    ],
)
def test_a_step_that_misbehaves_is_found(step, level, word):
    assert_finds(env_like(PlainGoodEnv, step=step), level, "step", word)


def test_calls_that_are_not_answered_one_by_one_are_found():
    def one_for_all(self, message):
        return [ANSWER], 0.0, not message.get("tool_calls"), {}

    env = env_like(PlainGoodEnv, step=one_for_all, tools=[lookup, calculator])
    assert_finds(env, "warning", "step", "2 calls were answered by 1")


def test_a_bug_in_process_reward_is_found():
    broken = env_like(process_reward=lambda self, call, result: result["content"])
    assert_finds(broken, "error", "step", "process_reward raised TypeError")


HANGS = {
    "step": (PlainGoodEnv, lambda self, message: time.sleep(5)),
    "outcome": (GoodEnv, lambda self, t: time.sleep(5)),
}


@pytest.mark.parametrize("check", ["step", "outcome"])
def test_a_method_that_hangs_is_found(check):
    base, hangs = HANGS[check]
    hanging = env_like(base, **{"outcome_reward" if check == "outcome" else check: hangs})
    assert_finds(hanging, "error", check, "did not come back", EXAMPLES[:1], timeout_s=0.2)


# -------------------------------------------------------------------- outcome


@pytest.mark.parametrize(
    ("outcome", "level", "word"),
    [
        (lambda self, t: None, "error", "returned None"),
        (lambda self, t: float("nan"), "error", "nan"),
        (lambda self, t: "1.0", "error", "'1.0'"),
        (lambda self, t: (1.0, {"a": 0.5}), "error", "must add up"),
        (None, "warning", "no outcome_reward"),
        (lambda self, t: t.turns[-1].message["content"] == "x", "error", "empty trajectory"),
        (lambda self, t: float(t.final_text.strip()[0] == "x"), "error", "IndexError"),
        (lambda self, t: float(len(t.turns[-1].message["content"])) if t.turns else 0.0, "error", "without content"),
        (lambda self, t: random.random(), "warning", "differently each time"),
        (lambda self, t: 0.0, "warning", "earns 0, nonsense 0"),
        (lambda self, t: float(t.final_text == self.example["question"]), "warning", "column 'answer'"),
        (lambda self, t: -1.0 if t.stop_reason.value == "done" else 0.0, "warning", "Never answering earns 0"),
    ],
)
def test_an_outcome_that_misbehaves_is_found(outcome, level, word):
    assert_finds(
        env_like(PlainGoodEnv if outcome is None else GoodEnv, outcome_reward=outcome), level, "outcome", word
    )


def test_an_outcome_that_raises_is_said_once():
    forgetful = env_like(reset=lambda self, example: prompt("What?"))  # no example is kept
    assert len(problems(forgetful)) == 1
    assert_finds(forgetful, "error", "outcome", "no attribute 'example'")


def test_calls_that_earn_more_than_the_task_are_found():
    assert_finds(functools.partial(GoodEnv, max_process_reward=50.0), "warning", "outcome", "more than solving")
    assert_finds(functools.partial(GoodEnv, tool_error_reward=0.3), "warning", "step", "earns 0.3")


# -------------------------------------------------------------------- shared state and close


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


@pytest.mark.parametrize(
    ("env", "word"),
    [
        (env_like(tools=[remember], memory=[]), "Broken.memory"),
        (env_like(tools=[remember], memory=World()), "Broken.memory"),
        (env_like(tools=[remember], __init__=lambda self, world=World(): setattr(self, "memory", world)), "memory"),  # noqa: B008
        (env_like(tools=[count_on_the_class], memory=0), "Broken.memory"),
        (env_like(GoodTRL, remember=remember, memory=[]), "Broken.memory"),
        (env_like(tools=[remember], memory=property(lambda self: self._Broken__memory), _Broken__memory=[]), "memory"),
    ],
    ids=["list", "object", "argument", "assignment", "TRL", "private"],
)
def test_state_that_instances_share_is_found(env, word):
    assert_finds(env, "error", "state", word)


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


def test_findings_are_not_repeated():
    found = problems(env_like(tools=[tool_of(lambda: Opaque())]), EXAMPLES * 3)
    assert len({(item.level, item.check, item.message) for item in found}) == len(found) == 1


# -------------------------------------------------------------------- tools that reset chooses


class PerRowEnv(ToolEnv):
    """Offers the tools that the row names."""

    offered: typing.ClassVar = {"lookup": [lookup], "calculator": [calculator], "undescribed": [lambda x: x]}

    def reset(self, example):
        self.tools = self.offered[example["toolset"]]
        return super().reset(example)

    def outcome_reward(self, trajectory):
        return exact_match(trajectory.final_text, self.example["answer"]) == 1.0


def rows_with(*toolsets):
    return [{"prompt": "What?", "answer": "Oslo", "toolset": name} for name in toolsets]


def test_tools_that_reset_chooses_are_checked_in_every_row():
    assert check_env(PerRowEnv, rows_with("lookup", "calculator")) == []
    found = assert_finds(PerRowEnv, "error", "tools", "<lambda>", rows_with("lookup", "undescribed"))
    assert "schema=" in found.fix


def test_tools_that_reset_chooses_are_played():
    called = []

    def mine(query: str) -> str:
        """Look a thing up in the collection.

        Args:
            query: What to look up.
        """
        called.append(query)
        raise NameError("no such name")

    env = type("Env", (PerRowEnv,), {"offered": {"mine": [mine]}})
    assert_finds(env, "error", "tools", "'mine' failed", rows_with("mine"))
    assert called


def test_an_environment_whose_tools_exist_only_after_reset_is_sound():
    class Late(GoodEnv):
        @property
        def tools(self):
            return {"Oslo": [lookup], "Madrid": []}[self.example["answer"]]

    assert check_env(Late, EXAMPLES) == []


def test_a_call_that_is_left_alone_ends_its_event_loop_once_it_lets_go_of_it(monkeypatch):
    monkeypatch.setattr(caller_module, "_GRACE_S", 0.0)
    caller, wakes_up = caller_module.Caller(0.1), threading.Event()
    blocked = caller._loop

    async def block():
        wakes_up.wait(10)

    assert "did not come back" in caller.call("env.reset", block()).failure
    used = caller._loop
    assert used is not blocked and caller.call("env.reset", asyncio.sleep(0, "value")).value == "value"
    wakes_up.set()
    caller.close()
    deadline = time.monotonic() + 10
    while not (blocked.is_closed() and used.is_closed()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert blocked.is_closed() and used.is_closed()

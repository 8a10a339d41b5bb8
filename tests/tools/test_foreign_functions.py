"""Functions as other people write them: docstring styles, type hints beyond JSON's, schemas of other systems."""

import asyncio
import dataclasses
import datetime
import enum
import functools
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import fsspec
import numpy as np
import pydantic
import pytest
from typing_extensions import TypedDict

from agent_r1_trl import ToolEnv
from agent_r1_trl.environments.factory import read_form, resolve_env_factory
from agent_r1_trl.rollout import EnvSession, RolloutRequest
from agent_r1_trl.testing import FAMILIES, make_tokenizer
from agent_r1_trl.tools import Tool, ToolCall, ToolExecutor, ToolSchemaError, tool
from agent_r1_trl.tools.render import render_result
from agent_r1_trl.tools.signature import read_type

DOCSTRINGS = {
    "google": """Move a file.

    Args:
        source: Where it is.
        force: Whether to replace.

    Returns:
        What happened.
    """,
    "google with types": """Move a file.
    Args:
        source (str): Where it is.
        force (bool, optional): Whether to replace.
    Returns:
        What happened.
    """,
    "numpy": """Move a file.

    Parameters
    ----------
    source : str
        Where it is.
    force : bool, optional
        Whether to replace.

    Returns
    -------
    str
        What happened.
    """,
    "sphinx": """Move a file.

    :param source: Where it is.
    :type source: str
    :param bool force: Whether to replace.
    :return: What happened.
    """,
}


@pytest.mark.parametrize("style", DOCSTRINGS)
def test_a_docstring_of_any_style_gives_the_same_schema(style):
    def move(source: str, force: bool = False) -> str: ...

    move.__doc__ = DOCSTRINGS[style]
    assert Tool(move).schema == {
        "type": "function",
        "function": {
            "name": "move",
            "description": "Move a file.",
            "parameters": {
                "type": "object",
                "properties": {
                    "source": {"type": "string", "description": "Where it is."},
                    "force": {"type": "boolean", "description": "Whether to replace."},
                },
                "required": ["source"],
            },
        },
    }


WORDED = {
    "str": str,
    "string or None": str | None,
    "int, optional": int,
    "bool (default: False)": bool,
    "float, default 0.5": float,
    "str or list of str": str | list[str],
    "list of strings": list[str],
    "list[int] | None": list[int] | None,
    "Optional[Union[int, str]]": int | str | None,
    "int, float or None": int | float | None,
    "tuple of int": list[int],
    "dict(str, bytes)": dict,
    "{'fast', 'slow'}, optional": Literal["fast", "slow"],
    '"raise", "omit" or "return"': Literal["raise", "omit", "return"],
    "Literal['fast'] or int": Literal["fast"] | int,
    "list of tuple[int, ...]": list[list[int]],
    "os.PathLike": str,
    "path-like": str,
    "pathlib.Path": None,
    "list of callable": None,
    "{0.5, 1.5}": None,
    "callable": None,
    "ndarray of int": None,
    "the words": None,
    "": None,
}


@pytest.mark.parametrize("words", WORDED)
def test_types_that_a_docstring_words_are_read(words):
    assert read_type(words) == WORDED[words]


@pytest.mark.parametrize("style", ["numpy", "sphinx", "google with types"])
def test_a_function_without_hints_has_the_types_of_its_docstring(style):
    def move(source, force=False): ...

    def hinted(source: str, force: bool = False): ...

    move.__doc__ = hinted.__doc__ = DOCSTRINGS[style]
    assert Tool(move, name="m").schema == Tool(hinted, name="m").schema


def test_methods_of_other_peoples_classes_are_tools():
    files = fsspec.filesystem("memory")
    files.pipe("/words/a", b"x")
    assert run(Tool(files.find), path="/words").content == '["/words/a"]'
    parameters = Tool(files.rm).schema["function"]["parameters"]
    assert parameters["properties"]["recursive"]["type"] == "boolean" and parameters["required"] == ["path"]
    assert run(Tool(files.rm), path=["/words/a"], recursive=1).error.value == "invalid_arguments"
    with pytest.raises(ToolSchemaError, match=r"'rm_file': argument 'path' has no type hint.*docstring"):
        Tool(files.rm_file)


def test_what_annotated_says_describes_an_argument_that_the_docstring_leaves_out():
    @tool
    def search(
        query: Annotated[str, "What to look for."],
        top_k: Annotated[int, pydantic.Field(description="How many.", ge=1)] = 3,
        lang: str = pydantic.Field(default="en", description="Language."),
    ) -> str:
        """Search."""
        return f"{query} {top_k} {lang}"

    assert search.schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for."},
            "top_k": {"type": "integer", "minimum": 1, "default": 3, "description": "How many."},
            "lang": {"type": "string", "description": "Language."},
        },
        "required": ["query"],
    }
    assert run(search, query="x").content == "x 3 en"
    assert run(search, query="x", top_k=0).error is not None


# -------------------------------------------------------------------- type hints


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Text(str, enum.Enum):  # noqa: UP042 - how it was written before Python 3.11
    ONE = "one"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Point:
    x: int
    color: Color = Color.RED


class Order(pydantic.BaseModel):
    points: list[Point]
    note: str | None = None


class Options(TypedDict, total=False):
    verbose: bool
    point: typing.Required[Point]


POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer"},
        "color": {"type": "string", "enum": ["red", "blue"], "default": "red"},
    },
    "required": ["x"],
}
CASES: list[tuple[Any, dict[str, Any], Any, Any]] = [
    (Color, {"type": "string", "enum": ["red", "blue"]}, "blue", Color.BLUE),
    (Level, {"type": "integer", "enum": [1, 2]}, 2, Level.HIGH),
    (Color | None, {"type": "string", "enum": ["red", "blue"], "nullable": True}, None, None),
    (Point, POINT, {"x": 1, "color": "blue"}, Point(1, Color.BLUE)),
    (list[Point], {"type": "array", "items": POINT}, [{"x": 1}], [Point(1)]),
    (Sequence[Color], {"type": "array", "items": {"type": "string", "enum": ["red", "blue"]}}, ["red"], [Color.RED]),
    (
        Order,
        {
            "type": "object",
            "properties": {"points": {"type": "array", "items": POINT}, "note": {"type": "string", "nullable": True}},
            "required": ["points"],
        },
        {"points": [{"x": 3}]},
        Order(points=[Point(3)]),
    ),
    (
        Options,
        {"type": "object", "properties": {"verbose": {"type": "boolean"}, "point": POINT}, "required": ["point"]},
        {"point": {"x": 2}},
        {"point": Point(2)},
    ),
    (datetime.date, {"type": "string", "format": "date"}, "2024-02-29", datetime.date(2024, 2, 29)),
    (set[int], {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 2], {1, 2}),
    (tuple[str, int], {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], ("a", 1)),
    (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}, [1, 2, 3], (1, 2, 3)),
    (tuple, {"type": "array", "items": {}}, [1, "a"], (1, "a")),
    (dict[int, str], {"type": "object", "additionalProperties": {"type": "string"}}, {"1": "a"}, {1: "a"}),
    (list[int], {"type": "array", "items": {"type": "integer"}}, [1.0], [1]),
    (int | str, {"type": ["integer", "string"]}, 2.0, 2),
    (Annotated[int, pydantic.Field(ge=0)], {"type": "integer", "minimum": 0}, 3.0, 3),
    (Path, {"type": "string", "format": "path"}, "a/b", Path("a/b")),
    (bytes, {"type": "string", "format": "binary"}, "ab", b"ab"),
    (dict, {"type": "object"}, {"a": [1]}, {"a": [1]}),
    (dict[str, Any], {"type": "object", "additionalProperties": {}}, {"a": [1]}, {"a": [1]}),
    (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}, "a", "a"),
    (Any, {}, [1], [1]),
    (float, {"type": "number"}, 2, 2.0),
]


def tool_of(hint: Any, default: Any = ...) -> tuple[Tool, list[Any]]:
    """A tool with one argument `x`, and a list of what it receives."""
    received: list[Any] = []

    def fn(x):
        """Do it.

        Args:
            x: A thing.
        """
        received.append(x)
        return "done"

    fn.__annotations__["x"] = hint
    if default is not ...:
        fn.__defaults__ = (default,)
    return Tool(fn), received


def run(item: Tool, **arguments: Any):
    (result,) = asyncio.run(ToolExecutor([item]).execute([ToolCall(name=item.name, arguments=arguments)]))
    return result


@pytest.mark.parametrize(("hint", "schema", "value", "expected"), CASES, ids=[str(case[0]) for case in CASES])
def test_the_function_receives_an_object_of_the_hinted_type(hint, schema, value, expected):
    made, received = tool_of(hint)
    assert made.schema["function"]["parameters"]["properties"]["x"] == {**schema, "description": "A thing."}
    result = run(made, x=value)
    assert not result.is_error, result.content
    assert received == [expected] and type(received[0]) is type(expected)
    assert result.call.arguments == {"x": value}  # the record keeps what the model wrote


@pytest.mark.parametrize(
    ("hint", "value", "named"),
    [
        (Color, "green", "'green' is not one of"),
        (datetime.date, "2023-02-29", "valid date"),
        (tuple[str, int], ["a"], "'x'"),
        (list[Point], [{"x": 1}, {"y": 1}], "'x' is a required property"),
        (list[dict[str, int]], [{"euro": 1}, {"euro": "two"}], "'x'[1]['euro']: 'two' is not of type 'integer'"),
        (dict[int, str], {"one": "a"}, "'x'"),
    ],
)
def test_a_value_that_does_not_fit_is_a_wrong_argument_and_never_reaches_the_function(hint, value, named):
    made, received = tool_of(hint)
    result = run(made, x=value)
    assert result.error.value == "invalid_arguments" and named in result.content
    assert received == []


def test_a_validator_that_raises_anything_is_a_wrong_argument():
    class Odd(pydantic.BaseModel):
        name: str

        @pydantic.field_validator("name")
        @classmethod
        def check(cls, value):
            raise KeyError(value)

    result = run(tool_of(Odd)[0], x={"name": "n"})
    assert result.error.value == "invalid_arguments" and "KeyError" in result.content


@pytest.mark.parametrize(
    ("hint", "default", "shown"),
    [
        (Color, Color.BLUE, "blue"),
        (Point, Point(4), {"x": 4, "color": "red"}),
        (datetime.date, datetime.date(2024, 1, 2), "2024-01-02"),
        (set[int], frozenset({1}), [1]),
    ],
)
def test_the_default_of_such_an_argument_stands_in_the_schema(hint, default, shown):
    made, received = tool_of(hint, default)
    parameters = made.schema["function"]["parameters"]
    assert parameters["properties"]["x"]["default"] == shown and "required" not in parameters
    assert not run(made).is_error
    assert received == [default]


def test_a_plain_hint_has_the_schema_that_trl_shows_whatever_its_neighbours_are():
    from transformers.utils import get_json_schema

    def plain(city: str, nights: int = 2, tags: list[str] | None = None):
        """Book.

        Args:
            city: Where.
            nights: How many.
            tags: Which.
        """

    def mixed(city: str, color: Color, nights: int = 2, tags: list[str] | None = None):
        """Book.

        Args:
            city: Where.
            color: What colour.
            nights: How many.
            tags: Which.
        """

    expected = get_json_schema(plain)["function"]["parameters"]["properties"]
    shown = Tool(mixed).schema["function"]["parameters"]["properties"]
    assert {name: shown[name] for name in expected} == expected
    assert list(shown) == ["city", "color", "nights", "tags"]


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family in ("qwen3", "gptoss") else pytest.mark.matrix) for family in FAMILIES],
)
def test_chat_templates_render_these_schemas(family):
    tools = [tool_of(hint)[0] for hint, *_ in CASES] + [tool_of(Order, Order(points=[]))[0]]
    schemas = [item.schema for item in tools]
    text = make_tokenizer(family).apply_chat_template(
        [{"role": "user", "content": "Hi."}], tools=schemas, tokenize=False, add_generation_prompt=True
    )
    assert "$ref" not in text and "$defs" not in text


def undescribed(x: int): ...


class Undescribed:
    def reset(self, **row): ...

    def look(self, where):
        """Look around."""


def sampled_with(tools):
    env = type("Env", (ToolEnv,), {"__init__": lambda self: ToolEnv.__init__(self, tools=[Tool(*tools)])})
    session = EnvSession(env, truncate=lambda text, max_tokens: text)
    asyncio.run(session.reset(RolloutRequest(example={"prompt": "?"})))


@pytest.mark.parametrize(
    "give",
    [
        lambda: type("Env", (ToolEnv,), {"tools": [undescribed]}),
        lambda: read_form(resolve_env_factory(tools=[undescribed])),
        lambda: read_form(resolve_env_factory(environment_factory=Undescribed)),
        lambda: read_form(resolve_env_factory(environment_factory={"a": Undescribed})),
        lambda: sampled_with([undescribed]),
    ],
    ids=["class", "functions", "TRL's class", "TRL's classes", "instance"],
)
def test_a_function_that_cannot_be_described_is_refused_where_it_is_given(give):
    with pytest.raises(ToolSchemaError, match=r"'(undescribed|look)'.*schema="):
        give()


# -------------------------------------------------------------------- schemas of other systems

REFERRING = {
    "type": "object",
    "properties": {"point": {"$ref": "#/$defs/Point"}},
    "required": ["point"],
    "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
}


@pytest.mark.parametrize(
    "schema",
    [
        {"name": "go", "description": "Go there.", "inputSchema": REFERRING},
        {"name": "go", "description": "Go there.", "input_schema": REFERRING},
        {"type": "function", "name": "go", "description": "Go there.", "parameters": REFERRING, "strict": True},
        {"type": "function", "function": {"name": "go", "description": "Go there.", "parameters": REFERRING}},
    ],
    ids=["mcp", "anthropic", "openai responses", "openai chat"],
)
def test_a_schema_of_another_system_is_brought_into_our_form_without_references(schema):
    made = Tool(lambda **arguments: str(arguments), schema=schema)
    assert made.schema == {
        "type": "function",
        "function": {
            "name": "go",
            "description": "Go there.",
            "parameters": {
                "type": "object",
                "properties": {
                    "point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
                },
                "required": ["point"],
            },
        },
    }
    assert run(made, point={"x": 1}).content == "{'point': {'x': 1}}"
    assert run(made, point={}).error.value == "invalid_arguments"


def test_a_schema_that_the_function_cannot_be_called_with_is_refused():
    schema = {"name": "go", "description": "Go.", "parameters": {"type": "object", "properties": {"x": {}}}}
    for fn, named in ((lambda y=1: y, "unexpected .*'x'"), (lambda x, y: y, "missing .*'y'")):
        with pytest.raises(ToolSchemaError, match=f"'go'.*{named}"):
            Tool(fn, schema=schema)
    assert Tool(functools.partial(lambda x, y: y, y=1), schema=schema).name == "go"


def test_a_schema_that_refers_to_itself_or_to_nothing_is_refused():
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    for definitions, named in (({"Node": node}, "Node refers to itself"), ({}, "Node is named, but not defined")):
        schema = {"name": "go", "inputSchema": {**node, "$defs": definitions}}
        with pytest.raises(ToolSchemaError, match=f"'go'.*{named}"):
            Tool(lambda **arguments: "", schema=schema)


def test_none_is_accepted_where_it_is_the_default_whatever_the_hint_says():
    made, received = tool_of(str, None)
    assert not run(made, x=None).is_error and not run(made, x="a").is_error
    assert received == [None, "a"]
    assert run(tool_of(str, "b")[0], x=None).error.value == "invalid_arguments"


def test_a_function_that_yields_is_refused():
    def lines():
        """Read lines."""
        yield "a"

    async def later():
        """Read lines."""
        yield "a"

    for fn in (lines, later, functools.partial(lines)):
        with pytest.raises(ValueError, match=r"'(lines|later)' yields: return"):
            Tool(fn)


def test_the_signature_names_each_type_once_and_null_with_it():
    for hint, text in {
        Color | None: '"red" | "blue" | null',
        datetime.date | str: "string",
        list[Color | None]: 'array of "red" | "blue" | null',
        Point | int | None: "object | integer | null",
    }.items():
        assert tool_of(hint)[0].signature == f"fn(x: {text})"


# -------------------------------------------------------------------- what tools return

LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, "(no output)"),
        ({"a": [1, None], "ü": True}, '{"a": [1, null], "ü": true}'),
        ((1, 2), "[1, 2]"),
        (b"caf\xc3\xa9 \xff", "café \ufffd"),
        ({"when": complex(1, 2)}, '{"when": "(1+2j)"}'),
        ({(1, 2): "tuple keys are no JSON"}, "{(1, 2): 'tuple keys are no JSON'}"),
        (LOOP, "[[...]]"),
        (Point(1, Color.BLUE), '{"x": 1, "color": "blue"}'),
        ([Point(1)], '[{"x": 1, "color": "red"}]'),
        (Order(points=[Point(2)]), '{"points": [{"x": 2, "color": "red"}], "note": null}'),
        (Color.RED, "red"),
        (Level.HIGH, "2"),
        (Text.ONE, "one"),
        ({"b", "a"}, '["a", "b"]'),
        ({"when": datetime.date(2024, 1, 2), "in": Path("a")}, '{"when": "2024-01-02", "in": "a"}'),
        (np.arange(3), "[0, 1, 2]"),
        (np.float64(0.5), "0.5"),
        ([np.int64(3), {"a": np.arange(2)}], '[3, {"a": [0, 1]}]'),
        (Point, str(Point)),
        (datetime.date(2024, 1, 2), "2024-01-02"),
    ],
)
def test_what_a_tool_returns_is_read_as_json(value, text):
    assert render_result(value) == text

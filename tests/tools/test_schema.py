"""Schemas: what a model is told about a function, and what the user is told when that is not possible."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import pytest

from agent_r1_trl.tools import Tool, ToolSchemaError, tool
from agent_r1_trl.tools.json_schema import describe_signature


def book(city: str, nights: int = 1, budget: float | None = None, kind: Literal["hotel", "hostel"] = "hotel") -> str:
    """Book a room.

    Args:
        city: Where.
        nights: How many nights.
        budget: Most it may cost.
        kind: What sort of room.

    Returns:
        A confirmation.
    """
    return f"{city} {nights} {budget} {kind}"


def with_doc(fn):
    fn.__doc__ = "Do it.\n\n    Args:\n        x: A thing."
    return fn


class Plain:
    """A class that neither transformers nor pydantic knows."""


@dataclasses.dataclass
class Node:
    children: "list[Node]"


def schema_of(fn) -> dict[str, Any]:
    return Tool(fn).schema


def test_the_schema_equals_the_one_trl_shows_to_the_model_but_for_what_servers_drop():
    from transformers.utils import get_json_schema

    of_trl = get_json_schema(book)
    assert of_trl["function"].pop("return")
    assert Tool(book).schema == of_trl


def test_a_name_of_ones_own_replaces_the_functions_name():
    assert Tool(book, name="reserve").schema["function"]["name"] == "reserve"
    assert Tool(book, description="Reserve a room.").description == "Reserve a room."


def test_a_partial_offers_only_what_it_has_not_filled_in():
    described = Tool(functools.partial(book, nights=3))
    assert described.name == "book"
    assert "nights" not in described.schema["function"]["parameters"]["properties"]
    assert described("Oslo") == "Oslo 3 None hotel"


def test_a_callable_object_is_a_tool():
    class Lookup:
        def __call__(self, key: str) -> str:
            """Look a key up.

            Args:
                key: The key.
            """
            return key

    described = Tool(Lookup(), name="lookup")
    assert described.schema["function"]["parameters"]["required"] == ["key"]


def test_a_hint_that_json_cannot_express_is_refused():
    @with_doc
    def fn(x): ...

    for hint in (type, Callable[[], int], Plain, list[Plain], Node):
        fn.__annotations__["x"] = hint
        with pytest.raises(ToolSchemaError, match=r"'fn'.*'x'.*schema="):
            schema_of(fn)


def test_a_missing_description_of_an_argument_is_said_once_and_no_refusal(caplog):
    def described_in_part(x: str, level: Literal[1, 2], y: int = 1, **others):
        """Do it.

        Args:
            x: A thing.
        """

    for _ in range(2):
        schema = Tool(described_in_part, name="half").schema
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "x": {"type": "string", "description": "A thing."},
            "level": {"type": "integer", "enum": [1, 2]},
            "y": {"type": "integer"},
        },
        "required": ["x", "level"],
    }
    (said,) = caplog.messages
    assert said.startswith("Tool 'half': a model sees no description of 'level', 'y'") and said.endswith(
        "no **others."
    )


def test_arguments_that_cannot_be_passed_by_name_are_refused():
    def stars(*x: str): ...

    def double_stars(**x: str): ...

    def positional(x: str, /): ...

    for fn, named in ((stars, r"'stars': \*x"), (double_stars, r"'double_stars': \*\*x"), (positional, "'x'")):
        with pytest.raises(ToolSchemaError, match=named):
            schema_of(with_doc(fn))


def test_a_hint_that_names_nothing_is_refused_with_its_name():
    @with_doc
    def fn(x: "NoSuchType"): ...  # noqa: F821

    with pytest.raises(ToolSchemaError, match="NoSuchType"):
        Tool(fn)


def test_names_that_no_template_can_spell_are_refused():
    for name in ("\t", "two words", "naïve", "a" * 65, "x\n"):
        with pytest.raises(ToolSchemaError, match="Tool name"):
            Tool(book, name=name)
    with pytest.raises(ToolSchemaError, match=r"<lambda>.*name="):
        Tool(lambda x: x)
    assert Tool(lambda: "x", name="constant", description="Give x.").name == "constant"


def test_a_hand_written_schema_is_taken_as_it_is_and_checked():
    schema = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
    assert Tool(lambda: "x", schema=schema).schema == schema
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "strange"}}}
    for wrong, named in ((broken, "'f'.*strange"), ({"name": "f"}, "Tool schema .*'f'")):
        with pytest.raises(ToolSchemaError, match=named):
            Tool(lambda: "x", schema=wrong)


def test_the_signature_is_one_line_a_model_can_follow():
    assert describe_signature(Tool(book).schema["function"]) == (
        'book(city: string, nights?: integer, budget?: number | null, kind?: "hotel" | "hostel")'
    )


def test_an_argument_may_be_called_description_or_nullable():
    @tool
    def label(description: str, nullable: bool) -> str:
        """Label it.

        Args:
            description: The words.
            nullable: Whether.
        """
        return description

    assert label.check_arguments({"description": "x", "nullable": True})[1] == []
    assert label.check_arguments({"description": "x", "nullable": None})[1] != []


def test_the_schema_is_made_once_for_all_tools_of_a_function():
    assert Tool(book).schema is schema_of(book)

"""Schemas as servers publish them: right calls are accepted, whatever the schema consists of, and none takes long."""

import time

import pytest

from agent_r1_trl.tools import Tool
from agent_r1_trl.tools.json_schema import fits_pattern
from agent_r1_trl.tools.references import inline_references
from agent_r1_trl.tools.signature import ToolSchemaError

TEXT, URL = {"content": {"type": "string"}}, {"url": {"type": "string"}}


def make(parameters, name="attach"):
    def call(**arguments):
        return str(arguments)

    return Tool(call, schema={"name": name, "description": "Attach.", "parameters": parameters})


def problems(parameters, **arguments):
    return make(parameters).check_arguments(arguments)[1]


COMPOSED = {
    "anyOf": {"type": "object", "anyOf": [{"properties": TEXT}, {"properties": URL}]},
    "anyOf with required": {
        "anyOf": [{"properties": TEXT, "required": ["content"]}, {"properties": URL, "required": ["url"]}]
    },
    "oneOf": {"oneOf": [{"properties": TEXT, "required": ["content"]}, {"properties": URL, "required": ["url"]}]},
    "allOf": {"allOf": [{"properties": TEXT}, {"properties": URL}]},
    "nested": {"allOf": [{"anyOf": [{"properties": TEXT}, {"properties": URL}]}]},
    "if": {"properties": TEXT, "if": {"required": ["content"]}, "else": {"properties": URL, "required": ["url"]}},
    "dependentSchemas": {"properties": TEXT, "dependentSchemas": {"content": {"properties": URL}}},
    "a reference": {"$defs": {"way": {"properties": URL}}, "anyOf": [{"properties": TEXT}, {"$ref": "#/$defs/way"}]},
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#", "anyOf": [{"properties": TEXT}, {"properties": URL}],
    },
}  # fmt: skip


STRICT = ("anyOf with required", "oneOf", "allOf", "if", "dependentSchemas")
"""Where a wrong type fits no branch: without `required`, branches that do not name an argument take any."""


@pytest.mark.parametrize("kind", COMPOSED)
def test_arguments_of_a_branch_are_known_and_checked_and_others_are_refused(kind):
    beside = {"content": "x"} if kind == "dependentSchemas" else {}
    assert not problems(COMPOSED[kind], url="file:///a", **beside)
    assert bool(problems(COMPOSED[kind], url=5, **beside)) == (kind in STRICT)
    assert "'path' was unexpected" in str(problems(COMPOSED[kind], url="a", path="b", **beside))


def test_a_branch_that_takes_anything_and_pattern_properties_in_a_branch_keep_their_meaning():
    assert not problems({"anyOf": [{"properties": TEXT, "additionalProperties": True}]}, anything=1)
    assert not problems({"anyOf": [{"patternProperties": {"^x-": {"type": "string"}}}]}, **{"x-trace": "a"})
    assert problems({"anyOf": [{"patternProperties": {"^x-": {"type": "string"}}}]}, other="a")


def test_the_signature_shows_the_branches():
    assert make(COMPOSED["anyOf with required"]).signature == "attach(content: string) or attach(url: string)"
    assert make(COMPOSED["allOf"]).signature == "attach(content?: string, url?: string)"
    many = {"allOf": [{"anyOf": [{"properties": {f"{a}{b}": {}}} for b in "abc"]} for a in "xyz"]}
    assert make(many).signature.count("attach(") == 1


REFERENCES = {
    "into the properties": ({"price": {"type": "number"}, "other": {"$ref": "#/properties/price"}}, {}),
    "an escaped slash": ({"other": {"$ref": "#/$defs/a~1b"}}, {"$defs": {"a/b": {"type": "number"}}}),
    "an escaped bracket": ({"other": {"$ref": "#/$defs/List%5Bint%5D"}}, {"$defs": {"List[int]": {"type": "number"}}}),
    "an anchor": ({"other": {"$ref": "#amount"}}, {"$defs": {"x": {"$anchor": "amount", "type": "number"}}}),
    "nested definitions": (
        {"other": {"$ref": "#/$defs/outer/$defs/inner"}},
        {"$defs": {"outer": {"$defs": {"inner": {"type": "number"}}}}},
    ),
    "an id": (
        {"other": {"$ref": "https://example.org/amount"}},
        {"$defs": {"x": {"$id": "https://example.org/amount", "type": "number"}}},
    ),
    "equal last names": (
        {"other": {"$ref": "#/definitions/b/item"}},
        {"definitions": {"item": {"type": "string"}, "b": {"item": {"type": "number"}}}},
    ),
    "an index": (
        {"other": {"$ref": "#/$defs/many/anyOf/1"}}, {"$defs": {"many": {"anyOf": [{}, {"type": "number"}]}}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFERENCES)
def test_a_reference_leads_where_its_pointer_says(kind):
    properties, rest = REFERENCES[kind]
    parameters = {"type": "object", "properties": properties, **rest}
    shown = make(parameters).schema["function"]["parameters"]["properties"]["other"]
    assert shown["type"] == "number"
    assert not problems(parameters, other=1.5) and problems(parameters, other="x")


def test_an_argument_called_ref_and_data_that_look_like_references_are_left_alone():
    properties = {"$ref": {"type": "string"}, "kind": {"enum": [{"$ref": "#/nowhere"}]}}
    parameters = {"type": "object", "properties": properties, "required": ["$ref"]}
    assert inline_references(parameters)["properties"] == properties
    assert not problems(parameters, **{"$ref": "main"})


@pytest.mark.parametrize(("reference", "why"), [("#/$defs/gone", "not defined"), ("#/$defs/tree", "refers to itself")])
def test_a_reference_that_leads_nowhere_or_to_itself_is_refused_by_name(reference, why):
    tree = {"properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
    with pytest.raises(ToolSchemaError, match=why):
        make({"type": "object", "properties": {"other": {"$ref": reference}}, "$defs": {"tree": tree}})


def test_arguments_are_checked_by_the_draft_that_is_declared_or_the_newest_that_fits():
    pair = {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]}
    seven = {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"pair": pair}}
    assert not problems(seven, pair=["a", 1]) and problems(seven, pair=[1, "a"])
    assert not problems({"properties": {"pair": pair}}, pair=["a", 1])  # no draft is declared
    assert problems({"properties": {"pair": pair}}, pair=[1, "a"])
    four = {"properties": {"n": {"type": "integer", "minimum": 0, "exclusiveMinimum": True}}}
    assert not problems(four, n=1) and problems(four, n=0)
    with pytest.raises(ToolSchemaError):
        make({"properties": {"n": {"type": "nothing"}}})


def test_a_pattern_that_python_cannot_read_is_left_to_the_server():
    assert not problems({"properties": {"name": {"type": "string", "pattern": r"(?<=a+)\cX["}}}, name="x")
    letters = {"properties": {"name": {"type": "string", "pattern": r"^\p{L}+$"}}}  # ECMAScript's, which regex knows
    assert not problems(letters, name="Zürich") and problems(letters, name="1")
    assert not problems({"patternProperties": {r"\cX[": {"type": "string"}}}, anything=1)


@pytest.mark.parametrize("place", ["pattern", "patternProperties", "items"])
def test_a_pattern_that_takes_for_ever_holds_nobody_up(place):
    evil, text = "^(a+)+$", "a" * 40 + "b"
    parameters, arguments = {
        "pattern": ({"properties": {"name": {"type": "string", "pattern": evil}}}, {"name": text}),
        "patternProperties": ({"patternProperties": {evil: {"type": "string"}}}, {text: "x"}),
        "items": ({"properties": {"names": {"items": {"pattern": evil}}}}, {"names": [text] * 3}),
    }[place]
    start = time.perf_counter()
    problems(parameters, **arguments)
    assert time.perf_counter() - start < 5
    assert fits_pattern("^a+$", "aaa") and fits_pattern("^a+$", "aab") is False and fits_pattern(r"\cX[", "a") is None

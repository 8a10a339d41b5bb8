"""Schemas as servers publish them, common forms and rare ones: right calls are accepted, and no check takes long."""

import time

import pytest

from agent_r1_trl.tools import Tool, json_schema
from agent_r1_trl.tools.json_schema import fits_pattern, make_validator
from agent_r1_trl.tools.references import inline_references
from agent_r1_trl.tools.signature import ToolSchemaError

TEXT = {"type": "string"}
BODY, URL = {"content": TEXT}, {"url": TEXT}


def make(parameters):
    def call(**arguments):
        return str(arguments)

    return Tool(call, schema={"name": "attach", "description": "Attach.", "parameters": parameters})


def problems(parameters, /, *arguments, **named):
    """What is wrong with the arguments, which are given as to `dict`."""
    return make(parameters).check_arguments(dict(*arguments, **named))[1]


COMPOSED = {
    "anyOf": {"type": "object", "anyOf": [{"properties": BODY}, {"properties": URL}]},
    "anyOf with required": {
        "anyOf": [{"properties": BODY, "required": ["content"]}, {"properties": URL, "required": ["url"]}]
    },
    "oneOf": {"oneOf": [{"properties": BODY, "required": ["content"]}, {"properties": URL, "required": ["url"]}]},
    "allOf": {"allOf": [{"properties": BODY}, {"properties": URL}]},
    "nested": {"allOf": [{"anyOf": [{"properties": BODY}, {"properties": URL}]}]},
    "if": {"properties": BODY, "if": {"required": ["content"]}, "else": {"properties": URL, "required": ["url"]}},
    "dependentSchemas": {"properties": BODY, "dependentSchemas": {"content": {"properties": URL}}},
    "a reference": {"$defs": {"way": {"properties": URL}}, "anyOf": [{"properties": BODY}, {"$ref": "#/$defs/way"}]},
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#", "anyOf": [{"properties": BODY}, {"properties": URL}],
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
    assert not problems({"anyOf": [{"properties": BODY, "additionalProperties": True}]}, anything=1)
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


# -------------------------------------------------------------------- rare forms

OPEN = {
    "required without properties": ({"required": ["a"]}, {"a": 1}, {}),
    "required by another": ({"dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 2}, {"a": 1}),
    "propertyNames": ({"propertyNames": {"pattern": "^[a-z]+$"}}, {"abc": 1}, {"ABC": 1}),
    "propertyNames beside properties": (
        {"properties": {"a": TEXT}, "propertyNames": {"maxLength": 3}}, {"b": 1}, {"long": 1},
    ),
    "minProperties": ({"minProperties": 1}, {"anything": 1}, {}),
    "not": ({"not": {"properties": {"a": {"const": 1}}, "required": ["a"]}}, {"a": 2}, {"a": 1}),
    "not, in a branch": ({"anyOf": [{"not": {"required": ["a", "b"]}}]}, {"a": 2}, {"a": 1, "b": 1}),
}  # fmt: skip


@pytest.mark.parametrize("kind", OPEN)
def test_arguments_that_something_other_than_properties_describes_are_accepted(kind):
    parameters, right, wrong = OPEN[kind]
    assert not problems(parameters, right) and problems(parameters, wrong)


def test_a_schema_that_describes_nothing_still_takes_no_arguments():
    assert problems({"type": "object"}, {"a": 1})
    assert problems({"properties": {"a": TEXT}, "required": ["a"]}, {"b": 1})
    assert make({"required": ["a"]}).signature == "attach(a: any)"


BESIDE = {
    "properties": ({"properties": {"b": TEXT}}, [{"a": "x"}, {"a": "x", "b": "y"}], [{"a": "x", "b": 1}, {"a": 1}]),
    "required": ({"required": ["b"]}, [{"a": "x", "b": 1}], [{"a": "x"}, {"b": 1}]),
    "one argument twice": ({"properties": {"a": {"maxLength": 2}}}, [{"a": "xy"}], [{"a": "xyz"}, {"a": 1}]),
    "the same keyword": ({"maxProperties": 9}, [{"a": "x"}], [{"a": "x", "b": 1, "c": 1, "d": 1}]),
    "allOf": ({"allOf": [{"required": ["b"]}]}, [{"a": "x", "b": 1}], [{"a": "x"}, {"b": 1}]),
    "if": (
        {"if": {"required": ["b"]}, "then": {"required": ["c"]}}, [{"a": "x", "b": 1, "c": 1}], [{"a": "x", "b": 1}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BESIDE)
@pytest.mark.parametrize("is_root", [True, False])
def test_a_reference_and_what_stands_beside_it_hold_both(kind, is_root):
    beside, right, wrong = BESIDE[kind]
    target = {
        "properties": {"a": TEXT, "b": {}, "c": {}, "d": {}}, "required": ["a"], "maxProperties": 3,
        "allOf": [{"maxProperties": 8}], "if": {"required": ["c"]}, "then": {"required": ["b"]},
    }  # fmt: skip
    node = {"$ref": "#/$defs/way", **beside}
    parameters = node if is_root else {"properties": {"way": node}}
    parameters = {**parameters, "$defs": {"way": target}}
    for arguments in (right, wrong):
        for item in arguments:
            item = item if is_root else {"way": item}
            assert bool(problems(parameters, item)) == (arguments is wrong), item


def test_in_older_drafts_a_reference_alone_counts_and_its_neighbours_only_describe():
    parameters = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"a": {"$ref": "#/definitions/text", "maxLength": 1, "description": "A text."}},
        "definitions": {"text": {"type": "string", "description": "Any."}},
    }
    assert not problems(parameters, {"a": "long"}) and problems(parameters, {"a": 1})
    assert make(parameters).schema["function"]["parameters"]["properties"]["a"]["description"] == "A text."


NAMES = ["default", "examples", "enum", "const", "nullable", "$ref", "$defs", "x-id", "properties", "title", "id"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_nested", [False, True])
def test_an_argument_may_have_the_name_of_a_keyword(name, is_nested):
    own = {"properties": {name: {"$ref": "#/$defs/text"}, "other": True}, "required": [name]}
    parameters = {"type": "object", "properties": {"way": own}} if is_nested else own
    parameters = {**parameters, "$defs": {"text": {"type": "string", "nullable": True}}}
    for value, is_right in (("x", True), (None, True), (1, False)):
        arguments = {name: value}
        assert bool(problems(parameters, {"way": arguments} if is_nested else arguments)) != is_right


def test_data_under_keywords_of_an_authors_own_are_no_references():
    assert not problems({"properties": {"a": {"type": "string", "x-form": {"$ref": "#/gone"}}}}, {"a": "x"})


def test_dynamic_references_lead_where_they_say_or_are_refused():
    node = {"$dynamicAnchor": "node", "properties": {"v": TEXT, "kids": {"items": {"$dynamicRef": "#node"}}}}
    words = {**node["properties"], "w": {"$ref": "#/$defs/w"}}
    for parameters in (node, {**node, "$defs": {"w": TEXT}, "properties": words}):
        assert not problems(parameters, {"kids": [{"v": "x"}]}) and problems(parameters, {"kids": [{"v": 1}]})
    named = {"a": {"$dynamicRef": "#text"}, "b": {"$ref": "#/$defs/text"}}
    parameters = {"properties": named, "$defs": {"text": {"$dynamicAnchor": "text", "type": "string"}}}
    assert not problems(parameters, {"a": "x", "b": "y"}) and problems(parameters, {"a": 1})
    for gone in ({"$dynamicRef": "#gone"}, {"$dynamicRef": "https://example.org/gone"}):
        with pytest.raises(ToolSchemaError, match="gone is named, but not defined"):
            make({"properties": {"a": {"items": gone}}})


@pytest.mark.parametrize(
    "declared",
    [5, None, "https://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema", "mine"],
)
def test_a_draft_that_a_schema_declares_wrongly_is_no_reason_to_refuse_it(declared):
    pair = {"type": "array", "items": [TEXT, {"type": "integer"}]}
    parameters = {"$schema": declared, "properties": {"pair": pair}}
    assert not problems(parameters, {"pair": ["a", 1]}) and problems(parameters, {"pair": [1, "a"]})


def test_multiples_are_those_of_the_numbers_as_they_are_written():
    parameters = {"properties": {"price": {"type": "number", "multipleOf": 0.01}}}
    for price in (19.99, 0.07, 3, 1e308, 10**400, -4.35):
        assert not problems(parameters, {"price": price}), price
    for price in (19.995, float("inf"), float("nan"), "19.99"):
        assert problems(parameters, {"price": price}), price
    assert problems({"properties": {"price": {"multipleOf": 3}}}, {"price": 10**30})


def test_unique_items_are_found_without_comparing_each_with_each():
    parameters = {"properties": {"items": {"type": "array", "uniqueItems": True}}}
    start = time.perf_counter()
    many = [{"key": number, "parts": [number, str(number)]} for number in range(20_000)]
    assert not problems(parameters, {"items": many}) and problems(parameters, {"items": [*many, many[7]]})
    assert time.perf_counter() - start < 10
    for right in ([1, "1"], [1, True], [0, False, None], [[1], [True]], [{"a": 1}, {"a": True}], [{}, []]):
        assert not problems(parameters, {"items": right}), right
    for wrong in ([1, 1.0], [[1], [1.0]], [{"a": 1, "b": 2}, {"b": 2.0, "a": 1}], [None, None]):
        assert problems(parameters, {"items": wrong}), wrong


def test_references_that_unfold_without_bounds_are_refused_at_once():
    defs = {"d0": TEXT}
    for level in range(1, 30):
        defs[f"d{level}"] = {"properties": {name: {"$ref": f"#/$defs/d{level - 1}"} for name in "ab"}}
    start = time.perf_counter()
    with pytest.raises(ToolSchemaError, match=r"its references unfold to more than 20,000 parts"):
        make({"properties": {"a": {"$ref": "#/$defs/d29"}}, "$defs": defs})
    assert time.perf_counter() - start < 5


def nested_choices(depth, path=""):
    """Two branches in each of so many levels, every one with an argument of its own."""
    if depth == 0:
        return {"properties": {f"k{path}": {"type": "integer"}}, "required": [f"k{path}"]}
    return {"anyOf": [nested_choices(depth - 1, path + "0"), nested_choices(depth - 1, path + "1")]}


def test_a_schema_with_so_many_branches_that_each_check_would_take_seconds_is_refused_at_once():
    began = time.process_time()
    with pytest.raises(ToolSchemaError, match=r"it has 98,\d\d\d parts, of which at most 20,000 .* fewer branches"):
        make(nested_choices(14))
    assert time.process_time() - began < 5.0


def test_of_equal_schemas_the_second_costs_nothing(monkeypatch):
    """An environment makes its tools anew for each trajectory."""
    made = []
    monkeypatch.setattr(json_schema, "make_validator", lambda *rest: made.append(rest) or make_validator(*rest))
    checks = []
    for _ in range(3):
        found = make(nested_choices(3, "x"))
        checks.append([found.check_arguments({"kx010": 1})[1], bool(found.check_arguments({"kx010": "1"})[1])])
    assert len(made) == 1 and checks == [[[], True]] * 3

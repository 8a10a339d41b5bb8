"""What tools return, as the model reads it: all of it, or a visible note. What has no text is nobody's charge."""

import asyncio
import base64
import csv
import dataclasses
import io
import itertools
import json
import re
import sqlite3
import types
from typing import Any

import anthropic
import httpx
import numpy
import pydantic
import pytest
import torch
from openai.types.responses import ResponseOutputText

from agent_r1_trl import ToolEnv, tool
from agent_r1_trl.environments import FunctionToolsEnv
from agent_r1_trl.testing import call
from agent_r1_trl.tools import Tool, ToolCall, ToolErrorKind, ToolExecutor
from agent_r1_trl.tools.blocks import warn_of_media
from agent_r1_trl.tools.render import render_result


def look(value, *, as_trl=False, **settings):
    """The result of a tool that returns a value, or what a function returns."""

    def look() -> object:
        """Look."""
        return value() if isinstance(value, types.FunctionType) else value

    made = FunctionToolsEnv([look]).tools[0] if as_trl else Tool(look, **settings)
    (result,) = asyncio.run(ToolExecutor([made]).execute([ToolCall(name="look", arguments={})]))
    return result


def rows_of(query):
    connection = sqlite3.connect(":memory:")
    connection.row_factory = sqlite3.Row
    return connection.execute(query).fetchall()


class Opaque:
    def method(self):
        pass


class Broken:
    def __str__(self):
        raise TypeError("no text")


NO_TEXT = {
    "map": lambda: map(str, [1]),
    "zip": lambda: zip([1], [2], strict=True),
    "filter": lambda: filter(None, [1]),
    "generator": lambda: (number for number in [1]),
    "list_iterator": lambda: iter([1]),
    "count": lambda: itertools.count(),
    "reader": lambda: csv.reader(["a,b"]),
    "BytesIO": lambda: io.BytesIO(b"a"),
    "StringIO": lambda: io.StringIO("a"),
    "TextIOWrapper": lambda: open(__file__),  # noqa: SIM115
    "Cursor": lambda: sqlite3.connect(":memory:").execute("select 1"),
    "Response": lambda: httpx.Response(200, text="a"),
    "Opaque": lambda: Opaque(),
    "method": lambda: Opaque().method,
    "Broken": lambda: Broken(),
}


@pytest.mark.parametrize("kind", NO_TEXT)
@pytest.mark.parametrize("form", ["alone", "inside", "with keys that are no JSON", "as TRL"])
def test_a_result_without_a_text_is_never_the_models_doing_and_says_what_to_return(kind, form):
    make = NO_TEXT[kind]
    forms = {"inside": lambda: {"a": [make()]}, "with keys that are no JSON": lambda: {(1, 2): make()}}
    wrapped = forms.get(form, make)
    result = look(wrapped, as_trl=form == "as TRL")
    assert result.error is ToolErrorKind.INFRASTRUCTURE and result.attempts == 1
    assert f"'look' returned an object of type {kind}" in result.content and "0x" not in result.content


def test_a_policy_is_not_charged_for_it():
    @tool
    def add(a: int, b: int) -> object:
        """Add."""
        return map(str, [a, b])

    env = ToolEnv(tools=[add], tool_error_reward=-7.0)
    env.reset({"prompt": "?"})
    made = asyncio.run(env.step(call("add", a=1, b=2)))
    (result,) = made.info["tool_results"]
    assert result.is_infrastructure_failure and made.info["reward_parts"] == {} and made.reward == 0.0
    assert result.cause == (
        "'add' returned an object of type map, which is neither text nor JSON: return a list of what it yields"
    )


def test_what_a_render_function_declares_as_the_models_doing_stays_so():
    def render(value):
        raise KeyError("no such name")

    assert look(1, render=render).error is ToolErrorKind.INFRASTRUCTURE
    declared = look(1, render=render, user_errors=KeyError)
    assert declared.error is ToolErrorKind.EXCEPTION and declared.is_charged


def test_rows_of_sqlite_are_json():
    rows = rows_of("select 1 as id, 'tea' as name union select 2, null")
    told = '[{"id": 1, "name": "tea"}, {"id": 2, "name": null}]'
    assert render_result(rows) == told and render_result(rows[0]) == '{"id": 1, "name": "tea"}'
    assert render_result({"rows": rows}) == '{"rows": ' + told + "}"
    assert render_result(rows_of("select 1 as id, 2 as id")) == "[[1, 2]]", "a dict would lose one of them"


def test_texts_that_look_like_objects_are_texts():
    for value in ("<map object at 0x7f12>", ["<map object at 0x7f12>"], {(1, 2): "<map object at 0x7f12>"}):
        for as_trl in (False, True):
            result = look(value, as_trl=as_trl)
            assert "0x7f12" in result.content and not result.is_error


TABLE = {"city": [f"city {number}" for number in range(200)], "note": ["x" * 120] * 200}
ROWS = "".join(f"city {number},{'x' * 120}\n" for number in range(200))


@pytest.mark.parametrize("is_inside", [False, True], ids=["alone", "in a dict"])
def test_a_table_is_read_with_all_its_rows_and_cells(is_inside):
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    expected = "city,note\n" + ROWS
    frame = pandas.DataFrame(TABLE)
    text = render_result({"rows": frame} if is_inside else frame)
    assert (json.loads(text)["rows"] if is_inside else text) == expected
    named = frame.set_index("city")["note"]
    text = render_result([named] if is_inside else named)
    assert (json.loads(text)[0] if is_inside else text) == expected
    rows = json.loads(render_result([pyarrow.table(TABLE)] if is_inside else pyarrow.table(TABLE)))
    assert (rows[0] if is_inside else rows)[199] == {"city": "city 199", "note": "x" * 120}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"\x89PNG\r\n\x1a\n" + bytes(1016), "[PNG image, 1,024 bytes]"),
        (b"%PDF-1.7 text", "[PDF document, 13 bytes]"),
        (bytes(range(256)), "[binary data, 256 bytes]"),
        (bytearray(b"plain \xc3\xa9"), "plain é"),
        ({"file": b"\xff\xd8\xff\xe0"}, '{"file": "[JPEG image, 4 bytes]"}'),
        ([memoryview(b"text")], '["text"]'),
    ],
)
def test_bytes_are_text_or_named_by_kind_and_size(value, text):
    assert render_result(value) == text


PIXELS = base64.b64encode(b"\x89PNG" + bytes(1020)).decode()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([{"type": "text", "text": "Oslo"}, {"type": "text", "text": "is cold", "annotations": []}], "Oslo\nis cold"),
        ([{"type": "output_text", "text": "Oslo"}, {"text": "is", "type": None}, "cold"], "Oslo\nis\ncold"),
        ({"type": "text", "text": "a"}, '{"type": "text", "text": "a"}'),
        ([{"type": "note", "text": "a"}], '[{"type": "note", "text": "a"}]'),
        (["Oslo", "Bergen"], '["Oslo", "Bergen"]'),
        ([{"text": "a", "score": 1}], '[{"text": "a", "score": 1}]'),
        ([{"type": "file", "path": "a.txt"}], '[{"type": "file", "path": "a.txt"}]'),
        ([{"type": "image", "url": "a.png", "title": "A"}], '[{"type": "image", "url": "a.png", "title": "A"}]'),
        ([{"type": "text", "text": "a", "score": 0.5}], '[{"type": "text", "text": "a", "score": 0.5}]'),
        ([{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}], "a"),
        ([{"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a"}]}}], "a"),
        ({"content": [{"type": "text", "text": "a"}], "isError": False}, "a"),
        (
            {"content": [{"type": "text", "text": "a"}], "author": "b"},
            '{"content": [{"type": "text", "text": "a"}], "author": "b"}',
        ),
        ([anthropic.types.TextBlock(type="text", text="a")], "a"),
        ([ResponseOutputText(type="output_text", text="a", annotations=[])], "a"),
    ],
)
def test_blocks_of_text_are_their_text_and_data_stay_data(value, text, caplog):
    assert look(value).content == render_result(value) == text
    assert not caplog.messages


@pytest.mark.parametrize(
    ("picture", "name"),
    [
        ({"type": "image", "data": PIXELS, "mimeType": "image/png"}, "[PNG image, 1,024 bytes]"),
        ({"type": "image", "base64": PIXELS, "mime_type": "image/png"}, "[PNG image, 1,024 bytes]"),
        ({"type": "image", "source": {"type": "base64", "data": PIXELS}}, "[PNG image, 1,024 bytes]"),
        ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXELS}"}}, "[PNG image, 1,024 bytes]"),
        ({"type": "input_image", "image_url": "https://a.b/c.png"}, "[input_image: https://a.b/c.png]"),
        ({"type": "image", "url": "https://a.b/c.png"}, "[image: https://a.b/c.png]"),
        ({"type": "image", "image": io.BytesIO()}, "[image, BytesIO]"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA" * 4, "format": "wav"}}, "[wav, 12 bytes]"),
        ({"type": "image", "bytes": b"\x89PNG", "path": None}, "[PNG image, 4 bytes]"),
    ],
)
@pytest.mark.parametrize("as_trl", [False, True])
def test_a_picture_that_a_tool_returns_is_named_and_warned_of_once(picture, name, as_trl, caplog):
    warn_of_media.cache_clear()
    beside = [{"type": "text", "text": "Here:"}, picture]
    assert look(beside, as_trl=as_trl).content == f"Here:\n{name}"
    assert look([picture], as_trl=as_trl).content == look(picture, as_trl=as_trl).content == name
    assert len(caplog.messages) == 1 and "Tool 'look' returned an image" in caplog.text


@pytest.mark.parametrize("as_trl", [False, True])
def test_a_picture_deep_in_an_answer_is_named_and_warned_of_too(as_trl, caplog):
    warn_of_media.cache_clear()
    picture = {"type": "image", "data": PIXELS, "mimeType": "image/png"}
    for value in ({"page": 1, "shots": [picture]}, [{"type": "resource_link", "uri": "a", "size": 1}, picture]):
        text = look(value, as_trl=as_trl).content
        assert "[PNG image, 1,024 bytes]" in text and PIXELS[:20] not in text
    assert len(caplog.messages) == 1


def test_a_result_of_mcp_that_was_made_a_dict_fails_where_it_says_so():
    for key in ("isError", "is_error"):
        result = look({"content": [{"type": "text", "text": "no such city"}], key: True})
        assert result.content == "no such city" and result.error is ToolErrorKind.EXCEPTION
    assert look({"content": "a", "isError": True}).error is None, "data of the tool's own"


def test_bytes_of_a_picture_are_warned_of_unless_render_has_words_for_them(caplog):
    warn_of_media.cache_clear()
    assert look(b"\x89PNG", render=lambda value: "a cat").content == "a cat" and not caplog.messages
    assert look(b"\x89PNG").content == "[PNG image, 4 bytes]" and len(caplog.messages) == 1


def cells(text):
    """The numbers of a text that shows some, whatever stands between them."""
    return [int(word) for word in re.findall(r"\d+", text)]


class Report:
    """A user's class whose text holds an array's."""

    def __init__(self, array):
        self.array = array

    def __str__(self):
        return f"report: {self.array}"


@dataclasses.dataclass
class Measured:
    values: Any


class Model(pydantic.BaseModel):
    model_config = {"arbitrary_types_allowed": True}
    values: Any


HOLDERS = {
    "alone": lambda array: array,
    "in a list": lambda array: [array],
    "in a dict": lambda array: {"a": array},
    "in a dict whose keys are no JSON": lambda array: {(): array},
    "in a dataclass": Measured,
    "in a dataclass in such a dict": lambda array: {(): Measured(array)},
    "in a model": lambda array: Model(values=array),
    "in a model in such a dict": lambda array: {(): Model(values=array)},
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("as_trl", [False, True], ids=["ours", "as TRL"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_an_array_is_read_with_all_its_numbers(kind, as_trl, holder):
    array = numpy.arange(2000) if kind == "numpy" else torch.arange(2000)
    result = look(HOLDERS[holder](array), as_trl=as_trl)
    assert cells(result.content) == list(range(2000)) and result.error is None


def test_an_array_inside_the_text_of_an_object_or_in_a_cell_of_a_table_is_whole_too():
    pandas = pytest.importorskip("pandas")
    array = numpy.arange(2000)
    for value in (Report(array), pandas.DataFrame({"a": [array]}), [pandas.Series([array])]):
        assert cells(look(value).content)[-2000:] == list(range(2000))


def test_a_tensor_that_has_no_list_keeps_its_text():
    result = look(torch.eye(2).to_sparse())
    assert "layout=torch.sparse_coo" in result.content and result.error is None
    assert render_result(torch.tensor([1.5, 2.0], requires_grad=True)) == "[1.5, 2.0]"
    assert look(torch.arange(3), as_trl=True).content == "tensor([0, 1, 2])", "TRL's own text where it shows all"

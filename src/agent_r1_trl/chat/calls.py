"""Readers of tool calls, one per way of writing them.

A reader takes the text between a call's markers and returns the calls in it, as dicts with `name`, `arguments` and,
where the model wrote one, `id` (or another of `ID_NAMES`). It raises ValueError with a reason that the model can read.

A grammar says how a model family writes calls and reasoning. It has the form of a transformers `response_template`;
in those of our own `content` names a reader in `tool_calls`, and `hints` the markers of an attempted call. The others
are TRL's. The table in docs/model-families.md lists what belongs to which model.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import json
import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from agent_r1_trl.tools.json_schema import Schema

Call = dict[str, Any]
Reader = Callable[[str, Any], list[Call]]


def strict_decoder() -> json.JSONDecoder:
    """JSON without what only Python reads: NaN, infinities, one key twice."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON value")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f'the key "{twice}" appears twice in one JSON object')
        return value

    return json.JSONDecoder(object_pairs_hook=unique, parse_constant=refuse)


def strict_json(text: str) -> Any:
    """The value of a JSON text; ValueError if it is none."""
    return strict_decoder().decode(text.strip())


def _some(calls: list[Call]) -> list[Call]:
    if not calls:
        raise ValueError("the list of calls is empty")
    return calls


# ---------------------------------------------------------------- JSON


def json_call(body: str, tools: Sequence[Schema] | None) -> list[Call]:
    """`{"name": ..., "arguments": {...}}`, one call between its markers (Hermes, Qwen)."""
    return [strict_json(body)]


def json_calls(body: str, tools: Sequence[Schema] | None) -> list[Call]:
    """`[{"name": ..., "arguments": {...}, "id": ...}]` or one such object."""
    value = strict_json(body)
    return _some(value if isinstance(value, list) else [value])


def mistral_calls(body: str, tools: Sequence[Schema] | None) -> list[Call]:
    """A JSON list of calls (up to Mistral Small 3.1), or `name[ARGS]{...}`, maybe with `[CALL_ID]id` before."""
    if body.lstrip()[:1] in ("[", "{"):
        return json_calls(body, tools)
    match = re.match(r"\s*(?P<name>[^\s\[{]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[{]+)\s*)?(?P<args>\[ARGS\])?", body)
    if match is None:
        raise ValueError("the call has no name")
    written = body[match.end() :].strip()
    if not written and not match["args"]:
        raise ValueError("the call has no arguments after its name")
    arguments: Any = {}
    if written:
        # No marker ends a call; as in vLLM, text behind the arguments is no part of it.
        arguments, _ = strict_decoder().raw_decode(written)
    call = {"name": match["name"], "arguments": arguments}
    if match["id"]:
        call["id"] = match["id"]
    return [call]


def deepseek_calls(body: str, tools: Sequence[Schema] | None) -> list[Call]:
    """`name<sep>{...}` (V3.1), or `function<sep>name` and the arguments in a fence of JSON (V3, R1)."""
    name, found, arguments = body.partition("<｜tool▁sep｜>")
    if not found:
        raise ValueError("the call has no <｜tool▁sep｜> between its name and its arguments")
    if name.strip() == "function":
        fenced = re.fullmatch(r"\s*(\S+)\s*```json(.*)```\s*", arguments, re.DOTALL)
        if fenced is None:
            raise ValueError("the arguments are not in a fence of JSON")
        name, arguments = fenced.groups()
    return [{"name": name.strip(), "arguments": strict_json(arguments)}]


# ---------------------------------------------------------------- XML


def function_calls(body: str, tools: Sequence[Schema] | None) -> list[Call]:
    """`<function=name><parameter=key>value</parameter></function>`; the newlines around a value are markup."""
    calls = []
    for name, inside in _blocks(body, r"<function=(?P<name>[^>\n]{1,128})>", "</function>"):
        key = r"<parameter=(?P<key>[^>\n]{1,128})>"
        calls.append(_from_tags(name, inside, key, "</parameter>", tools, _without_wrapping))
    return calls


def pair_calls(body: str, tools: Sequence[Schema] | None) -> list[Call]:
    """`name<arg_key>key</arg_key><arg_value>value</arg_value>` (GLM); a value is taken as it stands."""
    name, found, rest = body.partition("<arg_key>")
    key = r"<arg_key>(?P<key>[^<\n]+)</arg_key>\s*<arg_value>"
    return [_from_tags(name, found + rest, key, "</arg_value>", tools, str)]


def _blocks(body: str, opening: str, closing: str) -> Iterator[tuple[str, str]]:
    """Names and contents of the blocks that a text consists of; the closing tag may be missing."""
    before, blocks = _cut(body, opening)
    if not blocks or before.strip():
        raise ValueError("the call does not begin with the name of a function in the expected form")
    for start, text in blocks:
        inside, _, after = text.rpartition(closing)
        if after.strip() and inside:
            raise ValueError(f"{after.strip()[:40]!r} follows {closing}")
        yield start["name"], inside or after


def _cut(text: str, opening: str) -> tuple[str, list[tuple[re.Match[str], str]]]:
    """The text before the first opening tag; each opening tag with the text up to the next one."""
    starts = list(re.finditer(opening, text))
    if not starts:
        return text, []
    ends = [start.start() for start in starts[1:]] + [len(text)]
    blocks = [(start, text[start.end() : end]) for start, end in zip(starts, ends, strict=True)]
    return text[: starts[0].start()], blocks


def _from_tags(
    name: str, text: str, opening: str, closing: str, tools: Sequence[Schema] | None, trim: Callable[[str], str]
) -> Call:
    """A call whose arguments are tags. A value whose closing tag is missing ends where the next one begins."""
    types = _schema(tools, name.strip())
    arguments: dict[str, Any] = {}
    before, tags = _cut(text, opening)
    if before.strip():
        raise ValueError(f"{text.strip()[:40]!r} is not an argument in the expected form")
    for start, rest in tags:
        value, closed, after = rest.partition(closing)
        if after.strip():
            raise ValueError(f"{after.strip()[:40]!r} stands between the arguments")
        key = start["key"].strip()
        if key in arguments:
            raise ValueError(f'the argument "{key}" appears twice')
        value = trim(value)
        if not closed:
            value = value.rstrip()
        arguments[key] = _typed(value, types.get(key))
    return {"name": name, "arguments": arguments}


def _without_wrapping(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def _schema(tools: Sequence[Schema] | None, name: str) -> dict[str, Any]:
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == name:
            return (function.get("parameters") or {}).get("properties") or {}
    return {}


def _kinds(schema: object) -> set[str]:
    """The JSON types that a parameter may have; a string if nothing says so."""
    if not isinstance(schema, dict):
        return {"string"}
    declared = schema.get("type")
    if not isinstance(declared, list):
        declared = [declared]
    kinds = {kind for kind in declared if isinstance(kind, str)}
    listed = schema.get("enum")
    if isinstance(listed, list):
        kinds |= {_JSON_TYPES.get(type(value), "string") for value in listed}
    for name in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(name)
        if isinstance(choices, list):
            for choice in choices:
                kinds |= _kinds(choice)
    return kinds or {"string"}


_JSON_TYPES: dict[type, str] = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
}  # fmt: skip


def _typed(text: str, schema: object) -> Any:
    """The value of an argument written as bare text, by the parameter's schema, as vLLM's parsers read it.

    The types are tried in a fixed order, text last. What fits none of them is JSON if it can be, else text.
    """
    kinds = _kinds(schema)
    word = text.strip().lower()
    if "null" in kinds and text.lower() == "null":
        return None
    for kind, number in (("integer", int), ("number", _number)):
        if kind in kinds:
            with contextlib.suppress(ValueError, OverflowError):
                return number(text)
    if "boolean" in kinds and word in ("true", "1", "false", "0"):
        return word in ("true", "1")
    if "string" in kinds and not kinds & {"object", "array"}:
        return text
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value


def _number(text: str) -> int | float:
    value = float(text)
    whole = int(value)
    return whole if value == whole else value


# ---------------------------------------------------------------- Gemma 4


_GEMMA_STRING = '<|"|>'
_GEMMA_MAX_DEPTH = 64


def gemma_calls(body: str, tools: Sequence[Schema] | None) -> list[Call]:
    """`call:name{key:<|"|>text<|"|>,other:[1,{...}]}`, Gemma 4's form.

    As in vLLM, names may hold dashes and dots, and a bare word is read by the schema of its argument: `note:3` is text
    where the schema says so.
    """
    match = re.match(r"\s*(?:call)?:(?P<name>[^{(]{1,128})\{", body)
    if match is None:
        raise ValueError("the call does not begin with call:name{")
    name = match["name"].strip()
    schema = _schema(tools, name)
    reader = _GemmaReader(body, match.end())
    arguments = reader.members(schema, is_known=bool(schema))
    rest = body[reader.position :].strip()
    if rest:
        raise ValueError(f"{rest[:40]!r} follows the arguments")
    return [{"name": name, "arguments": arguments}]


class _GemmaReader:
    """Reads values of Gemma's notation, each character once."""

    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position
        self._depth = 0

    def members(self, properties: dict[str, Any], *, is_known: bool) -> dict[str, Any]:
        """The members of an object, behind its `{` up to its `}`; `is_known`: bare words are read by `properties`."""
        found: dict[str, Any] = {}
        while not self._ends("}"):
            end = self.text.find(":", self.position)
            if end < 0:
                raise ValueError("an argument has no ':' after its name")
            key = self.text[self.position : end].strip().removeprefix(_GEMMA_STRING).removesuffix(_GEMMA_STRING)
            key = key.strip('"')
            if key in found:
                raise ValueError(f'the argument "{key}" appears twice')
            self.position = end + 1
            found[key] = self._value(properties.get(key), is_known=is_known)
        return found

    def _items(self, schema: object, *, is_known: bool) -> list[Any]:
        found = []
        while not self._ends("]"):
            found.append(self._value(schema, is_known=is_known))
        return found

    def _ends(self, closing: str) -> bool:
        """Skip blanks and commas; whether the object or list ends here, which is then read."""
        skipped = re.compile(r"[\s,]*").match(self.text, self.position)
        self.position = skipped.end() if skipped else self.position
        if self.position >= len(self.text):
            raise ValueError(f"the arguments have no closing {closing}")
        if self.text[self.position] != closing:
            return False
        self.position += 1
        return True

    def _value(self, schema: object, *, is_known: bool) -> Any:
        blanks = re.compile(r"\s*").match(self.text, self.position)
        self.position = blanks.end() if blanks else self.position
        schema = schema if isinstance(schema, dict) else {}
        if self.text.startswith(_GEMMA_STRING, self.position):
            return self._string()
        start = self.text[self.position : self.position + 1]
        if start == '"':  # JSON's form, which models write as well
            value, self.position = json.JSONDecoder(strict=False).raw_decode(self.text, self.position)
            return value
        if start in ("{", "["):
            self._depth += 1
            if self._depth > _GEMMA_MAX_DEPTH:
                raise ValueError(f"the arguments are nested more than {_GEMMA_MAX_DEPTH} levels deep")
            self.position += 1
            if start == "{":
                value = self.members(schema.get("properties") or {}, is_known=is_known)
            else:
                value = self._items(schema.get("items"), is_known=is_known)
            self._depth -= 1
            return value
        return self._word(schema, is_known=is_known)

    def _string(self) -> str:
        start = self.position + len(_GEMMA_STRING)
        end = self.text.find(_GEMMA_STRING, start)
        if end < 0:
            raise ValueError("a string is not closed")
        self.position = end + len(_GEMMA_STRING)
        return self.text[start:end]

    def _word(self, schema: dict[str, Any], *, is_known: bool) -> Any:
        end = re.compile(r"[^,}\]]*").match(self.text, self.position)
        word = end[0].strip() if end else ""
        if not word:
            raise ValueError("an argument has no value")
        self.position += len(end[0]) if end else 0
        if is_known and schema:
            may_be_null = schema.get("nullable") is True or "string" not in _kinds(schema)
            if word == "null" and may_be_null:
                return None
            return _typed(word, schema)
        try:
            return strict_json(word)
        except ValueError:
            return word


# ---------------------------------------------------------------- Python


def python_calls(body: str, tools: Sequence[Schema] | None) -> list[Call]:
    """`[name(key="value"), other()]`, LFM2's form, or JSON, which its models write as well."""
    text = body.strip()
    if text.startswith(("{", "[{")):
        return json_calls(text, tools)
    try:
        tree = ast.parse(_as_python(text), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("the calls are not a list of calls with named arguments") from error
    nodes = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
    return _some([_from_tree(node) for node in nodes])


def _as_python(text: str) -> str:
    """Strings may hold line breaks and quotes of their own kind; names of arguments may be words of Python."""
    pieces: list[str] = []
    position = 0
    while match := re.compile(r"[\"']").search(text, position):
        pieces.append(_renamed(text[position : match.start()]))
        # A quote ends a string only where something can follow a value.
        end = re.compile(rf"(?s)((?:\\.|[^\\])*?){match[0]}(?=\s*(?:[,)\]}}:]|$))").match(text, match.end())
        if end is None:
            raise ValueError("a string is not closed")
        quote = match[0]
        inside = re.sub(rf"(?s)(\\.)|({quote})", _escaped, end[1])
        inside = inside.replace("\n", "\\n").replace("\r", "\\r")
        pieces.append(quote + inside + quote)
        position = end.end()
    return "".join([*pieces, _renamed(text[position:])])


def _escaped(found: re.Match[str]) -> str:
    """An escape sequence as it is, a quote with a backslash before it."""
    sequence, quote = found[1], found[2]
    return sequence or "\\" + quote


def _renamed(code: str) -> str:
    """Named arguments with a prefix, which makes words of Python such as `from` readable."""
    return re.sub(r"\b([A-Za-z_]\w*)(\s*=(?!=))", r"k_\1\2", code)


def _from_tree(node: ast.AST) -> Call:
    if not isinstance(node, ast.Call):
        raise ValueError("the calls are not a list of calls with named arguments")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("every argument of a call must be named")
    arguments = {}
    for keyword_node in node.keywords:
        name = str(keyword_node.arg).removeprefix("k_")
        arguments[name] = _value(keyword_node.value)
    if len(arguments) < len(node.keywords):
        raise ValueError("an argument appears twice")
    return {"name": ast.unparse(node.func), "arguments": arguments}


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_value(key)): _value(item) for key, item in pairs if key}
    try:
        return ast.literal_eval(node)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{ast.unparse(node)[:40]!r} is not a value") from error


_READERS: tuple[Reader, ...] = (
    json_call, json_calls, mistral_calls, deepseek_calls, function_calls, pair_calls,
    gemma_calls, python_calls,
)  # fmt: skip
READERS = {reader.__name__: reader for reader in _READERS}
"""Name in a grammar's `content` -> reader `(text between the markers, schemas) -> calls`."""


# ---------------------------------------------------------------- grammars

Grammar = dict[str, Any]


def _grammar(
    reader: str, opening: str, closing: str, *hints: str, reasoning: tuple[str, str] = ("<think>", "</think>")
) -> Grammar:
    calls = {"open_pattern": opening, "close_pattern": closing, "repeats": True, "content": reader}
    fields = {
        "reasoning_content": {"open": reasoning[0], "close": reasoning[1], "content": "text"},
        "tool_calls": calls | {"hints": list(hints)},
        "content": {"content": "text"},
    }
    return {"defaults": {"role": "assistant"}, "fields": fields}


_TAG, _TAG_END = r"<tool_call>\s*", r"</tool_call>\s*"
GRAMMARS: dict[str, Grammar] = {
    "hermes": _grammar("json_call", _TAG, _TAG_END, "<tool_call>", "</tool_call>"),
    "qwen3_coder": _grammar("function_calls", _TAG, _TAG_END, "<tool_call>", "</tool_call>", "<function="),
    "glm": _grammar("pair_calls", _TAG, _TAG_END, "<tool_call>", "</tool_call>", "<arg_key>"),
    "mistral": _grammar(
        "mistral_calls", r"\[TOOL_CALLS\]", r"(?=\[TOOL_CALLS\]|\[/THINK\])|\Z", "[TOOL_CALLS]",
        reasoning=("[THINK]", "[/THINK]"),
    ),
    "deepseek": _grammar(
        "deepseek_calls", r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>",
        r"<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?", "<｜tool▁call", "<｜tool▁sep｜>",
    ),
    "seed": _grammar(
        "function_calls", r"<seed:tool_call>", r"</seed:tool_call>\s*", "seed:tool_call>", "<function=",
        reasoning=("<seed:think>", "</seed:think>"),
    ),
    "nemotron_nano": _grammar("json_calls", r"<TOOLCALL>", r"</TOOLCALL>\s*", "TOOLCALL>"),
    "lfm2": _grammar("python_calls", r"<\|tool_call_start\|>", r"<\|tool_call_end\|>\s*", "<|tool_call_"),
}  # fmt: skip
"""Name -> grammar; the names are accepted as `response_template`."""
_OF_TRL = {"llama3": "llama3_template", "gpt_oss": "gptoss_template", "gemma4": "gemma4_template"}
GRAMMAR_NAMES = (*GRAMMARS, *_OF_TRL)
"""The names that `response_template` takes."""

# Text that a template of the family contains, none of it from a prompt, which publishers reword; the first row that
# fits decides.
_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("seed", ("<seed:tool_call>",)),
    ("nemotron_nano", ("<TOOLCALL>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("glm", ("<arg_key>", "<tool_call>")),
    ("qwen3_coder", ("<function=", "<tool_call>")),
    ("hermes", ("<tool_call>",)),
    ("gemma4", ("<|tool_call>call:",)),
    ("gpt_oss", ("<|channel|>", "<|call|>")),
    ("llama3", ("<|start_header_id|>", '"parameters": ')),
)


def named_grammar(name: str) -> Grammar:
    """A copy of the grammar with one of `GRAMMAR_NAMES`."""
    if name in GRAMMARS:
        return copy.deepcopy(GRAMMARS[name])
    # Imported here: an environment server must not wait for torch.
    from trl import chat_template_utils as trl

    return copy.deepcopy(getattr(trl, _OF_TRL[name]))


_GEMMA_CALLS: Grammar = {
    "open_pattern": r"<\|tool_call>", "close_pattern": r"<tool_call\|>\s*", "repeats": True, "content": "gemma_calls",
    "hints": ["<|tool_call>", "<tool_call|>"],
}  # fmt: skip


def with_own_reader(grammar: Grammar) -> Grammar:
    """TRL's grammar of Gemma 4 with our reader of its calls; any other grammar as it is.

    TRL's takes names without dashes and dots alone, and arguments for JSON.
    """
    calls = grammar.get("fields", {}).get("tool_calls") or {}
    if "tool_call>call:" not in str(calls.get("open_pattern") or calls.get("open") or ""):
        return grammar
    return {**grammar, "fields": {**grammar["fields"], "tool_calls": _GEMMA_CALLS}}


def refused_names(grammar: Grammar, names: Iterable[str]) -> list[str]:
    """The names of tools that calls in this grammar cannot have: those that are no names of Python, for LFM2."""
    calls = grammar.get("fields", {}).get("tool_calls") or {}
    if calls.get("content") != "python_calls":
        return []
    refused = []
    for name in names:
        parts = name.split(".")
        if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
            refused.append(name)
    return refused


def find_grammar(template: str) -> Grammar | None:
    """The grammar of a template, known by the markers in its source; None if there is none."""
    for name, marks in _MARKS:
        if all(mark in template for mark in marks):
            return named_grammar(name)
    return None

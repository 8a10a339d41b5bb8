"""Read one assistant turn: its reasoning, content and tool calls, and what is wrong with a call that cannot be read.

The grammar is a transformers `response_template` (TRL ships one per model family). Its delimiters cut the turn into
regions; each call's region is then read by itself, so one broken call neither hides the good ones beside it nor
disappears: its text stays in `content` and the reason goes to `malformed_tool_call`.

Not covered: ids (`encoding.py`), which grammar belongs to which template (`templates.py`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent_r1_trl.chat.calls import READERS, Reader, strict_decoder, strict_json, with_own_reader
from agent_r1_trl.patterns import Match, PatternTimeoutError, TimedPattern, time_limit, warn_once
from agent_r1_trl.tools.calls import ID_NAMES, written_id
from agent_r1_trl.trajectory import Message

if TYPE_CHECKING:
    from agent_r1_trl.tools.json_schema import Schema

# The length of a name is bounded wherever a name is searched for: reading stays linear, whatever the text.
# GPT-OSS names the recipient before or after the channel, on any channel, with or without `functions.`, and the type
# of the content with or without <|constrain|> (json, code). vLLM reads all of them; one spelling is enough here.
_HARMONY_CHANNEL = r"(?:<\|channel\|>(?:analysis|commentary|final)\s*+)?"
_HARMONY_TYPE = r"(?:<\|constrain\|>\s*+)?(?:\w{1,32}+\s*+)?"
_HARMONY_CALL = re.compile(
    rf"{_HARMONY_CHANNEL}\bto=(?:functions\.)?(?P<name>[^\s<]{{1,128}}+)\s*+{_HARMONY_CHANNEL}{_HARMONY_TYPE}<\|message\|>"
)
# transformers' grammar knows the channels of the other messages only without a type.
_HARMONY_TYPED = re.compile(rf"(<\|channel\|>(?:analysis|commentary|final))\s*+{_HARMONY_TYPE}(?=<\|message\|>)")
# Headers of messages without a recipient, and what ends them: what stands between them is content.
_HARMONY_HEADER = re.compile(
    rf"<\|start\|>assistant|<\|channel\|>\w*\s*{_HARMONY_TYPE}(?=<\|message\|>)|<\|channel\|>\w*|<\|message\|>|"
    r"<\|end\|>|<\|return\|>"
)
_HARMONY_END = re.compile(r"<\|(?:call|end)\|>\Z")
_SEPARATORS = re.compile(r"[; \n\t,]*")
_ARGUMENTS_KEY = re.compile(r'"(?:parameters|arguments)"\s*:')
# Deeper than any tool's arguments; shallow enough for everything downstream that recurses.
_MAX_DEPTH = 64

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

# Markers of an attempted call, by a piece of the opening delimiter of a grammar that names none.
_HINTS = {
    "<tool_call>": ("<tool_call>", "</tool_call>"),
    "<|tool_call>": ("<|tool_call>", "<tool_call|>"),
    "to=functions": ("to=functions", "<|call|>"),
    "tool_call_start": ("<|tool_call_start|>", "<|tool_call_end|>"),
}


@dataclass
class _Region:
    """A piece of the turn; `field` is None for text outside every delimiter."""

    field: str | None
    raw: str
    body: str
    is_closed: bool = True


class _Scan:
    """The matches of a pattern from growing positions on, so that a text is read once and not once per region."""

    def __init__(self, pattern: TimedPattern, text: str) -> None:
        self._pattern = pattern
        self._text = text
        self._found = pattern.search(text)

    def next(self, position: int) -> Match | None:
        """The first match that starts at `position` or later; no position may be before that of an earlier call."""
        if self._found is not None and self._found.start() < position:
            self._found = self._pattern.search(self._text, position)
        return self._found


class TurnParser:
    """Reads assistant turns of one model family.

    Args:
        response_template: transformers' grammar of an assistant message.
        parse_call: `(text, tools=...) -> message`, transformers' parser for this grammar; it may raise.
        turn_ends: spellings of the end-of-turn tokens.
        thinks: whether the model's template knows reasoning, so that some may be closed that was never opened.
    """

    def __init__(
        self,
        response_template: dict[str, Any],
        parse_call: Callable[..., Message],
        *,
        turn_ends: Iterable[str],
        thinks: bool = True,
    ) -> None:
        response_template = with_own_reader(response_template)
        self._thinks = thinks
        self._turn_ends = re.compile("|".join(map(re.escape, turn_ends)))
        self._parse_call = parse_call
        self._anchor = _delimiter(response_template, "start_anchor")
        fields = response_template["fields"]
        self._opens = _delimiters(fields, "open")
        self._closes = _delimiters(fields, "close")
        implicit = [name for name in fields if name not in self._opens]
        self._implicit = implicit[0] if implicit else None
        call = fields.get("tool_calls", {})
        opening = str(call.get("open") or call.get("open_pattern") or "").replace("\\", "")
        self._hints = call.get("hints") or _usual_hints(opening)
        self._reader = READERS.get(str(call.get("content")))
        closed = [name for name in _REASONING_FIELDS if name in self._opens and name in self._closes]
        self._reasoning = closed[0] if closed else None
        self._is_strict_json = call.get("content") == "json" and not call.get("content_args")
        self._is_bare_json = opening.startswith('{"name"')
        self._is_harmony = "to=functions" in opening
        if self._is_harmony:
            bounded = self._opens["tool_calls"].pattern.replace(r"\S+?", r"\S{1,128}?")
            self._opens["tool_calls"] = TimedPattern(bounded, dot_all=True)
        tag = (call.get("content_args") or {}).get("tag_pattern")
        self._tag = TimedPattern(tag, dot_all=True) if isinstance(tag, str) else None

    def parse(self, text: str, *, prefix: str = "", tools: list[dict[str, Any]] | None = None) -> Message:
        """The message that `text` spells.

        Args:
            text: the sampled turn, stop token included.
            prefix: what the template wrote after the last message; what of it belongs to this turn is read first.
            tools: schemas that give the arguments their types.

        Raises:
            PatternTimeoutError: a pattern of the grammar took too long on the turn. Then nobody knows what the model
                wrote, which may be a perfect call.
        """
        try:
            with time_limit():
                return self._parse(text, prefix, tools)
        except PatternTimeoutError as error:
            warn_once(error, "response_template")
            raise PatternTimeoutError(f"the turn was not read by the response_template: {error}") from error

    def _parse(self, text: str, prefix: str, tools: list[dict[str, Any]] | None) -> Message:
        if self._is_harmony:
            text = _HARMONY_TYPED.sub(r"\1", text)
            text = _HARMONY_CALL.sub(r"to=functions.\g<name><|channel|>commentary json<|message|>", text)
        begun = self._begun(prefix, text)
        whole = self._turn_ends.sub("", text).strip()
        regions: Iterable[_Region] = self._regions(begun + text)
        if self._is_bare_json and _looks_like_bare_call(whole, tools):
            # Bare JSON has no marker before it: a delimiter found inside it would tear it apart.
            regions = [_Region(None, text, whole)]

        content = []
        reasoning = []
        calls = []
        reasons = []
        for region in regions:
            if region.field in _REASONING_FIELDS:
                reasoning.append(self._turn_ends.sub("", region.body).strip())
                continue
            if region.field == "tool_calls":
                found, reason = self._read_call(region, tools)
                left_over = self._turn_ends.sub("", region.raw) if reason else ""
            else:
                raw, body = self._without_call_end(region)
                found, reason = self._read_stray_call(raw, tools)
                left_over = "" if found else body
            calls += found
            content.append(left_over.strip())
            if reason:
                reasons.append(reason)

        message: Message = {"role": "assistant", "content": "\n".join(filter(None, content))}
        if any(reasoning):
            message["reasoning_content"] = "\n".join(filter(None, reasoning))
        if calls:
            message["tool_calls"] = calls
        if reasons:
            message["malformed_tool_call"] = "; ".join(dict.fromkeys(reasons))
        return message

    def _without_call_end(self, region: _Region) -> tuple[str, str]:
        """Raw text and body of a text; GPT-OSS may end its answer, on the final channel, like a call."""
        is_answer = self._is_harmony and region.field is not None and "to=" not in region.raw
        if not is_answer:
            return region.raw, region.body
        return _HARMONY_END.sub("", region.raw), _HARMONY_END.sub("", region.body)

    def closed_reasoning(self, prefix: str) -> str:
        """The reasoning that `prefix` ends with, whole; "" if it ends with none, or with one that is open."""
        if self._reasoning is None:
            return ""
        closed = list(self._closes[self._reasoning].finditer(prefix))
        if not closed or prefix[closed[-1].end() :].strip():
            return ""
        opened = self._opens[self._reasoning].search(prefix)
        start = opened.start() if opened else closed[-1].start()
        return prefix[start:]

    # ---------------------------------------------------------------- regions

    def _begun(self, prefix: str, text: str) -> str:
        """The part of the turn before the sampled text: the opener of reasoning, as a rule."""
        begun = ""
        anchors = list(self._anchor.finditer(prefix)) if self._anchor else []
        if anchors:
            prefix = prefix[anchors[-1].end() :]
            begun = prefix
        if self._reasoning is None:
            return begun
        closed = list(self._closes[self._reasoning].finditer(prefix))
        if closed:
            return prefix[closed[-1].end() :]  # the template wrote whole reasoning, empty as a rule
        opened = self._opens[self._reasoning].search(prefix)
        if opened:
            return prefix[opened.start() :]
        return begun + self._missing_opener(self._reasoning, text)

    def _missing_opener(self, reasoning: str, text: str) -> str:
        """The opener of reasoning that the text only closes: some templates and models leave it out."""
        opener = self._opens[reasoning].pattern.replace("\\", "")
        bracket = opener[:1]
        if not self._thinks or bracket not in ("<", "["):
            return ""
        closer = opener.replace(bracket, bracket + "/", 1)
        before, closed, _ = text.partition(closer)
        if not closed:
            return ""
        if "tool_calls" in self._closes:
            before = self._without_calls(before)
        is_open = any(pattern.search(before) for pattern in self._opens.values())
        return "" if is_open else opener

    def _without_calls(self, text: str) -> str:
        """A text without the whole calls in it."""
        opens = _Scan(self._opens["tool_calls"], text)
        closes = _Scan(self._closes["tool_calls"], text)
        rest = ""
        position = 0
        for opened, closed in self._calls_within(opens, closes, 0, len(text)):
            rest += text[position : opened.start()]
            position = closed.end()
        return rest + text[position:]

    def _regions(self, text: str) -> Iterator[_Region]:
        """The regions between delimiters and the texts outside of them, in their order."""
        opens = {name: _Scan(pattern, text) for name, pattern in self._opens.items()}
        closes = {name: _Scan(pattern, text) for name, pattern in self._closes.items()}
        position = 0
        while first := self._first_opening(opens, position):
            name, opened = first
            yield from self._outside(text[position : opened.start()])
            closed = closes[name].next(opened.end()) if name in closes else None
            end = closed.end() if closed else len(text)
            body_start, body_end = opened.end(), closed.start() if closed else end
            is_closed = closed is not None
            if name == self._reasoning and "tool_calls" in opens:
                if closed is None and (call := opens["tool_calls"].next(opened.end())):
                    # A call ends reasoning that was never closed, as it does in vLLM.
                    end = body_end = call.start()
                    is_closed = True
                if is_closed:
                    whole_calls = self._calls_within(opens["tool_calls"], closes["tool_calls"], body_start, body_end)
                    for call, called in whole_calls:
                        yield _Region(name, "", text[body_start : call.start()])
                        raw = text[call.start() : called.end()]
                        inside = text[call.end() : called.start()]
                        yield _Region("tool_calls", raw, inside)
                        body_start = called.end()
            yield _Region(name, text[opened.start() : end], text[body_start:body_end], is_closed)
            position = max(end, opened.end(), opened.start() + 1)
        yield from self._outside(text[position:])

    def _first_opening(self, opens: dict[str, _Scan], position: int) -> tuple[str, Match] | None:
        """The field whose delimiter comes first from a position on; of several at one place the longest."""
        found = []
        for name, scan in opens.items():
            match = scan.next(position)
            if match is not None:
                found.append((match.start(), -len(match[0]), name, match))
        if not found:
            return None
        _, _, name, match = min(found, key=lambda item: item[:3])
        return name, match

    def _calls_within(self, opens: _Scan, closes: _Scan, position: int, end: int) -> Iterator[tuple[Match, Match]]:
        """The delimiters of the whole calls inside reasoning: they are made, as in vLLM.

        A marker that is only mentioned has no closing one before the reasoning ends.
        """
        while (call := opens.next(position)) and call.start() < end:
            called = closes.next(call.end())
            if called is None or called.start() > end:
                return
            yield call, called
            position = max(called.end(), call.end())

    def _outside(self, text: str) -> Iterator[_Region]:
        """The region of a text outside all delimiters, none for blanks."""
        if self._implicit is not None and self._implicit in self._closes:
            text = self._closes[self._implicit].sub("", text)
        if self._is_harmony:
            text = _HARMONY_HEADER.sub("", text)
        if text.strip():
            yield _Region(None, text, self._turn_ends.sub("", text))

    # ---------------------------------------------------------------- calls

    def _read_call(self, region: _Region, tools: Sequence[Schema] | None) -> tuple[list[dict[str, Any]], str | None]:
        if self._is_bare_json:
            return self._read_bare_json(region.raw)
        if not region.is_closed:
            return [], "the call was not finished: its closing marker is missing"
        if self._reader is not None:
            return self._read_by(self._reader, region.body, tools)
        try:
            if self._is_strict_json:
                strict_json(region.body)
            self._rehearse(region)
            calls = self._parse_call(region.raw, tools=tools).get("tool_calls") or []
            return [_well_formed(call) for call in calls], None
        except PatternTimeoutError:
            raise
        except Exception as error:
            return [], _reason(error)

    def _rehearse(self, region: _Region) -> None:
        """Run the grammar's patterns on a region before transformers does, which knows no limit of time."""
        for pattern in (*self._opens.values(), *self._closes.values()):
            pattern.finditer(region.raw)
        if self._tag is not None:
            self._tag.finditer(region.body)

    def _read_by(
        self, reader: Reader, body: str, tools: Sequence[Schema] | None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """With a reader of ours: one broken call among several does not take the others along."""
        calls, reasons = [], []
        try:
            for call in reader(self._turn_ends.sub("", body), tools):
                try:
                    calls.append(_well_formed({"function": call}))
                except Exception as error:
                    reasons.append(_reason(error))
        except Exception as error:
            return [], _reason(error)
        return calls, "; ".join(dict.fromkeys(reasons)) or None

    def _read_stray_call(self, text: str, tools: Sequence[Schema] | None) -> tuple[list[dict[str, Any]], str | None]:
        """Text outside the delimiters: a call in a form the grammar does not know, or no call at all."""
        if self._is_bare_json:
            bare = self._turn_ends.sub("", text).strip()
            return self._read_bare_json(bare) if _looks_like_bare_call(bare, tools) else ([], None)
        if any(hint in text for hint in self._hints):
            return [], "a call marker was written, but no call in the expected form follows it"
        return [], None

    def _read_bare_json(self, text: str) -> tuple[list[dict[str, Any]], str | None]:
        """Llama 3: `{"name": ..., "parameters": {...}}` with any key order, several divided by semicolons."""
        rest = self._turn_ends.sub("", text).replace("<|python_tag|>", "").strip()
        calls: list[dict[str, Any]] = []
        decoder = strict_decoder()
        try:
            if not rest.startswith("{"):
                raise ValueError('the call is not a JSON object with "name" and "parameters"')
            position = 0
            while position < len(rest):
                value, end = decoder.raw_decode(rest, position)
                position = _SEPARATORS.match(rest, end).end()  # type: ignore[union-attr]
                calls.append(_well_formed(_as_function(value)))
        except Exception as error:
            return calls, _reason(error)
        return calls, None


def _looks_like_bare_call(text: str, tools: Sequence[Schema] | None) -> bool:
    """Whether bare JSON is a call, not an answer: it has the tag, an arguments key or a known name, or was cut off."""
    if text.startswith("<|python_tag|>") or (text[:1] in ("{", "[") and _ARGUMENTS_KEY.search(text)):
        return True
    if not re.match(r'\{\s*"name"', text):
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return True
    known = [tool.get("function", tool).get("name") for tool in tools or ()]
    return value.get("name") in known


def _as_function(value: object) -> dict[str, Any]:
    """A call of the usual form, of JSON with the function at its root or below `function`."""
    if not isinstance(value, dict):
        return {"type": "function", "function": value}
    call: dict[str, Any] = {}
    function = dict(value)
    if isinstance(value.get("function"), dict):
        call = value
        function = dict(value["function"])
    if "parameters" in function:
        function["arguments"] = function.pop("parameters")
    return {**call, "type": "function", "function": function}


def _well_formed(call: object) -> dict[str, Any]:
    """A call as `{"type": "function", "function": {"name", "arguments"}}`, or ValueError with the reason."""
    function = call.get("function") if isinstance(call, dict) else call
    if not isinstance(function, dict):
        raise ValueError(f"the call is {_kind(function)}, not a JSON object with a name and arguments")
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ValueError('the call has no "name"')
    arguments = _arguments(function)
    _check_values(name)
    _check_values(arguments)
    written: dict[str, Any] = {"type": "function", "function": {"name": name.strip(), "arguments": arguments}}
    own_id = written_id(call, function) if isinstance(call, dict) else ""
    if own_id:
        written["id"] = own_id
    return written


def _arguments(function: dict[str, Any]) -> Any:
    """The arguments of a call: {} for none, decoded where they are JSON in a text."""
    arguments = function.get("arguments")
    if arguments is None:
        others = sorted(str(key) for key in function if key not in ("name", "arguments", "type", *ID_NAMES))
        if others and "arguments" not in function:
            raise ValueError(f'the call has no "arguments" (its keys are "name" and {", ".join(others)})')
        return {}
    if isinstance(arguments, str):
        try:
            decoded = strict_json(arguments)
        except ValueError:
            return arguments
        if isinstance(decoded, dict):
            return decoded
    return arguments


def _kind(value: object) -> str:
    """The name of a value's type, or the beginning of a short one, for a message."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, (bool, int, float, str)):
        return json.dumps(value)[:40]
    return type(value).__name__


def _check_values(value: object, depth: int = 0) -> None:
    """Refuse values that Python's json module reads but that no JSON writer or tokenizer accepts."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"the arguments are nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a JSON number")
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("a string holds half of a surrogate pair (a broken \\u escape)")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_values(key, depth)
            _check_values(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_values(item, depth + 1)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"the call is not valid JSON ({error.msg} at character {error.pos})"
    if isinstance(error, RecursionError):
        return "the call is nested too deeply"
    if not str(error):
        return type(error).__name__
    return str(error).splitlines()[0][:200]


def _delimiters(fields: dict[str, Any], name: str) -> dict[str, TimedPattern]:
    """The opening or closing delimiter of each field that has one."""
    found = {}
    for field, grammar in fields.items():
        delimiter = _delimiter(grammar, name)
        if delimiter is not None:
            found[field] = delimiter
    return found


def _delimiter(field: dict[str, Any], name: str) -> TimedPattern | None:
    """A delimiter as a pattern, from literal texts (the longest first) or from a pattern; None if there is none."""
    literal, pattern = field.get(name), field.get(f"{name}_pattern")
    if literal is not None:
        literals = [literal] if isinstance(literal, str) else literal
        literals = sorted(literals, key=len, reverse=True)
        pattern = "|".join(map(re.escape, literals))
    if pattern is None:
        return None
    return TimedPattern(pattern, dot_all=True)


def _usual_hints(opening: str) -> tuple[str, ...]:
    """Markers of an attempted call for a grammar that names none."""
    for piece, hints in _HINTS.items():
        if piece in opening:
            return hints
    return ()

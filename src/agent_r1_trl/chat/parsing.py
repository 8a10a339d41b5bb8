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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.chat.calls import READERS, Reader, strict_decoder, strict_json
from agent_r1_trl.trajectory import Message

# The length of a name is bounded wherever a name is searched for: reading stays linear, whatever the text.
# GPT-OSS may name the recipient before or after the channel, with or without <|constrain|>; one spelling is enough.
_HARMONY_CALL = re.compile(
    r"(?:<\|channel\|>commentary\s*)?to=functions\.(?P<name>[^\s<]{1,128})\s*(?:<\|channel\|>commentary\s*)?"
    r"(?:<\|constrain\|>\s*)?(?:json\s*)?<\|message\|>"
)
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

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        self._pattern = pattern
        self._text = text
        self._found = pattern.search(text)

    def next(self, position: int) -> re.Match[str] | None:
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
        self._thinks = thinks
        self._turn_ends = re.compile("|".join(map(re.escape, turn_ends)))
        self._parse_call = parse_call
        self._anchor = _delimiter(response_template, "start_anchor")
        fields = response_template["fields"]
        self._opens = {name: found for name, field in fields.items() if (found := _delimiter(field, "open"))}
        self._closes = {name: found for name, field in fields.items() if (found := _delimiter(field, "close"))}
        self._implicit = next((name for name in fields if name not in self._opens), None)
        call = fields.get("tool_calls", {})
        opening = str(call.get("open") or call.get("open_pattern") or "").replace("\\", "")
        self._hints = call.get("hints") or next((hints for piece, hints in _HINTS.items() if piece in opening), ())
        self._reader = READERS.get(str(call.get("content")))
        self._reasoning = next(
            (name for name in _REASONING_FIELDS if name in self._opens and name in self._closes), None
        )
        self._is_strict_json = call.get("content") == "json" and not call.get("content_args")
        self._is_bare_json = opening.startswith('{"name"')
        self._is_harmony = "to=functions" in opening
        if self._is_harmony:
            bounded = self._opens["tool_calls"].pattern.replace(r"\S+?", r"\S{1,128}?")
            self._opens["tool_calls"] = re.compile(bounded, re.DOTALL)

    def parse(self, text: str, *, prefix: str = "", tools: list[dict[str, Any]] | None = None) -> Message:
        """The message that `text` spells.

        Args:
            text: the sampled turn, stop token included.
            prefix: what the template wrote after the last message; what of it belongs to this turn is read first.
            tools: schemas that give the arguments their types.
        """
        if self._is_harmony:
            text = _HARMONY_CALL.sub(r"to=functions.\g<name><|channel|>commentary json<|message|>", text)
        begun = self._begun(prefix, text)
        message: Message = {"role": "assistant", "content": ""}
        content, reasoning, calls, reasons = [], [], [], []
        whole = self._turn_ends.sub("", text).strip()
        is_bare_call = self._is_bare_json and _looks_like_bare_call(whole, tools)
        # Bare JSON has no marker before it: a delimiter found inside it would tear it apart.
        for region in [_Region(None, text, whole)] if is_bare_call else self._regions(begun + text):
            if region.field == "tool_calls":
                found, reason = self._read_call(region, tools)
                calls += found
                if reason:
                    reasons.append(reason)
                    content.append(self._turn_ends.sub("", region.raw))
            elif region.field in _REASONING_FIELDS:
                reasoning.append(self._turn_ends.sub("", region.body).strip())
            else:
                found, reason = self._read_stray_call(region.raw, tools)
                calls += found
                if reason:
                    reasons.append(reason)
                if not found:
                    content.append(region.body)
        message["content"] = "\n".join(filter(None, (piece.strip() for piece in content)))
        if any(reasoning):
            message["reasoning_content"] = "\n".join(filter(None, reasoning))
        if calls:
            message["tool_calls"] = calls
        if reasons:
            message["malformed_tool_call"] = "; ".join(dict.fromkeys(reasons))
        return message

    def closed_reasoning(self, prefix: str) -> str:
        """The reasoning that `prefix` ends with, whole; "" if it ends with none, or with one that is open."""
        closed = list(self._closes[self._reasoning].finditer(prefix)) if self._reasoning else []
        if not closed or prefix[closed[-1].end() :].strip():
            return ""
        opened = self._opens[self._reasoning].search(prefix)  # type: ignore[index]
        return prefix[opened.start() if opened else closed[-1].start() :]

    # ---------------------------------------------------------------- regions

    def _begun(self, prefix: str, text: str) -> str:
        """What of the turn stands before the sampled text: the opener of reasoning, as a rule."""
        anchors = list(self._anchor.finditer(prefix)) if self._anchor else []
        prefix, begun = (prefix[anchors[-1].end() :],) * 2 if anchors else (prefix, "")
        if self._reasoning is None:
            return begun
        opener, closer = self._opens[self._reasoning], self._closes[self._reasoning]
        if closed := list(closer.finditer(prefix)):
            return prefix[closed[-1].end() :]  # the template wrote whole reasoning, empty as a rule
        if opened := opener.search(prefix):
            return prefix[opened.start() :]
        return begun + self._missing_opener(text)

    def _missing_opener(self, text: str) -> str:
        """The opener of reasoning that the text only closes: some templates and models leave it out."""
        literal = self._opens[self._reasoning].pattern.replace("\\", "")  # type: ignore[index]
        before, closed, _ = text.partition(literal.replace(literal[:1], literal[:1] + "/", 1))
        if "tool_calls" in self._closes:
            opening, closing = _Scan(self._opens["tool_calls"], before), _Scan(self._closes["tool_calls"], before)
            rest, position = "", 0
            for call, called in self._calls_within(opening, closing, 0, len(before)):
                rest, position = rest + before[position : call.start()], called.end()
            before = rest + before[position:]
        is_open = any(pattern.search(before) for pattern in self._opens.values())
        return literal if self._thinks and closed and not is_open and literal[:1] in ("<", "[") else ""

    def _regions(self, text: str) -> Iterator[_Region]:
        opens = {name: _Scan(pattern, text) for name, pattern in self._opens.items()}
        closes = {name: _Scan(pattern, text) for name, pattern in self._closes.items()}
        position = outside = 0
        while True:
            found = [(name, match) for name, scan in opens.items() if (match := scan.next(position))]
            if not found:
                break
            name, match = min(found, key=lambda item: (item[1].start(), -len(item[1][0]), item[0]))
            yield from self._outside(text[outside : match.start()])
            close = closes[name].next(match.end()) if name in closes else None
            end = close.end() if close else len(text)
            if close is None and name == self._reasoning and "tool_calls" in opens:
                # A call ends reasoning that was never closed, as it does in vLLM.
                close = opens["tool_calls"].next(match.end())
                end = close.start() if close else end
            began = match.end()
            if close is not None and name == self._reasoning and "tool_calls" in opens:
                delimiters = opens["tool_calls"], closes["tool_calls"]
                for call, called in self._calls_within(*delimiters, began, close.start()):
                    yield _Region(name, "", text[began : call.start()])
                    yield _Region("tool_calls", text[call.start() : called.end()], text[call.end() : called.start()])
                    began = called.end()
            body = text[began : close.start() if close else end]
            yield _Region(name, text[match.start() : end], body, close is not None)
            position = outside = max(end, match.end(), match.start() + 1)
        yield from self._outside(text[outside:])

    def _calls_within(
        self, opens: _Scan, closes: _Scan, position: int, end: int
    ) -> Iterator[tuple[re.Match[str], re.Match[str]]]:
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
        if self._implicit is not None and self._implicit in self._closes:
            text = self._closes[self._implicit].sub("", text)
        if self._is_harmony:
            # Headers of messages without a recipient: what they introduce is content.
            text = re.sub(r"<\|start\|>assistant|<\|channel\|>\w*|<\|message\|>|<\|end\|>|<\|return\|>", "", text)
        if text.strip():
            yield _Region(None, text, self._turn_ends.sub("", text))

    # ---------------------------------------------------------------- calls

    def _read_call(self, region: _Region, tools: Any) -> tuple[list[dict[str, Any]], str | None]:
        if self._is_bare_json:
            return self._read_bare_json(region.raw)
        if not region.is_closed:
            return [], "the call was not finished: its closing marker is missing"
        if self._reader is not None:
            return self._read_by(self._reader, region.body, tools)
        try:
            if self._is_strict_json:
                strict_json(region.body)
            calls = self._parse_call(region.raw, tools=tools).get("tool_calls") or []
            return [_well_formed(call) for call in calls], None
        except Exception as error:
            return [], _reason(error)

    def _read_by(self, reader: Reader, body: str, tools: Any) -> tuple[list[dict[str, Any]], str | None]:
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

    def _read_stray_call(self, text: str, tools: Any) -> tuple[list[dict[str, Any]], str | None]:
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


def _looks_like_bare_call(text: str, tools: Any) -> bool:
    """Whether bare JSON is a call, not an answer: it has the tag, an arguments key or a known name, or was cut off."""
    if text.startswith("<|python_tag|>") or (text[:1] in ("{", "[") and _ARGUMENTS_KEY.search(text)):
        return True
    if not re.match(r'\{\s*"name"', text):
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return True
    return value.get("name") in [tool.get("function", tool).get("name") for tool in tools or ()]


def _as_function(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        value = dict(value)
        if isinstance(value.get("function"), dict):
            value = dict(value["function"])
        if "parameters" in value:
            value["arguments"] = value.pop("parameters")
    return {"type": "function", "function": value}


def _well_formed(call: Any) -> dict[str, Any]:
    """A call as `{"type": "function", "function": {"name", "arguments"}}`, or ValueError with the reason."""
    function = call.get("function") if isinstance(call, dict) else call
    if not isinstance(function, dict):
        raise ValueError(f"the call is {_kind(function)}, not a JSON object with a name and arguments")
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ValueError('the call has no "name"')
    arguments = function.get("arguments")
    if arguments is None:
        others = sorted(str(key) for key in function if key not in ("name", "arguments", "id", "type"))
        if others and "arguments" not in function:
            raise ValueError(f'the call has no "arguments" (its keys are "name" and {", ".join(others)})')
        arguments = {}
    if isinstance(arguments, str):
        try:
            decoded = strict_json(arguments)
        except ValueError:
            decoded = None
        arguments = decoded if isinstance(decoded, dict) else arguments
    _check_values(name)
    _check_values(arguments)
    written: dict[str, Any] = {"type": "function", "function": {"name": name.strip(), "arguments": arguments}}
    if isinstance(function.get("id"), str) and function["id"].strip():
        written["id"] = function["id"].strip()
    return written


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return "a list"
    return f"{json.dumps(value)[:40]}" if isinstance(value, (bool, int, float, str)) else type(value).__name__


def _check_values(value: Any, depth: int = 0) -> None:
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
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _delimiter(field: dict[str, Any], name: str) -> re.Pattern[str] | None:
    literal, pattern = field.get(name), field.get(f"{name}_pattern")
    if literal is not None:
        literals = sorted([literal] if isinstance(literal, str) else literal, key=len, reverse=True)
        pattern = "|".join(map(re.escape, literals))
    return re.compile(pattern, re.DOTALL) if pattern is not None else None

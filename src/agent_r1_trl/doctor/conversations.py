"""Are masks exact and calls readable, whatever a conversation holds?

Scripted conversations go through the real rollout loop, so every sampled id is known beforehand.
"""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.chat.checks import Schema, speak
from agent_r1_trl.chat.templates import suggestion
from agent_r1_trl.doctor.report import Report, describe_error
from agent_r1_trl.environments.base import StepResult
from agent_r1_trl.generation.scripted import ScriptedGenerator
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner
from agent_r1_trl.rollout.thinking import STRIP_POLICY
from agent_r1_trl.trajectory import Author, Message, StopReason, Trajectory

# Longer than any scripted turn.
_TURN_TOKENS = 2000
_WORDS = (
    "Paris",
    "a b",
    "Zürich",
    "東京",
    "🙂🚀",
    "e\u0301",
    "x\ny",
    "a\tb",
    '"quoted"',
    "{",
    "}}",
    "\\n",
    "'",
    "0.1",
)
_VALUES: dict[str, tuple[Any, ...]] = {
    "integer": (0, 7, -12),
    "number": (0.5, -3, 2),
    "boolean": (True, False),
    "array": ([], [1, 2], ["a", ["ü"]]),
    "object": ({}, {"inner": {"list": ["a", {"b": 1}]}}, {"deep": {"er": {"still": "é"}}}),
}


@dataclass
class _Scene:
    """A scripted conversation: the ids to sample in each turn, and the environment's answers."""

    prompt: list[Message]
    turns: list[list[int]] = field(default_factory=list)
    calls: list[list[dict[str, Any]]] = field(default_factory=list)
    """The calls that each turn writes."""
    broken: set[int] = field(default_factory=set)
    """The turns in which only the first calls are whole, or none."""
    observations: list[list[Message]] = field(default_factory=list)


class _ScriptedEnv:
    """Plays the environment's part of a scene."""

    def __init__(self, scene: _Scene, tools: Sequence[Any]) -> None:
        self.scene, self.tools, self.turn = scene, tools, 0

    def reset(self, example: dict[str, Any]) -> list[Message]:
        return self.scene.prompt

    def step(self, message: Message) -> StepResult:
        answer = self.scene.observations[self.turn]
        self.turn += 1
        return StepResult(answer, 0.0, self.turn == len(self.scene.turns), {})

    def close(self) -> None:
        """Nothing to free."""


def check_parser(report: Report, chat: ChatFormat, tools: Sequence[Schema], *, num_calls: int, seed: int) -> None:
    """Calls with random arguments, rendered by the template, must be read back unchanged."""
    rng = random.Random(seed)
    wrong = []
    for index in range(num_calls):
        calls = _calls(chat, rng, tools, index, is_plain=index < 3)
        try:
            message = chat.parse(chat.encode_reply(_assistant(calls)), tools=tools)
        except Exception as error:
            wrong.append((index, calls, describe_error(error)))
            continue
        # Tokenizers with a normaliser compose accents; that is not the parser's doing.
        found, written = (
            _folded(json.dumps([call["function"] for call in some], ensure_ascii=False, sort_keys=True))
            for some in (message.get("tool_calls", []), calls)
        )
        if found != written:
            wrong.append((index, calls, message.get("malformed_tool_call") or found))
    if wrong:
        index, calls, read = wrong[0]
        function = json.dumps(calls[0]["function"], ensure_ascii=False)
        note = report.error if index < 3 else report.warning
        note(
            "parser",
            f"{len(wrong)} of {num_calls} rendered calls are not read back as they were written; {function[:150]} "
            f"gave {read[:150]}.",
            "Set response_template to the grammar of this template (docs/model-families.md), or pass another "
            "chat_template."
            if index < 3
            else "Keep arguments of tools simple: this format cannot carry every JSON value.",
        )
    report.ok("parser", f"{num_calls} calls with unicode and nested JSON are read back as they were written.")


def check_masks(
    report: Report, chat: ChatFormat, tools: Sequence[Schema] | None, *, num_conversations: int, seed: int
) -> None:
    """Play scripted conversations and compare the masks with the ids that were sampled."""
    rng = random.Random(seed)
    num_tokens = 0
    for _ in range(num_conversations):
        scene = _scene(chat, rng, tools)
        try:
            trajectory = _play(chat, scene, tools)
        except Exception as error:
            report.error(
                "masks",
                f"A rollout of a scripted conversation raised {describe_error(error)}.",
                suggestion(chat.tokenizer, chat.chat_template),
            )
            return
        _check_trajectory(report, chat, scene, trajectory)
        num_tokens += len(trajectory.completion_ids)
    report.ok(
        "masks",
        f"{num_conversations} conversations, {num_tokens} tokens: mask 1 exactly on what was sampled; special tokens "
        "in tool text stay text; cut turns are closed.",
    )


# ---------------------------------------------------------------- scripts


def _scene(chat: ChatFormat, rng: random.Random, tools: Sequence[Schema] | None) -> _Scene:
    scene = _Scene(prompt=[{"role": "user", "content": _text(chat, rng)}])
    for number in range(rng.randint(1, 4)):
        kind = rng.choice(["call", "call", "cut", "broken", "text"] if tools else ["cut", "text"])
        calls = _calls(chat, rng, tools or (), number) if kind == "call" else []
        words = {"role": "assistant", "content": _word(rng) + "."}
        reply = speak(chat, _assistant(calls) if calls else words, sum(map(len, scene.calls)))
        if kind == "broken":
            calls = _calls(chat, rng, tools or (), number)
            whole = speak(chat, _assistant(calls), 0)
            reply = [*whole[: len(whole) // 2], reply[-1]]
        if kind == "cut":
            reply = reply[:-1] or reply
        scene.turns.append(reply)
        scene.calls.append(calls)
        if kind == "broken":
            scene.broken.add(number)
        told: list[Message] = [
            {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": _text(chat, rng)}
            for call in (calls if kind == "call" else ())
        ]
        scene.observations.append(told or [{"role": "user", "content": _text(chat, rng)}])
    scene.turns.append(chat.encode_reply({"role": "assistant", "content": "Done."}))
    scene.calls.append([])
    scene.observations.append([])
    return scene


def _calls(
    chat: ChatFormat, rng: random.Random, tools: Sequence[Schema], number: int, *, is_plain: bool = False
) -> list[dict[str, Any]]:
    calls = []
    for index in range(1 if is_plain else rng.choice([1, 1, 2, 3])):
        schema = rng.choice(list(tools))["function"]
        properties = schema.get("parameters", {}).get("properties", {}) or {"query": {}}
        values = {name: "x" if is_plain else _value(rng, spec) for name, spec in properties.items()}
        function = {"name": schema["name"], "arguments": values}
        calls.append({"type": "function", "id": f"c{number:06d}{index:02d}", "function": function})
    try:
        chat.encode_reply(_assistant(calls))
        several = chat.encode_reply(_assistant(calls)) != chat.encode_reply(_assistant(calls[:1]))
    except Exception:  # Llama 3 renders one call per turn, GPT-OSS the first of them
        several = False
    return calls if several else calls[:1]


def _assistant(calls: list[dict[str, Any]]) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _value(rng: random.Random, spec: Any) -> Any:
    kind = spec.get("type") if isinstance(spec, dict) else None
    return rng.choice(_VALUES[kind]) if isinstance(kind, str) and kind in _VALUES else _word(rng)


def _word(rng: random.Random) -> str:
    return rng.choice(_WORDS)


def _text(chat: ChatFormat, rng: random.Random) -> str:
    """Random words, JSON and control tokens of the format, spelled out as a hostile tool result would."""
    spellings = list(chat.encoder.control_ids) or [""]
    parts = [
        rng.choice([_word(rng), rng.choice(spellings), json.dumps(rng.choice(_VALUES["object"]))]) for _ in range(6)
    ]
    return "result " + " ".join(parts) + " end"


# ---------------------------------------------------------------- verdicts


def _play(chat: ChatFormat, scene: _Scene, tools: Sequence[Schema] | None) -> Trajectory:
    from agent_r1_trl.tools import Tool

    generator = ScriptedGenerator(lambda request: scene.turns[request.index], stop_token_ids=chat.stop_token_ids)
    shown = [Tool(_never_called, schema=schema) for schema in tools or ()]
    limits = RolloutLimits(
        max_turns=len(scene.turns),
        max_completion_length=10 * _TURN_TOKENS,
        max_tokens_per_turn=_TURN_TOKENS,
        max_observation_tokens=_TURN_TOKENS,
        max_invalid_calls=len(scene.turns),
        context_policy="keep" if chat.thought_rule is None else STRIP_POLICY,
    )
    runner = RolloutRunner(lambda: _ScriptedEnv(scene, shown), generator, chat, limits)
    try:
        return runner.run([RolloutRequest(example={})])[0]
    finally:
        runner.close()


def _never_called(**arguments: Any) -> str:
    raise AssertionError("scripted environments answer themselves")


def _check_trajectory(report: Report, chat: ChatFormat, scene: _Scene, trajectory: Trajectory) -> None:
    if trajectory.stop_reason is not StopReason.DONE:
        report.error(
            "masks",
            f"A scripted conversation ended with {trajectory.stop_reason.value} ({trajectory.error}).",
            "Report it with the template: this is a fault of the package or of a template's special case.",
        )
        return
    ids, authors = trajectory.completion_ids, trajectory.authors
    sampled = [token_id for token_id, mask in zip(ids, trajectory.action_mask, strict=True) if mask]
    if sampled != [token_id for turn in scene.turns for token_id in turn]:
        report.error(
            "masks",
            "The tokens with mask 1 are not those that were sampled.",
            "Report it with the template: masks come from positions and cannot be wrong in a working package.",
        )
    control = set(chat.encoder.control_ids.values())
    heard = [token_id for token_id, author in zip(ids, authors, strict=True) if author is Author.ENVIRONMENT]
    forged = control & set(heard)
    if forged:
        names = ", ".join(chat.tokenizer.convert_ids_to_tokens(sorted(forged)))
        report.error(
            "masks",
            f"Tool text contains control tokens ({names}): a tool result could open a turn.",
            "Use a template that puts contents into its text as they are.",
        )
    _check_closings(report, chat, trajectory)
    _check_calls(report, scene, trajectory)
    _check_words(report, chat, scene, trajectory)


def _check_closings(report: Report, chat: ChatFormat, trajectory: Trajectory) -> None:
    ends = {*chat.turn_end_ids, *chat.encode_turn_end([])}
    rewritten = {segment.start for segment in trajectory.segments}
    for turn in trajectory.turns[:-1]:
        if turn.end in rewritten:
            continue
        around = trajectory.completion_ids[turn.end - 1 : turn.end + 1]
        if not ends & set(around):
            report.error(
                "masks",
                "A turn is followed by an observation without an end-of-turn token between them.",
                "Use a template that ends assistant turns with a token of its own.",
            )


def _check_calls(report: Report, scene: _Scene, trajectory: Trajectory) -> None:
    """Each turn makes the calls that were written in it, and no others."""
    for number, (turn, calls) in enumerate(zip(trajectory.turns, scene.calls, strict=False)):
        made, written = (
            [call["function"]["name"] for call in some] for some in (turn.message.get("tool_calls", []), calls)
        )
        if made != (written[: len(made)] if number in scene.broken else written):
            report.error(
                "masks",
                f"Turn {number} of a conversation made the calls {made}, but {written} were written in it.",
                "Set response_template to the grammar of this template (docs/model-families.md).",
            )
            return


def _check_words(report: Report, chat: ChatFormat, scene: _Scene, trajectory: Trajectory) -> None:
    """Every observation must arrive word for word (or as a JSON string) between its turn and the next."""
    rewritten = {segment.start: segment.prompt_ids or [] for segment in trajectory.segments}
    for turn, following, told in zip(trajectory.turns, trajectory.turns[1:], scene.observations, strict=False):
        between = rewritten.get(turn.end, []) + trajectory.completion_ids[turn.end : following.start]
        text = _folded(chat.encoder.to_text(between))
        for observation in told:
            words = _folded(observation["content"])
            if words not in text and json.dumps(words, ensure_ascii=False)[1:-1] not in text:
                report.warning(
                    "masks",
                    f"An observation does not arrive as it was sent: {observation['content'][:80]!r} became "
                    f"{text[:160]!r}.",
                    "Use a template that leaves contents alone, and a tokenizer that can spell them.",
                )
                return


def _folded(text: str) -> str:
    return unicodedata.normalize("NFC", text)

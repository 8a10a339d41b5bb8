"""The rollout of a hosted model: messages in place of token ids, as `loop.py` plays them with ids.

A trajectory then holds messages and no tokens: it can be scored, shown and exported, but not trained on. Limits count
what the server says that it read and sampled; what comes after its last count is estimated, four characters a token.

Messages differ in OpenAI's protocol from those of environments: arguments of calls are text there, contents are text
or null, and a turn with calls must be followed by one message of role `tool` for each of them.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.chat.messages import as_text
from agent_r1_trl.generation.base import Generation, GenerationError, Generator, SamplingParams
from agent_r1_trl.generation.endpoint import Endpoint, EndpointUnusableError
from agent_r1_trl.rollout.draft import Draft
from agent_r1_trl.rollout.env_session import EnvironmentFailure, EnvSession
from agent_r1_trl.rollout.limits import RolloutLimits
from agent_r1_trl.rollout.loop import GenerationFailure, conclude, cut_message, reset_in_time, shortened, take_step
from agent_r1_trl.rollout.requests import derive_seed
from agent_r1_trl.rollout.runner import RolloutRunner
from agent_r1_trl.tools.calls import read_arguments
from agent_r1_trl.trajectory import Message, StopReason, Trajectory

MAX_SEED = 2**31
CHARS_PER_TOKEN = 4
MAX_ID_CHARS = 64
"""Characters of a call's id; environments cut longer ones."""
_USAGE = ("prompt_tokens", "completion_tokens")


class RoughCount:
    """Tokens of text where the model's tokenizer is not known: four characters each."""

    def count(self, text: str) -> int:
        """Number of tokens."""
        return math.ceil(len(text) / CHARS_PER_TOKEN)

    def truncate(self, text: str, max_tokens: int) -> str:
        """The beginning of a text."""
        return text[: max_tokens * CHARS_PER_TOKEN]


ROUGH = RoughCount()


class HostedRunner(RolloutRunner):
    """Plays trajectories of a hosted model concurrently; see `RolloutRunner`.

    Args:
        env_factory: see `RolloutRunner`.
        endpoint: an `Endpoint`.
        limits: of every trajectory.
        params: how tokens are drawn. 0 as temperature sends neither `top_p` nor a seed.
        **options: see `RolloutRunner`.

    Raises:
        ValueError: a limit or a sampling setting has no meaning for messages.
    """

    def __init__(
        self,
        env_factory: Callable[[], Any],
        endpoint: Endpoint,
        limits: RolloutLimits | None = None,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> None:
        self.endpoint = endpoint
        # Of the chat format, the runner itself only cuts texts.
        super().__init__(env_factory, cast(Generator, endpoint), cast(ChatFormat, ROUGH), limits, params, **options)

    def _check(self) -> None:
        if self.limits.context.policy != "keep":
            raise ValueError(
                f"context.policy={self.limits.context.policy!r}: a hosted model reads every turn so far. Set "
                "context='keep'."
            )
        for name, neutral in (("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
            value = getattr(self.params, name)
            if value != neutral:
                raise ValueError(
                    f"{name}={value}: OpenAI's protocol has no such setting. Remove it; for a server that takes it, "
                    f"set endpoint_options={{{name}: {value}}}."
                )

    async def run_one(self, draft: Draft, session: EnvSession, generator: Any, params: SamplingParams) -> Trajectory:
        """Play one trajectory; see `run_trajectory`."""
        play = _play(draft, session, generator, self.limits, params)
        return await conclude(play, draft, session, self.limits, keep_going=self.keep_going)

    def close(self) -> None:
        """Stop what is running, close the connections, and end the event loop's thread."""
        self.stop()
        if self._loop is not None and self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self.endpoint.aclose(), self._loop).result(10)
        super().close()


async def _play(
    draft: Draft, session: EnvSession, endpoint: Any, limits: RolloutLimits, params: SamplingParams
) -> StopReason:
    draft.phase = "reset"
    draft.prompt_messages, tools = await reset_in_time(draft, session, limits)
    spent = _SpentTokens(draft)
    for turn_index in range(limits.max_turns):
        room = (limits.max_completion_length or 0) - spent.length
        if room < 1:
            return StopReason.MAX_COMPLETION_LENGTH
        max_tokens = room if limits.max_tokens_per_turn is None else min(room, limits.max_tokens_per_turn)
        draft.phase = f"turn {turn_index}: generation"
        began = time.perf_counter()
        body = _body(draft, tools, max_tokens, params, derive_seed(draft.request.seed, turn_index))
        answer = await _ask(endpoint, body, turn_index)
        spent.take(answer)
        message = cut_message(answer.message, max_tokens) if answer.is_cut else answer.message
        generation = Generation(token_ids=[], logprobs=[], stop="length" if answer.is_cut else "stop")
        turn = draft.add_turn(generation, message, generate_s=time.perf_counter() - began)
        if answer.is_cut and spent.length >= (limits.max_completion_length or 0):
            return StopReason.MAX_COMPLETION_LENGTH
        observations, _, end = await take_step(draft, session, limits, turn_index)
        if end is not None:
            return end
        turn.observations = shortened(observations, ROUGH, limits.max_observation_tokens)
        spent.hear(turn.observations)
    return StopReason.MAX_TURNS


def _body(draft: Draft, tools: Sequence[Any], max_tokens: int, params: SamplingParams, seed: int) -> dict[str, Any]:
    said = [message for turn in draft.turns for message in (turn.message, *turn.observations)]
    try:
        messages = to_send([*draft.prompt_messages, *said])
    except Exception as error:  # an image in a message of the environment
        raise EnvironmentFailure(f"{type(error).__name__}: {error}") from error
    body: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens, "temperature": params.temperature}
    if params.temperature:
        body |= {"top_p": params.top_p, "seed": seed % MAX_SEED}
    return body | ({"tools": [_tool_to_send(schema) for schema in tools]} if tools else {})


async def _ask(endpoint: Any, body: Mapping[str, Any], turn_index: int) -> HostedAnswer:
    try:
        record = await endpoint.ask(body)
    except EndpointUnusableError:
        raise  # it ends the evaluation
    except GenerationError as error:
        raise GenerationFailure(f"{type(error).__name__}: {error}") from error
    try:
        return read_answer(record, turn_index)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise GenerationFailure(f"an answer in another form than OpenAI's ({error}): {str(record)[:200]}") from error


class _SpentTokens:
    """Tokens of a trajectory, kept in `draft.usage` under the names of the metrics.

    Without a count by the server, the limits see an estimate and `draft.usage` stays empty.
    """

    def __init__(self, draft: Draft) -> None:
        draft.usage = {}
        self._usage = draft.usage
        self._first_prompt: int | None = None
        self.length = 0
        """Tokens after the prompt; estimated since the last count."""
        self._counted = 0

    def take(self, answer: HostedAnswer) -> None:
        """An answer has come."""
        if not answer.usage:
            self.length += ROUGH.count(_text_of(answer.message))
            return
        read, sampled = answer.usage["prompt_tokens"], answer.usage["completion_tokens"]
        if self._first_prompt is None:
            self._first_prompt = read
        # Thoughts that are not sent back were sampled, though the next prompt is shorter by them.
        self._counted = max(self._counted, read - self._first_prompt) + sampled
        self.length = self._counted
        usage = self._usage
        usage["completion_tokens"] = self._counted
        usage["input_tokens"] = usage.get("input_tokens", 0) + read
        usage["sampled_tokens"] = usage.get("sampled_tokens", 0) + sampled

    def hear(self, observations: Sequence[Message]) -> None:
        """The environment has answered."""
        self.length += sum(ROUGH.count(_text_of(message)) for message in observations)


def _text_of(message: Message) -> str:
    calls = "".join(str(call.get("function")) for call in message.get("tool_calls") or ())
    return f"{message.get('content') or ''}{calls}"


# ---------------------------------------------------------------- messages


@dataclass(frozen=True)
class HostedAnswer:
    """What a server answered, read."""

    message: Message
    """As environments read it; arguments that are no JSON stay text, which the tools answer with an explanation."""
    is_cut: bool
    """A limit of tokens ended it."""
    usage: dict[str, int]
    """`prompt_tokens` and `completion_tokens`; empty if the server does not count."""


def read_answer(record: Mapping[str, Any], turn: int) -> HostedAnswer:
    """The first choice of an answer.

    Args:
        record: the answer's JSON.
        turn: number of the turn, for calls without a usable id.

    Raises:
        Exception: it has another form, which shows as an error of any type.
    """
    choice = record["choices"][0]
    given = choice["message"]
    text = given.get("content") or given.get("refusal") or ""
    message: Message = {"role": "assistant", "content": as_text(text, "answer")}
    thoughts = given.get("reasoning_content") or given.get("reasoning")
    if isinstance(thoughts, str) and thoughts:
        message["reasoning_content"] = thoughts
    calls: list[dict[str, Any]] = []
    for index, call in enumerate(given.get("tool_calls") or ()):
        identifier = call.get("id")
        is_known = any(identifier == other["id"] for other in calls)
        if not isinstance(identifier, str) or not 0 < len(identifier) <= MAX_ID_CHARS or is_known:
            identifier = f"call_{turn + 1}_{index}"
        name, arguments = call["function"].get("name"), read_arguments(call["function"].get("arguments"))
        function = {"name": name if isinstance(name, str) else "", "arguments": arguments}
        calls.append({"type": "function", "id": identifier, "function": function})
    if calls:
        message["tool_calls"] = calls
    usage = {name: count for name in _USAGE if isinstance(count := (record.get("usage") or {}).get(name), int)}
    is_counted = len(usage) == len(_USAGE)
    return HostedAnswer(message, choice.get("finish_reason") == "length", usage if is_counted else {})


def to_send(messages: Sequence[Message]) -> list[Message]:
    """A conversation as a request has it.

    A tool message that answers no call becomes the user's, and a call that the environment did not answer gets an
    empty answer: servers refuse both.
    """
    sent: list[Message] = []
    waiting: list[str] = []

    def end_turn() -> None:
        sent.extend({"role": "tool", "tool_call_id": item, "content": ""} for item in waiting)
        waiting.clear()

    for index, message in enumerate(messages):
        role, identifier = str(message.get("role")), message.get("tool_call_id") or next(iter(waiting), None)
        content = as_text(message.get("content"), f"messages[{index}]")
        if role == "tool" and identifier in waiting:
            waiting.remove(str(identifier))
            sent.append({"role": role, "tool_call_id": identifier, "content": content})
            continue
        end_turn()
        if role == "assistant" and message.get("tool_calls"):
            calls = [_call_to_send(call, f"call_{index}_{place}") for place, call in enumerate(message["tool_calls"])]
            waiting += [call["id"] for call in calls]
            sent.append({"role": role, "content": content or None, "tool_calls": calls})
        else:
            sent.append({"role": "user" if role in ("tool", "function") else role, "content": content})
    end_turn()
    return sent


def _call_to_send(call: Mapping[str, Any], identifier: str) -> dict[str, Any]:
    """Arguments as text that is a JSON object, whatever they were: servers read them again."""
    function = call.get("function") or {}
    arguments = read_arguments(function.get("arguments"))
    arguments = arguments if isinstance(arguments, dict) else {"not_an_object": arguments}
    text = json.dumps(arguments, ensure_ascii=False, default=str)
    named = {"name": function.get("name") or "unknown", "arguments": text}
    return {"id": str(call.get("id") or identifier), "type": "function", "function": named}


def _tool_to_send(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with the keys that OpenAI's protocol knows."""
    names = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: schema["function"][name] for name in names if name in schema["function"]},
    }

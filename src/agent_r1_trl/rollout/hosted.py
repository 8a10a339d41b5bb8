"""The rollout of a hosted model: messages in place of token ids, as `loop.py` rolls out with ids.

A trajectory then holds messages and no tokens: it can be scored, shown and exported, but not trained on. Limits count
what the server says that it read and sampled; what comes after its last count is estimated, four characters a token.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.chat.messages import as_text
from agent_r1_trl.generation.base import Generation, GenerationError, Generator, SamplingParams
from agent_r1_trl.generation.endpoint import Endpoint, EndpointUnusableError
from agent_r1_trl.rollout.draft import Draft
from agent_r1_trl.rollout.env_session import EnvSession, named
from agent_r1_trl.rollout.limits import RolloutLimits
from agent_r1_trl.rollout.loop import GenerationFailure, conclude, cut_message, reset_in_time, shortened, take_step
from agent_r1_trl.rollout.requests import derive_seed
from agent_r1_trl.rollout.runner import RolloutRunner
from agent_r1_trl.safe_text import whole
from agent_r1_trl.tools.calls import read_calls
from agent_r1_trl.tools.event_loop import run_on_loop
from agent_r1_trl.trajectory import Message, StopReason, ToolCall, Trajectory

MAX_SEED = 2**31
CHARS_PER_TOKEN = 4


class RoughCount:
    """Tokens of text where the model's tokenizer is not known."""

    def count(self, text: str) -> int:
        """Four characters each."""
        return math.ceil(len(text) / CHARS_PER_TOKEN)

    def truncate(self, text: str, max_tokens: int) -> str:
        """The beginning of a text."""
        return text[: max_tokens * CHARS_PER_TOKEN]


ROUGH = RoughCount()


class HostedRunner(RolloutRunner):
    """A `RolloutRunner` whose endpoint answers in place of a generator; at temperature 0 it is sent no seed.

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
        # Of the chat format, the runner itself only cuts texts.
        super().__init__(env_factory, cast(Generator, endpoint), cast(ChatFormat, ROUGH), limits, params, **options)

    def _check(self) -> None:
        if (policy := self.limits.context.policy) != "keep":
            raise ValueError(f"context.policy={policy!r}: a hosted model reads every turn so far. Set context='keep'.")
        for name, neutral in (("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
            if (value := getattr(self.params, name)) != neutral:
                raise ValueError(
                    f"{name}={value}: OpenAI's protocol has no such setting. Remove it; for a server that takes it, "
                    f"set endpoint_options={{{name}: {value}}}."
                )

    async def run_one(
        self, draft: Draft, session: EnvSession, generator: Any, params: SamplingParams, limits: RolloutLimits
    ) -> Trajectory:
        """Roll out one trajectory; see `run_trajectory`."""
        turns = _sample_turns(draft, session, generator, limits, params)
        return await conclude(turns, draft, session, limits, keep_going=self.keep_going)

    def close(self) -> None:
        """Stop what is running, and close the connections."""
        super().close()
        run_on_loop(cast(Any, self.generator).aclose(), 10)


async def _sample_turns(
    draft: Draft, session: EnvSession, endpoint: Endpoint, limits: RolloutLimits, params: SamplingParams
) -> StopReason:
    draft.enter("reset")
    draft.prompt_messages, tools = await reset_in_time(draft, session, limits)
    if hasattr(session.env, "drive"):
        raise ValueError(
            f"env={session.name}: an agent asks for its turns itself, of a model that is loaded here. Evaluate such a "
            "model, or give the agent the hosted model's base_url and run it alone."
        )
    spent = _SpentTokens()
    draft.usage = spent.usage
    assert limits.max_completion_length is not None
    for turn_index in range(limits.max_turns):
        room = limits.max_completion_length - spent.length
        if room < 1:
            return StopReason.MAX_COMPLETION_LENGTH
        max_tokens = min(room, limits.max_tokens_per_turn or room)
        draft.enter(f"turn {turn_index}: generation")
        began = time.perf_counter()
        body = _body(draft, tools, max_tokens, params, derive_seed(draft.request.seed, turn_index))
        message, is_cut, usage = await _ask(endpoint, body, turn_index)
        spent.take(message, usage)
        generation = Generation(token_ids=[], logprobs=[], stop="length" if is_cut else "stop")
        message = cut_message(message, max_tokens) if is_cut else message
        turn = draft.add_turn(generation, message, generate_s=time.perf_counter() - began)
        if is_cut and spent.length >= limits.max_completion_length:
            return StopReason.MAX_COMPLETION_LENGTH
        observations, _, end = await take_step(draft, session, limits, turn_index)
        if end is not None:
            return end
        with named():
            turn.observations = shortened(observations, ROUGH, limits.max_observation_tokens)
        spent.length += sum(map(_estimated, turn.observations))
    return StopReason.MAX_TURNS


class _SpentTokens:
    """Tokens of a trajectory after its prompt, and what the server has counted of all its requests."""

    def __init__(self) -> None:
        self.length = self._counted = self._prompt = 0
        self.usage: dict[str, int] = {}
        """Under the names of the metrics; empty without a count by the server."""

    def take(self, message: Message, usage: Mapping[str, Any]) -> None:
        read, sampled = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not isinstance(read, int) or not isinstance(sampled, int):
            self.length += _estimated(message)
            return
        self._prompt = self._prompt or read
        # Reasoning that is not sent back was sampled, though the next prompt is shorter by it.
        self.length = self._counted = max(self._counted, read - self._prompt) + sampled
        self.usage["completion_tokens"] = self._counted
        self.usage["input_tokens"] = self.usage.get("input_tokens", 0) + read
        self.usage["sampled_tokens"] = self.usage.get("sampled_tokens", 0) + sampled


def _estimated(message: Message) -> int:
    calls = "".join(str(call.get("function")) for call in message.get("tool_calls") or ())
    return ROUGH.count(f"{message.get('content') or ''}{calls}")


# ---------------------------------------------------------------- messages


def _body(draft: Draft, tools: Sequence[Any], max_tokens: int, params: SamplingParams, seed: int) -> dict[str, Any]:
    said = [message for turn in draft.turns for message in (turn.message, *turn.observations)]
    with named():  # an image in a message of the environment, say
        messages = whole(to_send([*draft.prompt_messages, *said]))
    body: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens, "temperature": params.temperature}
    if params.temperature:
        body |= {"top_p": params.top_p, "seed": seed % MAX_SEED}
    if tools:
        body["tools"] = [_tool_to_send(tool["function"]) for tool in tools]
    return body


def _tool_to_send(function: Mapping[str, Any]) -> dict[str, Any]:
    known = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: function[name] for name in known if name in function}}


async def _ask(
    endpoint: Endpoint, body: Mapping[str, Any], turn_index: int
) -> tuple[Message, bool, Mapping[str, Any]]:
    try:
        record = await endpoint.ask(body)
    except EndpointUnusableError:
        raise  # it ends the evaluation
    except GenerationError as error:
        raise GenerationFailure(f"{type(error).__name__}: {error}") from error
    try:
        choice = record["choices"][0]
        message = whole(read_answer(choice["message"], turn_index))
        return message, choice.get("finish_reason") == "length", record.get("usage") or {}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise GenerationFailure(f"an answer in another form than OpenAI's ({error}): {str(record)[:200]}") from error


def read_answer(given: Message, turn: int, where: str = "answer") -> Message:
    """A message of an assistant as environments read it; calls without a usable id get one with the turn's number."""
    content = as_text(given.get("content") or given.get("refusal"), where)
    message: Message = {"role": "assistant", "content": content}
    reasoning = given.get("reasoning_content") or given.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        message["reasoning_content"] = reasoning
    calls = [
        {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in read_calls(given, id_prefix=f"call_{turn + 1}")
    ]
    return message | ({"tool_calls": calls} if calls else {})


def to_send(messages: Sequence[Message]) -> list[Message]:
    """A conversation as OpenAI's protocol has it: texts as contents, arguments as JSON text, each call answered once.

    A tool message that answers no call becomes the user's, and a call that the environment did not answer gets an
    empty answer: servers refuse both.
    """
    sent: list[Message] = []
    waiting: list[str] = []

    def end_turn() -> None:
        sent.extend({"role": "tool", "tool_call_id": item, "content": ""} for item in waiting)
        waiting.clear()

    for index, message in enumerate(messages):
        role = str(message.get("role"))
        content = as_text(message.get("content"), f"messages[{index}]")
        if role == "tool" and waiting:
            named = message.get("tool_call_id")  # which an environment may have left out, or shortened
            answered = waiting.pop(waiting.index(named) if named in waiting else 0)
            sent.append({"role": role, "tool_call_id": answered, "content": content})
            continue
        end_turn()
        calls = read_calls(message, id_prefix=f"call_{index}") if role == "assistant" else []
        if calls:
            waiting += [call.id for call in calls]
            sent.append(
                {"role": role, "content": content or None, "tool_calls": [_call_to_send(call) for call in calls]}
            )
        else:
            sent.append({"role": "user" if role in ("tool", "function") else role, "content": content})
    end_turn()
    return sent


def _call_to_send(call: ToolCall) -> dict[str, Any]:
    """Arguments as the text of a JSON object, whatever they were: servers read them again."""
    arguments = call.arguments if isinstance(call.arguments, dict) else {"not_an_object": call.arguments}
    text = json.dumps(arguments, ensure_ascii=False, default=str)
    return {"id": call.id, "type": "function", "function": {"name": call.name or "unknown", "arguments": text}}

"""The rollout of a hosted model: messages in place of token ids, as `loop.py` plays them with ids.

A trajectory then holds messages and no tokens: it can be scored, shown and exported, but not trained on. Limits count
what the server says that it read and sampled; what comes after its last count is estimated, four characters a token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.generation.base import Generation, GenerationError, Generator, SamplingParams
from agent_r1_trl.generation.endpoint import Endpoint, EndpointUnusableError
from agent_r1_trl.generation.endpoint_messages import Answer, RoughCount, read_answer, to_send, tools_to_send
from agent_r1_trl.rollout.draft import Draft
from agent_r1_trl.rollout.env_session import EnvironmentFailure, EnvSession
from agent_r1_trl.rollout.limits import RolloutLimits
from agent_r1_trl.rollout.loop import GenerationFailure, conclude, cut_message, reset_in_time, shortened, take_step
from agent_r1_trl.rollout.requests import derive_seed
from agent_r1_trl.rollout.runner import RolloutRunner
from agent_r1_trl.trajectory import Message, StopReason, Trajectory

ROUGH = RoughCount()
MAX_SEED = 2**31


class Hosted(Protocol):
    """A hosted model: an `Endpoint`, or what keeps a journal of one."""

    async def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON of the server's answer."""


class HostedRunner(RolloutRunner):
    """Plays trajectories of a hosted model concurrently; see `RolloutRunner`.

    Args:
        env_factory: see `RolloutRunner`.
        endpoint: an `Endpoint`.
        limits: of every trajectory.
        params: how tokens are drawn. 0 as temperature sends neither `top_p` nor a seed.
        retry_failed: see `RolloutRunner`.
        on_trajectory: see `RolloutRunner`.
        keep_going: see `RolloutRunner`.

    Raises:
        ValueError: a limit or a sampling setting has no meaning for messages; see `check_hosted`.
    """

    def __init__(
        self,
        env_factory: Callable[[], Any],
        endpoint: Endpoint,
        limits: RolloutLimits | None = None,
        params: SamplingParams | None = None,
        *,
        retry_failed: int = 0,
        on_trajectory: Callable[[Trajectory], None] | None = None,
        keep_going: bool = False,
    ) -> None:
        self.endpoint = endpoint
        super().__init__(
            env_factory,
            cast(Generator, endpoint),
            cast(ChatFormat, ROUGH),  # of which the runner itself only cuts texts
            limits,
            params,
            retry_failed=retry_failed,
            on_trajectory=on_trajectory,
            keep_going=keep_going,
        )

    def _check(self) -> None:
        check_hosted(self.limits, self.params)

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


def check_hosted(limits: RolloutLimits, params: SamplingParams) -> None:
    """Refuse what only a model whose ids are known can do.

    Raises:
        ValueError: names the setting, the rule and the cure.
    """
    if limits.context_policy != "keep":
        raise ValueError(
            f"context_policy={limits.context_policy!r}: a hosted model reads every turn so far. Set "
            "context_policy='keep', and remove thinking='strip' and the settings that belong to another policy."
        )
    for name, neutral in (("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
        value = getattr(params, name)
        if value != neutral:
            raise ValueError(
                f"{name}={value}: OpenAI's protocol has no such setting. Remove it; for a server that takes it, set "
                f"endpoint_options={{{name}: {value}}}."
            )


async def _play(
    draft: Draft, session: EnvSession, endpoint: Hosted, limits: RolloutLimits, params: SamplingParams
) -> StopReason:
    draft.phase = "reset"
    draft.prompt_messages, tools = await reset_in_time(draft, session, limits)
    spent = _Spent(draft)
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
    return body | ({"tools": tools_to_send(tools)} if tools else {})


async def _ask(endpoint: Hosted, body: Mapping[str, Any], turn_index: int) -> Answer:
    try:
        return read_answer(await endpoint.ask(body), turn_index)
    except EndpointUnusableError:
        raise  # it ends the evaluation
    except (GenerationError, ValueError) as error:  # ValueError: an answer that is no text
        raise GenerationFailure(f"{type(error).__name__}: {error}") from error


class _Spent:
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

    def take(self, answer: Answer) -> None:
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

"""The rollout of one trajectory, on one page: the order of events and every way it can end.

Within a context, ids are only ever appended: what the policy sampled (mask 1), what the template adds to close a turn,
what the environment answered (mask 0). `chat/format.py` says what a message looks like in tokens, `contexts.py` which
context comes next.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from agent_r1_trl.chat.encoding import LONG_TEXT
from agent_r1_trl.chat.format import PREFIX_TOKENS, ChatFormat
from agent_r1_trl.chat.messages import as_text
from agent_r1_trl.environments.base import ProtocolError, RewardError
from agent_r1_trl.generation.base import (
    Generation,
    GenerationError,
    GenerationRequest,
    Generator,
    RefusedRequestError,
    RequestTooLongError,
    SamplingParams,
    check_generation,
)
from agent_r1_trl.objects import locate_error
from agent_r1_trl.rollout.contexts import Contexts
from agent_r1_trl.rollout.draft import AGENT_START, RESET, Draft, record_step
from agent_r1_trl.rollout.env_session import EnvironmentFailure, EnvSession, TrajectoryFailure, named
from agent_r1_trl.rollout.limits import MAX_CHARS_PER_TOKEN, RolloutLimits
from agent_r1_trl.rollout.requests import derive_seed
from agent_r1_trl.rollout.summaries import Summaries
from agent_r1_trl.trajectory import Author, Message, StopReason, Trajectory

if TYPE_CHECKING:
    from agent_r1_trl.tools.json_schema import Schema


class GenerationFailure(TrajectoryFailure):
    """The generation back end raised."""

    stop_reason = StopReason.GENERATION_ERROR


async def run_trajectory(
    draft: Draft,
    session: EnvSession,
    generator: Generator,
    chat: ChatFormat,
    limits: RolloutLimits,
    params: SamplingParams,
    *,
    keep_going: bool = False,
) -> Trajectory:
    """Roll out one trajectory. Whatever model, tools or environment do is a `StopReason`, never an exception.

    The draft, which is empty but for the request, shows how far the trajectory has come. With `keep_going`, what is
    raised otherwise ends this trajectory alone, as an `environment_error`.

    Raises:
        ProtocolError: an environment that breaks the protocol (a mistake of its author).
        RewardError: `outcome_reward` raised, or a method returned no reward (a bug of its author).
    """
    turns = _sample_turns(draft, session, generator, chat, limits, params)
    return await conclude(turns, draft, session, limits, keep_going=keep_going)


async def conclude(
    turns: Coroutine[Any, Any, StopReason],
    draft: Draft,
    session: EnvSession,
    limits: RolloutLimits,
    *,
    keep_going: bool = False,
) -> Trajectory:
    """Await the turns of a trajectory, which fill the draft, name what ended it, score it, close the environment."""
    start = time.perf_counter()
    try:
        try:
            async with asyncio.timeout(limits.rollout_timeout) as draft.time_limit:
                stop_reason = await turns
        except TimeoutError:
            stop_reason, draft.cancelled_in = StopReason.TIMEOUT, draft.phase
            if draft.phase in (RESET, AGENT_START):  # the policy has not had its turn
                stop_reason = StopReason.ENVIRONMENT_ERROR
                draft.error = _too_slow(session, "reset", "rollout_timeout", limits)
        except TrajectoryFailure as failure:
            stop_reason, draft.error = failure.stop_reason, str(failure)
            # An environment's own request is not the policy's.
            cause = failure.__cause__ if isinstance(failure, GenerationFailure) else None
            draft.is_refused = isinstance(cause, RefusedRequestError)
            if isinstance(cause, RequestTooLongError):
                has_begun = bool(draft.turns)  # then what it has said so far counts, as at the limit of the model
                stop_reason = StopReason.MAX_COMPLETION_LENGTH if has_begun else StopReason.PROMPT_TOO_LONG
                draft.error = None if has_begun else draft.error
        finally:
            draft.time_limit = None
        trajectory = draft.finish(stop_reason, duration_s=time.perf_counter() - start - draft.waited_s)
        if not stop_reason.is_infrastructure_failure and session.env is not None:
            draft.enter("outcome_reward")
            await _score(trajectory, session, limits)
        return trajectory
    except GenerationError:  # of the back end, for all trajectories
        raise
    except Exception as error:
        if keep_going:
            draft.error = _located(error, session, draft.phase)
            return draft.finish(StopReason.ENVIRONMENT_ERROR, duration_s=time.perf_counter() - start - draft.waited_s)
        where = f"It was in example {draft.request.example_id!r}, generation {draft.request.generation}."
        if isinstance(error, ProtocolError):
            raise ProtocolError(f"{error} {where}") from error
        fix = "" if isinstance(error, RewardError) else ". Correct the method."
        if fix and draft.phase != "outcome_reward":
            raise
        raise RewardError(f"{_located(error, session, draft.phase)}{fix} {where}") from error
    finally:
        await _close(session)


async def _close(session: EnvSession) -> None:
    """Close an environment to its end, also if another trajectory fails meanwhile and this one is cancelled."""
    closing = asyncio.ensure_future(session.close())
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.wait({closing})
        raise


def _drive_of(env: object, limits: RolloutLimits) -> Callable[..., Any] | None:
    """The endpoint of an agent's turns, in place of this loop; None for an environment without an agent."""
    drive, policy = getattr(env, "drive", None), limits.context.policy
    if (drive is not None) == (policy == "agent"):
        return drive
    why, fix = (
        "is no agent: it has no `drive`, so nothing decides what stands in its contexts",
        "'keep', or another one",
    )
    if drive is not None:
        why, fix = "is an agent, which decides itself what it asks with, and may change what it has said", "'agent'"
    raise ValueError(f"context.policy={policy!r}: {type(env).__name__} {why}. Set context={fix}.")


async def _sample_turns(
    draft: Draft,
    session: EnvSession,
    generator: Generator,
    chat: ChatFormat,
    limits: RolloutLimits,
    params: SamplingParams,
) -> StopReason:
    draft.enter(AGENT_START if limits.context.policy == "agent" else RESET)
    draft.prompt_messages, tools = await reset_in_time(draft, session, limits)
    if (drive := _drive_of(session.env, limits)) is not None:
        stop_reason: StopReason = await drive(draft, generator, chat, limits, params)
        return stop_reason
    num_characters = sum(len(str(message.get("content") or "")) for message in draft.prompt_messages)
    if limits.is_too_long(num_characters):
        return StopReason.PROMPT_TOO_LONG  # which needs no tokenizer to see
    with named():
        if num_characters < LONG_TEXT:
            draft.prompt_ids = chat.encode_prompt(draft.prompt_messages, tools or None)
        else:
            draft.prompt_ids = await asyncio.to_thread(chat.encode_prompt, draft.prompt_messages, tools or None)
    if limits.turn_budget(len(draft.prompt_ids), 0) < 1:
        return StopReason.PROMPT_TOO_LONG
    contexts = Contexts(draft, chat, tools, limits)
    summaries = Summaries(draft, chat, tools, limits)
    sample = functools.partial(sample_turn, draft, generator, chat, tools, params)
    for turn_index in range(limits.max_turns):
        max_tokens = limits.turn_budget(*draft.lengths)
        draft.enter(f"turn {turn_index}: generation")
        generation, message, seconds = await sample(max_tokens, derive_seed(draft.request.seed, turn_index))
        message = cut_message(message, max_tokens) if generation.stop == "length" else message
        draft.add_turn(generation, message, generate_s=seconds)
        if generation.stop == "length" and limits.room(*draft.lengths) < 1:
            return StopReason.MAX_COMPLETION_LENGTH
        if turn_index == limits.max_tool_calling_iterations and message.get("tool_calls"):
            return StopReason.MAX_TURNS
        observations, info, end = await take_step(draft, session, limits, turn_index)
        if end is not None and not info.get("is_truncated"):  # then what it says is part of the context
            return end
        with named():
            observations = shortened(observations, chat, limits.max_observation_tokens)
            closing = chat.encode_turn_end(generation.token_ids, stopped=generation.stop == "stop")
            ids, authors = chat.encode_observations(message, observations, tools or None)
            goes_on = end is None and turn_index + 1 < limits.max_turns
            wants_summary = goes_on and summaries.ask(observations, closing, ids)
        if wants_summary:
            draft.enter(f"turn {turn_index}: summary")
            seed = derive_seed(draft.request.seed, turn_index, "summary")
            generation, message, seconds = await sample(limits.context.summary_tokens or 0, seed)
            with named():
                goes_on = summaries.take([*closing, *ids], generation, message, generate_s=seconds)
        else:
            authors = [*[Author.TEMPLATE] * len(closing), *authors]
            goes_on = contexts.go_on(observations, [*closing, *ids], authors, info.get("next_context"))
        if end is not None or not goes_on:
            break  # no room to go on, whatever turns are left
    return end or (StopReason.MAX_TURNS if turn_index + 1 == limits.max_turns else StopReason.MAX_COMPLETION_LENGTH)


async def take_step(
    draft: Draft, session: EnvSession, limits: RolloutLimits, turn_index: int
) -> tuple[list[Message], dict[str, Any], StopReason | None]:
    """Give the draft's last turn to the environment: its observations and info, and why it ended if it did."""
    turn = draft.turns[-1]
    names = [str(call.get("function", {}).get("name")) for call in turn.message.get("tool_calls", ())]
    draft.enter(f"turn {turn_index}: {'tools ' + ', '.join(names) if names else 'environment step'}")
    began = time.perf_counter()
    observations, reward, done, info = await session.step(turn.message)
    record_step(turn, reward, info, env_s=time.perf_counter() - began)
    turn.rendered = await session.render()
    failed = [result for result in turn.tool_results if result.is_infrastructure_failure]
    if failed:
        draft.error = f"tool {failed[0].cause} (attempts: {failed[0].attempts})"
        return observations, info, StopReason.TOOL_FAILURE
    if done:
        return observations, info, StopReason.MAX_TURNS if info.get("is_truncated") else StopReason.DONE
    latest = (turn.is_invalid for turn in reversed(draft.turns) if not turn.is_summary)
    last = list(itertools.islice(latest, limits.max_invalid_calls + 1))
    is_lost = len(last) > limits.max_invalid_calls and all(last)
    return observations, info, StopReason.INVALID_CALLS if is_lost else None


async def sample_turn(
    draft: Draft,
    generator: Generator,
    chat: ChatFormat,
    tools: Sequence[Schema] | None,
    params: SamplingParams,
    max_tokens: int,
    seed: int,
) -> tuple[Generation, Message, float]:
    """The policy's turn after the present context, the message in it, and the seconds that it took to sample."""
    began = time.perf_counter()
    context = draft.context_ids
    prefix = context[-PREFIX_TOKENS:]
    position = len(draft.prompt_ids) + len(draft.completion_ids)
    try:
        request = GenerationRequest(prompt_ids=context, max_tokens=max_tokens, seed=seed, params=params)
        sampled = generator.generate(request)
        if not inspect.isawaitable(sampled):
            raise TypeError(
                f"{type(generator).__name__}.generate is not async. Write async def generate(self, request)"
            )
        generation = await sampled
        check_generation(generation, max_tokens)
    except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # the trajectory was cancelled, not the engine's request
        cause = f" ({error.__cause__})" if error.__cause__ and str(error.__cause__) not in str(error) else ""
        raise GenerationFailure(f"{type(error).__name__}: {error}{cause}") from error
    with named(GenerationFailure):
        message = chat.parse(generation.token_ids, prefix, tools or None, position=position)
    return generation, message, time.perf_counter() - began - generation.waited_s


async def reset_in_time(
    draft: Draft, session: EnvSession, limits: RolloutLimits
) -> tuple[list[Message], list[dict[str, Any]]]:
    """Start the episode; returns prompt messages and tool schemas."""
    try:
        async with asyncio.timeout(limits.reset_timeout):
            begun = await session.reset(draft.request)
    except TimeoutError as error:
        raise EnvironmentFailure(_too_slow(session, "reset", "reset_timeout", limits)) from error
    draft.rendered = await session.render()
    return begun


async def _score(trajectory: Trajectory, session: EnvSession, limits: RolloutLimits) -> None:
    """Add the outcome reward."""
    try:
        async with asyncio.timeout(limits.scoring_timeout) as time_limit:
            trajectory.outcome_reward, trajectory.reward_parts = await session.outcome(trajectory)
            return
    except EnvironmentFailure as error:
        failure = str(error)
    except TimeoutError:
        if not time_limit.expired():  # it is the method's own
            raise
        failure = _too_slow(session, "outcome_reward", "scoring_timeout", limits)
    trajectory.stop_reason, trajectory.error = StopReason.ENVIRONMENT_ERROR, failure


def _located(error: Exception, session: EnvSession, phase: str) -> str:
    """A bug in words; ours are the errors that say what an environment returned in place of what it must."""
    if phase != "outcome_reward" or isinstance(error, RewardError):
        return str(error)
    return f"{session.name}.{phase} raised {locate_error(error)}"


def _too_slow(session: EnvSession, method: str, limit: str, limits: RolloutLimits) -> str:
    return f"{session.name}.{method} had not returned after {limit}={getattr(limits, limit):g} s"


def cut_message(message: Message, max_tokens: int) -> Message:
    """The message of a turn that a limit cut: neither an answer nor a call, and the model is told so if it fits."""
    cut = {name: value for name, value in message.items() if name not in ("tool_calls", "malformed_tool_call")}
    # Only a turn that had begun a call attempted one.
    attempted = "tool_calls" in message or "malformed_tool_call" in message
    name = "malformed_tool_call" if attempted else "cut_off"
    cut[name] = f"the turn was cut off after {max_tokens} tokens, before it was finished"
    return cut


def shortened(observations: Sequence[Message], chat: Any, max_tokens: int) -> list[Message]:
    """The observations with their texts cut to equal shares of the limit, where together they exceed it.

    One note says so, behind the last text that was cut; under a limit that it would half fill, there is none.
    `chat` has `count(text)` and `truncate(text, max_tokens)`.
    """
    # The bound keeps a tokenizer from reading megabytes while every trajectory waits; no token is that long.
    limit = MAX_CHARS_PER_TOKEN * max_tokens
    texts = [as_text(observation.get("content"), "observations") for observation in observations]
    if all(map(str.isascii, texts)) and 2 * sum(map(len, texts)) <= max_tokens:
        return list(observations)  # no tokenizer makes two tokens of a character
    counts = [chat.count(text[:limit]) for text in texts]
    if sum(counts) <= max_tokens and all(len(text) <= limit for text in texts):
        return list(observations)
    at_least = "more than " if any(len(text) > limit for text in texts) else ""
    notes = (f"\n[truncated: {at_least}{sum(counts)} tokens, the limit is {max_tokens}]", "\n[truncated]")
    note = next((note for note in notes if 2 * chat.count(note) <= max_tokens), "")  # the data come first
    shares = _shares(counts, max_tokens - chat.count(note))
    kept = [chat.truncate(text[:limit], share) for text, share in zip(texts, shares, strict=True)]
    last = max(index for index, text in enumerate(texts) if len(kept[index]) < len(text))
    others = kept[:last] + kept[last + 1 :]
    room = max_tokens - sum(chat.count(text) for text in others)
    while kept[last] and chat.count(kept[last] + note) > room:  # where both meet, they may make a token more
        kept[last] = chat.truncate(kept[last], chat.count(kept[last]) - 1)
    kept[last] += note
    return [{**observation, "content": text} for observation, text in zip(observations, kept, strict=True)]


def _shares(counts: Sequence[int], room: int) -> list[int]:
    """Tokens for each text: short ones stay whole, and the others get equal parts of what is left.

    >>> _shares([90, 3, 60], 43)
    [20, 3, 20]
    """
    shares = [0] * len(counts)
    in_order = sorted(range(len(counts)), key=lambda index: (counts[index], -index))
    for num_left, index in zip(range(len(counts), 0, -1), in_order, strict=True):
        shares[index] = min(counts[index], room // num_left)
        room -= shares[index]
    return shares

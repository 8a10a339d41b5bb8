"""The calls of one trajectory: what they are sampled after, what they may spend, and when they are recorded.

A call is recorded when its answer is handed to a client that is still there, in one piece: what nobody heard is not in
the trajectory. The same request again, by a client that says so or after one that has left, gets the same answer; the
same request heard twice is two actions.
"""

from __future__ import annotations

import asyncio
import bisect
import contextvars
import functools
import itertools
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from agent_r1_trl.chat.encoding import LONG_TEXT
from agent_r1_trl.chat.errors import ChatFormatError
from agent_r1_trl.chat.format import PREFIX_TOKENS, ChatFormat
from agent_r1_trl.errors import APIError
from agent_r1_trl.features.doors.agent.held import Held, HeldContext, HeldTurn
from agent_r1_trl.features.doors.agent.wire import Asked, completion, read_request, size_of
from agent_r1_trl.generation.base import Generation, Generator, SamplingParams
from agent_r1_trl.rollout.draft import Draft, record_step
from agent_r1_trl.rollout.env_session import named
from agent_r1_trl.rollout.limits import RolloutLimits
from agent_r1_trl.rollout.loop import GenerationFailure, cut_message, sample_turn
from agent_r1_trl.rollout.requests import derive_seed
from agent_r1_trl.tools.calls import read_calls
from agent_r1_trl.trajectory import Message, StopReason, ToolErrorKind, ToolResult, Turn

logger = logging.getLogger(__name__)

MODEL = "policy"
"""Name of the model, as it is listed; requests may name any."""
NUM_FINAL_TEXTS, NUM_REFUSALS = 2, 4
"""How many requests after the budget is spent are answered with a text, and how many there may be in all."""
SPENT = "The budget of this task is spent. Give your final answer."
FINAL = "chatcmpl-end"
"""Id of that text, which is no turn."""
GONE = "This trajectory has ended; its key is of no use any more."
TAKES_TURNS = "agent/taking_turns"
"""Key of `Trajectory.info`: how often a conversation without a seat went on after another one, as players do."""
T = TypeVar("T")
_warned: set[str] = set()


@dataclass(eq=False)
class _SampledCall:
    """One request, and the turn that answers it."""

    asked: Asked
    context: HeldContext
    is_trained: bool
    connection: asyncio.BaseTransport
    task: asyncio.Task[tuple[Generation, Message, float]]
    is_main: bool = False
    seat: str | None = None
    answer: dict[str, Any] | None = None
    """Once a client has heard it."""
    failure: GenerationFailure | None = None
    """Why the turn could not be cut."""
    asked_at: float = field(default_factory=time.perf_counter)

    @property
    def is_waited_for(self) -> bool:
        """Whether a client is there that has heard nothing yet."""
        return self.answer is None and not self.connection.is_closing()


class AgentSession:
    """One agent at work. All methods but `reward` are called on the rollout's event loop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.key = f"agent-{secrets.token_hex(16)}"
        self.called: asyncio.Future[list[Message]] = loop.create_future()
        """Messages of the first request."""
        self.over: asyncio.Future[StopReason] = loop.create_future()
        """Why the agent is not waited for any more."""
        self.over.add_done_callback(lambda over: over.cancelled() or over.exception())
        self.limit: StopReason | None = None
        """The limit that a call has met."""
        self.asked: Asked | None = None
        """The last request."""
        self.has_ended = False
        self._begun: asyncio.Future[None] = loop.create_future()
        self._long_work = asyncio.Lock()
        """Long requests are read and encoded in a thread, one after another."""
        self._calls: dict[tuple[str, bool, str | None], list[_SampledCall]] = {}
        self._turns: dict[str, Turn] = {}
        """By the identity of its answer."""
        self._heard: dict[HeldTurn, tuple[Turn, float, set[str]]] = {}
        """The turn, when it was heard, and the names of the tools that it could call."""
        self._main: HeldTurn | _SampledCall | None = None
        """The point from which the first conversation goes on, or the call that does so."""
        self._num_refused = 0
        self._speaker = ""
        """The conversation that had the last turn."""
        self._speakers: dict[str, bool] = {}
        """Conversation -> whether its last turn made calls."""
        self._interrupted: set[str] = set()
        """Conversations that went on with the results of their calls after another one had its turn."""

    def begin(
        self, draft: Draft, generator: Generator, chat: ChatFormat, limits: RolloutLimits, params: SamplingParams
    ) -> None:
        """Answer calls from now on."""
        self._draft = draft
        self._generator = generator
        self._chat = chat
        self._limits = limits
        self._params = params
        self._held = Held(chat)
        self._variables = contextvars.copy_context()
        self._begun.set_result(None)

    def end(self) -> None:
        """Answer no call any more."""
        self.has_ended = True
        for call in (call for calls in self._calls.values() for call in calls):
            call.task.cancel()
        self._begun.cancel()
        self.called.cancel()

    def reward(self, identity: str, value: float, name: str) -> None:
        """Add to the reward of the turn with this answer."""
        if identity == FINAL:
            return
        turn = self._turns[identity]
        turn.reward += value
        turn.reward_parts[name] = turn.reward_parts.get(name, 0.0) + value

    async def read(
        self, body: object, num_characters: int, connection: asyncio.BaseTransport, *, is_trained: bool
    ) -> Asked:
        """Read the JSON of a request, of so many characters.

        Raises:
            APIError: it asks for what cannot be given, or is too long.
            ChatFormatError: a message holds an image.
            ConnectionResetError: nobody is there any more to hear the answer.
        """
        if self._begun.done():  # else `complete` looks, once the limits are known
            self._check_open()
            self._check_size(size_of(body), is_trained=is_trained)
        reading = functools.partial(read_request, body, self.asked)
        return await self._worked_off(num_characters, connection, reading)

    async def complete(
        self,
        asked: Asked,
        connection: asyncio.BaseTransport,
        *,
        is_retry: bool,
        is_trained: bool,
        seat: str | None = None,
    ) -> dict[str, Any]:
        """Answer a request.

        Raises:
            APIError: it cannot be answered.
            ChatFormatError: the chat template refuses the messages.
            ConnectionResetError: nobody is there any more to hear it.
        """
        self.asked = asked
        if not self.called.done():
            self.called.set_result(asked.messages)
        await asyncio.wait({self._begun})
        self._check_open()
        self._check_size(asked.size, is_trained=is_trained)
        try:
            encoding = functools.partial(self._held.context, asked.messages, asked.tools)
            context = await self._worked_off(asked.size, connection, encoding)
        except ChatFormatError as error:
            self._count("agent/refused", agent_refused=str(error))
            raise
        place = (context.key, is_trained, seat)
        call = self._same(place, is_retry=is_retry)
        if call is None:
            max_tokens = self._max_tokens(context, asked, is_trained=is_trained)
            if max_tokens is None:
                return completion(FINAL, MODEL, {"content": SPENT}, "length", len(context.ids), 0)
            call = self._start(context, asked, connection, max_tokens, is_trained=is_trained, seat=seat)
        call.connection = connection
        await asyncio.wait({call.task})
        self._check_open()
        if (failure := call.task.exception() or call.failure) is not None:
            raise APIError(500, f"The policy could not answer: {failure}") from failure
        if connection.is_closing():
            raise ConnectionResetError
        if call.answer is None:
            try:
                call.answer = self._hear(call)
            except GenerationFailure as error:
                self._fail(error)
                raise APIError(500, f"The policy could not answer: {error}") from error
        return call.answer

    async def _worked_off(self, num_characters: int, connection: asyncio.BaseTransport, work: Callable[[], T]) -> T:
        """The result of `work`; for a long text it is done in a thread, if anybody still waits for it then."""
        if num_characters < LONG_TEXT:
            return work()
        async with self._long_work:
            if connection.is_closing():
                raise ConnectionResetError
            if self.has_ended:
                raise APIError(410, GONE)
            done = await asyncio.to_thread(work)
        self._check_open()
        return done

    def _check_open(self) -> None:
        if self.has_ended:
            raise APIError(410, GONE)

    def _same(self, place: tuple[str, bool, str | None], *, is_retry: bool) -> _SampledCall | None:
        """The call that a request repeats."""
        calls = self._calls.get(place, [])
        left = [call for call in calls if call.answer is None and not call.is_waited_for]
        if left:
            return left[-1]
        return calls[-1] if is_retry and calls else None

    # ---------------------------------------------------------------- what a call may spend

    @property
    def _num_in_flight(self) -> int:
        """Calls that are to be turns, and whose clients wait."""
        return sum(call.is_trained and call.is_waited_for for calls in self._calls.values() for call in calls)

    def _max_tokens(self, context: HeldContext, asked: Asked, *, is_trained: bool) -> int | None:
        """How many tokens may be sampled; None for a final text in their place."""
        draft, limits = self._draft, self._limits
        if not is_trained:
            room = limits.turn_budget(len(context.ids), 0)
            if room < 1:
                raise _too_long(self._spent(len(context.ids), 0))
            return min(room, asked.max_tokens or room)
        if not draft.turns:  # so that a trajectory without a turn has a prompt
            draft.prompt_messages, draft.prompt_ids = context.messages, context.ids
        num_spent = 0 if not draft.turns else draft.lengths[1] + len(context.delta)
        num_before = len(context.ids) - num_spent
        budget = limits.turn_budget(num_before, num_spent)
        if len(draft.turns) + self._num_in_flight >= limits.max_turns:
            if self.limit is None and budget > 0:
                self._go_on(context, asked_at=time.perf_counter())  # what was observed last is part of the trajectory
            self._refuse(StopReason.MAX_TURNS, f"max_turns={limits.max_turns} calls are made")
            return None
        if budget < 1:
            assert limits.max_completion_length is not None
            may_shorten = num_spent < limits.max_completion_length
            self._refuse(self._limit_of_length, self._spent(num_before, num_spent), may_shorten=may_shorten)
            return None
        return min(budget, asked.max_tokens or budget)

    @property
    def _limit_of_length(self) -> StopReason:
        """The limit that a request has met."""
        is_first = not self._draft.turns and not self._num_in_flight
        return StopReason.PROMPT_TOO_LONG if is_first else StopReason.MAX_COMPLETION_LENGTH

    def _check_size(self, num_characters: int, *, is_trained: bool) -> None:
        """Refuse what no tokenizer needs to see."""
        if self._limits.is_too_long(num_characters):
            why = f"messages and tools of {num_characters} characters do not fit into {self._model_length}"
            raise self.too_large(why, is_trained=is_trained)

    def too_large(self, why: str, *, is_trained: bool) -> APIError:
        """The refusal of a request that is not looked at; a shorter one may go on."""
        if is_trained and self._begun.done() and not self.has_ended:
            self._refuse(self._limit_of_length, why, may_shorten=True)
        return _too_long(why)

    @property
    def _model_length(self) -> str:
        return f"max_model_length={self._limits.max_model_length} (tokens of a conversation and its answer)"

    def _spent(self, num_before: int, num_spent: int) -> str:
        """Which limit leaves no room after so many tokens."""
        limits = self._limits
        assert limits.max_completion_length is not None
        if num_spent >= limits.max_completion_length:
            return f"{num_spent} tokens are spent of max_completion_length={limits.max_completion_length}"
        return f"{num_before + num_spent} tokens leave no room for an answer within {self._model_length}"

    def _refuse(self, limit: StopReason, why: str, *, may_shorten: bool = False) -> None:
        """Refuse a request, or return if a final text is to answer it; `may_shorten`: a shorter one could go on."""
        self.limit = self.limit or limit
        if limit is StopReason.PROMPT_TOO_LONG:
            self._draft.error = why
        self._num_refused += not self._num_in_flight  # one of many at once has not heard yet that there are too many
        is_end = limit is StopReason.PROMPT_TOO_LONG or self._num_refused >= NUM_REFUSALS
        if is_end and not self.over.done():
            self.over.set_result(self.limit)
        if is_end or may_shorten or self._num_refused > NUM_FINAL_TEXTS:
            raise _too_long(why)

    # ---------------------------------------------------------------- sampling

    def _start(
        self,
        context: HeldContext,
        asked: Asked,
        connection: asyncio.BaseTransport,
        max_tokens: int,
        *,
        is_trained: bool,
        seat: str | None,
    ) -> _SampledCall:
        same = self._calls.setdefault((context.key, is_trained, seat), [])
        is_main = is_trained and self._main is context.before and (context.before is not None or not self._turns)
        # A conversation that goes on is sampled as an environment's; the order of arrival decides nothing.
        depth = 0 if context.before is None else context.before.depth
        place: list[int | str] = [depth]
        if not is_main:
            place += [context.key, len(same), "trained" if is_trained else "untrained"]
            place += [seat] if seat else []
        request = self._draft.request
        sampling = sample_turn(
            Draft(request=request, prompt_ids=context.ids),
            self._generator,
            self._chat,
            context.tools,
            self._params,
            max_tokens,
            derive_seed(request.seed, *place),
        )
        task = asyncio.get_running_loop().create_task(sampling, context=self._variables)
        call = _SampledCall(asked, context, is_trained, connection, task, is_main, seat)
        task.add_done_callback(lambda task: self._look_at(call))
        same.append(call)
        if is_trained:
            self.limit = None  # there was room for it
        if is_main:
            self._main = call
        self._draft.enter(f"turn {len(self._draft.turns)}: generation")
        self._warn(asked)
        return call

    def _look_at(self, call: _SampledCall) -> None:
        """A turn has been sampled, or could not be."""
        if call.task.cancelled() or self.has_ended:
            return
        if (error := call.task.exception()) is not None:
            self._fail(error)
            return
        generation, _, _ = call.task.result()
        if found := _first_stop(self._chat, generation.token_ids, call.asked.stop):
            try:
                self._cut(call, found, "stop")
            except GenerationFailure as failure:
                call.failure = failure
                self._fail(failure)

    def _fail(self, error: BaseException) -> None:
        """End the trajectory with a failure."""
        if not self.over.done():
            self.over.set_exception(error)

    def _cut(self, call: _SampledCall, num_tokens: int, stop: Literal["stop", "length"]) -> None:
        """Keep the first tokens of a turn: they were sampled as they would have been.

        Raises:
            GenerationFailure: what is kept cannot be read in time.
        """
        generation, message, _ = call.task.result()
        generation.cut(num_tokens)
        generation.stop = stop
        ids = call.context.ids
        with named(GenerationFailure):
            cut = self._chat.parse(
                generation.token_ids, ids[-PREFIX_TOKENS:], call.context.tools or None, position=len(ids)
            )
        message.clear()
        message.update(cut)

    def _warn(self, asked: Asked) -> None:
        new = [name for name in asked.overridden if name not in _warned]
        _warned.update(new)
        if new:
            logger.warning(
                "An agent sets %s, which does not count here: turns are sampled as the run says. Reported once for "
                "each setting; env/agent/overridden counts on.",
                ", ".join(new),
            )

    # ---------------------------------------------------------------- what has been heard

    def _hear(self, call: _SampledCall) -> dict[str, Any]:
        """Record a turn, as its answer is handed over; returns the answer."""
        draft = self._draft
        limits = self._limits
        context = call.context
        generation, message, seconds = call.task.result()
        num_turns = len(draft.turns)
        identity = f"chatcmpl-{self.key[-8:]}-{num_turns if call.is_trained else 'untrained'}"
        if call.is_trained:
            self._go_on(context, asked_at=call.asked_at)
            room = limits.turn_budget(*draft.lengths)  # others may have spent some of it meanwhile
            if len(generation.token_ids) > max(room, 1):
                self._cut(call, max(room, 1), "length")
        is_cut = generation.stop == "length"
        message = cut_message(message, len(generation.token_ids)) if is_cut else message
        message = _without(message, call.asked.stop)
        if call.is_trained:
            turn = draft.add_turn(generation, message, generate_s=seconds)
            record_step(turn, 0.0, {}, env_s=0.0)  # the agent says nothing of it
            turn.seat = call.seat
            held = self._held.add(context, generation.token_ids, message, is_stopped=generation.stop == "stop")
            names = {tool["function"]["name"] for tool in context.tools}
            self._turns[identity], self._heard[held] = turn, (turn, time.perf_counter(), names)
            self._main = held if self._main is call else self._main
            if is_cut and limits.room(*draft.lengths) < 1:
                self.limit = StopReason.MAX_COMPLETION_LENGTH
            if call.seat is None:
                self._note_speaker(context.said[0], has_called=bool(message.get("tool_calls")))
            if context.drift:
                self._count(f"drift/{context.drift}", agent_drift=context.difference)
            if call.asked.overridden:
                self._count("agent/overridden", agent_overridden=", ".join(call.asked.overridden))
        draft.enter(f"turn {len(draft.turns)}: agent")
        finish = "length" if is_cut else "tool_calls" if message.get("tool_calls") else "stop"
        answer = completion(identity, MODEL, message, finish, len(context.ids), len(generation.token_ids))
        if call.asked.wants_ids:
            answer["prompt_token_ids"] = context.ids
            answer["choices"][0]["token_ids"] = list(generation.token_ids)
        return answer

    def _go_on(self, context: HeldContext, *, asked_at: float) -> None:
        """Let the next turn stand after a context: in the row that it extends, or in one of its own."""
        draft = self._draft
        if not draft.turns:
            draft.prompt_messages, draft.prompt_ids = context.messages, context.ids
            return
        draft.rewrite_context(context.ids, context.delta, context.authors)
        if context.before is None:
            draft.turns[-1].next_context = context.messages
        else:
            turn, heard_at, _ = self._heard[context.before]
            if not turn.observations:
                turn.observations, turn.env_s = context.news, asked_at - heard_at
        self._note_results(context)

    def _note_results(self, context: HeldContext) -> None:
        """The calls that the messages show: their results, and which tool there was not; not whether a tool failed."""
        newest = len(context.messages) - len(context.news) - 1
        turns = context.own if context.before is None else {newest: context.before}
        for place, held in turns.items():
            turn, _, tools = self._heard[held]
            answers = itertools.takewhile(lambda item: item["role"] == "tool", context.messages[place + 1 :])
            texts = {item["tool_call_id"]: item["content"] for item in answers}
            sent = read_calls(context.messages[place])  # whose ids the agent may have changed
            calls = read_calls(turn.message)
            names = [item.id for item in sent] if len(sent) == len(calls) else [item.id for item in calls]
            found = [(call, texts[name]) for call, name in zip(calls, names, strict=True) if name in texts]
            if turn.tool_results:
                continue
            for call, text in found:
                error = None if call.name in tools else ToolErrorKind.UNKNOWN_TOOL
                turn.tool_results.append(ToolResult(call=replace(call), content=text, error=error))

    def _note_speaker(self, name: str, *, has_called: bool) -> None:
        """Count turns of a conversation that goes on after another one, as players do; `name`: of how it begins.

        A conversation whose call waits for the other one has a sub-agent, and is none.
        """
        last_called = self._speakers.pop(name, None)
        waiting = {other for other, calls in self._speakers.items() if calls}
        if last_called is not None and self._speaker != name:
            if last_called:
                self._interrupted.add(name)
                takes_turns = len(self._interrupted) > 1 and waiting <= self._interrupted
            else:
                takes_turns = not waiting
            if takes_turns:
                self._count(TAKES_TURNS)
        self._speakers[name], self._speaker = has_called, name

    def _count(self, name: str, **notes: str) -> None:
        """Count something in the trajectory, and note it in words the first time."""
        info = self._draft.info
        info[name] = info.get(name, 0) + 1
        for key, text in notes.items():
            info.setdefault(key, text)


def _too_long(why: str) -> APIError:
    message = f"The limits of this task are met: {why}."
    return APIError(400, message, param="messages", code="context_length_exceeded")


def _first_stop(chat: ChatFormat, ids: list[int], stops: tuple[str, ...]) -> int:
    """Number of ids up to the end of the first of these strings; 0 if none is there."""

    def has_stop(count: int) -> bool:
        text = chat.encoder.decode(ids[:count])
        return any(stop in text for stop in stops)

    return bisect.bisect_left(range(len(ids)), True, key=has_stop) if has_stop(len(ids)) else 0


def _without(message: Message, stops: tuple[str, ...]) -> Message:
    """The message up to the first of these strings, as clients expect it."""
    content = str(message.get("content") or "")
    ends = [content.index(stop) for stop in stops if stop in content]
    return {**message, "content": content[: min(ends)]} if ends else message

"""The two partners of a rollout, with a memory: what a conversation has played already is not played again.

Every message of the user plays the whole trajectory with the training rollout. What the model sampled before comes
from a `Tape`, what the environment answered before from a `Stage`; only what is new is sampled and run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.environments.base import StepResult
from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.features.serve.events import Event, Listener, TextStream, from_any_thread
from agent_r1_trl.generation.base import Generation, Generator, SamplingParams, token_listener
from agent_r1_trl.rollout import EnvSession, RolloutRequest
from agent_r1_trl.trajectory import Message, Trajectory


class Tape(Generator):
    """A generator that remembers: recorded generations first, then those of the back end.

    Args:
        generator: the back end.
        chat: the model's chat format.
        tell: is told what the model says, while it does.
    """

    def __init__(self, generator: Generator, chat: ChatFormat, tell: Listener) -> None:
        self._generator, self._chat, self._tell = generator, chat, tell
        self.recorded: list[Generation] = []
        self._next = 0

    def rewind(self) -> None:
        """Begin with the first generation again."""
        self._next = 0

    async def generate(
        self, prompt_ids: list[int], *, max_tokens: int, seed: int, params: SamplingParams
    ) -> Generation:
        """See `Generator`."""
        self._next += 1
        if self._next <= len(self.recorded):
            return self.recorded[self._next - 1]
        stream = TextStream(self._chat, lambda text: self._tell(Event(kind="text", text=text)))
        token = token_listener.set(from_any_thread(stream.take))
        try:
            generation = await self._generator.generate(prompt_ids, max_tokens=max_tokens, seed=seed, params=params)
        finally:
            token_listener.reset(token)
        stream.finish(generation.token_ids)
        self.recorded.append(generation)
        return generation


@dataclass(kw_only=True)
class PlayedStep:
    """One message of the model, and what the environment said to it."""

    message: Message
    result: StepResult

    @property
    def is_answer(self) -> bool:
        """Whether it ends what the model had to say: the user is next."""
        has_calls = self.message.get("tool_calls") or self.message.get("malformed_tool_call")
        return self.result.done and not has_calls


class Stage:
    """An environment that stays while its trajectory is played again and again, and the user's messages.

    Args:
        factory: makes the environment.
        truncate: see `EnvSession`.
        row: columns of the row beside the user's first message.
        tell: is told of calls and observations.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        truncate: Callable[[str, int], str],
        row: dict[str, Any],
        tell: Listener,
    ) -> None:
        self._factory, self._truncate, self._row, self._tell = factory, truncate, row, tell
        self.said: list[Any] = []
        """The user's messages; the first may be a list of messages."""
        self.steps: list[PlayedStep] = []
        self.has_acted = False
        """Whether the environment has made a step since the flag was last cleared."""
        self._session: EnvSession | None = None
        self._start: tuple[list[Message], list[dict[str, Any]]] | None = None
        self._next = 0

    async def start(self, request: RolloutRequest) -> tuple[list[Message], list[dict[str, Any]]]:
        """The prompt and the tools' schemas; the environment is made at the first call."""
        self._next = 0
        if self._start is None:
            session = EnvSession(self._factory, truncate=self._truncate)
            try:
                self._start = await session.reset(request)
            except BaseException:
                await session.close()
                raise
            if isinstance(session.env, ToolEnv):
                session.env.process_reward = lambda call, result: 0.0  # type: ignore[method-assign]
            self._session = session
            self._tell_prompt(self._start[0])
        return self._start

    async def step(self, message: Message) -> StepResult:
        """What the environment, or after an answer the user, says to a message of the model."""
        if self._next == len(self.steps):
            assert self._session is not None
            self.has_acted = True
            self._tell_calls(message)
            observations, _, done, info = await self._session.step(message)
            info = {**info, "reward_parts": {}}  # nothing is scored: there is no gold answer
            self.steps.append(PlayedStep(message=message, result=StepResult(observations, 0.0, done, info)))
            self._tell_observations(self.steps[-1].result)
        self._next += 1
        step = self.steps[self._next - 1]
        num_answers = sum(item.is_answer for item in self.steps[: self._next])
        if step.is_answer and num_answers < len(self.said):
            heard = {"role": "user", "content": self.said[num_answers]}
            return StepResult([heard], 0.0, False, step.result.info)
        return step.result

    async def forget(self) -> None:
        """Close the environment, and forget the episode."""
        session, self._session = self._session, None
        self._start, self.steps, self.said = None, [], []
        if session is not None:
            await session.close()

    def row(self) -> dict[str, Any]:
        """The row of the data set that the environment is to see."""
        first = self.said[0]
        question = first if isinstance(first, str) else str(first[-1].get("content") or "")
        return {"answer": "?", **self._row, "prompt": first, "question": question}

    def _tell_prompt(self, messages: list[Message]) -> None:
        for message in messages:
            content = str(message.get("content") or "")
            if content and content != self.row()["question"]:
                self._tell(Event(kind="prompt", name=str(message.get("role")), text=content))

    def _tell_calls(self, message: Message) -> None:
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            name, arguments = str(function.get("name")), function.get("arguments")
            self._tell(Event(kind="call", name=name, arguments=arguments, call_id=str(call.get("id", ""))))

    def _tell_observations(self, result: StepResult) -> None:
        results = [item for item in result.info.get("tool_results") or () if hasattr(item, "call")]
        for item in results:
            call = {"name": item.call.name, "call_id": str(item.call.id)}
            self._tell(Event(kind="observation", text=item.content, is_error=item.is_error, **call))
        for message in () if results or result.done else result.observations:
            text = str(message.get("content") or "")
            self._tell(Event(kind="observation", name=str(message.get("name") or message.get("role")), text=text))


class StageSession(EnvSession):
    """A rollout's view on a stage, which outlives it and is not scored."""

    def __init__(self, stage: Stage, factory: Callable[[], Any], truncate: Callable[[str, int], str]) -> None:
        super().__init__(factory, truncate=truncate)
        self._stage = stage

    async def reset(self, request: RolloutRequest) -> tuple[list[Message], list[dict[str, Any]]]:
        """See `EnvSession`."""
        return await self._stage.start(request)

    async def step(self, message: Message) -> StepResult:
        """See `EnvSession`."""
        return await self._stage.step(message)

    async def outcome(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        """Nothing is scored."""
        return 0.0, {}

    async def close(self) -> None:
        """The stage stays."""

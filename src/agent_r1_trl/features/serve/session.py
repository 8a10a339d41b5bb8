"""A conversation with an agent: the training rollout, with a person who says the next message.

After every message the trajectory is that of an environment whose user says the same (`ToolEnv.next_user_message`),
token for token: prompt, limits, context policy and masks are those of a training with these settings.

Every message runs the training rollout from its beginning. What the model sampled before comes from a `Tape`,
what the environment answered before from a `Stage`; only what is new is sampled and run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.environments.base import StepResult
from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.evaluation.agent import Agent
from agent_r1_trl.generation.base import (
    Generation,
    GenerationRequest,
    Generator,
    SamplingParams,
    TrajectorySlot,
    current_slot,
)
from agent_r1_trl.rollout import Draft, EnvSession, RolloutRequest, run_trajectory
from agent_r1_trl.rollout.context_policies import check_thinking
from agent_r1_trl.rollout.summaries import check_room
from agent_r1_trl.trajectory import Message, StopReason, Trajectory

_LIMIT_OF = {
    StopReason.MAX_TURNS: "max_turns",
    StopReason.MAX_COMPLETION_LENGTH: "max_completion_length",
    StopReason.INVALID_CALLS: "max_invalid_calls",
    StopReason.TIMEOUT: "rollout_timeout",
}


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that has just happened in a conversation."""

    kind: Literal["prompt", "text", "call", "observation"]
    """`prompt`: a message that the environment put before the first turn. `text`: the words of the model in a turn,
    without its calls. `call`: the model calls a tool. `observation`: the answer of the environment."""
    text: str = ""
    name: str = ""
    """Name of the tool; for a prompt or another observation, the role of the message."""
    arguments: Any = None
    """Arguments of a call as the model gave them, a dict as a rule."""
    is_error: bool = False
    """Whether the call of an observation failed."""


Listener = Callable[[Event], None]


class ConversationError(RuntimeError):
    """A message could not be answered: the model, a tool or the environment failed, which ended the trajectory so."""

    def __init__(self, message: str, stop_reason: StopReason) -> None:
        super().__init__(message)
        self.stop_reason = stop_reason


class Conversation:
    """Messages of a user, and what the agent says and does.

    Use it from one event loop, one message at a time; `close` it at the end.

    Args:
        agent: model, chat format and limits, which count over the whole conversation.
        env_factory: makes the environment. It sees a row whose `prompt` and `question` are the first message; its
            rewards are not asked for.
        params: how tokens are drawn; greedy by default.
        seed: of sampling and of the environment.
        row: further columns that the environment reads.
        on_event: is told what happens, while it does.

    Raises:
        ValueError: the limits do not fit the model's chat format; see `RolloutRunner`.
    """

    def __init__(
        self,
        agent: Agent,
        env_factory: Callable[[], Any],
        *,
        params: SamplingParams | None = None,
        seed: int = 0,
        row: dict[str, Any] | None = None,
        on_event: Listener | None = None,
    ) -> None:
        self.agent = agent
        self.limits = agent.limits.within(getattr(agent.generator, "max_model_length", None))
        check_room(agent.chat, self.limits)
        check_thinking(agent.chat, self.limits.context.policy)
        self.params = params or SamplingParams(temperature=0.0)
        self.seed = seed
        self.on_event: Listener = on_event or (lambda event: None)
        self._env_factory = env_factory
        self._row = dict(row or {})
        self._begin()

    def _begin(self) -> None:
        """Forget everything."""
        self._tape = Tape(self.agent.generator, self.agent.chat, self.on_event)
        self._stage = Stage(self._env_factory, self.agent.chat.truncate, self._row, self.on_event, self._tape)
        self._slot = TrajectorySlot()
        self.trajectory: Trajectory | None = None
        """The conversation so far; None before the first answer."""
        self.ended: str | None = None
        """Why the conversation cannot go on; None while it can."""

    async def say(self, message: str | Sequence[Message]) -> Trajectory:
        """Say something and hear the answer, after whatever calls the agent makes.

        Args:
            message: text; the first one may be a list of messages, as a row's `prompt`.

        Returns:
            The whole conversation. If a limit or the environment has ended it, `ended` says so.

        Raises:
            ValueError: the conversation has ended, or the environment breaks the protocol.
            ConversationError: the message could not be answered. It is taken back, and the conversation stays open
                unless the environment has acted on it.
        """
        problem = self.ended and f"The conversation has ended: {self.ended}. Start anew (reset)."
        if self._stage.said and not isinstance(message, str):
            problem = f"message={message!r:.100}: only the first may be a list. Pass a string."
        if problem:
            raise ValueError(problem)
        num_generations, num_steps = len(self._tape.recorded), len(self._stage.steps)
        self._stage.said.append(message if isinstance(message, str) else [dict(item) for item in message])
        self._stage.has_acted = False
        try:
            trajectory = await self._roll_out()
        except BaseException:  # Ctrl-C as well
            await self._take_back(num_generations, num_steps)
            raise
        self._tape.tell_rest()
        reason = trajectory.stop_reason
        if reason.is_infrastructure_failure or len(self._tape.recorded) == num_generations:
            await self._take_back(num_generations, num_steps)
            raise ConversationError(trajectory.error or str(self._end_of(reason)), reason)
        trajectory.is_scored = False  # rewards are not asked for
        self.trajectory = trajectory
        self.ended = self._end_of(reason)
        return trajectory

    async def reset(self) -> None:
        """Forget everything; the next message begins another conversation."""
        await self.close()
        self._begin()

    async def close(self) -> None:
        """Close the environment."""
        await self._stage.leave()

    async def _roll_out(self) -> Trajectory:
        request = RolloutRequest(example=self._stage.row(), example_id="chat", seed=self.seed)
        self._tape.num_given = 0
        current_slot.set(self._slot)
        draft = Draft(request=request)
        return await run_trajectory(draft, self._stage, self._tape, self.agent.chat, self.limits, self.params)

    async def _take_back(self, num_generations: int, num_steps: int) -> None:
        del self._tape.recorded[num_generations:], self._stage.steps[num_steps:], self._stage.said[-1:]
        if not self._stage.said:
            await self.reset()
        elif self._stage.has_acted:
            self.ended = "the environment has acted on a message that was not answered"

    def _end_of(self, reason: StopReason) -> str | None:
        if reason is StopReason.DONE:
            return None if self._stage.steps[-1].is_answer else "the environment has ended the episode"
        longest = self.limits.max_model_length
        if reason is StopReason.PROMPT_TOO_LONG:
            return f"the prompt leaves no room for an answer within the model's limit of {longest} tokens"
        if reason is StopReason.MAX_TURNS and self._stage.steps[-1].result.info.get("is_truncated"):
            return "a limit of the environment's own is reached"
        limit = f"{_LIMIT_OF[reason]}={getattr(self.limits, _LIMIT_OF[reason])}"
        if reason is StopReason.MAX_COMPLETION_LENGTH and longest is not None:
            return f"{limit} or the model's own limit of {longest} tokens is reached"
        return f"{limit} is reached"


def refuse_agent(env: object) -> None:
    """Raise a `ValueError` for an environment that is an agent (`drive`): nobody can talk in its place."""
    if hasattr(env, "drive"):
        raise ValueError(
            f"env={type(env).__name__}: an agent asks for its turns itself, so nobody can talk in its place. Serve "
            "the model (vllm serve) and run the agent with that base_url, or name an env with tools."
        )


# ---------------------------------------------------------------- the two partners of the rollout


class Tape(Generator):
    """A generator that remembers: recorded generations first, then those of the back end."""

    def __init__(self, generator: Generator, chat: ChatFormat, tell: Listener) -> None:
        self._generator = generator
        self._chat = chat
        self._tell = tell
        self.recorded: list[Generation] = []
        self.num_given = 0
        self._untold = ""
        """The text of the newest turn, until it is known whether it is a call."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `Generator`."""
        self.num_given += 1
        if self.num_given <= len(self.recorded):
            return self.recorded[self.num_given - 1]
        generation = await self._generator.generate(request)
        ids = [token_id for token_id in generation.token_ids if token_id not in self._chat.stop_token_ids]
        self._untold = str(
            self._chat.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
        self.recorded.append(generation)
        return generation

    def tell_turn(self, message: Message) -> None:
        """Tell what the model says in a turn; its calls are told apart, and would else be there twice."""
        if message.get("tool_calls") and not message.get("malformed_tool_call"):
            texts = (str(message.get(name) or "").strip() for name in ("reasoning_content", "content"))
            self._untold = "\n".join(filter(None, texts))
        self.tell_rest()

    def tell_rest(self) -> None:
        """Tell what is left of a turn to which the environment has said nothing."""
        text, self._untold = self._untold, ""
        if text:
            self._tell(Event(kind="text", text=text))


class RecordedStep(NamedTuple):
    """One message of the model, and what the environment said to it."""

    result: StepResult
    is_answer: bool
    """Whether it ends what the model had to say: the user is next."""


class Stage(EnvSession):
    """An environment that stays while its trajectory is sampled again and again, and the user's messages."""

    def __init__(
        self,
        factory: Callable[[], Any],
        truncate: Callable[[str, int], str],
        row: dict[str, Any],
        tell: Listener,
        tape: Tape,
    ) -> None:
        super().__init__(factory, truncate=truncate)
        self._row = row
        self._tell = tell
        self._tape = tape
        self.said: list[Any] = []
        """The user's messages; the first may be a list of messages."""
        self.steps: list[RecordedStep] = []
        self.has_acted = False
        """Whether the environment has made a step since the flag was last cleared."""
        self._start: tuple[list[Message], list[dict[str, Any]]] | None = None
        self._next = 0

    async def reset(self, request: RolloutRequest) -> tuple[list[Message], list[dict[str, Any]]]:
        """The prompt and the tools' schemas; the environment is made at the first call."""
        self._next = 0
        if self._start is None:
            start = await super().reset(request)
            refuse_agent(self.env)
            self._start = start
            if isinstance(self.env, ToolEnv):
                self.env.process_reward = lambda call, result: 0.0  # type: ignore[method-assign]
            self._tell_prompt(self._start[0])
        return self._start

    async def step(self, message: Message) -> StepResult:
        """The answer of the environment, or after an answer the user, to a message of the model."""
        if self._next == len(self.steps):
            self.has_acted = True
            self._tape.tell_turn(message)
            self._tell_calls(message)
            observations, _, done, info = await super().step(message)
            info = {**info, "reward_parts": {}}  # nothing is scored: there is no gold answer
            is_answer = done and not (message.get("tool_calls") or message.get("malformed_tool_call"))
            self.steps.append(RecordedStep(StepResult(observations, 0.0, done, info), is_answer))
            self._tell_observations(self.steps[-1].result)
        self._next += 1
        step = self.steps[self._next - 1]
        num_answers = sum(item.is_answer for item in self.steps[: self._next])
        if step.is_answer and num_answers < len(self.said):
            heard = {"role": "user", "content": self.said[num_answers]}
            return StepResult([heard], 0.0, False, step.result.info)
        return step.result

    async def outcome(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        """Nothing is scored."""
        return 0.0, {}

    async def close(self) -> None:
        """The environment stays when a rollout has ended."""

    async def leave(self) -> None:
        """Close the environment."""
        await super().close()

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
            self._tell(Event(kind="call", name=str(function.get("name")), arguments=function.get("arguments")))

    def _tell_observations(self, result: StepResult) -> None:
        results = [item for item in result.info.get("tool_results") or () if hasattr(item, "call")]
        for item in results:
            self._tell(Event(kind="observation", name=item.call.name, text=item.content, is_error=item.is_error))
        for message in () if results or result.done else result.observations:
            text = str(message.get("content") or "")
            self._tell(Event(kind="observation", name=str(message.get("name") or message.get("role")), text=text))

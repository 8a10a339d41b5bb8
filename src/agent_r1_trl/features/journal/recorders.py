"""Recorders of a trajectory for the journal: each does its work as without one, and writes down what came of it.

They first repeat what a killed run has recorded. `run_trajectory` does not notice: it asks the generator, which
answers from the journal as long as it is asked what it was asked then, and the environment, which comes back to its
state as it declares. So prompts, masks and limits are made anew by the code that always makes them, and where anything
differs, the trajectory goes on from there as a new one would.

The class of an environment says in its attribute `on_resume` how it comes back to where it stood:

- `"replay"`: a fresh environment gets the recorded messages again, for the sake of its state; the policy reads what
  was recorded. The tools of a `ToolEnv` that are plain functions are not called: their results are in the journal.
- `"restart"`: a fresh environment gets the messages again, tools are called again, and what it says now counts. What
  the policy said is taken from the journal as long as it reads the same as then.

Without the attribute, a `ToolEnv` whose tools are plain functions and whose turns are `ToolEnv`'s own is replayed, and
everything else is restarted.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from agent_r1_trl.environments.base import StepResult
from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.environments.trl_adapters import TRLEnvAdapter
from agent_r1_trl.features.journal.reader import RecordedTurn, is_same_answer, read_step, step_record
from agent_r1_trl.features.journal.records import Record, checksum_ids, dump, pack_floats, pack_ids
from agent_r1_trl.generation.base import Generation, GenerationRequest, Generator
from agent_r1_trl.generation.endpoint import Endpoint
from agent_r1_trl.rollout import Draft, EnvSession, RolloutRequest
from agent_r1_trl.settings import OneOf, check_value
from agent_r1_trl.tools import Tool
from agent_r1_trl.trajectory import Message, ToolCall, ToolResult, Turn

if TYPE_CHECKING:
    from agent_r1_trl.tools.executor import ToolExecutor

logger = logging.getLogger(__name__)


@dataclass
class TrajectoryLog:
    """The journal of one trajectory."""

    append: Callable[[Record], None]
    turns: list[RecordedTurn]
    """Records that nothing has contradicted yet."""
    request: Record = field(default_factory=dict)
    """The request to the generator for the turn in flight."""
    is_agents: bool = False
    """An agent asks for the turns, several at a time: they are found by what was asked, wherever they stand."""
    asked: dict[int, tuple[Generation, Record]] = field(default_factory=dict)
    """The requests of an agent's turns that are not yet recorded, by the identity of their samples."""

    def turn(self, index: int) -> RecordedTurn | None:
        """The recorded turn; None if it is to be sampled."""
        return self.turns[index] if index < len(self.turns) else None

    def find(self, index: int, request: Record) -> RecordedTurn | None:
        """The recorded turn that was asked for in these words; where there is none, those from `index` on are void."""
        places = self.turns if self.is_agents else self.turns[index : index + 1]
        found = next((turn for turn in places if request.items() <= turn.sampled.items()), None)
        if found is None and not self.is_agents:
            self.forget_from(index)
        return found

    def forget_from(self, index: int) -> None:
        """Sample that turn and those after it."""
        del self.turns[index:]


@dataclass(kw_only=True)
class JournaledDraft(Draft):
    """Token lists that only grow, here and on disk."""

    log: TrajectoryLog

    def add_turn(self, generation: Generation, message: Message, **times: Any) -> Turn:
        """Append what the policy sampled; see `Draft`."""
        log, index = self.log, len(self.turns)
        turn = super().add_turn(generation, message, **times)
        request, recorded = log.request, log.turn(index)
        if log.is_agents:
            _, request = log.asked.pop(id(generation))
            index, recorded = len(log.turns), log.find(index, request)
        if recorded is not None:
            turn.generate_s = recorded.sampled["generate_s"]
            return turn
        record = {
            "kind": "turn",
            "turn": index,
            **request,
            "ids": pack_ids(generation.token_ids),
            "logprobs": pack_floats(generation.logprobs),
            "stop": generation.stop,
            "message": message,
            "generate_s": turn.generate_s,
            "kept_ids": None if generation.kept_ids is None else generation.kept_ids.to_dict(),
            "versions": generation.versions,
        }
        if log.is_agents:
            log.turns.append(RecordedTurn(sampled=record))
        log.append(record)
        return turn


class JournaledGenerator(Generator):
    """Samples turns that are not recorded."""

    def __init__(self, generator: Generator, *, log: TrajectoryLog, draft: Draft) -> None:
        self._generator = generator
        self._log = log
        self._draft = draft
        self._context: list[int] = []
        self._checksum = 0
        """Checksum of the context."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """The recorded turn if it was asked for with the same words; else a new one. See `Generator`."""
        index = len(self._draft.turns)
        context = self._checksum_of(request.prompt_ids)
        asked = {"seed": request.seed, "max_tokens": request.max_tokens, "context": context}
        if (recorded := self._log.find(index, asked)) is not None:
            generation = recorded.generation
        else:
            self._log.request = asked
            generation = await self._generator.generate(request)
        if self._log.is_agents:
            self._log.asked[id(generation)] = generation, asked
        return generation

    def _checksum_of(self, prompt_ids: list[int]) -> int:
        """Only what the last turn has not seen is read."""
        last = self._context
        num_known = len(last) if prompt_ids[: len(last)] == last else 0
        self._checksum = checksum_ids(prompt_ids[num_known:], self._checksum if num_known else 0)
        self._context = list(prompt_ids)
        return self._checksum


@dataclass
class JournaledEndpoint:
    """Asks a hosted model for turns that are not recorded."""

    endpoint: Endpoint
    log: TrajectoryLog
    draft: Draft

    async def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The recorded answer if it was asked for with the same words; else a new one. See `Endpoint`."""
        asked = zlib.crc32(dump(body).encode())
        if (recorded := self.log.find(len(self.draft.turns), {"asked": asked})) is not None:
            return dict(recorded.sampled["answer"])
        answer = await self.endpoint.ask(body)
        self.log.request = {"asked": asked, "answer": answer}
        return answer


# -------------------------------------------------------------------- how an environment comes back


def resume_mode(env: object) -> str:
    """The environment's declaration, "replay" or "restart", or the default for its kind.

    Raises:
        ValueError: the attribute has another value.
    """
    users = users_object(env)
    declared = getattr(users, "on_resume", None)
    if declared is None:
        return "replay" if _has_no_state(env) else "restart"
    check_value(f"{type(users).__name__}.on_resume", declared, Annotated[str, OneOf("replay", "restart")])
    return str(declared)


def users_object(env: object) -> Any:
    """The object that the user wrote: of TRL's form the instance behind the adapter."""
    return env.environment if isinstance(env, TRLEnvAdapter) else env


def _has_no_state(env: Any) -> bool:
    """Whether nothing but `ToolEnv`'s own code and plain functions decides what the environment says."""
    own = ("step", "next_user_message")
    is_plain = isinstance(env, ToolEnv) and all(getattr(type(env), name) is getattr(ToolEnv, name) for name in own)
    return is_plain and not any(is_method(item, env) for item in env.tools)


def is_method(item: object, env: object) -> bool:
    """Whether a tool is a method of the environment, whose state it may change."""
    fn = item.fn if isinstance(item, Tool) else item
    owners = [getattr(fn, "__self__", None), *getattr(fn, "args", ())]  # a bound method, a partial
    environments = [env, users_object(env)]
    return any(owner is each for owner in owners for each in environments)


class RecordedResults:
    """Stands in for the executor of a `ToolEnv` during one recorded turn.

    Methods of the environment are called again, because they may change its state; functions are not. Either way the
    results are those of the journal.
    """

    def __init__(self, executor: ToolExecutor, env: object, results: Sequence[ToolResult]) -> None:
        self._executor = executor
        self._env = env
        self._results = results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    async def execute(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """The recorded results; see `ToolExecutor.execute`."""
        methods = [call for call in calls if is_method(self._executor.tools.get(call.name), self._env)]
        if methods:
            await self._executor.execute(methods)
        return list(self._results[: len(calls)])


class JournaledSession(EnvSession):
    """Drives an environment, which first comes back to where it stood."""

    def __init__(
        self, factory: Callable[[], Any], *, truncate: Callable[[str, int], str], log: TrajectoryLog, draft: Draft
    ) -> None:
        super().__init__(factory, truncate=truncate)
        self._log, self._draft = log, draft

    async def reset(self, request: RolloutRequest) -> tuple[list[Message], list[dict[str, Any]]]:
        """Make the environment and start the episode; see `EnvSession`.

        Raises:
            ValueError: as for `EnvSession`, or `on_resume` is not one of its values.
        """
        result = await super().reset(request)
        self._is_replayed = resume_mode(self.env) == "replay"
        self._log.is_agents = hasattr(self.env, "drive")
        return result

    async def step(self, message: Message) -> StepResult:
        """Take one assistant message; see `EnvSession`."""
        index = len(self._draft.turns) - 1
        recorded = self._log.turn(index)
        before = None if recorded is None else recorded.step
        if before is not None and self._is_replayed:
            return await self._repeat(message, before)
        result = await super().step(message)
        if before is not None and is_same_answer(result, before):
            return result
        self._log.forget_from(index)  # from here on this is a new trajectory
        self._log.append({"kind": "step", "turn": index, **step_record(result)})
        return result

    async def _repeat(self, message: Message, record: Record) -> StepResult:
        """The recorded answer, with the environment in the state behind it."""
        answer = read_step(record)
        executor = self.env.executor if isinstance(self.env, ToolEnv) else None
        if executor is not None:
            self.env._executor = RecordedResults(executor, self.env, answer.info["tool_results"])
        try:
            again = await super().step(message)
        finally:
            if executor is not None:
                self.env._executor = executor
        if not is_same_answer(again, record):
            logger.warning(
                "%s is replayed after a kill (on_resume='replay') and answers turn %d of example %r otherwise than "
                "before; what was recorded counts. Set on_resume='restart' on an environment that is not "
                "deterministic.",
                self.name,
                len(self._draft.turns) - 1,
                self._draft.request.example_id,
            )
        return answer

"""An environment that is an agent: it asks for its turns itself, and what it returns is scored."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import os
import re
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agent_r1_trl.environments.reward_values import read_number, read_outcome
from agent_r1_trl.features.doors.agent.server import LOOPBACK, DoorServer, check_host, server_here
from agent_r1_trl.features.doors.agent.session import MODEL, TAKES_TURNS, AgentSession
from agent_r1_trl.features.doors.tail import tail_of
from agent_r1_trl.objects import import_object, locate_error
from agent_r1_trl.rollout.env_session import EnvironmentFailure, ToolFailure
from agent_r1_trl.rollout.failures import MAX_CAUSES
from agent_r1_trl.safe_text import shown
from agent_r1_trl.settings import Finite, check_value
from agent_r1_trl.tools import shared_pool
from agent_r1_trl.tools.faults import is_infrastructure_error
from agent_r1_trl.tools.pool import own_context
from agent_r1_trl.trajectory import Message, StopReason, Trajectory

if TYPE_CHECKING:
    from agent_r1_trl.chat.format import ChatFormat
    from agent_r1_trl.generation.base import Generator, SamplingParams
    from agent_r1_trl.rollout.draft import Draft
    from agent_r1_trl.rollout.limits import RolloutLimits

logger = logging.getLogger(__name__)
AGENT_THREADS = 1000
"""Maximum number of plain `run` functions at once. Each holds its thread for the whole of its trajectory, so they have
a pool of their own, which no other number of places names."""
_warned: set[str] = set()
CLOSE_WAIT_S = 2.0
"""Seconds that an agent has to end when its trajectory has; it may clean up."""


class Door:
    """How an agent reaches the policy: what an OpenAI client takes, and rewards for single calls."""

    model = MODEL

    def __init__(self, session: AgentSession, server: DoorServer, seat: str | None = None) -> None:
        self._session, self._server = session, server
        self.api_key = session.key if seat is None else f"{session.key}.{seat}"
        """The session: every trajectory has its own."""
        self.host = server.host
        """Address of the machine that trains."""
        self.base_url = f"{server.address}/v1"
        self.session_url = f"{server.address}/sessions/{self.api_key}/v1"
        """A `base_url` that needs no key, for clients that have one of their own."""
        self.untrained_base_url = f"{server.address}/untrained/v1"
        """A `base_url` for calls that are not the agent's own work and not trained on (titles, simulators, judges)."""
        self.untrained_session_url = f"{server.address}/sessions/{self.api_key}/untrained/v1"
        """It needs no key."""

    @property
    def settings(self) -> dict[str, str]:
        """Arguments of an OpenAI client: `openai.AsyncOpenAI(**door.settings)`."""
        return {"base_url": self.base_url, "api_key": self.api_key}

    @property
    def client(self) -> Any:
        """An `openai.OpenAI`, for plain functions; all trajectories share its connections, which is cheap."""
        return self._server.client("OpenAI").with_options(api_key=self.api_key)

    @property
    def async_client(self) -> Any:
        """An `openai.AsyncOpenAI`, for async functions."""
        return self._server.client("AsyncOpenAI").with_options(api_key=self.api_key)

    def seat(self, name: str) -> Door:
        """The door of one of several players, who have rewards of their own: `run` returns {name: reward}.

        Args:
            name: letters, digits, - and _. Calls at this door, and sub-agents that are given it, are that seat's.

        Raises:
            ValueError: the name has other characters, or more than 64.
        """
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            raise ValueError(f"door.seat({name!r:.80}): must be 1 to 64 letters, digits, - or _. Rename the seat.")
        return Door(self._session, self._server, name)

    def reward(self, answer: object, value: float, name: str = "reward") -> None:
        """Reward one call, beside the outcome.

        Args:
            answer: of the call, or its `id`. The text that says that the budget is spent earns nothing.
            value: is added to the turn's reward.
            name: of the part, in metrics.

        Raises:
            KeyError: no call of this trajectory has that answer.
        """
        self._session.reward(str(getattr(answer, "id", answer)), read_number(value, "reward"), name)


class AgentEnv:
    """Lets an agent act in place of the rollout's own loop.

    Every trajectory calls `run(door, example)`, a plain or async function, which talks to `door` as to OpenAI. What it
    returns is the reward: a number, True (1) or False (0), or (number, {part: number}). A subclass may define `run`
    and `outcome_reward(trajectory)`, which finds in `answer` what `run` returned, and in `example` the row. Use it
    with `context="agent"`.

    Args:
        run: the agent: a function, its path (my_module.my_agent), or a command line as a list (`run_command`). A
            subclass may define it instead.
        unfinished_reward: of a trajectory whose agent raised, or was stopped before it returned.
        shared_reward: whether conversations that take turns, or seats, are one task with one reward.
        door_host: the address of this machine by which agents on other machines reach the door; by default none does.
            Every request needs a session's key, a random one for each trajectory. It goes over the network as it is,
            so the network must be your own.
    """

    has_reward = True
    tools = ()
    run: Callable[..., Any]
    unfinished_reward: Finite = 0.0
    shared_reward: bool = False
    door_host: str = LOOPBACK
    example: dict[str, Any]
    answer: Any = None
    """The result of `run`; None if it has not returned."""
    is_finished = False
    """Whether it has."""
    _server: DoorServer | None = None
    _session: AgentSession
    _agent: asyncio.Task[Any] | None = None

    def __init__(
        self,
        run: Callable[..., Any] | str | Sequence[str] | None = None,
        *,
        unfinished_reward: float | None = None,
        shared_reward: bool | None = None,
        door_host: str | None = None,
    ) -> None:
        if isinstance(run, list | tuple):
            self.run = functools.partial(run_command, run)
        elif run is not None:
            given: Any = import_object(run, "run") if isinstance(run, str) else run
            self.run = given
        if shared_reward is not None:
            self.shared_reward = shared_reward
        if door_host is not None:
            self.door_host = door_host
        check_host(self.door_host)
        if unfinished_reward is not None:
            self.unfinished_reward = unfinished_reward
        check_value(f"{type(self).__name__}.unfinished_reward", self.unfinished_reward, Finite)
        if not callable(getattr(self, "run", None)):
            raise ValueError(
                f"{type(self).__name__}.run={getattr(self, 'run', None)!r:.80}: must be a function of a door and an "
                "example. Pass it, or define it in a subclass."
            )

    def outcome_reward(self, trajectory: Trajectory) -> Any:
        """Score the finished trajectory: what `run` returned, or 0 if that was None or text (for `reward_funcs`)."""
        if not self.is_finished:
            seats = sorted({turn.seat for turn in trajectory.turns if turn.seat is not None})
            return dict.fromkeys(seats, self.unfinished_reward) if len(seats) > 1 else self.unfinished_reward
        if isinstance(self.answer, Mapping) and any(turn.seat is not None for turn in trajectory.turns):
            return self.answer
        if self.answer is None or isinstance(self.answer, str):
            return 0.0
        return read_outcome(self.answer, f"{type(self).__name__}.run", 1.0, 0.0)

    # ---------------------------------------------------------------- the protocol

    async def reset(self, example: dict[str, Any]) -> list[Message]:
        """Start the agent; returns the messages of its first call.

        Raises:
            RuntimeError: it made none.
            ToolFailure: it made none, because what it needs has failed.
        """
        self.example = example
        self._server = await server_here(self.door_host)
        self._session = self._server.open()
        door = Door(self._session, self._server)
        running = _call(self.run, door, example)
        # What the agent sets, `outcome_reward` sees.
        self._agent = asyncio.get_running_loop().create_task(running, context=own_context())
        self._agent.add_done_callback(lambda agent: agent.cancelled() or agent.exception())  # nobody may look any more
        called = self._session.called
        await asyncio.wait({self._agent, called}, return_when=asyncio.FIRST_COMPLETED)
        if called.done():
            return called.result()
        if (error := _error_of(self._agent)) is None:
            raise RuntimeError("the agent returned and made no call. It must ask the model at door.base_url.")
        if is_infrastructure_error(error, has_backend=False):
            raise ToolFailure(f"the agent made no call: it raised {type(error).__name__}: {error}") from error
        raise RuntimeError(f"the agent made no call: {_told(error)}") from error

    async def drive(
        self, draft: Draft, generator: Generator, chat: ChatFormat, limits: RolloutLimits, params: SamplingParams
    ) -> StopReason:
        """Answer the agent's calls until it returns; in place of the rollout's loop.

        Raises:
            TrajectoryFailure: what the agent needs has failed.
        """
        assert self._agent is not None
        try:
            draft.enter("turn 0: agent")
            session = self._session
            session.begin(draft, generator, chat, limits, params)
            await asyncio.wait({self._agent, session.over}, return_when=asyncio.FIRST_COMPLETED)
            return session.over.result() if session.over.done() else self._conclude(draft)
        finally:
            self._end()

    def _conclude(self, draft: Draft) -> StopReason:
        """The agent has returned, or raised."""
        assert self._agent is not None
        error, limit = _error_of(self._agent), self._session.limit
        if error is not None:
            draft.info["agent_error"] = told = _told(error)
            if told not in _warned and len(_warned) < MAX_CAUSES and limit is None:
                _warned.add(told)
                logger.warning(
                    "An agent raised %s. If the policy is not to blame, correct the agent: such a trajectory earns "
                    "unfinished_reward=%g. Reported once; env/agent/raised counts on.",
                    shown(told),
                    self.unfinished_reward,
                )
        if error is not None and is_infrastructure_error(error, has_backend=False):
            raise ToolFailure(f"the agent raised {type(error).__name__}: {error}") from error
        if not draft.turns:
            raise EnvironmentFailure(f"the agent ended and had heard no answer ({error!r})")
        draft.info["agent/raised"] = int(error is not None and limit is None)
        if TAKES_TURNS in draft.info and not self.shared_reward:
            _warn_of_seats()
        if error is None:
            self.answer, self.is_finished = self._agent.result(), True
        return limit or StopReason.DONE

    def step(self, message: Message) -> Any:
        """An agent takes no messages.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{type(self).__name__} asks for its turns itself. Train or evaluate it without a hosted model."
        )

    async def close(self) -> None:
        """End the agent, and the session if it has not ended."""
        self._end()
        if self._agent is not None:
            await asyncio.wait({self._agent}, timeout=CLOSE_WAIT_S)

    def _end(self) -> None:
        if self._server is not None:
            self._server.end(self._session)
        if self._agent is not None:
            self._agent.cancel()


async def _call(run: Callable[..., Any], *arguments: object) -> Any:
    """Call an agent: on the loop, or on a thread of its own if it is a plain function."""
    try:
        if inspect.iscoroutinefunction(run):
            return await run(*arguments)
        result = await shared_pool(AGENT_THREADS).run(functools.partial(run, *arguments))
        return await result if inspect.isawaitable(result) else result
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__} {error}".strip()) from error


@functools.cache
def _warn_of_seats() -> None:
    logger.warning(
        "Conversations of an agent take turns, and are trained with one reward. If they are players, give each a door "
        "of its own, door.seat('white'), and return {'white': 1.0, 'black': -1.0} from run; an opponent that is not "
        "to be trained asks at door.untrained_base_url. If they are one task, pass shared_reward=True. Reported once; "
        "env/agent/taking_turns counts on."
    )


def _error_of(task: asyncio.Task[Any]) -> Exception | None:
    """The exception of an agent that has ended."""
    if task.cancelled():
        return RuntimeError("the agent was cancelled, by itself")
    error = task.exception()
    return error if error is None or isinstance(error, Exception) else RuntimeError(repr(error))


def _told(error: Exception) -> str:
    return locate_error(error) if error.__traceback__ else str(error)


MAX_ERROR_CHARS = 500
MAX_OUTPUT_BYTES = 2**20
"""How much of a program's output is kept: its end, in which the answer is the last line."""


async def run_command(command: Sequence[str], door: Door, example: dict[str, Any]) -> Any:
    """Run a program for one trajectory; returns the last line that it writes, as JSON if it is some.

    It finds the endpoint in OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and the row as JSON in its input.

    Raises:
        RuntimeError: it ended with another exit code than 0.
    """
    found = {"OPENAI_BASE_URL": door.base_url, "OPENAI_API_KEY": door.api_key, "OPENAI_MODEL": door.model}
    direct = ",".join(filter(None, (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), door.host)))
    found |= {"no_proxy": direct, "NO_PROXY": direct}  # no proxy leads to the endpoint
    async with tail_of(MAX_OUTPUT_BYTES) as output, tail_of(MAX_ERROR_CHARS) as errors:
        with tempfile.TemporaryFile() as given:
            given.write(json.dumps(example, ensure_ascii=False, default=str).encode(errors="replace"))
            given.seek(0)
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=given,
                stdout=output.file,
                stderr=errors.file,
                env=os.environ | found,
                start_new_session=True,
            )
        try:
            await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # and whatever it has started
            await process.wait()
        written, told = await output.text(), await errors.text()
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with exit code {process.returncode}. {told}")
    last = next(reversed(written.splitlines()), "")
    with contextlib.suppress(ValueError):
        return json.loads(last)
    return last

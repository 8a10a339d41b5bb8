"""Drive one environment for one trajectory: plain or async methods, failures named, closed exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import Context
from typing import Any, NoReturn
from xml.etree import ElementTree

from agent_r1_trl.environments.base import ProtocolError, RewardError, StepResult
from agent_r1_trl.environments.prompts import read_prompt, with_text
from agent_r1_trl.environments.reward_values import read_number
from agent_r1_trl.environments.trl_adapters import TRLEnvAdapter
from agent_r1_trl.rollout.context_policies import is_context
from agent_r1_trl.rollout.requests import RolloutRequest
from agent_r1_trl.tools import Tool, ToolSchemaError, shared_pool
from agent_r1_trl.tools.base import check_tool_list, shown_tool
from agent_r1_trl.tools.event_loop import run_on_loop
from agent_r1_trl.tools.executor import check_names
from agent_r1_trl.tools.faults import is_infrastructure_error
from agent_r1_trl.tools.pool import OwnThread, own_thread
from agent_r1_trl.tools.variables import private_context
from agent_r1_trl.trajectory import Message, StopReason, Trajectory

logger = logging.getLogger(__name__)

ENV_THREADS = 256
"""Maximum number of plain (not async) environment methods that run at once."""
CLOSE_TIMEOUT_S = 60.0
"""Seconds that `close` may take before the rollout goes on without it."""
RENDER_TIMEOUT_S = 5.0
"""Seconds that `render_text` or `render_svg` may take before the rollout goes on without them."""
MAX_RENDERED = 20_000
"""Maximum number of characters that is recorded of one state, in either form."""


class TrajectoryFailure(Exception):
    """Ends one trajectory, for no fault of the policy."""

    stop_reason: StopReason


class EnvironmentFailure(TrajectoryFailure):
    """The environment itself raised, in a method whose failures are not the policy's fault."""

    stop_reason = StopReason.ENVIRONMENT_ERROR


class ToolFailure(TrajectoryFailure):
    """A tool failed by the fault of its infrastructure, and the environment's `step` passed that on."""

    stop_reason = StopReason.TOOL_FAILURE


@contextlib.contextmanager
def named(kind: type[TrajectoryFailure] = EnvironmentFailure, what: str = "") -> Iterator[None]:
    """An exception in here ends this trajectory alone; `what` begins the message."""
    try:
        yield
    except Exception as error:
        raise kind(f"{what}{type(error).__name__}: {error}") from error


class EnvSession:
    """Drives an environment from the event loop; all of its plain methods run on one thread.

    All calls share context variables (`contextvars`): what one sets, the next one reads, and no other trajectory.

    Args:
        factory: makes the environment.
        truncate: `(text, max_tokens) -> text` in the model's tokens, handed to environments that take it.
    """

    def __init__(self, factory: Callable[[], Any], *, truncate: Callable[[str, int], str]) -> None:
        self._factory, self._truncate = factory, truncate
        self._lock, self._is_closed = threading.Lock(), False
        self._is_render_broken = False
        self.thread = OwnThread()
        self._context: Context | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.env: Any = None

    async def reset(self, request: RolloutRequest) -> tuple[list[Message], list[dict[str, Any]]]:
        """Make the environment and start the episode; returns prompt messages and tool schemas."""
        made = await self._guard("__init__", self._make)
        self.env = self.env if made is None else made
        missing = [name for name in ("reset", "step") if not callable(getattr(self.env, name, None))]
        if missing:
            what = f"env={getattr(self._factory, '__name__', 'env')} made a {type(self.env).__name__}"
            raise ProtocolError(
                f"{what} without {' and '.join(missing)}: an environment has both. Pass an environment class, or a "
                "function that returns an environment."
            )
        if getattr(self.env, "truncate_text", self) is None:
            self.env.truncate_text = self._truncate
        seeds = {"reset_seed": request.reset_seed, "dynamics_seed": request.seed}
        if _takes_any(getattr(self.env, "seed", None), seeds):  # another `seed`, such as gym's, is its own business
            await self._guard("seed", lambda: self.env.seed(**seeds))
        # A copy all the way down: the members of a group share the row.
        messages = await self._guard("reset", self.env.reset, copy.deepcopy(dict(request.example)))
        if not is_context(messages):
            self._refuse(
                "reset", f"{messages!r:.200}", "a list of messages such as [{'role': 'user', 'content': '...'}]"
            )
        tools = check_names(map(shown_tool, check_tool_list(getattr(self.env, "tools", None) or (), self.name)))
        schemas = [item.schema for item in tools.values()]
        with named():
            return with_text(read_prompt(messages, schemas, request.example)), schemas

    def _make(self) -> Any:
        """On the environment's thread, perhaps after the trajectory was given up; what an async factory awaits."""
        env = self._factory()
        if inspect.isawaitable(env):
            return env
        with self._lock:
            self.env = None if self._is_closed else env
        if self.env is None and callable(getattr(env, "close", None)):
            closing = env.close()
            if inspect.isawaitable(closing):
                run_on_loop(_contained(lambda: closing))
        return None

    async def step(self, message: Message) -> StepResult:
        """Take one assistant message.

        Raises:
            ProtocolError: the result does not have the protocol's shape, a mistake of the environment's author.
        """
        # Copies both ways: the record of the turn is not the environment's to change.
        result = await self._guard("step", self.env.step, copy.deepcopy(message))
        try:
            observations, reward, done, info = result
        except (TypeError, ValueError):
            self._refuse("step", f"{result!r:.200}", "a StepResult, or (observations, reward, done, info)")
        observations, info = [] if observations is None else observations, {} if info is None else info
        if not isinstance(observations, list | tuple) or not all(isinstance(item, dict) for item in observations):
            self._refuse("step", f"{observations=!r:.200}", "a list of messages as observations")
        try:
            is_done = bool(done)
        except Exception:  # an array of several: TypeError, ValueError, or torch's RuntimeError
            self._refuse("step", f"{done=!r:.200}", "done as True or False")
        parts = (info.get("reward_parts") or {}) if isinstance(info, Mapping) else None
        results = (info.get("tool_results") or []) if isinstance(info, Mapping) else None
        if not isinstance(parts, Mapping) or not isinstance(results, list | tuple):
            rule = "info as a dict, with a dict of numbers as its reward_parts and a list as its tool_results"
            self._refuse("step", f"{info=!r:.200}", rule)
        info = {**info, "reward_parts": _numbers(parts, f"{self.name}.step")}
        number = read_number(reward, f"{self.name}.step, as reward,")
        return StepResult(with_text(observations), number, is_done, info)

    async def render(self) -> dict[str, str]:
        """The environment's view of its state for readers of the record: `text`, `svg`, or `error`; {} if nothing.

        No prompt holds it. A method that raises, hangs or returns another form is asked no more.
        """
        rendered: dict[str, str] = {}
        for kind in () if isinstance(self.env, TRLEnvAdapter) or self._is_render_broken else ("text", "svg"):
            try:  # a property may raise, too
                if callable(method := getattr(self.env, f"render_{kind}", None)):
                    async with asyncio.timeout(RENDER_TIMEOUT_S):
                        rendered[kind] = check_rendered(kind, await self._call(method))
            except Exception as error:
                self._is_render_broken = True
                rendered["error"] = f"{self.name}.render_{kind}: {str(error) or type(error).__name__}"[:500]
        return rendered

    async def outcome(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        """Score the finished trajectory. An exception is a bug in a reward function and propagates.

        Raises:
            EnvironmentFailure: an `InfrastructureError` in it: the judge behind the method is down, for example.
        """
        method = getattr(self.env, "outcome_reward", None)
        if method is None:
            return 0.0, {}
        result = await self._guard("outcome_reward", method, trajectory)
        source = f"{self.name}.outcome_reward"
        seats = {turn.seat for turn in trajectory.turns if turn.seat is not None}
        if isinstance(result, Mapping) and seats:
            return share_out(trajectory, _numbers(result, source), source), {}
        if len(seats) > 1 and not getattr(self.env, "shared_reward", False):
            raise RewardError(
                f"{source} returned {result!r:.100} for the seats {sorted(seats)}: one reward would train them "
                "all. Return a reward for each, {seat: reward}, or set shared_reward=True."
            )
        value, parts = result if isinstance(result, tuple) else (result, {})
        return read_number(value, source), _numbers(parts, source)

    async def close(self) -> None:
        """Free what reset and the tools took. A failure to do so is not the trajectory's problem."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True  # the watchdog closes the sessions of a loop that it gives up
        await self._close("close", getattr(self.env, "close", None))
        for item in self._listed_tools():
            if isinstance(item, Tool) and type(item).close is not Tool.close:
                await self._close(f"tools: {item.name!r}", item.close)
        self.thread.end()
        self._context = None

    def _listed_tools(self) -> list[Any]:
        """The environment's tools; none if they cannot be read, which `reset` has said."""
        with contextlib.suppress(Exception):
            return list(getattr(self.env, "tools", None) or ())
        return []

    async def _close(self, name: str, method: Callable[[], Any] | None) -> None:
        if method is not None:
            closing = asyncio.ensure_future(self._call(method))
            done, _ = await asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S)
            if not done:
                closing.cancel()
                logger.warning(
                    "%s.%s has not returned after %g s; going on without it", self.name, name, CLOSE_TIMEOUT_S
                )
            elif error := closing.exception():
                logger.warning("%s.%s raised %r", self.name, name, error)

    @property
    def name(self) -> str:
        """Class name of the environment."""
        if self.env is None:
            return getattr(self._factory, "__name__", "env")
        users = getattr(self.env, "environment", None) if isinstance(self.env, TRLEnvAdapter) else None
        return type(users or self.env).__name__

    def _refuse(self, method: str, returned: str, rule: str) -> NoReturn:
        raise ProtocolError(f"{self.name}.{method} returned {returned}. Return {rule}.")

    async def _guard(self, method: str, fn: Callable[..., Any], *args: object) -> Any:
        try:
            return await self._call(fn, *args)
        except Exception as error:
            is_infrastructure = is_infrastructure_error(error, has_backend=False)
            is_reward = method == "outcome_reward" and not is_infrastructure
            # Bugs must be heard; an agent names its failures itself.
            if is_reward or isinstance(error, RewardError | ToolSchemaError | TrajectoryFailure):
                raise
            kind = ToolFailure if method == "step" and is_infrastructure else EnvironmentFailure
            raise kind(f"{self.name}.{method} raised {type(error).__name__}: {error}") from error

    async def _call(self, fn: Callable[..., Any], *args: object) -> Any:
        """Run a plain or async method as a task of its own, which may refuse to be cancelled."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(_contained(fn, *args), context=self._context_on(loop))
        # Nobody waits for a method that was given up; asyncio complains about errors that nobody looked at.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:  # not GeneratorExit, which comes when the loop is gone
            task.cancel()
            raise
        try:
            return task.result()
        except Exception:
            raise
        except BaseException as error:  # the method's own CancelledError is not this task's
            raise _as_exception(error) from error

    def _context_on(self, loop: asyncio.AbstractEventLoop) -> Context:
        """The trajectory's context; a copy on another loop, since one that was given up may be within it."""
        if self._context is None or self._loop is not loop:
            self._context = private_context() if self._context is None else self._context.copy()
            self._context.run(own_thread.set, self.thread)
            self._loop, self.thread.context = loop, self._context
        return self._context


def share_out(trajectory: Trajectory, rewards: dict[str, float], source: str) -> float:
    """Give each seat its own outcome reward; returns their mean.

    Raises:
        RewardError: a turn's seat has none.
    """
    if missing := {turn.seat for turn in trajectory.turns} - set(rewards):
        told = ", ".join(sorted("calls without a seat" if seat is None else repr(seat) for seat in missing))
        raise RewardError(
            f"{source} returned {rewards!r:.200}, which has no reward for {told}. Return one for every seat; ask for "
            "what is no seat's at door.untrained_base_url."
        )
    trajectory.seat_rewards = dict(rewards)
    trajectory.info |= {f"seat/{seat}": reward for seat, reward in rewards.items()}
    return math.fsum(rewards.values()) / len(rewards)


def check_rendered(kind: str, value: object) -> str:
    """A state as an environment rendered it.

    Raises:
        ValueError: it is no text, too long, or not the SVG document that `kind` "svg" asks for.
    """
    problem = None
    if not isinstance(value, str) or len(value) > MAX_RENDERED:
        problem = f"returned {value!r:.80}, which is no text of at most {MAX_RENDERED} characters"
    elif kind == "svg":
        tag = None if "<!ENTITY" in value else ElementTree.fromstring(value).tag
        if tag != "{http://www.w3.org/2000/svg}svg":
            problem = 'returned no <svg xmlns="http://www.w3.org/2000/svg"> without entities'
    if problem:
        raise ValueError(problem)
    return str(value)


def _numbers(parts: Mapping[Any, Any], source: str) -> dict[str, float]:
    return {str(name): read_number(part, f"{source}, part {name!r},") for name, part in parts.items()}


def _takes_any(method: Any, names: Collection[str]) -> bool:
    """Whether a method takes a keyword of these names."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # there is none, or it is a builtin
        return False
    return any(item.name in names or item.kind is item.VAR_KEYWORD for item in parameters)


async def _contained(fn: Callable[..., Any], *args: object) -> Any:
    try:
        if inspect.iscoroutinefunction(fn):
            return await fn(*args)
        result = await shared_pool(ENV_THREADS).run(lambda: fn(*args), thread=own_thread.get())
        return await result if inspect.isawaitable(result) else result
    except (SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # the user's
        raise _as_exception(error) from error  # else it would end the event loop's thread


def _as_exception(error: BaseException) -> RuntimeError:
    return RuntimeError(f"{type(error).__name__} {error}".strip())

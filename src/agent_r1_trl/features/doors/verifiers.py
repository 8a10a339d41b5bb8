"""Environments of verifiers (the Environments Hub): their harness acts behind the agent door, their rubric scores."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from agent_r1_trl.features.doors.agent import AgentEnv, Door
from agent_r1_trl.tools.faults import InfrastructureError

if TYPE_CHECKING:
    from verifiers.v1 import Env, Episode, Task, Trace

NO_KEY = "AGENT_R1_TRL_DOOR_KEY"
"""A variable of the environment that nobody sets: the address opens the session, and no key is read."""
POLICYS_OWN = ("HarnessError", "ProviderError", "TimeoutError")
"""Failures that the policy may bring about: a program that gives up, a request that the door refuses, a deadline."""


class VerifiersEnv(AgentEnv):
    """Acts in an environment of verifiers (0.4, `verifiers.v1`), whose rewards score the trajectory, part by part.

    A row of the data set names a task by `idx`, its place in the taskset; `verifiers_rows` makes such rows. Use it
    with `context="agent"`.

    Args:
        env: the environment, as the key `env` of a configuration of verifiers:
            `{"taskset": {"id": "gsm8k_v1"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}`.
        untrained: roles that the policy plays and that are not trained on, besides those that the environment itself
            calls so in its `setup`.
        unfinished_reward: of a trajectory that was not scored by the policy's doing.

    Raises:
        ImportError: verifiers is not installed.
        ValueError: the environment has no such role.
    """

    def __init__(
        self, env: Mapping[str, Any], *, untrained: Sequence[str] = (), unfinished_reward: float | None = None
    ) -> None:
        self.config, self.untrained = dict(env), tuple(untrained)
        super().__init__(self._play, unfinished_reward=unfinished_reward)

    async def _play(self, door: Door, example: Mapping[str, Any]) -> Any:
        from verifiers.v1 import EvalClientConfig, ModelContext, SamplingConfig

        served = await _served_here(self.config)
        aside = await _roles_aside(served.env, self.untrained)
        players = [name for name in _roles_of(served.env) if name not in aside]
        urls = dict.fromkeys(aside, door.untrained_session_url)
        if len(players) > 1:
            urls |= {name: door.seat(name).session_url for name in players}
        env = copy.copy(served.env)  # the servers behind it are shared; the addresses of its roles are not
        clients = {name: EvalClientConfig(base_url=url, api_key_var=NO_KEY) for name, url in urls.items()}
        roles = {
            name: getattr(env.config, name).model_copy(update={"client": client}) for name, client in clients.items()
        }
        env.config = env.config.model_copy(update=roles)
        client = EvalClientConfig(base_url=door.session_url, api_key_var=NO_KEY)
        context = ModelContext(client=client, model=door.model, sampling=SamplingConfig())
        episode = await env.run_episode(served.task(example), context)
        rewards = _rewards(episode, aside)
        if len(players) > 1:
            return {name: reward for name, (reward, _) in rewards.items()}
        return next(iter(rewards.values()))


def verifiers_rows(env: Mapping[str, Any], limit: int | None = None) -> list[dict[str, Any]]:
    """Rows of a data set for `VerifiersEnv`: the place, the name and the prompt of each task.

    Args:
        env: the environment, as for `VerifiersEnv`.
        limit: number of tasks, from the first; None: all.

    Raises:
        ValueError: the taskset has no end, and `limit` is not set.
    """
    loaded = _load(env)
    if limit is None and not loaded.taskset.bounded:
        raise ValueError(f"limit=None: the taskset {loaded.config.taskset.id!r} has no end. Pass a number of tasks.")
    tasks = itertools.islice(loaded.taskset, limit)
    return [{"idx": task.data.idx, "name": task.data.name, "prompt": task.data.prompt_text} for task in tasks]


def _load(config: Mapping[str, Any]) -> Env:
    from verifiers.v1 import load_environment, resolve_env_config

    return load_environment(resolve_env_config(dict(config)))


class _Served:
    """An environment whose shared servers are up, as long as the loop runs; all trajectories on the loop share it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._tasks: list[Task] = []
        self._is_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Not a part of the trajectory that comes first: neither its variables nor its end.
        self._serving = asyncio.create_task(self._serve(config), context=contextvars.Context())

    async def _serve(self, config: Mapping[str, Any]) -> None:
        try:
            self.env = await asyncio.to_thread(_load, config)
            self._unread: Iterator[Task] = iter(self.env.taskset)
            async with self.env.serving():
                self._is_up.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if self._is_up.done():
                raise
            self._is_up.set_exception(error)

    async def up(self) -> _Served:
        """This, once it can be used."""
        await asyncio.shield(self._is_up)
        return self

    @property
    def has_failed(self) -> bool:
        """Whether it could not be started."""
        return self._is_up.done() and self._is_up.exception() is not None

    def task(self, example: Mapping[str, Any]) -> Task:
        """The task that a row names; a taskset may have no end, and is read as far as that."""
        idx = example.get("idx")
        if not isinstance(idx, int):
            raise ValueError(
                f"idx={idx!r}: a row must name a task by its position. Make the rows with verifiers_rows."
            )
        self._tasks += itertools.islice(self._unread, max(0, idx + 1 - len(self._tasks)))
        if not 0 <= idx < len(self._tasks):
            name = self.env.config.taskset.id
            raise ValueError(f"idx={idx}: the taskset {name!r} has {len(self._tasks)} tasks. Make the rows anew.")
        return self._tasks[idx]


_running: dict[tuple[asyncio.AbstractEventLoop, str], _Served] = {}


async def _served_here(config: Mapping[str, Any]) -> _Served:
    loop = asyncio.get_running_loop()
    key = loop, json.dumps(config, sort_keys=True, default=str)
    for other in [other for other in _running if other[0].is_closed()]:
        del _running[other]
    if key not in _running or _running[key].has_failed:
        _running[key] = _Served(config)
    return await _running[key].up()


def _roles_of(env: Env) -> list[str]:
    """The names of the roles, in the order in which the environment declares them."""
    from verifiers.v1 import AgentConfig

    return [name for name, value in env.config if isinstance(value, AgentConfig)]


async def _roles_aside(env: Env, untrained: Sequence[str]) -> list[str]:
    """The roles that are not trained on: those that the user names, and those that the environment does."""
    from verifiers.v1 import Agents

    asked: dict[str, SimpleNamespace] = {}

    def make(name: str, spec: object) -> SimpleNamespace:
        return asked.setdefault(name, SimpleNamespace(name=name, config=spec, trainable=True))

    agents: Any = Agents(env.config, make)
    for name in untrained:
        if name not in asked:
            raise ValueError(f"untrained={name!r}: the environment has no such role; it has {', '.join(asked)}.")
        asked[name].trainable = False
    with contextlib.suppress(
        AttributeError
    ):  # of what only an agent that runs has; `_rewards` looks at those that ran
        await env.setup(agents)
    return [name for name, agent in asked.items() if not agent.trainable]


def _rewards(episode: Episode, aside: Sequence[str]) -> dict[str, tuple[float, dict[str, float]]]:
    """For each trained role the sum of its rewards, and these by name.

    Raises:
        InfrastructureError: something else than the policy has failed.
        RuntimeError: the episode was not scored.
        ValueError: one reward would stand for tokens that it does not score.
    """
    rewards: dict[str, tuple[float, dict[str, float]]] = {}
    traces = [trace for trace in episode.traces if trace.agent.name not in aside]
    for error in [*episode.errors, *(error for trace in traces for error in trace.errors)]:
        if not episode.ok and error.type not in POLICYS_OWN:
            raise InfrastructureError(f"{error.type}: {error.message}")
    for trace in traces:
        name = trace.agent.name
        if not trace.agent.trainable:
            raise ValueError(
                f"The role {name!r} is not trained, and setup() does not mark it so. List it in untrained=."
            )
        reward = _reward(trace)
        if rewards.setdefault(name, reward) != reward:
            raise ValueError(
                f"The role {name!r} has run several times in one episode, with different rewards, and its calls "
                "cannot be told apart. Let each task have one run of a trained role, or name it in untrained=."
            )
    if not rewards:
        raise RuntimeError(f"no trained role has run: {episode.last_error}")
    return rewards


def _reward(trace: Trace) -> tuple[float, dict[str, float]]:
    if not trace.rewards or None in trace.rewards.values():
        error = trace.last_error
        raise RuntimeError(f"the episode was not scored: {error.message if error else trace.stop_condition}")
    return trace.reward, {name: reward.value for name, reward in trace.rewards.items() if reward is not None}

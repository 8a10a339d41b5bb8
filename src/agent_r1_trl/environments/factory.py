"""Four ways to pass an environment to a trainer: `env=`, `tools=`, `environment_factory=`, or none of them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.environments.trl_adapters import FunctionToolsEnv, SingleTurnEnv, TRLEnvAdapter, has_get_reward
from agent_r1_trl.tools.base import check_tool_list, shown_tool
from agent_r1_trl.tools.event_loop import run_on_loop

EnvFactory = Callable[[], Any]

CLOSE_TIMEOUT_S = 60.0


def resolve_env_factory(
    env: object = None,
    tools: Sequence[Callable] | None = None,
    environment_factory: Callable | dict[str, Callable] | None = None,
) -> EnvFactory | None:
    """One zero-argument factory that makes a fresh environment per trajectory; None for plain GRPO without tools.

    Args:
        env: an `Environment` class, or a zero-argument function (`functools.partial(MyEnv, weight=2)`) that makes one.
        tools: plain functions, as TRL's argument of the same name.
        environment_factory: TRL's argument of the same name: a class with `reset`, tool methods and optionally
            `get_reward` (or a function that makes an instance), or a dictionary of them by the row's `environment`
            column.

    Raises:
        ValueError: `env` is an instance or needs arguments, or was given together with one of the others.
    """
    if env is not None:
        given = {"tools": tools, "environment_factory": environment_factory}
        return _checked_env_factory(env, [f"{name}=" for name, value in given.items() if value])
    if environment_factory is not None:
        return functools.partial(
            TRLEnvAdapter, environment_factory, tools=list(check_tool_list(tools or [], "trainer"))
        )
    if tools:
        return functools.partial(FunctionToolsEnv, list(check_tool_list(tools, "trainer")))
    return None


def _checked_env_factory(env: Any, others: Sequence[str]) -> EnvFactory:
    if others:
        raise ValueError(
            f"env={env_name(env)} brings its own tools: remove {' and '.join(others)}, or put them into its `tools`."
        )
    problem: str | None
    if isinstance(env, str):
        problem = "is a text, which only a recipe takes"
    elif not callable(env) or (hasattr(env, "step") and not inspect.isclass(env)):
        instead = f": pass env={type(env).__name__}" if hasattr(env, "step") else ""
        problem = f"is an instance, and every trajectory needs its own{instead}"
    else:
        problem = makes_environments(env)
    if problem is None:
        try:
            inspect.signature(env).bind()
        except TypeError as error:
            problem = f"cannot be made without arguments ({error})"
        except ValueError:  # a builtin has no signature; calling it will show whether it needs arguments
            pass
    if problem is not None:
        raise ValueError(
            f"env={getattr(env, '__name__', repr(env)):.100} {problem}. Pass a class with reset and step (subclass "
            "agent_r1_trl.ToolEnv), or a function of your own that makes one; for arguments "
            "env=functools.partial(MyEnv, ...)."
        )
    return env


@dataclass(kw_only=True)
class EnvForm:
    """Facts about an environment factory, for the trainer before the first rollout."""

    has_reward: bool = True
    """Whether environments score trajectories themselves (`FunctionToolsEnv` does not)."""
    pays_calls: bool = False
    """Whether environments reward single tool calls."""
    reward_classes: list[type] | None = None
    """The classes with a `get_reward`, for TRL's `environment_factory`; None for other forms."""
    tools: list[Any] = field(default_factory=list)
    """The functions of TRL's forms that the model may call; empty for `env=`, which brings its own."""
    names: list[Any] | None = None
    """The allowed values of the column `environment`; None if no such column is read."""
    hands_over_environments: bool = True
    """Whether reward functions receive `environments`; with `tools=` there are none of the user's."""


def read_form(factory: EnvFactory) -> EnvForm:
    """Read the form of a factory; for TRL's forms an environment is made, as TRL does, and its tools are checked."""
    made_by = _class_or_function(factory)
    if made_by not in (TRLEnvAdapter, FunctionToolsEnv):
        return EnvForm(
            has_reward=bool(getattr(made_by, "has_reward", True)),
            pays_calls=_pays_calls(made_by),
            hands_over_environments=made_by is not SingleTurnEnv,
        )
    with made_and_closed(factory) as env:
        for item in env.tools:
            _ = item.schema  # made on first use: in the first rollout, if not here
        form = EnvForm(has_reward=env.has_reward, pays_calls=_pays_calls(env), tools=[item.fn for item in env.tools])
        if made_by is FunctionToolsEnv:
            form.hands_over_environments = False
        else:
            form.reward_classes = [*dict.fromkeys(type(item) for item in env.instances if has_get_reward(item))]
            form.tools, form.names = env.functions, env.names
        return form


@contextlib.contextmanager
def made_and_closed(factory: EnvFactory) -> Iterator[Any]:
    """An environment to look at, which is closed at the end; one that was never reset may fail to close."""
    env = factory()
    try:
        yield env
    finally:
        with contextlib.suppress(Exception):
            closing = env.close() if callable(getattr(env, "close", None)) else None
            if inspect.isawaitable(closing):
                _run_beside(closing)


def _run_beside(closing: Awaitable[Any]) -> None:
    """Await it where rollouts run: a loop may be running in this thread (notebooks)."""

    async def run() -> None:
        with contextlib.suppress(Exception):
            await closing

    with contextlib.suppress(TimeoutError):
        run_on_loop(run(), CLOSE_TIMEOUT_S)


def _pays_calls(env: object) -> bool:
    return any(getattr(env, name, 0.0) != 0.0 for name in ("tool_call_reward", "tool_error_reward"))


def users_environments(environments: Sequence[Any], factory: EnvFactory) -> list[Any] | None:
    """The `environments` of reward functions: of TRL's classes the user's own instances, as in TRL.

    None for `tools=` alone and for no form at all: no environment is the user's there.
    """
    if _class_or_function(factory) in (FunctionToolsEnv, SingleTurnEnv):
        return None
    return [item.environment if isinstance(item, TRLEnvAdapter) else item for item in environments]


def makes_environments(target: Any) -> str | None:
    """None if an object may be called to make environments; else why not, before anything of it has run.

    Classes have `reset` and `step`. Functions are written in Python and not part of the standard library, so that no
    path to `os.system` is ever called.
    """
    while isinstance(target, functools.partial):
        target = target.func
    if inspect.isclass(target):
        missing = [name for name in ("reset", "step") if not callable(getattr(target, name, None))]
        return f"is a class without {' and '.join(missing)}" if missing else None
    called = inspect.unwrap(target) if inspect.isroutine(target) or hasattr(target, "__wrapped__") else type(target)
    module = str(getattr(called, "__module__", None) or "")
    if module.partition(".")[0] in sys.stdlib_module_names and module != "__main__":
        return f"is {module}.{getattr(called, '__qualname__', called)}, which makes no environments"
    if not inspect.isclass(called) and not inspect.isfunction(called) and not inspect.ismethod(called):
        return "is not written in Python, so it makes no environments"
    return None


def env_name(factory: EnvFactory) -> str:
    """Name of the environment in metrics and in the model card."""
    made_by = _class_or_function(factory)
    return str(getattr(made_by, "__name__", type(made_by).__name__))


def tool_schemas(factory: EnvFactory) -> list[dict[str, Any]]:
    """JSON schemas of the environment's tools, for the model card; none if they exist only after `reset`."""
    try:
        with made_and_closed(factory) as env:
            return [shown_tool(item).schema for item in getattr(env, "tools", None) or ()]
    except Exception:  # the card is written when the training is done, which must not be lost
        return []


def _class_or_function(factory: EnvFactory) -> Any:
    return factory.func if isinstance(factory, functools.partial) else factory

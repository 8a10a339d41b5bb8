"""Four ways to pass an environment to a trainer: `env=`, `tools=`, `environment_factory=`, or none of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from agent_r1_trl.environments.trl_adapters import FunctionToolsEnv, TRLEnvAdapter
from agent_r1_trl.tools import as_tool

EnvFactory = Callable[[], Any]


def resolve_env_factory(
    env: Any = None,
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
    if env is not None and (tools or environment_factory is not None):
        other = "tools" if tools else "environment_factory"
        raise ValueError(
            f"env= and {other}= were both given. An environment brings its own tools: put them into its `tools` "
            f"attribute and remove {other}=."
        )
    if env is not None:
        return _checked_env_factory(env)
    if environment_factory is not None:
        return functools.partial(TRLEnvAdapter, environment_factory, tools=list(tools or []))
    if tools:
        return functools.partial(FunctionToolsEnv, list(tools))
    return None


def _checked_env_factory(env: Any) -> EnvFactory:
    if not callable(env) or (hasattr(env, "step") and not inspect.isclass(env)):
        name = type(env).__name__
        raise ValueError(
            f"env={name} instance: every trajectory needs its own environment, so env takes the class or a function "
            f"that makes one. Pass env={name}, or env=functools.partial({name}, ...) for arguments."
        )
    try:
        inspect.signature(env).bind()
    except TypeError as error:
        name = getattr(env, "__name__", repr(env))
        raise ValueError(
            f"env={name} cannot be made without arguments ({error}). Pass env=functools.partial({name}, ...)."
        ) from error
    except ValueError:  # a builtin has no signature; calling it will show whether it needs arguments
        pass
    return env


def has_own_reward(factory: EnvFactory) -> bool:
    """Whether the environment scores trajectories itself (`FunctionToolsEnv` does not)."""
    return bool(getattr(_class_or_function(factory), "has_reward", True))


def env_name(factory: EnvFactory) -> str:
    """Name of the environment in metrics and in the model card."""
    made_by = _class_or_function(factory)
    return str(getattr(made_by, "__name__", type(made_by).__name__))


def tool_schemas(factory: EnvFactory) -> list[dict[str, Any]]:
    """JSON schemas of the environment's tools, for the model card."""
    return [as_tool(item).schema for item in getattr(factory(), "tools", ())]


def _class_or_function(factory: EnvFactory) -> Any:
    return factory.func if isinstance(factory, functools.partial) else factory

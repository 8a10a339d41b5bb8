"""What the user acts in, told in any of four ways: `env=`, `tools=`, `environment_factory=`, or nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

EnvFactory = Callable[[], Any]


def resolve_env_factory(
    env: Any = None,
    tools: Sequence[Callable] | None = None,
    environment_factory: Callable | dict[str, Callable] | None = None,
) -> EnvFactory | None:
    """One zero-argument factory that makes a fresh environment per trajectory; None for plain, tool-less GRPO.

    Args:
        env: an `Environment` class, or a zero-argument function (`functools.partial(MyEnv, weight=2)`) that makes one.
        tools: TRL's `tools=`: plain functions.
        environment_factory: TRL's: a factory of a class with `reset`, tool methods and optionally `get_reward`, or a
            dictionary of them by the row's `environment` column.

    Raises:
        ValueError: for an environment instance, an environment class that needs arguments, or two sources at once.
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
        from agent_r1_trl.environments import TRLEnvAdapter

        return functools.partial(TRLEnvAdapter, environment_factory, tools=list(tools or []))
    if tools:
        from agent_r1_trl.environments import FunctionToolsEnv

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
    except ValueError:  # a builtin without a signature: calling it will tell
        pass
    return env


def has_own_reward(factory: EnvFactory) -> bool:
    """Whether the environment scores trajectories itself (plain TRL functions do not)."""
    return bool(getattr(_target(factory), "has_reward", True))


def env_name(factory: EnvFactory) -> str:
    """Name for metrics and the model card."""
    target = _target(factory)
    return str(getattr(target, "__name__", type(target).__name__))


def tool_schemas(factory: EnvFactory) -> list[dict[str, Any]]:
    """JSON schemas of the environment's tools, for the model card."""
    from agent_r1_trl.tools import as_tool

    return [as_tool(item).schema for item in getattr(factory(), "tools", ())]


def _target(factory: EnvFactory) -> Any:
    return factory.func if isinstance(factory, functools.partial) else factory

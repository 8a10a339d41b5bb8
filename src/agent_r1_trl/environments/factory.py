"""Four ways to pass an environment to a trainer: `env=`, `tools=`, `environment_factory=`, or none of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.environments.trl_adapters import FunctionToolsEnv, SingleTurnEnv, TRLEnvAdapter, has_get_reward
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


@dataclass(kw_only=True)
class EnvForm:
    """What a trainer reads off an environment factory before the first rollout."""

    has_reward: bool = True
    """Whether environments score trajectories themselves (`FunctionToolsEnv` does not)."""
    pays_calls: bool = False
    """Whether environments reward single tool calls."""
    reward_classes: list[type] | None = None
    """The classes with a `get_reward`, for TRL's `environment_factory`; None for other forms."""
    tools: list[Any] = field(default_factory=list)
    """The functions of TRL's forms that the model may call; empty for `env=`, which brings its own."""
    names: list[Any] | None = None
    """What the column `environment` may hold; None if no such column is read."""
    hands_over_environments: bool = True
    """Whether reward functions receive `environments`; with `tools=` there are none of the user's."""

    @property
    def extra_arguments(self) -> tuple[str, ...]:
        """What reward functions receive besides TRL's arguments: those that do not take it are called without it."""
        is_ours = self.hands_over_environments and self.reward_classes is None
        return ("trajectory", "environments") if is_ours else ("trajectory",)


def read_form(factory: EnvFactory) -> EnvForm:
    """Read the form of a factory. An environment of TRL's forms is made for that, as TRL does.

    Raises:
        ToolSchemaError: a tool of TRL's forms cannot be described to a model.
        ValueError: an environment of TRL's forms has no `reset`, or two tools of one name.
    """
    made_by = _class_or_function(factory)
    if made_by is TRLEnvAdapter:
        adapter = factory()
        _check_schemas(adapter.tools)
        classes = dict.fromkeys(type(item) for item in adapter.instances if has_get_reward(item))
        return EnvForm(
            has_reward=bool(classes),
            pays_calls=_pays_calls(adapter),
            reward_classes=list(classes),
            tools=adapter.functions,
            names=adapter.names,
        )
    if made_by is FunctionToolsEnv:
        env = factory()
        _check_schemas(env.tools)
        tools = [item.fn for item in env.tools]
        return EnvForm(has_reward=False, pays_calls=_pays_calls(env), tools=tools, hands_over_environments=False)
    return EnvForm(
        has_reward=bool(getattr(made_by, "has_reward", True)),
        pays_calls=_pays_calls(made_by),
        hands_over_environments=made_by is not SingleTurnEnv,
    )


def _check_schemas(tools: Sequence[Any]) -> None:
    for item in tools:
        _ = item.schema  # made on first use: in the first rollout, if not here


def _pays_calls(env: Any) -> bool:
    return any(getattr(env, name, 0.0) != 0.0 for name in ("tool_call_reward", "tool_error_reward"))


def users_environments(environments: Sequence[Any], factory: EnvFactory) -> list[Any] | None:
    """What reward functions receive as `environments`: of TRL's classes the user's own instances, as in TRL.

    None for `tools=` alone and for no form at all: no environment is the user's there.
    """
    if _class_or_function(factory) in (FunctionToolsEnv, SingleTurnEnv):
        return None
    return [item.environment if isinstance(item, TRLEnvAdapter) else item for item in environments]


def env_name(factory: EnvFactory) -> str:
    """Name of the environment in metrics and in the model card."""
    made_by = _class_or_function(factory)
    return str(getattr(made_by, "__name__", type(made_by).__name__))


def tool_schemas(factory: EnvFactory) -> list[dict[str, Any]]:
    """JSON schemas of the environment's tools, for the model card; none if they exist only after `reset`."""
    try:
        return [as_tool(item).schema for item in getattr(factory(), "tools", None) or ()]
    except Exception:  # the card is written when the training is done, which must not be lost
        return []


def _class_or_function(factory: EnvFactory) -> Any:
    return factory.func if isinstance(factory, functools.partial) else factory

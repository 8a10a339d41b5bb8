"""Adapters that make environments of TRL's two forms: `tools=[functions]` and `environment_factory=`.

`TRLEnvAdapter` behaves as TRL 1.16 does:

- The tools are the functions of `tools=`, followed by the public methods of the class in alphabetical order.
- `reset(**row)` may return text, or a list of text blocks, which is appended to the last message of the prompt.
- With a dictionary of factories, the column `environment` chooses one and is not passed to `reset`.
- A row without `prompt` starts from an empty user message.
- `get_reward()`, plain or async, scores the episode; None means that it is not scored.

Unlike in TRL, every trajectory has its own instance, so its state still exists when the reward functions run.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agent_r1_trl.environments.reward_values import read_number
from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.tools import Tool, as_tool, shared_pool
from agent_r1_trl.tools.base import check_tool_list
from agent_r1_trl.tools.blocks import describe_blocks, media_in, with_named_media
from agent_r1_trl.tools.pool import own_thread
from agent_r1_trl.tools.render import whole_arrays, with_readable_parts
from agent_r1_trl.trajectory import Message, Trajectory


class FunctionToolsEnv(ToolEnv):
    """Plain functions as tools, without a reward of its own: the reward comes from `reward_funcs`.

    The prompt is the column `prompt` (messages or a string). Results read as in TRL: `str` of the return value.

    Args:
        tools: functions with type hints and a docstring, or `Tool`s with different names.
        **settings: settings of `ToolEnv`; process rewards are 0 unless set here.
    """

    tool_call_reward = 0.0
    tool_error_reward = 0.0
    has_reward = False

    def __init__(self, tools: Iterable[Any], **settings: object) -> None:
        tools = check_tool_list(tools, type(self).__name__)
        super().__init__(tools=[_as_trl_tool(item) for item in tools], **settings)
        _ = self.executor  # reports two tools of the same name here instead of in the first rollout


class SingleTurnEnv(ToolEnv):
    """No tools and no reward of its own: the prompt is answered in one turn, and `reward_funcs` score the answer."""

    tool_call_reward = 0.0
    tool_error_reward = 0.0
    has_reward = False

    def is_done(self, message: Message) -> bool:
        """Any answer ends the trajectory."""
        return True


class TRLEnvAdapter(ToolEnv):
    """Wraps one instance of a TRL environment class for one trajectory.

    Args:
        factory: class or function that makes an instance, or a dictionary of them by the row's `environment` column.
        tools: functions that are offered in addition to the environment's methods.
        **settings: settings of `ToolEnv`; process rewards are 0 unless set here.

    Raises:
        ValueError: a factory cannot be called, or an instance has no `reset`.
    """

    tool_call_reward = 0.0
    tool_error_reward = 0.0

    def __init__(
        self,
        factory: Callable[[], Any] | Mapping[str, Callable[[], Any]],
        tools: Iterable[Any] = (),
        **settings: Any,
    ) -> None:
        self._is_multi = isinstance(factory, Mapping)
        self._factories: dict[Any, Any] = dict(factory) if isinstance(factory, Mapping) else {None: factory}
        if not self._factories or not all(map(callable, self._factories.values())):
            raise ValueError(
                f"environment_factory={factory!r:.200}: must be a class, a function that makes an instance, or a "
                "dictionary of such by name."
            )
        self._standalone = [_as_trl_tool(item) for item in check_tool_list(tools, type(self).__name__)]
        self._probed: list[Any] | None = None
        self._offered: list[Tool] | None = None
        self.environment: Any = None if self._is_multi else self._make(None)
        super().__init__(**settings)
        if not self._is_multi:
            _ = self.executor  # reports two tools of the same name here instead of in the first rollout

    @property
    def tools(self) -> list[Tool]:  # type: ignore[override]
        """The tools of the chosen environment; before one is chosen, the tools of all environments."""
        if self._offered is None:
            self._offered = list(self._standalone)
            for method in map(_as_trl_tool, self._methods):
                if self.environment is not None or method.name not in {other.name for other in self._offered}:
                    self._offered.append(method)
        return self._offered

    def reset(self, example: dict[str, Any]) -> list[Message]:
        """Reset the environment that the row asks for; returns its prompt.

        Raises:
            ValueError: the row names an unknown environment, or `reset` returned something other than text or None.
        """
        row = dict(example)
        if self._is_multi:
            name = row.pop("environment", None)
            if name not in self._factories:
                raise ValueError(
                    f"The example has environment={name!r}, which environment_factory does not know: must be one of "
                    f"{list(self._factories)}."
                )
            self.environment = self._make(name)
            self._offered = self._executor = None
        self.example = row
        messages = self._read_prompt({"prompt": "" if example.get("prompt") is None else example["prompt"]})
        observation = self.environment.reset(**row)
        if observation is not None:
            messages[-1]["content"] = _append(messages[-1].get("content"), observation)
        return messages

    async def outcome_reward(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:  # type: ignore[override]
        """The value of `get_reward`; the trajectory is not scored if there is no such method or it returns None."""
        value = None
        if has_get_reward(self.environment):
            # A plain method may be slow and must not hold up other trajectories.
            value = await shared_pool(self.max_tool_workers).run(self.environment.get_reward, thread=own_thread.get())
            value = await value if inspect.isawaitable(value) else value
        if value is None:
            trajectory.is_scored = False
            return 0.0, {}
        name = type(self.environment).__name__
        reward = read_number(value, f"{name}.get_reward")
        return reward, {name: reward}

    def close(self) -> None:
        """End the session that TRL's own environments (OpenReward's) keep for their next reset, which never comes."""
        bases = type(self.environment).__mro__
        if any(base.__module__.startswith("trl.") and hasattr(base, "_close") for base in bases):
            self.environment._close()
        super().close()

    @property
    def has_reward(self) -> bool:  # type: ignore[override]
        """Whether any of the environments scores its episodes."""
        return any(map(has_get_reward, self.instances))

    @property
    def instances(self) -> list[Any]:
        """The chosen environment; before one is chosen, one instance of each."""
        if self.environment is not None:
            return [self.environment]
        if self._probed is None:
            self._probed = [self._make(name) for name in self._factories]
        return self._probed

    @property
    def names(self) -> list[Any] | None:
        """The allowed values of the column `environment`; None for a single factory, which reads no such column."""
        return list(self._factories) if self._is_multi else None

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The functions of `tools=`, then the methods that each of `instances` offers: TRL's `trainer.tools`."""
        return [*(item.fn for item in self._standalone), *self._methods]

    @property
    def _methods(self) -> list[Callable[..., Any]]:
        return [
            getattr(instance, name)
            for instance in self.instances
            for name in _method_names(instance)
            if name not in ("reset", "get_reward") and not name.startswith("_")
        ]

    def _make(self, name: str | None) -> Any:
        instance = self._factories[name]()
        if "reset" not in _method_names(instance):
            raise ValueError(
                f"environment_factory: {type(instance).__name__} has no method reset(self, **row); TRL environments "
                "must define it."
            )
        if hasattr(type(instance), "__del__"):
            _ENDED_BY_DEL[id(instance)] = instance
        return instance


_ENDED_BY_DEL: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Instances by id: they need not be hashable."""


@atexit.register
def _end_instances() -> None:
    """End what is left by `__del__`, the only end that TRL's classes have, while its threads run.

    Python calls it later, and Harbor's then waits for ever for a thread that is no more.
    """
    for instance in list(_ENDED_BY_DEL.values()):
        kind: Any = type(instance)
        with contextlib.suppress(Exception):
            instance.__class__ = type(kind)(kind.__name__, (kind,), {"__slots__": (), "__del__": lambda self: None})
            kind.__del__(instance)


def _append(content: Any, observation: Any) -> Any:
    if isinstance(content, str) and isinstance(observation, str):
        return content + observation
    parts = [[{"type": "text", "text": part}] if isinstance(part, str) else part for part in (content, observation)]
    if not all(isinstance(part, list) for part in parts):
        raise ValueError(
            f"environment_factory: reset returned {observation!r:.200}: must be a string that is appended to the "
            "prompt, a list of content blocks, or None."
        )
    return [*parts[0], *copy.deepcopy(parts[1])]


def _as_trl_tool(item: object) -> Tool:
    """A function as TRL runs it; a `Tool` keeps its own settings."""
    if isinstance(item, Tool):
        return item
    made = as_tool(item)
    made.render = _render_as_trl
    return made


def _render_as_trl(value: object) -> str:
    """TRL's text of a return value: `str` where that says what it holds, and for a list of content blocks their texts.

    Media have a name, where TRL shows them to a model that can see.
    """
    media = media_in(value)
    if media and isinstance(value, (bytes, bytearray, memoryview)):
        return media[0]
    described = describe_blocks(value) if media or isinstance(value, list) else None
    if described is not None:
        return described
    with whole_arrays():
        return str(with_readable_parts(with_named_media(value)))


def has_get_reward(instance: object) -> bool:
    """Whether the class has a method `get_reward`, as TRL looks for it: a property or an attribute is none."""
    return "get_reward" in _method_names(instance)


def _method_names(instance: object) -> list[str]:
    """Functions of the class; looking at the instance would evaluate its properties."""
    return [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]

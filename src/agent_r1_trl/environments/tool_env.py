"""ToolEnv: tools and rewards, the environment that most tasks subclass.

    class MyEnv(ToolEnv):
        tools = [search]

        def outcome_reward(self, trajectory):
            return exact_match(trajectory.final_text, self.example["answer"]) == 1.0

Tools are functions, or methods that read and change the environment's state:

    class Doors(ToolEnv):
        def reset(self, example):
            self.is_open = False
            return super().reset(example)

        @tool
        def open_door(self, number: int) -> str: ...
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any

from agent_r1_trl.environments.base import RewardError, StepResult
from agent_r1_trl.environments.prompts import prompt_messages, read_prompt
from agent_r1_trl.environments.reward_values import is_bool, read_number, with_read_outcome
from agent_r1_trl.objects import did_you_mean, locate_error
from agent_r1_trl.settings import Count, Finite, Number, Rule, Text, check_rules, check_value, rules_of
from agent_r1_trl.tools import InfrastructureError, Tool, ToolExecutor, as_tool, read_calls, shared_pool
from agent_r1_trl.tools.base import check_tool_list, takes_self
from agent_r1_trl.tools.faults import is_thread_error
from agent_r1_trl.tools.foreign import read_foreign
from agent_r1_trl.tools.pool import own_thread
from agent_r1_trl.trajectory import Message, ToolCall, ToolErrorKind, ToolResult, Trajectory

SecondsOrNoLimit = Annotated[float, Number(above=0, may_be_infinite=True)]


class ToolList:
    """The attribute `tools`: of a class the list as written, of an instance `Tool`s with methods bound to it."""

    def __init__(self, declared: object) -> None:
        if isinstance(declared, Iterator):
            declared = list(declared)  # it would give the first instance its tools alone
        self.declared = declared
        if not isinstance(declared, (list, tuple)):
            return
        for item in declared:
            if inspect.isroutine(item) and not takes_self(item):
                as_tool(item)  # says here, and not in the first rollout, what its schema lacks
        # Tools of other libraries are read once, and not for every trajectory.
        self.declared = [as_tool(item) if read_foreign(item) else item for item in declared]

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self.declared
        state = vars(instance)
        if "_tools" not in state:
            state["_tools"] = resolve_tools(state.get("_declared_tools", self.declared), instance)
        return state["_tools"]

    def __set__(self, instance: object, value: object) -> None:
        state = vars(instance)
        state["_declared_tools"] = value
        state.pop("_tools", None)
        state.pop("_executor", None)


class ToolEnv:
    """A conversation in which the model calls tools until it answers without a call.

    Every setting is a class attribute that a subclass may set, and a constructor argument that overrides it; a
    subclass declares settings of its own in the same way, `size: Count = 4` (`agent_r1_trl.settings`). A
    subclass needs no `__init__`, and one that has its own need not call this one. Methods to override:
    `process_reward`, `outcome_reward`, `reset`, `next_user_message`, `system_message`, `is_done`; each may be async,
    except `is_done` and `system_message`.

    Raises:
        TypeError: there is no such setting.
        ValueError: a setting is out of range, or two tools have the same name.
    """

    tools: Any = ToolList(())
    """Functions, `Tool`s, or names of methods. Methods decorated with `@tool` are tools without being listed."""
    system_prompt: Annotated[str, Text(may_be_empty=True)] | None = None
    """System message of prompts that have none of their own."""
    tool_call_reward: Finite = 0.5
    """Process reward of a call that succeeded and was not made before."""
    tool_error_reward: Finite = -0.1
    """Reward of a call that failed by the model's fault (`ToolResult.is_charged`), instead of its process reward."""
    max_process_reward: Annotated[float, Number(minimum=0, may_be_infinite=True)] | None = 1.0
    """Maximum sum of positive process rewards in one trajectory, so that calling tools is never worth more than
    solving the task; `math.inf` for no limit. Penalties are not capped."""
    success_reward: Finite = 1.0
    failure_reward: Finite = -1.0
    """The numbers that `True` and `False` from `outcome_reward` stand for."""
    tool_timeout_s: SecondsOrNoLimit | None = 30.0
    """Maximum seconds per call of a tool that sets no limit itself; `math.inf` for no limit."""
    max_tool_workers: Count = 128
    """Maximum number of plain tools that run at once in the whole process."""
    tool_queue_timeout_s: SecondsOrNoLimit | None = 600.0
    """Maximum seconds that a plain tool waits for a free thread, which is not its own time; `math.inf` for no limit.
    Then the trajectory ends with `tool_failure`."""
    max_calls_per_turn: Count = 32
    """How many calls of one turn are made. One error answers all that are above it."""
    has_reward = True
    on_resume: str | None = None
    """How the environment of a killed run comes back: "replay" or "restart"; None: as suits its tools."""

    example: dict[str, Any]
    """The row of the data set that `reset` received."""
    _executor: ToolExecutor | None = None
    _num_turns = 0
    _paid_process_reward = 0.0
    _seen_calls: frozenset[str] = frozenset()

    def __init__(self, *, tools: Iterable[Any] | None = None, **settings: object) -> None:
        kind: Any = type(self)
        known = declared_rules(kind)
        for name, value in settings.items():
            if name not in known:
                raise TypeError(f"{type(self).__name__} has no setting {name!r}.{did_you_mean(name, known)}")
            if value is not None:
                setattr(self, name, value)
        if tools is not None:
            self.tools = list(check_tool_list(tools, type(self).__name__))
        self._check_settings()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        declared = cls.__dict__.get("tools", ())
        if isinstance(declared, Tool) or inspect.isroutine(declared):  # which look like properties
            check_tool_list(declared, cls.__name__)
        if "tools" in cls.__dict__ and not hasattr(declared, "__get__"):
            cls.tools = ToolList(declared)
        if "outcome_reward" in cls.__dict__:
            # True and False mean success and failure; every caller (rollout, evaluation, test) receives a number.
            cls.outcome_reward = with_read_outcome(cls.__dict__["outcome_reward"])  # type: ignore[method-assign]

    # ---------------------------------------------------------------- methods to override

    def process_reward(self, call: ToolCall, result: ToolResult) -> float:
        """Reward of one call that succeeded; a failed one earns `tool_error_reward` if the model is charged, else 0.

        By default `tool_call_reward`, and 0 for a call with the same tool and arguments as an earlier one.
        """
        return 0.0 if _fingerprint(call) in self._seen_calls else self.tool_call_reward

    def outcome_reward(self, trajectory: Trajectory) -> float | bool | tuple[float, dict[str, float]]:
        """Score the finished trajectory, once: a number, True or False, or (number, its parts by name).

        By default 0, for tasks whose reward comes from `reward_funcs`.
        """
        return 0.0

    def is_done(self, message: Message) -> bool:
        """Whether the episode is over after this assistant message, whose calls have been executed.

        By default it is over when the model answers without attempting a call, and was not cut off.
        """
        return not any(message.get(name) for name in ("tool_calls", "malformed_tool_call", "cut_off"))

    def next_user_message(self, message: Message) -> str | None:
        """The user's reply to an answer (a message without a call), for conversations of several user turns.

        None, the default, leaves it to `is_done` whether the episode is over.
        """
        return None

    def system_message(self, example: dict[str, Any]) -> str | None:
        """Text of the system message, or None for no system message. By default `system_prompt`."""
        return self.system_prompt

    def reset(self, example: dict[str, Any]) -> list[Message]:
        """Start the episode; returns the prompt messages.

        The prompt is the column `prompt` (messages or a string), else `question`.

        Raises:
            ValueError: the example has neither.
        """
        self.example = copy.deepcopy(dict(example)) if isinstance(example, Mapping) else example
        self._num_turns = 0
        self._paid_process_reward = 0.0
        self._seen_calls = frozenset()
        messages = self._read_prompt(example)
        system_text = self.system_message(example)
        if not system_text or messages[0].get("role") == "system":
            return messages
        return [{"role": "system", "content": system_text}, *messages]

    def _read_prompt(self, example: dict[str, Any]) -> list[Message]:
        """The messages of the column `prompt`, else of `question`, without what Arrow added to earlier calls.

        Raises:
            ValueError: the row has neither.
        """
        messages = prompt_messages(example, type(self).__name__)
        has_calls = any("tool_calls" in message for message in messages)
        if not has_calls:
            return messages
        # The rollout warns of what cannot be known: a subclass may choose its tools after this.
        return read_prompt(messages, [item.schema for item in self.tools], example, warns=False)

    def close(self) -> None:
        """Free what `reset` took."""

    # ---------------------------------------------------------------- the protocol

    async def step(self, message: Message) -> StepResult:
        """Run the calls of an assistant message.

        Observations are one message of role `tool` per call, in their order, and one for all above the limit; or one
        of role `user`: what `next_user_message` says, or how to go on if no call could be read.
        """
        executor = self.executor
        self._num_turns += 1
        calls = read_calls(message, id_prefix=f"call_{self._num_turns}")
        made = calls[: self.max_calls_per_turn]
        surplus = calls[self.max_calls_per_turn :]
        results = await executor.execute(made) if made else []
        if surplus:
            told = f"Error: at most {len(made)} calls per turn are made; this one and those after it were not."
            results.append(ToolResult(call=surplus[0], content=told, error=ToolErrorKind.TOO_MANY, attempts=0))
        observations = [_tool_message(result) for result in results]
        malformed = message.get("malformed_tool_call")
        if malformed:
            feedback = executor.explain_malformed(str(malformed))
            call = ToolCall(name="", arguments=str(malformed), id=f"call_{self._num_turns}_malformed")
            results = [*results, ToolResult(call=call, content=feedback, error=ToolErrorKind.MALFORMED)]
            if observations:  # templates expect tool messages, and only those, after a turn with calls
                observations[-1]["content"] += f"\n{feedback}"
            else:
                observations.append({"role": "user", "content": feedback})
        reward_parts = await self._reward_calls(results)
        is_answer = not message.get("tool_calls") and not malformed and not message.get("cut_off")
        said = await self._call_method("next_user_message", message) if is_answer else None
        if said is not None and not isinstance(said, str):
            raise ValueError(f"{type(self).__name__}.next_user_message returned {said!r:.200}: must be text, or None.")
        done = said is None and bool(await self._call_method("is_done", message))
        if not done and not observations:
            told = executor.explain_no_call(message.get("cut_off")) if said is None else said
            observations.append({"role": "user", "content": told})
        is_invalid = not done and said is None and all(result.is_refused for result in results)
        info: dict[str, Any] = {"tool_results": results, "reward_parts": reward_parts, "is_invalid": is_invalid}
        return StepResult(observations, math.fsum(reward_parts.values()), done, info)

    @property
    def executor(self) -> ToolExecutor:
        """The executor that runs the calls; created on first use."""
        if self._executor is None:
            self._check_settings()
            timeouts = [None if s == math.inf else s for s in (self.tool_timeout_s, self.tool_queue_timeout_s)]
            self._executor = ToolExecutor(
                self.tools, timeout_s=timeouts[0], max_workers=self.max_tool_workers, queue_timeout_s=timeouts[1]
            )
        return self._executor

    # ---------------------------------------------------------------- internal

    async def _reward_calls(self, results: list[ToolResult]) -> dict[str, float]:
        """Process rewards of one turn by source, with positive rewards capped at `max_process_reward`."""
        parts: dict[str, float] = {}
        for result in results:
            if result.is_charged:
                parts["tool_error"] = parts.get("tool_error", 0.0) + self.tool_error_reward
            if result.is_error:
                continue
            reward = await self._process_reward(result)
            if reward > 0 and self.max_process_reward is not None:
                # Only positive rewards count towards the cap; otherwise errors would cost nothing once it is reached.
                reward = min(reward, max(0.0, self.max_process_reward - self._paid_process_reward))
                self._paid_process_reward += reward
            parts["tool_call"] = parts.get("tool_call", 0.0) + reward
            self._seen_calls |= {_fingerprint(result.call)}
        return parts

    async def _process_reward(self, result: ToolResult) -> float:
        source = f"{type(self).__name__}.process_reward"
        try:
            value = await self._call_method("process_reward", result.call, result)
        except InfrastructureError:
            raise
        except Exception as error:
            kind = InfrastructureError if is_thread_error(error) else RewardError
            raise kind(f"{source} raised {locate_error(error)}") from error
        if is_bool(value):
            return self.tool_call_reward if value else 0.0
        return read_number(value, source)

    async def _call_method(self, name: str, *arguments: object) -> Any:
        method = getattr(self, name)
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        if getattr(method, "__func__", None) is getattr(ToolEnv, name):
            return method(*arguments)
        # The user's own method may be slow (a judge, a simulated user) and must not hold up other trajectories.
        return await shared_pool(self.max_tool_workers).run(lambda: method(*arguments), thread=own_thread.get())

    def _check_settings(self) -> None:
        owner = type(self).__name__
        kind: Any = type(self)  # a class is hashable, which the type checker doubts
        check_rules(self, declared_rules(kind), f"{owner}.")
        best = Annotated[float, Number(minimum=self.failure_reward)]  # solving is not worth less than failing
        check_value(f"{owner}.success_reward", self.success_reward, best)


@functools.cache
def declared_rules(kind: Any) -> dict[str, tuple[Rule, bool]]:
    """The settings of an environment class: those of its attributes whose annotation has a `Rule`.

    A class whose annotations name what cannot be found declares none of its own.
    """
    for parent in kind.__mro__:
        with contextlib.suppress(Exception):
            return rules_of(parent)
    return {}


def _tool_message(result: ToolResult) -> Message:
    # What the model wrote may be long, and have lone surrogates, which no tokenizer can encode.
    name = result.call.name[:64].encode("utf-8", errors="replace").decode("utf-8")
    return {"role": "tool", "name": name or "unknown", "tool_call_id": result.call.id, "content": result.content}


def _fingerprint(call: ToolCall) -> str:
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        return f"{call.name} {json.dumps(call.arguments, sort_keys=True, default=repr)}"
    return call.name


# -------------------------------------------------------------------- the tools of an instance


def resolve_tools(declared: object, instance: object) -> list[Tool]:
    """The listed tools in their order, then the methods of the class that are decorated with `@tool`."""
    declared = check_tool_list(declared, type(instance).__name__)
    decorated = {
        name: None
        for base in reversed(type(instance).__mro__)
        for name, value in vars(base).items()
        if isinstance(value, Tool)
    }
    found: list[Tool] = []
    for item in [*declared, *decorated]:
        candidate = _bind(item, instance)
        if candidate is not None and all(_function(candidate) is not _function(other) for other in found):
            found.append(candidate)
    return found


def _bind(item: object, instance: object) -> Tool | None:
    if isinstance(item, str):
        owner = type(instance).__name__
        if not hasattr(instance, item):
            raise ValueError(f"{owner}.tools names {item!r}, but {owner} has no such method.")
        item = getattr(instance, item)
        if item is None:  # a subclass removes an inherited tool by setting it to None
            return None
    if isinstance(item, staticmethod):
        item = Tool(item)
    if isinstance(item, Tool):
        return item.__get__(instance, type(instance))
    if inspect.isfunction(item) and takes_self(item):
        return Tool(item).bind(instance)
    return as_tool(item)


def _function(candidate: Tool) -> Callable[..., Any]:
    """The function behind a tool: a method and its bound form are the same tool."""
    return getattr(candidate.fn, "__func__", candidate.fn)

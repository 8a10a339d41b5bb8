"""ToolEnv: tools plus rewards, the environment most tasks subclass.

prompt -> [environment reset] -> [rollout (policy <-> tools)] -> Trajectory -> rewards on tokens -> filter
       -> batch -> advantages -> loss -> step -> sync weights -> next rollout

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

import copy
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agent_r1_trl.environments.base import RewardError, StepResult
from agent_r1_trl.environments.method_tools import ToolList
from agent_r1_trl.environments.prompts import prompt_messages, with_system_message
from agent_r1_trl.environments.scores import is_bool, read_number, with_read_outcome
from agent_r1_trl.tools import ToolExecutor, read_calls, shared_pool
from agent_r1_trl.trajectory import Message, ToolCall, ToolErrorKind, ToolResult, Trajectory

_NOT_RUN = (ToolErrorKind.MALFORMED, ToolErrorKind.UNKNOWN_TOOL, ToolErrorKind.INVALID_ARGUMENTS)


class ToolEnv:
    """A conversation in which the model calls tools until it answers without a call.

    Every setting is a class attribute that a subclass may set and a constructor argument that overrides it. A subclass
    needs no `__init__`, and one that has its own need not call this one. Methods to override: `process_reward`,
    `outcome_reward`, `reset`, `system_message`, `is_done`; each may be async, except `is_done` and `system_message`.

    Args:
        tools: functions, `Tool`s, or names of methods. Methods decorated with `@tool` are tools without being listed.
        system_prompt: put before the prompt where the example has no system message of its own.
        tool_call_reward: what `process_reward` gives for a call that worked and was not made before.
        tool_error_reward: for each call that failed, instead of `process_reward`.
        max_process_reward: most that positive process rewards add up to in one trajectory, so calling tools is never
            worth more than solving; `math.inf`: no limit. Penalties are not capped.
        success_reward: what `True` from `outcome_reward` means.
        failure_reward: what `False` from `outcome_reward` means.
        tool_timeout_s: seconds a call may take if its tool does not say; `math.inf`: no limit.
        max_tool_workers: most plain tools that run at once, in the whole process.

    Raises:
        ValueError: a setting is out of range, or two tools share a name.
    """

    tools: Any = ToolList(())
    system_prompt: str | None = None
    tool_call_reward: float = 0.5
    tool_error_reward: float = -0.1
    max_process_reward: float | None = 1.0
    success_reward: float = 1.0
    failure_reward: float = -1.0
    tool_timeout_s: float | None = 30.0
    max_tool_workers: int = 128
    has_reward = True
    truncate_text: Callable[[str, int], str] | None = None
    """`(text, max_tokens) -> text` in the model's tokens; whoever has the tokenizer sets it."""

    example: dict[str, Any]
    """The row of the data set, from `reset`."""
    _executor: ToolExecutor | None = None
    _num_turns = 0
    _paid_process_reward = 0.0
    _seen_calls: frozenset[str] = frozenset()

    def __init__(
        self,
        *,
        tools: Iterable[Any] | None = None,
        system_prompt: str | None = None,
        tool_call_reward: float | None = None,
        tool_error_reward: float | None = None,
        max_process_reward: float | None = None,
        success_reward: float | None = None,
        failure_reward: float | None = None,
        tool_timeout_s: float | None = None,
        max_tool_workers: int | None = None,
    ) -> None:
        self._override(
            system_prompt=system_prompt,
            tool_call_reward=tool_call_reward,
            tool_error_reward=tool_error_reward,
            max_process_reward=max_process_reward,
            success_reward=success_reward,
            failure_reward=failure_reward,
            tool_timeout_s=tool_timeout_s,
            max_tool_workers=max_tool_workers,
        )
        if tools is not None:
            self.tools = tools if isinstance(tools, (str, bytes)) else list(tools)
        self._check_settings()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "tools" in cls.__dict__ and not hasattr(cls.__dict__["tools"], "__get__"):
            cls.tools = ToolList(cls.__dict__["tools"])
        if "outcome_reward" in cls.__dict__:
            # Whoever calls it (rollout, evaluation, a test) gets a number: True and False mean success and failure.
            cls.outcome_reward = with_read_outcome(cls.__dict__["outcome_reward"])  # type: ignore[method-assign]

    # ---------------------------------------------------------------- what a subclass overrides

    def process_reward(self, call: ToolCall, result: ToolResult) -> float:
        """Reward of one call that worked; a failed one earns `tool_error_reward`.

        Here: `tool_call_reward`, and nothing for a call that repeats an earlier one to the letter.
        """
        return 0.0 if _fingerprint(call) in self._seen_calls else self.tool_call_reward

    def outcome_reward(self, trajectory: Trajectory) -> float | bool | tuple[float, dict[str, float]]:
        """Score of the finished trajectory, once: a number, True or False, or (number, its parts by name).

        Here 0: the reward comes from elsewhere.
        """
        return 0.0

    def is_done(self, message: Message) -> bool:
        """Whether the episode is over after this assistant message, its calls already executed.

        Here: the model answered without attempting a call.
        """
        return not message.get("tool_calls") and not message.get("malformed_tool_call")

    def system_message(self, example: dict[str, Any]) -> str | None:
        """Text of the system message; None for none. Here: `system_prompt`."""
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
        return with_system_message(prompt_messages(example, type(self).__name__), self.system_message(example))

    def close(self) -> None:
        """Free what `reset` took."""

    # ---------------------------------------------------------------- the protocol

    async def step(self, message: Message) -> StepResult:
        """Run the calls of an assistant message; over when `is_done` says so.

        Returns:
            One message of role `tool` per call, in their order, or one of role `user` that says how to go on when the
            message held no readable call; the sum of the calls' rewards; done; info (`tool_results`, `reward_parts`,
            `is_invalid`).
        """
        executor = self.executor
        executor.truncate = self.truncate_text
        self._num_turns += 1
        calls = read_calls(message, id_prefix=f"call_{self._num_turns}")
        results = await executor.execute(calls) if calls else []
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
        done = bool(self.is_done(message))
        if not done and not observations:
            observations.append({"role": "user", "content": executor.explain_no_call()})
        is_invalid = not done and all(result.error in _NOT_RUN for result in results)
        info: dict[str, Any] = {"tool_results": results, "reward_parts": reward_parts, "is_invalid": is_invalid}
        return StepResult(observations, math.fsum(reward_parts.values()), done, info)

    @property
    def executor(self) -> ToolExecutor:
        """Runs the calls; made on first use."""
        if self._executor is None:
            self._check_settings()
            self._executor = ToolExecutor(
                self.tools,
                timeout_s=None if self.tool_timeout_s == math.inf else self.tool_timeout_s,
                max_workers=self.max_tool_workers,
            )
        return self._executor

    # ---------------------------------------------------------------- inside

    async def _reward_calls(self, results: list[ToolResult]) -> dict[str, float]:
        """Process rewards of one turn by source, one call after the other, the positive ones capped."""
        parts: dict[str, float] = {}
        for result in results:
            if result.is_error:
                parts["tool_error"] = parts.get("tool_error", 0.0) + self.tool_error_reward
                continue
            reward = await self._process_reward(result)
            if reward > 0 and self.max_process_reward is not None:
                # Only what is positive counts towards the cap: otherwise errors would become free at the cap.
                reward = min(reward, max(0.0, self.max_process_reward - self._paid_process_reward))
                self._paid_process_reward += reward
            parts["tool_call"] = parts.get("tool_call", 0.0) + reward
            self._seen_calls |= {_fingerprint(result.call)}
        return parts

    async def _process_reward(self, result: ToolResult) -> float:
        source = f"{type(self).__name__}.process_reward"
        try:
            value = await self._call_process_reward(result)
        except Exception as error:
            raise RewardError(f"{source} raised {type(error).__name__}: {error}") from error
        if is_bool(value):
            return self.tool_call_reward if value else 0.0
        return read_number(value, source)

    async def _call_process_reward(self, result: ToolResult) -> Any:
        method = self.process_reward
        if inspect.iscoroutinefunction(method):
            return await method(result.call, result)
        if getattr(method, "__func__", None) is ToolEnv.process_reward:
            return method(result.call, result)
        # The user's own may be slow (a judge, a verifier) and must not stop other trajectories.
        return await shared_pool(self.max_tool_workers).run(lambda: method(result.call, result))

    def _override(self, **settings: Any) -> None:
        """Set the settings that were given (not None) on this instance."""
        for name, value in settings.items():
            if value is not None:
                setattr(self, name, value)

    def _check_settings(self) -> None:
        owner = type(self).__name__
        if self.system_prompt is not None and not isinstance(self.system_prompt, str):
            raise ValueError(f"{owner}.system_prompt={self.system_prompt!r:.100}: must be a string, or None.")
        for name in ("tool_call_reward", "tool_error_reward", "success_reward", "failure_reward"):
            check_finite(owner, name, getattr(self, name))
        if self.success_reward < self.failure_reward:
            raise ValueError(
                f"{owner}.success_reward={self.success_reward} is below failure_reward={self.failure_reward}: "
                "solving must not be worth less than failing."
            )
        for name in ("max_process_reward", "tool_timeout_s"):
            value = getattr(self, name)
            if value is not None and value != math.inf:
                check_finite(owner, name, value)
                if value < 0 or (value == 0 and name == "tool_timeout_s"):
                    raise ValueError(f"{owner}.{name}={value!r}: must be positive, or math.inf for no limit.")


def check_finite(owner: str, name: str, value: Any) -> None:
    """Raise a ValueError that names the setting if its value is no finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{owner}.{name}={value!r}: must be a finite number.")


def _tool_message(result: ToolResult) -> Message:
    return {
        "role": "tool",
        "name": _printable(result.call.name) or "unknown",
        "tool_call_id": _printable(result.call.id),
        "content": result.content,
    }


def _printable(text: str, limit: int = 64) -> str:
    """Short enough to render and without lone surrogates, which no tokenizer encodes; a model may write anything."""
    return text[:limit].encode("utf-8", errors="replace").decode("utf-8")


def _fingerprint(call: ToolCall) -> str:
    try:
        arguments = json.dumps(call.arguments, sort_keys=True, default=repr)
    except (TypeError, ValueError, RecursionError):
        arguments = ""
    return f"{call.name} {arguments}"

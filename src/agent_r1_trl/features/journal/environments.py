"""How an environment comes back to where it stood when the run was killed.

Its class says so in the attribute `on_resume`:

- `"replay"`: a fresh environment gets the recorded messages again, for the sake of its state; the policy reads what
  was recorded. The tools of a `ToolEnv` that are plain functions are not called: their results are in the journal.
- `"restart"`: a fresh environment gets the messages again, tools are called again, and what it says now counts. What
  the policy said is taken from the journal as long as it reads the same as then.

Without the attribute, a `ToolEnv` whose tools are plain functions and whose turns are `ToolEnv`'s own is replayed, and
everything else is restarted.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.environments.trl_adapters import TRLEnvAdapter
from agent_r1_trl.tools import Tool
from agent_r1_trl.trajectory import ToolCall, ToolResult


class ResumeMode(StrEnum):
    """How an environment comes back; see the module."""

    REPLAY = "replay"
    RESTART = "restart"


def resume_mode(env: Any) -> ResumeMode:
    """What the environment declares, or the default for its kind.

    Raises:
        ValueError: the attribute has another value.
    """
    users = users_object(env)
    declared = getattr(users, "on_resume", None)
    if declared is None:
        return ResumeMode.REPLAY if _has_no_state(env) else ResumeMode.RESTART
    owner = type(users).__name__
    if declared not in list(ResumeMode):
        known = ", ".join(repr(mode.value) for mode in ResumeMode)
        raise ValueError(f"{owner}.on_resume={declared!r}: must be one of {known}. Set it to one of them.")
    return ResumeMode(declared)


def users_object(env: Any) -> Any:
    """The object that the user wrote: of TRL's form the instance behind the adapter."""
    return env.environment if isinstance(env, TRLEnvAdapter) else env


def _has_no_state(env: Any) -> bool:
    """Whether nothing but `ToolEnv`'s own code and plain functions decides what the environment says."""
    own = ("step", "next_user_message")
    is_plain = isinstance(env, ToolEnv) and all(getattr(type(env), name) is getattr(ToolEnv, name) for name in own)
    return is_plain and not any(is_method(item, env) for item in env.tools)


def is_method(item: Any, env: Any) -> bool:
    """Whether a tool is a method of the environment, whose state it may change."""
    fn = item.fn if isinstance(item, Tool) else item
    owners = [getattr(fn, "__self__", None), *getattr(fn, "args", ())]  # a bound method, a partial
    environments = [env, users_object(env)]
    return any(owner is each for owner in owners for each in environments)


class RecordedResults:
    """Stands in for the executor of a `ToolEnv` during one recorded turn.

    Methods of the environment are called again, because they may change its state; functions are not. Either way the
    results are those of the journal.
    """

    def __init__(self, executor: Any, env: Any, results: Sequence[ToolResult]) -> None:
        self._executor, self._env, self._results = executor, env, results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    async def execute(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """The recorded results; see `ToolExecutor.execute`."""
        methods = [call for call in calls if is_method(self._executor.tools.get(call.name), self._env)]
        if methods:
            await self._executor.execute(methods)
        return list(self._results[: len(calls)])

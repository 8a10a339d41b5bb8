"""What all checks share: the environment under check, the examples, the report.

Not part of the data flow: a linter's plumbing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.doctor.environment.caller import BLOCKING_S, SafeCaller
from agent_r1_trl.doctor.environment.report import Report
from agent_r1_trl.doctor.environment.tools import watch_results
from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.environments.trl_adapters import TRLEnvAdapter
from agent_r1_trl.tools import Tool, ToolExecutor
from agent_r1_trl.trajectory import Message


@dataclass(kw_only=True)
class Context:
    """One run of the linter."""

    given: Any
    """What the user passed."""
    rows: list[dict[str, Any]]
    are_made_up: bool
    """The rows are the linter's, not the user's."""
    caller: SafeCaller
    report: Report = field(default_factory=Report)
    make: Callable[[], Any] = lambda: None
    """Makes a fresh environment."""
    is_instance: bool = False
    """An instance was given, so fresh ones are copies."""
    usable_tools: list[Tool] = field(default_factory=list)
    has_ended: bool = False
    """Some episode came to its end."""

    def new(self) -> Any:
        """A fresh environment; None (and a finding) if it could not be made."""
        made = self.caller.call(self.make)
        if made.failure:
            self.report.error(
                "construction", f"Making a further environment {made.failure}.", "It is made once per trajectory."
            )
        return made.value

    def fresh(self, row: dict[str, Any]) -> tuple[Any, list[Message]] | None:
        """A fresh environment after `reset(row)`, and its prompt; None (and a finding) if that failed.

        Tools of a `ToolEnv` are watched, and get no more time than the linter has.
        """
        env = self.new()
        if env is None:
            return None
        prompt = self.caller.call(env.reset, copy.deepcopy(row))
        if prompt.failure:
            self.report.error("reset", f"reset {prompt.failure}.", "It must work for every row.")
            return None
        if isinstance(env, ToolEnv):
            made = self.caller.call(lambda: env.executor)
            if made.failure:
                self.report.error("tools", f"Setting up the tools {made.failure}.", "Mend the list `tools`.")
                return None
            self._watch(made.value)
        return env, prompt.value

    def _watch(self, executor: ToolExecutor) -> None:
        limit_s = 0.8 * self.caller.timeout_s
        executor.timeout_s = min(executor.timeout_s or limit_s, limit_s)
        # Copies: the tools themselves may belong to the class.
        executor.tools = {name: watch_results(self.report, found) for name, found in executor.tools.items()}
        for found in executor.tools.values():
            if found.timeout_s is not None:
                found.timeout_s = min(found.timeout_s, limit_s)

    def check_blocking(self, check: str, blocked_s: float) -> None:
        """Report an async method that kept the event loop to itself."""
        if blocked_s > BLOCKING_S:
            self.report.error(
                check,
                f"An async method{' or tool' if check == 'step' else ''} blocked the event loop ({blocked_s:.1f} s): "
                "all other trajectories stood still.",
                "Use `await` versions (asyncio.sleep, an async HTTP client), or make it a plain function: those run "
                "on threads.",
            )


def innermost(env: Any) -> Any:
    """The user's own object behind the TRL adapter."""
    return env.environment if isinstance(env, TRLEnvAdapter) else env

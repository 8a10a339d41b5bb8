"""The python tool: runs the code that a model writes, in a sandbox of the trajectory.

    class MyEnv(ToolEnv):
        tools = [PythonTool()]                # or PythonTool("limits"), PythonTool("monty"), PythonTool(MySandbox)

Variables and files survive from call to call. See docs/sandbox.md for what each backend contains.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from agent_r1_trl.features.sandbox.base import Language, SandboxError, SandboxLimits, render_sandbox_result
from agent_r1_trl.features.sandbox.choose import default_sandbox, make_sandbox_factory
from agent_r1_trl.features.sandbox.sessions import Session
from agent_r1_trl.tools.base import Tool
from agent_r1_trl.tools.faults import InfrastructureError, ReportedError
from agent_r1_trl.tools.pool import shared_pool

MAX_SANDBOXES = 128


class SandboxTool(Tool):
    """What `PythonTool` and `ShellTool` share: one sandbox per environment instance, hence per trajectory.

    Tools of one environment that name the same sandbox with the same limits share it, with its files.

    Args:
        sandbox: `"sandlock"`, `"limits"`, `"monty"`, a class, or a function that makes a `Sandbox`, or the path of
            one. By default sandlock where this system has it, else limits with a warning.
        limits: what one sandbox may use; by default `SandboxLimits()`.
        max_sandboxes: maximum number of open sandboxes in this process; further trajectories wait for theirs.
        name: name of the tool.
        **settings: further arguments of `Tool` (`description`, `max_result_tokens`, ...).

    Raises:
        ValueError: the sandbox is unknown, not installed or cannot run here, or a setting is out of range.
    """

    language: ClassVar[Language] = "python"

    def __init__(
        self,
        sandbox: Any = None,
        *,
        limits: SandboxLimits | None = None,
        max_sandboxes: int = MAX_SANDBOXES,
        name: str | None = None,
        **settings: Any,
    ) -> None:
        if "timeout_s" in settings:
            raise ValueError(
                f"timeout_s={settings['timeout_s']!r}: the time of one call is one of the sandbox's limits. Pass "
                f"limits=SandboxLimits(timeout_s={settings['timeout_s']!r})."
            )
        if isinstance(max_sandboxes, bool) or not isinstance(max_sandboxes, int) or max_sandboxes < 1:
            raise ValueError(f"max_sandboxes={max_sandboxes!r}: must be an integer >= 1.")
        sandbox = default_sandbox() if sandbox is None else sandbox
        self.limits = limits or SandboxLimits()
        self._key = (sandbox, self.limits, max_sandboxes)
        self._session = Session(
            make_sandbox_factory(sandbox, self.limits, self.language),
            max_sandboxes=max_sandboxes,
            wait_s=self.limits.start_timeout_s,
            run_in_thread=shared_pool(max_sandboxes).run,
        )
        # The sandbox's own limits end a call long before this one, which is for a sandbox that hangs.
        longest_s = 2 * self.limits.timeout_s + 3 * self.limits.start_timeout_s
        super().__init__(self._make_function(), name=name or self.language, timeout_s=longest_s, **settings)

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        """Run code and return what a model would read, errors included."""
        (code,) = inspect.signature(self.fn).bind(*args, **kwargs).args
        result = self._session.run_now(code, self.language)
        return render_sandbox_result(result, self.limits.max_output_chars)

    def __get__(self, instance: Any, owner: type | None = None) -> Tool:
        """The tool with the sandbox of an environment instance."""
        if instance is None:
            return self
        sessions: dict[Any, Session] = vars(instance).setdefault("_sandboxes", {})
        bound = copy.copy(self)
        if self._key not in sessions:
            sessions[self._key] = self._session.another()
        bound._session = sessions[self._key]
        bound.fn = bound._make_function()
        bound.sequential = True
        return bound

    def __deepcopy__(self, memo: Any) -> SandboxTool:
        made = copy.copy(self)
        made._session = copy.deepcopy(self._session, memo)
        made.fn = made._make_function()
        return made

    def close(self) -> None:
        """Close the sandbox: its processes, variables and files are gone. The next call opens another one."""
        self._session.close()

    def _make_function(self) -> Callable[[str], Awaitable[str]]:
        raise NotImplementedError

    async def _execute(self, code: str) -> str:
        try:
            result = await self._session.run(code, self.language)
        except SandboxError as error:
            raise InfrastructureError(str(error)) from error
        text = render_sandbox_result(result, self.limits.max_output_chars)
        if result.error is not None:
            raise ReportedError(text)
        return text


class PythonTool(SandboxTool):
    """A tool `python(code)`: an interpreter that keeps its variables from call to call. Arguments as `SandboxTool`."""

    language: ClassVar[Language] = "python"

    def _make_function(self) -> Callable[[str], Awaitable[str]]:
        async def python(code: str) -> str:
            """Run Python code and return what it prints and the value of its last expression.

            Variables, functions and imports stay for later calls.

            Args:
                code: The code to run.
            """
            return await self._execute(code)

        return python

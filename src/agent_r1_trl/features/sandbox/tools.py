"""The python tool and the shell tool: run the code that a model writes, in a sandbox of the trajectory.

    class MyEnv(ToolEnv):
        tools = [PythonTool(), ShellTool()]   # or PythonTool("limits"), PythonTool("monty"), PythonTool(MySandbox)

Variables and files survive from call to call. See docs/sandbox.md for what each backend contains.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import logging
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, ClassVar

from agent_r1_trl.features.sandbox.base import (
    Language,
    Sandbox,
    SandboxError,
    SandboxLimits,
    SandboxResult,
    render_sandbox_result,
)
from agent_r1_trl.features.sandbox.local import LocalSandbox
from agent_r1_trl.features.sandbox.monty import MontySandbox
from agent_r1_trl.objects import check_call, did_you_mean, import_object, path_of
from agent_r1_trl.settings import refuse
from agent_r1_trl.tools.base import Tool
from agent_r1_trl.tools.faults import InfrastructureError, ReportedError
from agent_r1_trl.tools.pool import shared_pool

THREADS = 128
"""Calls that run at once; further ones wait for a thread."""


class Session:
    """The sandbox of one trajectory: made with its first call, freed with the trajectory."""

    def __init__(self, make: Callable[[], Sandbox]) -> None:
        self.make = make
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = None
        self._end: Callable[[], Any] = lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        return Session(self.make)  # a copy of an environment is another trajectory

    def open(self) -> Sandbox:
        """The sandbox; one of the user's own may take its time to start."""
        with self._lock:
            if self._sandbox is None:
                self._sandbox = _named("the sandbox could not be made:", self.make)
                self._end = weakref.finalize(self, self._sandbox.close)
            return self._sandbox

    def close(self) -> None:
        """Close the sandbox; the next call opens another one."""
        self._sandbox = None
        self._end()


def _named(what: str, function: Callable[..., Any], *arguments: object) -> Any:
    """Call what may be the user's own; whatever it raises is a `SandboxError`."""
    try:
        return function(*arguments)
    except SandboxError:
        raise
    except Exception as error:  # a lost connection, say
        raise SandboxError(f"{what} {type(error).__name__}: {error}") from error


def run_code(sandbox: Sandbox, code: str, language: Language) -> SandboxResult:
    """Run code in a sandbox that may be a class of the user's own.

    Raises:
        SandboxError: it raised anything, or returned no result.
    """
    name = type(sandbox).__name__
    result = _named(f"{name}.run raised", sandbox.run, code, language)
    if not isinstance(result, SandboxResult):
        raise SandboxError(f"{name}.run returned {result!r:.200}. Return a SandboxResult.")
    return result


class SandboxTool(Tool):
    """The common part of `PythonTool` and `ShellTool`: one sandbox per environment instance, hence per trajectory.

    Tools of one environment that name the same sandbox with the same limits share it, with its files.

    Args:
        sandbox: `"sandlock"`, `"limits"`, `"monty"`, a class, or a function that makes a `Sandbox`, or the path of
            one. By default sandlock where this system has it, else limits with a warning.
        limits: what one sandbox may use; by default `SandboxLimits()`.
        name: name of the tool.
        **settings: further arguments of `Tool` (`description`, `max_result_chars`, ...).

    Raises:
        ValueError: the sandbox is unknown, not installed or cannot run here, or a setting is out of range.
    """

    language: ClassVar[Language] = "python"

    def __init__(
        self,
        sandbox: object = None,
        *,
        limits: SandboxLimits | None = None,
        name: str | None = None,
        **settings: Any,
    ) -> None:
        if "timeout_s" in settings:
            raise ValueError(
                f"timeout_s={settings['timeout_s']!r}: the time of one call is one of the sandbox's limits. Pass "
                f"limits=SandboxLimits(timeout_s={settings['timeout_s']!r})."
            )
        sandbox = default_sandbox() if sandbox is None else sandbox
        self.limits = limits or SandboxLimits()
        self._key = (sandbox, self.limits)
        self._session = Session(make_sandbox_factory(sandbox, self.limits, self.language))
        # The sandbox's own limits end a call long before this one, which is for a sandbox that hangs.
        longest_s = 2 * self.limits.timeout_s + 3 * self.limits.start_timeout_s
        super().__init__(self._make_function(), name=name or self.language, timeout_s=longest_s, **settings)

    def __call__(self, *args: object, **kwargs: object) -> str:
        """Run code and return what a model would read, errors included."""
        (code,) = inspect.signature(self.fn).bind(*args, **kwargs).args
        result = run_code(self._session.open(), code, self.language)
        return render_sandbox_result(result, self.limits.max_output_chars)

    def __get__(self, instance: object, owner: type | None = None) -> Tool:
        """The tool with the sandbox of an environment instance."""
        if instance is None:
            return self
        sessions: dict[Any, Session] = vars(instance).setdefault("_sandboxes", {})
        bound = self._with(sessions.setdefault(self._key, Session(self._session.make)))
        bound.sequential = True
        return bound

    def _with(self, session: Session) -> SandboxTool:
        made = copy.copy(self)
        made._session = session
        made.fn = made._make_function()
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> SandboxTool:
        return self._with(copy.deepcopy(self._session, memo))

    def close(self) -> None:
        """Close the sandbox: its processes, variables and files are gone. The next call opens another one."""
        self._session.close()

    def _make_function(self) -> Callable[[str], Awaitable[str]]:
        raise NotImplementedError

    async def _execute(self, code: str) -> str:
        # A weak reference: a thread keeps its last function until it gets another.
        session: Callable[[], Any] = weakref.ref(self._session)
        language = self.language
        try:
            result = await shared_pool(THREADS).run(lambda: run_code(session().open(), code, language))
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


class ShellTool(SandboxTool):
    """A tool `shell(command)`: bash (or sh) in the private directory of the trajectory. Arguments as `SandboxTool`.

    Files stay from call to call. Each call is a shell of its own that starts in that directory, and what it leaves
    running in the background ends with it. `sandbox="monty"` has no shell and is refused.
    """

    language: ClassVar[Language] = "shell"

    def _make_function(self) -> Callable[[str], Awaitable[str]]:
        async def shell(command: str) -> str:
            """Run a command line with bash and return its output.

            Each command starts in the same directory; files stay for later commands.

            Args:
                command: The command line to run.
            """
            return await self._execute(command)

        return shell


# -------------------------------------------------------------------- from a name to a sandbox

BACKENDS = ("sandlock", "limits", "monty")
PACKAGES = {"sandlock": "sandlock", "monty": "pydantic_monty"}

logger = logging.getLogger(__name__)


@functools.cache
def default_sandbox() -> str:
    """`"sandlock"` where this system and the installation have it, else `"limits"` with a warning."""
    problem = next(find_problems("sandlock", "python"), None)
    if problem is None:
        return "sandlock"
    if sys.platform == "linux":  # elsewhere "limits" is refused as well, with what to use instead
        logger.warning('Code of the model runs without isolation, as sandbox="limits". %s', problem)
    return "limits"


def make_sandbox_factory(sandbox: Any, limits: SandboxLimits, language: Language) -> Callable[[], Sandbox]:
    """A function that makes the sandbox of one trajectory.

    Raises:
        ValueError: the backend is unknown, not installed, cannot run here, or cannot run the language.
    """
    if isinstance(sandbox, str) and any(mark in sandbox for mark in ".:"):
        sandbox = import_object(sandbox, "sandbox")
    refuse(find_problems(sandbox, language))
    if not isinstance(sandbox, str):
        check_call(f"sandbox={path_of(sandbox)!r}", sandbox, "a class or a function that is called without arguments")
        return sandbox
    if sandbox == "monty":
        return functools.partial(MontySandbox, limits)
    return functools.partial(LocalSandbox, "sandlock" if sandbox == "sandlock" else "limits", limits)


def find_problems(sandbox: object, language: Language) -> Iterator[str]:
    """Why a name or an object makes no sandbox here, with what to do."""
    names = ", ".join(map(repr, BACKENDS))
    if isinstance(sandbox, type):
        if not issubclass(sandbox, Sandbox):
            yield f"sandbox={path_of(sandbox)!r} has no methods run and close. Give it those of a Sandbox."
    elif not isinstance(sandbox, str):
        if not callable(sandbox) or isinstance(sandbox, Sandbox):
            yield (
                f"sandbox={sandbox!r:.200}: every trajectory needs a sandbox of its own, so pass a name ({names}), a "
                "class, or a function that makes one (or its path)."
            )
    elif sandbox not in BACKENDS:
        yield (
            f"sandbox={sandbox!r}: unknown.{did_you_mean(sandbox, BACKENDS)} Choose one of {names}, or pass a class "
            "of your own, or its path."
        )
    elif sandbox == "monty" and language != "python":
        yield 'sandbox="monty" runs Python only. Use sandbox="sandlock" or "limits" for a shell.'
    elif sandbox != "monty" and sys.platform != "linux":
        yield (
            f'sandbox={sandbox!r} needs Linux, and this is {sys.platform}. Use sandbox="monty" for Python, run in a '
            "Linux container, or pass a class of your own that sends the code elsewhere (docs/sandbox.md)."
        )
    elif sandbox in PACKAGES and importlib.util.find_spec(PACKAGES[sandbox]) is None:
        install = "pip install 'agent-r1-trl[sandbox]'"
        yield f"sandbox={sandbox!r} needs a package that is not installed. Install it: {install}"
    elif sandbox == "sandlock":
        import sandlock

        found, needed = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
        if found < needed:
            has = f"version {found}" if found > 0 else "none (is 'landlock' missing from the kernel's lsm= list?)"
            yield (
                f'sandbox="sandlock" needs Landlock version {needed} or newer (Linux 6.12), and this kernel has '
                f'{has}. Run on such a kernel, or use sandbox="monty" (a subset of Python), or sandbox="limits" '
                "inside a container or virtual machine of your own."
            )

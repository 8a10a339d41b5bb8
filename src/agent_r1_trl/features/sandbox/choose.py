"""From a name, or a class of the user's own, to a function that makes sandboxes."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any

from agent_r1_trl.features.sandbox.base import Language, Sandbox, SandboxLimits
from agent_r1_trl.features.sandbox.local import LocalSandbox
from agent_r1_trl.features.sandbox.monty import MontySandbox
from agent_r1_trl.objects import check_call, did_you_mean, import_object, path_of

BACKENDS = ("sandlock", "limits", "monty")
INSTALL = "pip install 'agent-r1-trl[sandbox]'"

logger = logging.getLogger(__name__)


@functools.cache
def default_sandbox() -> str:
    """`"sandlock"` where this system and the installation have it, else `"limits"` with a warning."""
    try:
        if sys.platform == "linux":  # elsewhere "limits" is refused as well, with what to use instead
            check_sandlock()
            return "sandlock"
    except ValueError as error:
        logger.warning('Code of the model runs without isolation, as sandbox="limits". %s', error)
    return "limits"


def make_sandbox_factory(sandbox: Any, limits: SandboxLimits, language: Language) -> Callable[[], Sandbox]:
    """A function that makes the sandbox of one trajectory.

    Raises:
        ValueError: the backend is unknown, not installed, cannot run here, or cannot run the language.
    """
    if isinstance(sandbox, str) and any(mark in sandbox for mark in ".:"):
        sandbox = import_object(sandbox, "sandbox")
    if not isinstance(sandbox, str):
        if not callable(sandbox) or (isinstance(sandbox, Sandbox) and not isinstance(sandbox, type)):
            raise ValueError(
                f"sandbox={sandbox!r:.200}: every trajectory needs a sandbox of its own, so pass a name "
                f"({', '.join(map(repr, BACKENDS))}), a class, or a function that makes one (or its path)."
            )
        if isinstance(sandbox, type) and not issubclass(sandbox, Sandbox):
            raise ValueError(f"sandbox={path_of(sandbox)!r} has no methods run and close. Give it those of a Sandbox.")
        check_call(f"sandbox={path_of(sandbox)!r}", sandbox, "a class or a function that is called without arguments")
        return sandbox
    if sandbox not in BACKENDS:
        raise ValueError(
            f"sandbox={sandbox!r}: unknown.{did_you_mean(sandbox, BACKENDS)} Choose one of "
            f"{', '.join(map(repr, BACKENDS))}, or pass a class of your own, or its path."
        )
    if sandbox == "monty":
        if language != "python":
            raise ValueError('sandbox="monty" runs Python only. Use sandbox="sandlock" or "limits" for a shell.')
        _require("pydantic_monty", sandbox)
        return functools.partial(MontySandbox, limits)
    if sys.platform != "linux":
        raise ValueError(
            f'sandbox={sandbox!r} needs Linux, and this is {sys.platform}. Use sandbox="monty" for Python, run in a '
            "Linux container, or pass a class of your own that sends the code elsewhere (docs/sandbox.md)."
        )
    if sandbox == "sandlock":
        check_sandlock()
    return functools.partial(LocalSandbox, "sandlock" if sandbox == "sandlock" else "limits", limits)


def check_sandlock() -> None:
    """Check that sandlock is installed and that the kernel has what it stands on.

    Raises:
        ValueError: it is not, or it has not; the message names the fix.
    """
    _require("sandlock", "sandlock")
    import sandlock

    found, needed = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
    if found < needed:
        has = f"version {found}" if found > 0 else "none (is 'landlock' missing from the kernel's lsm= list?)"
        raise ValueError(
            f'sandbox="sandlock" needs Landlock version {needed} or newer (Linux 6.12), and this kernel has {has}. '
            'Run on such a kernel, or use sandbox="monty" (a subset of Python), or sandbox="limits" inside a '
            "container or virtual machine of your own."
        )


def _require(module: str, sandbox: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"sandbox={sandbox!r} needs a package that is not installed. Install it: {INSTALL}")

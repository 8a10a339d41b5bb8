"""From a name, or a class of the user's own, to a function that makes sandboxes."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from agent_r1_trl.features.sandbox.base import Language, Sandbox, SandboxLimits
from agent_r1_trl.features.sandbox.local import LocalSandbox
from agent_r1_trl.features.sandbox.monty import MontySandbox
from agent_r1_trl.objects import check_call, did_you_mean, import_object, path_of
from agent_r1_trl.settings import refuse

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


def find_problems(sandbox: Any, language: Language) -> Iterator[str]:
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

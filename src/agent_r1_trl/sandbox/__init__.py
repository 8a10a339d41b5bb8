"""Sandboxes: where the code that a model writes runs. See docs/sandbox.md for what each backend contains."""

from agent_r1_trl.sandbox.base import (
    Language,
    Sandbox,
    SandboxError,
    SandboxLimits,
    SandboxResult,
    render_sandbox_result,
)
from agent_r1_trl.sandbox.choose import make_sandbox_factory
from agent_r1_trl.sandbox.local import LocalSandbox
from agent_r1_trl.sandbox.monty import MontySandbox

__all__ = [
    "Language",
    "LocalSandbox",
    "MontySandbox",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxResult",
    "make_sandbox_factory",
    "render_sandbox_result",
]

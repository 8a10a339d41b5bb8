"""Sandboxes: where the code that a model writes runs. See docs/sandbox.md for what each backend contains."""

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
from agent_r1_trl.features.sandbox.tools import PythonTool, SandboxTool, ShellTool, make_sandbox_factory

__all__ = [
    "Language",
    "LocalSandbox",
    "MontySandbox",
    "PythonTool",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxResult",
    "SandboxTool",
    "ShellTool",
    "make_sandbox_factory",
    "render_sandbox_result",
]

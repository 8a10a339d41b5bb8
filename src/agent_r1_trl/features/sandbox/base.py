"""What a sandbox is: something that runs a model's code for one trajectory, and the limits under which it does.

Every trajectory has a sandbox of its own. Its variables and files live until `close`, or until a limit ends them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, Protocol, runtime_checkable

Language = Literal["python", "shell"]


class SandboxError(RuntimeError):
    """The sandbox itself failed: it could not start, or its process stopped answering. Not the fault of the code."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of one sandbox. [docs/sandbox.md](sandbox.md) says which backend enforces which.

    Args:
        timeout_s: maximum wall-clock seconds of one call.
        cpu_s: maximum seconds of CPU time of one call, per process.
        memory_mb: maximum memory of one process, and of all processes together, in MiB.
        disk_mb: maximum size of one file, and of the private directory, in MiB.
        max_processes: maximum number of processes, the interpreter included.
        max_open_files: maximum number of open files per process.
        max_output_chars: maximum length of what the model reads of one call's output, in characters.
        start_timeout_s: maximum seconds that a call waits for a sandbox: for its turn, and for it to start.

    Raises:
        ValueError: a limit is out of range.
    """

    timeout_s: float = 10.0
    cpu_s: float = 10.0
    memory_mb: int = 1024
    disk_mb: int = 64
    max_processes: int = 32
    max_open_files: int = 128
    max_output_chars: int = 10_000
    start_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        least = {"memory_mb": 64, "max_open_files": 64}  # below that, no interpreter starts
        for item in fields(self):
            value = getattr(self, item.name)
            is_seconds = item.name.endswith("_s")
            if isinstance(value, bool) or not isinstance(value, (int, float) if is_seconds else int):
                raise ValueError(
                    f"SandboxLimits.{item.name}={value!r}: must be {'a number' if is_seconds else 'an integer'}."
                )
            minimum = least.get(item.name, 0 if is_seconds else 1)
            if not math.isfinite(value) or value < minimum or value <= 0:
                raise ValueError(
                    f"SandboxLimits.{item.name}={value!r}: must be finite and {f'>= {minimum}' if minimum else '> 0'}."
                )


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """What one call did. Everything in it is meant for the model."""

    output: str = ""
    """What the code printed."""
    value: str | None = None
    """`repr` of the last expression, or None if there was none, or if its value is None."""
    error: str | None = None
    """What went wrong: a short traceback, an exit code, or the limit that ended the code. None if nothing did."""
    lost: Literal["", "variables", "everything"] = ""
    """What a limit destroyed: nothing, the interpreter with its variables, or the private directory as well."""


@runtime_checkable
class Sandbox(Protocol):
    """Runs code for one trajectory. `PythonTool(sandbox=MySandbox)` makes one by calling `MySandbox()`."""

    def run(self, code: str, language: Language = "python") -> SandboxResult:
        """Run one piece of code; what it does wrong is part of the result. Called from one thread at a time.

        Raises:
            SandboxError: the sandbox could not start or does not answer.
        """
        ...

    def close(self) -> None:
        """Free everything: processes, files, connections. May be called twice, and while `run` waits."""
        ...


LOST = {
    "variables": (
        "The interpreter was restarted: variables, functions and imports of earlier calls are gone; files are kept."
    ),
    "everything": "The sandbox was restarted: variables, functions, imports and files of earlier calls are gone.",
}


def render_sandbox_result(result: SandboxResult, max_chars: int) -> str:
    """Text that the model reads: the output, the value of the last expression, and what went wrong."""
    parts = [cut_middle(result.output.rstrip("\n"), max_chars), cut_middle(result.value or "", max_chars)]
    parts += [result.error or "", LOST.get(result.lost, "")]
    return "\n".join(part for part in parts if part) or "(no output)"


def cut_middle(text: str, max_chars: int) -> str:
    """`text`, or its beginning and its end with a note between them that says how much is missing."""
    if len(text) <= max_chars:
        return text
    head = (max_chars + 1) // 2
    tail = max_chars - head
    end = text[len(text) - tail :]
    return f"{text[:head]}\n[truncated: {len(text) - max_chars} of {len(text)} characters are left out]\n{end}"

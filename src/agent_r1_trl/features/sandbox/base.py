"""The interface of sandboxes, which run a model's code for one trajectory, and the limits under which it does.

Every trajectory has a sandbox of its own. Its variables and files live until `close`, or until a limit ends them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, runtime_checkable

from agent_r1_trl.settings import Count, Seconds, Whole, check_settings

Language = Literal["python", "shell"]


class SandboxError(RuntimeError):
    """The sandbox itself failed: it could not start, or its process stopped answering. Not the fault of the code."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of one sandbox. [docs/sandbox.md](sandbox.md) says which backend enforces which.

    Args:
        timeout_s: maximum wall-clock seconds of one call.
        memory_mb: maximum memory of one process, and of all processes together, in MiB.
        disk_mb: maximum size of one file, and of the private directory, in MiB.
        max_processes: maximum number of processes, the interpreter included.
        max_output_chars: maximum length of what the model reads of one call's output, in characters.
        start_timeout_s: maximum seconds that a call waits for a sandbox to start.

    Raises:
        ValueError: a limit is out of range.
    """

    timeout_s: Seconds = 10.0
    memory_mb: Annotated[int, Whole(64)] = 1024  # below that, no interpreter starts
    disk_mb: Count = 64
    max_processes: Count = 32
    max_output_chars: Count = 10_000
    start_timeout_s: Seconds = 120.0

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """The result of one call. Everything in it is meant for the model."""

    output: str = ""
    """The output of the code."""
    value: str | None = None
    """`repr` of the last expression, or None if there was none, or if its value is None."""
    error: str | None = None
    """The failure: a short traceback, an exit code, or the limit that ended the code. None if nothing did."""
    lost: Literal["", "variables", "everything"] = ""
    """The damage by a limit: nothing, the interpreter with its variables, or the private directory as well."""


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

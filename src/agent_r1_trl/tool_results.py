"""Tool calls that the model wrote, what came of them, and who is charged for those that failed.

`ToolResult.is_charged` is the only place that decides about the charge. Whoever takes something from the policy for a
failed call asks it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any


class ToolErrorKind(StrEnum):
    """How a tool call failed."""

    MALFORMED = "malformed"
    """The call could not be read (broken JSON, missing name, cut off)."""
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    """The arguments violate the tool's JSON schema."""
    EXCEPTION = "exception"
    """The tool raised."""
    TIMEOUT = "timeout"
    TOO_MANY = "too_many"
    """The call, and those after it, exceed `max_calls_per_turn` and were not made."""
    INFRASTRUCTURE = "infrastructure"
    """The infrastructure behind the tool failed, as the tool declares, or the tool's own schema is broken; it ends the
    trajectory with `tool_failure`."""


class ToolFault(StrEnum):
    """Whose fault a failed call is."""

    MODEL = "model"
    """The call could not be made as the model wrote it, or the tool's author declared the error as the model's."""
    ARGUMENTS = "arguments"
    """By Python's convention the error is about the arguments, and the author has declared nothing else."""
    UNKNOWN = "unknown"
    """The error does not say whose fault it is."""
    TOOL = "tool"
    """Wrong arguments do not cause such an error: timeouts, lost connections, missing resources, broken schemas."""


_FAULTS = {
    ToolErrorKind.MALFORMED: ToolFault.MODEL,
    ToolErrorKind.UNKNOWN_TOOL: ToolFault.MODEL,
    ToolErrorKind.INVALID_ARGUMENTS: ToolFault.MODEL,
    ToolErrorKind.TOO_MANY: ToolFault.MODEL,
    ToolErrorKind.EXCEPTION: ToolFault.UNKNOWN,
    ToolErrorKind.TIMEOUT: ToolFault.TOOL,
    ToolErrorKind.INFRASTRUCTURE: ToolFault.TOOL,
}
"""The usual fault of each kind of failure; of exceptions and timeouts `ToolResult.judged_fault` may know better."""
_WITHOUT_A_KNOWN_NAME = (ToolErrorKind.MALFORMED, ToolErrorKind.UNKNOWN_TOOL, ToolErrorKind.TOO_MANY)


@dataclass(kw_only=True)
class ToolCall:
    """One call that the model wrote."""

    name: str
    """As the model wrote it; empty if it could not be read."""
    arguments: Any
    """Parsed arguments (a dict when well formed), else the raw text."""
    id: str = ""
    """Call id, unique in the trajectory."""


@dataclass(kw_only=True)
class ToolResult:
    """The result of one call; `content` is the text that the model reads."""

    call: ToolCall
    content: str
    error: ToolErrorKind | None = None
    """None for a call that succeeded."""
    latency_s: float = 0.0
    """Seconds that the tool itself ran, all attempts together."""
    queue_s: float = 0.0
    """Seconds that the call waited for a free thread."""
    attempts: int = 1
    """How often the tool was called: more than once after failures of its infrastructure, 0 if it could not be."""
    is_truncated: bool = False
    """The content was cut to the tool's token limit."""
    judged_fault: ToolFault | None = None
    """Whose fault an exception or a timeout is; None for what its kind says. `fault` reads both."""

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> ToolResult:
        """From its fields as JSON holds them; those of older records that are none any more are left out."""
        known = {item.name: record[item.name] for item in fields(cls) if item.name in record}
        error = ToolErrorKind(record["error"]) if record["error"] else None
        fault = ToolFault(known["judged_fault"]) if known.get("judged_fault") else None
        return cls(**{**known, "call": ToolCall(**record["call"]), "error": error, "judged_fault": fault})

    @property
    def is_error(self) -> bool:
        """Whether the call failed."""
        return self.error is not None

    @property
    def fault(self) -> ToolFault | None:
        """Whose fault the failure is; None for a call that succeeded."""
        if self.error is None:
            return None
        is_judged = self.error in (ToolErrorKind.EXCEPTION, ToolErrorKind.TIMEOUT)
        return (self.judged_fault if is_judged else None) or _FAULTS.get(self.error, ToolFault.UNKNOWN)

    @property
    def is_charged(self) -> bool:
        """Whether the policy is charged for the failure. It is not where nobody knows better."""
        return self.fault in (ToolFault.MODEL, ToolFault.ARGUMENTS)

    @property
    def is_refused(self) -> bool:
        """Whether the call never reached a tool, for what the model wrote: a turn of only such calls is invalid."""
        return self.error is not None and _FAULTS.get(self.error) is ToolFault.MODEL

    @property
    def has_known_name(self) -> bool:
        """Whether the call's name is for certain that of a tool."""
        return self.error not in _WITHOUT_A_KNOWN_NAME

    @property
    def is_infrastructure_failure(self) -> bool:
        """Whether the call failed by the fault of the infrastructure, which ends the trajectory."""
        return self.error is ToolErrorKind.INFRASTRUCTURE

    @property
    def error_label(self) -> str:
        """How the call failed, for readers of the record: its kind, and whether the policy was charged; "" if not."""
        return "" if self.error is None else f"{self.error}{'' if self.is_charged else ', not charged'}"

    @property
    def cause(self) -> str:
        """The failure, in one line."""
        return self.content.partition("\n")[0].removeprefix("Error: ").strip()

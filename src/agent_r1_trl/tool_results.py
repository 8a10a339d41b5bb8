"""Tool calls that the model wrote, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass
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
    """The infrastructure behind the tool failed, as the tool declares; it ends the trajectory with `tool_failure`."""


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
    is_models_mistake: bool | None = None
    """For an exception: True if the tool declares it as its callers' (`user_errors`), False if wrong arguments do not
    cause its type, None if that cannot be told."""

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> ToolResult:
        """From its fields as JSON holds them."""
        error = ToolErrorKind(record["error"]) if record["error"] else None
        return cls(**{**record, "call": ToolCall(**record["call"]), "error": error})

    @property
    def is_error(self) -> bool:
        """Whether the call failed."""
        return self.error is not None

    @property
    def is_infrastructure_failure(self) -> bool:
        """Whether the call failed by the fault of the infrastructure, for which the policy is not charged."""
        return self.error is ToolErrorKind.INFRASTRUCTURE

    @property
    def cause(self) -> str:
        """What went wrong, in one line."""
        return self.content.partition("\n")[0].removeprefix("Error: ").strip()

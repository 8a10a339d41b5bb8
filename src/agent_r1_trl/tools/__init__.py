"""Tools: functions that a model may call, the executor that runs the calls, and the tools of the package."""

from agent_r1_trl.tools.base import Tool, as_tool, tool
from agent_r1_trl.tools.calculator import calculator
from agent_r1_trl.tools.calls import read_calls
from agent_r1_trl.tools.executor import ToolExecutor
from agent_r1_trl.tools.faults import InfrastructureError, ReportedError
from agent_r1_trl.tools.pool import shared_pool
from agent_r1_trl.tools.search import Passage, Retriever, SearchIndex, make_search_tool, open_retriever
from agent_r1_trl.tools.signature import ToolSchemaError
from agent_r1_trl.trajectory import ToolCall, ToolErrorKind, ToolFault, ToolResult

__all__ = [
    "InfrastructureError",
    "Passage",
    "ReportedError",
    "Retriever",
    "SearchIndex",
    "Tool",
    "ToolCall",
    "ToolErrorKind",
    "ToolExecutor",
    "ToolFault",
    "ToolResult",
    "ToolSchemaError",
    "as_tool",
    "calculator",
    "make_search_tool",
    "open_retriever",
    "read_calls",
    "shared_pool",
    "tool",
]

"""The tools of a server of MCP: toolset.py lists and calls them, session.py keeps the connections."""

from agent_r1_trl.features.doors.mcp.toolset import MCPEnv, MCPToolset

__all__ = ["MCPEnv", "MCPToolset"]

"""Doors: agents, environments and tools that were not written for this package, as they are (docs/doors.md).

Each is imported on first use, for it needs a package of its own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agent_r1_trl.features import feature

if TYPE_CHECKING:
    from agent_r1_trl.features.doors.agent import AgentEnv, Door
    from agent_r1_trl.features.doors.gym import GymnasiumEnv, TextArenaEnv
    from agent_r1_trl.features.doors.mcp import MCPEnv, MCPToolset
    from agent_r1_trl.features.doors.methods import tools_from
    from agent_r1_trl.features.doors.openenv import OpenEnv
    from agent_r1_trl.features.doors.traces import training_trace
    from agent_r1_trl.features.doors.verifiers import VerifiersEnv, verifiers_rows

_MODULE_OF = {
    "AgentEnv": "agent",
    "Door": "agent",
    "GymnasiumEnv": "gym",
    "MCPEnv": "mcp",
    "MCPToolset": "mcp",
    "OpenEnv": "openenv",
    "TextArenaEnv": "gym",
    "VerifiersEnv": "verifiers",
    "tools_from": "methods",
    "training_trace": "traces",
    "verifiers_rows": "verifiers",
}
__all__ = [
    "AgentEnv",
    "Door",
    "GymnasiumEnv",
    "MCPEnv",
    "MCPToolset",
    "OpenEnv",
    "TextArenaEnv",
    "VerifiersEnv",
    "tools_from",
    "training_trace",
    "verifiers_rows",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _MODULE_OF[name] == "gym":
        feature("games", name)  # refuses by name: these are games
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)

"""Doors: agents that were not written for this package, trained as they are (docs/doors.md)."""

from agent_r1_trl.features.doors.agent import AgentEnv, Door

__all__ = ["AgentEnv", "Door"]

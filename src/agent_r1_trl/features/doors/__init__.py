"""Doors: agents and environments that were not written for this package (docs/doors.md)."""

from agent_r1_trl.features.doors.agent import AgentEnv, Door
from agent_r1_trl.features.doors.gym import GymnasiumEnv, TextArenaEnv

__all__ = ["AgentEnv", "Door", "GymnasiumEnv", "TextArenaEnv"]

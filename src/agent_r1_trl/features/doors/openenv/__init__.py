"""Environments of an OpenEnv server. `env.py` has their actions and rewards, `session.py` the connection.

The protocol is spoken directly: the package `openenv` stays with the server and is not needed here.
"""

from agent_r1_trl.features.doors.openenv.env import OpenEnv

__all__ = ["OpenEnv"]

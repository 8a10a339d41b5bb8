"""Environments of other packages, played in text: one class for each package.

base.py             what they share: an episode comes from a seed, an action from a reply
gymnasium_env.py    any registered environment of Gymnasium
textarena_env.py    games of TextArena, alone or against functions
"""

from agent_r1_trl.features.doors.gym.gymnasium_env import GymnasiumEnv
from agent_r1_trl.features.doors.gym.textarena_env import TextArenaEnv

__all__ = ["GymnasiumEnv", "TextArenaEnv"]

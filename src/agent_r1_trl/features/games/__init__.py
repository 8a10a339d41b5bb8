"""The games of RAGEN (arXiv 2504.20073). FrozenLake and Countdown need the extra `games`."""

from agent_r1_trl.features.games.bandit import BanditEnv
from agent_r1_trl.features.games.base import ActionError, GameEnv
from agent_r1_trl.features.games.countdown import CountdownEnv
from agent_r1_trl.features.games.frozen_lake import FrozenLakeEnv
from agent_r1_trl.features.games.levels import make_rows
from agent_r1_trl.features.games.sokoban import SokobanEnv

__all__ = [
    "ActionError",
    "BanditEnv",
    "CountdownEnv",
    "FrozenLakeEnv",
    "GameEnv",
    "SokobanEnv",
    "make_rows",
]

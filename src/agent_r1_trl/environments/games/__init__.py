"""The games of RAGEN (arXiv 2504.20073). FrozenLake, Countdown and ReasoningGym need the extra `games`."""

from agent_r1_trl.environments.games.bandit import BanditEnv
from agent_r1_trl.environments.games.base import ActionError, GameEnv
from agent_r1_trl.environments.games.countdown import CountdownEnv
from agent_r1_trl.environments.games.frozen_lake import FrozenLakeEnv
from agent_r1_trl.environments.games.levels import make_rows, rows
from agent_r1_trl.environments.games.reasoning import ReasoningGymEnv
from agent_r1_trl.environments.games.sokoban import SokobanEnv

__all__ = [
    "ActionError",
    "BanditEnv",
    "CountdownEnv",
    "FrozenLakeEnv",
    "GameEnv",
    "ReasoningGymEnv",
    "SokobanEnv",
    "make_rows",
    "rows",
]

"""The games of RAGEN (arXiv 2504.20073), on the packages of the extra `games`."""

from agent_r1_trl.environments.games.base import GameEnv

__all__ = ["GameEnv"]

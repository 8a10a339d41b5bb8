"""The rollout: chat format, limits, the loop for one trajectory, the runner for many."""

from agent_r1_trl.rollout.chat import ChatFormat
from agent_r1_trl.rollout.draft import Draft, RolloutRequest
from agent_r1_trl.rollout.env_session import EnvironmentFailure, EnvSession
from agent_r1_trl.rollout.errors import NothingPlayedError, check_some_played
from agent_r1_trl.rollout.limits import RolloutLimits, context_length
from agent_r1_trl.rollout.loop import run_trajectory
from agent_r1_trl.rollout.runner import RolloutRunner
from agent_r1_trl.rollout.seeds import derive_seed, example_key

__all__ = [
    "ChatFormat",
    "Draft",
    "EnvSession",
    "EnvironmentFailure",
    "NothingPlayedError",
    "RolloutLimits",
    "RolloutRequest",
    "RolloutRunner",
    "check_some_played",
    "context_length",
    "derive_seed",
    "example_key",
    "run_trajectory",
]

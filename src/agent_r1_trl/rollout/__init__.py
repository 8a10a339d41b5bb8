"""The rollout: requests, limits, the loop for one trajectory, the runner for many.

prompt -> [environment reset] -> [rollout (policy <-> tools)] -> [Trajectory] -> rewards on tokens -> filter
       -> batch -> advantages -> loss -> step -> sync weights -> next rollout
"""

from agent_r1_trl.rollout.draft import Draft
from agent_r1_trl.rollout.env_session import EnvironmentFailure, EnvSession
from agent_r1_trl.rollout.failures import NothingRolledOutError, check_some_rolled_out
from agent_r1_trl.rollout.limits import RolloutLimits, context_length, describe_sampling
from agent_r1_trl.rollout.loop import run_trajectory
from agent_r1_trl.rollout.requests import RolloutRequest, derive_seed, rollout_requests
from agent_r1_trl.rollout.runner import RolloutRunner
from agent_r1_trl.rollout.watchdog import LoopLostError, rollout_status

__all__ = [
    "Draft",
    "EnvSession",
    "EnvironmentFailure",
    "LoopLostError",
    "NothingRolledOutError",
    "RolloutLimits",
    "RolloutRequest",
    "RolloutRunner",
    "check_some_rolled_out",
    "context_length",
    "derive_seed",
    "describe_sampling",
    "rollout_requests",
    "rollout_status",
    "run_trajectory",
]

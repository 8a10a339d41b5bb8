"""Environments: the protocol, `ToolEnv`, the shipped environments, and adapters for TRL's forms.

prompt -> [environment reset] -> [rollout (policy <-> tools)] -> Trajectory -> rewards on tokens -> filter
       -> batch -> advantages -> loss -> step -> sync weights -> next rollout
"""

from agent_r1_trl.environments.base import Environment, RewardError, StepResult
from agent_r1_trl.environments.search_qa import SearchQAEnv
from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.environments.trl_adapters import FunctionToolsEnv, TRLEnvAdapter

__all__ = [
    "Environment",
    "FunctionToolsEnv",
    "RewardError",
    "SearchQAEnv",
    "StepResult",
    "TRLEnvAdapter",
    "ToolEnv",
]

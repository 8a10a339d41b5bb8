"""Environments: the protocol, `ToolEnv`, shipped environments, adapters."""

from agent_r1_trl.environments.base import Environment, RewardError, StepResult
from agent_r1_trl.environments.function_tools import FunctionToolsEnv
from agent_r1_trl.environments.search_qa import SearchQAEnv
from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.environments.trl_adapter import TRLEnvAdapter

__all__ = [
    "Environment",
    "FunctionToolsEnv",
    "RewardError",
    "SearchQAEnv",
    "StepResult",
    "TRLEnvAdapter",
    "ToolEnv",
]

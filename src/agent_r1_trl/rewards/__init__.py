"""Reward functions: gold answers, form of an answer, reasoning. Plain Python.

prompt -> environment reset -> rollout (policy <-> tools) -> Trajectory -> [rewards on tokens] -> filter
       -> batch -> advantages -> loss -> step -> sync weights -> next rollout
"""

from agent_r1_trl.rewards.answers import check_golds, exact_match, f1_score, normalize_answer, sub_em
from agent_r1_trl.rewards.format import extract_answer, format_reward, strip_reasoning
from agent_r1_trl.rewards.function import RewardFunction, RunningTotal, required
from agent_r1_trl.rewards.judge import JudgeReward
from agent_r1_trl.rewards.thinking import (
    grounded_thinking,
    overlong_penalty,
    thinking_format,
    thinking_format_penalty,
)

__all__ = [
    "JudgeReward",
    "RewardFunction",
    "RunningTotal",
    "check_golds",
    "exact_match",
    "extract_answer",
    "f1_score",
    "format_reward",
    "grounded_thinking",
    "normalize_answer",
    "overlong_penalty",
    "required",
    "strip_reasoning",
    "sub_em",
    "thinking_format",
    "thinking_format_penalty",
]

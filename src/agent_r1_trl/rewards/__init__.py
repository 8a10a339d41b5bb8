"""Reward functions: comparison with gold answers, form of an answer, composition. Plain Python.

prompt -> environment reset -> rollout (policy <-> tools) -> Trajectory -> [rewards on tokens] -> filter
       -> batch -> advantages -> loss -> step -> sync weights -> next rollout
"""

from agent_r1_trl.rewards.answers import check_golds, exact_match, f1_score, normalize_answer, sub_em
from agent_r1_trl.rewards.composition import compose
from agent_r1_trl.rewards.format import extract_answer, format_reward, strip_reasoning

__all__ = [
    "check_golds",
    "compose",
    "exact_match",
    "extract_answer",
    "f1_score",
    "format_reward",
    "normalize_answer",
    "strip_reasoning",
    "sub_em",
]

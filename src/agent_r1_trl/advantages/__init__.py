"""Advantage estimators: pure functions on tensors, (B, T) for B trajectories of T completion tokens.

prompt -> environment reset -> rollout (policy <-> tools) -> Trajectory -> rewards on tokens -> filter
       -> batch -> [advantages] -> loss -> step -> sync weights -> next rollout
"""

from agent_r1_trl.advantages.estimators import ESTIMATORS, Credit, CreditInputs, CreditSettings, Estimator
from agent_r1_trl.advantages.gae import compute_bilevel_gae, compute_gae, compute_step_gae
from agent_r1_trl.advantages.group import (
    compute_gigpo_advantages,
    compute_group_advantages,
    compute_reinforce_pp_baseline_advantages,
    compute_returns_to_go,
    compute_rloo_advantages,
    compute_turn_group_advantages,
)
from agent_r1_trl.advantages.masked import masked_mean, masked_whiten

__all__ = [
    "ESTIMATORS",
    "Credit",
    "CreditInputs",
    "CreditSettings",
    "Estimator",
    "compute_bilevel_gae",
    "compute_gae",
    "compute_gigpo_advantages",
    "compute_group_advantages",
    "compute_reinforce_pp_baseline_advantages",
    "compute_returns_to_go",
    "compute_rloo_advantages",
    "compute_step_gae",
    "compute_turn_group_advantages",
    "masked_mean",
    "masked_whiten",
]

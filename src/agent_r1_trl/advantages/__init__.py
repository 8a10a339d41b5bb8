"""Advantage estimators: pure functions on tensors."""

from agent_r1_trl.advantages.group import compute_group_advantages, compute_rloo_advantages
from agent_r1_trl.advantages.masked import masked_mean, masked_whiten

__all__ = ["compute_group_advantages", "compute_rloo_advantages", "masked_mean", "masked_whiten"]

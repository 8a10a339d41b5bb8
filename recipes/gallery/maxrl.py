"""MaxRL (arXiv 2602.02710): what a trajectory earned above its group's mean, over that mean.

The expected gradient is that of the log of the success rate instead of the rate itself: prompts that are rarely solved
weigh more. In a recipe:

    advantage_estimator: recipes/gallery/maxrl.py:MAXRL
"""

import torch

from agent_r1_trl.advantages import Credit, CreditInputs, Estimator


def maxrl(inputs: CreditInputs) -> Credit:
    """(N,) advantages (R - mean) / mean; 0 in a group that earned nothing."""
    returns, advantages = inputs.returns, torch.zeros_like(inputs.returns)
    if (returns < 0).any():
        lowest = returns[returns < 0].min().item()
        raise ValueError(
            f"MaxRL divides by the group's mean return, and one is {lowest:g}. Use rewards of 0 and above."
        )
    for group in inputs.group_ids.unique():
        rows = (inputs.group_ids == group) & inputs.in_baseline
        if rows.any() and (mean := returns[rows].mean()) > 0:
            advantages[rows] = (returns[rows] - mean) / mean
    return Credit(advantages=advantages)


MAXRL = Estimator(
    name="maxrl",
    compute=maxrl,
    baseline="mean of the group",
    credit="one number per trajectory",
    needs_group=True,
    papers=(("Maximum Likelihood Reinforcement Learning", "2602.02710"),),
)

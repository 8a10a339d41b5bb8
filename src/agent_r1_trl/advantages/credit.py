"""What an estimator reads and what it returns: tensors of the trajectories of all ranks.

Covered here: plain tensors. Not covered: how trajectories become these tensors (`trainers/credit.py`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class CreditSettings:
    """The training arguments that estimators read, under the names that they have there."""

    gamma: float = 1.0
    """Discount per action token."""
    gamma_turn: float = 0.99
    """Discount per turn."""
    lam: float = 0.95
    """GAE's lambda per action token (PPO trainer)."""
    lam_turn: float = 0.95
    """GAE's lambda per turn (PPO trainer)."""
    step_weight: float = 1.0
    """Weight of GiGPO's step advantages."""
    scale_rewards: str = "group"
    """What GRPO divides by: the std of the `group`, of the `batch`, or nothing (`none`)."""
    whiten_advantages: bool = False
    """Whether the trainer whitens what the estimator returned (PPO trainer). Estimators need not do it."""


@dataclass(kw_only=True)
class CreditInputs:
    """What an estimator reads: N trajectories of T completion tokens and K turns, the rows of all ranks.

    A trajectory outside the baseline (an infrastructure failure, or one that no reward function scored) stays a row:
    its `outcome_rewards` and `returns` are NaN and its mask is empty. One that is in the baseline but not in the loss
    (truncated, with `truncated_trajectories="mask"`) has rewards and an empty mask: it counts in means and standard
    deviations of returns, not in those of tokens (whitening).
    """

    mask: torch.Tensor
    """(N, T) bool: the positions that get an advantage, which are the action tokens of rows in the loss (with
    `advantage_mask=False` all their completion tokens)."""
    turn_ids: torch.Tensor
    """(N, T) int64: the turn of each action token, counted from 0; -1 elsewhere."""
    group_ids: torch.Tensor
    """(N,) int64: which prompt; the trajectories of one prompt share the number."""
    process_token_rewards: torch.Tensor
    """(N, T) turn rewards, each on the last token of its turn."""
    outcome_token_rewards: torch.Tensor
    """(N, T) outcome rewards, each on the last action token of its trajectory."""
    turn_rewards: torch.Tensor
    """(N, K) turn rewards; 0 after a row's last turn."""
    outcome_rewards: torch.Tensor
    """(N,) outcome rewards; NaN for rows outside the baseline."""
    anchor_ids: torch.Tensor
    """(N, K) int64: a number for what each turn read (the context that the environment gave for it, else the
    observation before it); -1 after a row's last turn."""
    kl_rewards: torch.Tensor | None = None
    """(N, T) the KL penalty as a reward; None unless `kl_placement="reward"`."""
    values: torch.Tensor | None = None
    """(N, T) the critic's values of action tokens; None without a critic."""
    bootstrap_values: torch.Tensor | None = None
    """(N,) the critic's value after the last token of truncated rows, 0 for the others; None for 0 everywhere."""
    is_kept: torch.Tensor | None = None
    """(N,) bool: whether the trajectory is in a group that `sampling.filter_groups` trains on; None for all."""
    settings: CreditSettings = field(default_factory=CreditSettings)

    @property
    def in_baseline(self) -> torch.Tensor:
        """(N,) bool: whether a trajectory's return counts in means and standard deviations."""
        return ~self.outcome_rewards.isnan()

    @property
    def kept_mask(self) -> torch.Tensor | None:
        """(N, T) bool: the positions over which whitening takes mean and variance; None for all of `mask`.

        They are those that are trained on: RAGEN (arXiv 2504.20073) filters before it whitens.
        """
        return None if self.is_kept is None else self.mask & self.is_kept.unsqueeze(1)

    @property
    def returns(self) -> torch.Tensor:
        """(N,) turn rewards + outcome; NaN for rows outside the baseline."""
        return self.turn_rewards.sum(dim=1) + self.outcome_rewards

    @property
    def token_rewards(self) -> torch.Tensor:
        """(N, T) all rewards that stand on tokens, the KL penalty included."""
        rewards = self.process_token_rewards + self.outcome_token_rewards
        return rewards if self.kl_rewards is None else rewards + self.kl_rewards

    def only(self, part: str) -> CreditInputs:
        """A copy with the `process` or the `outcome` rewards alone; values and KL stay with the outcome."""
        if part == "outcome":
            return dataclasses.replace(
                self,
                process_token_rewards=torch.zeros_like(self.process_token_rewards),
                turn_rewards=torch.zeros_like(self.turn_rewards),
            )
        return dataclasses.replace(
            self,
            outcome_token_rewards=torch.zeros_like(self.outcome_token_rewards),
            outcome_rewards=torch.zeros_like(self.outcome_rewards) + 0 * self.outcome_rewards,  # NaN stays
            kl_rewards=None,
            values=None if self.values is None else torch.zeros_like(self.values),
            bootstrap_values=None,
        )


@dataclass(kw_only=True)
class Credit:
    """What an estimator returns. The package sets whatever stands outside the mask to 0."""

    advantages: torch.Tensor
    """(N, T), or (N,) for one number per trajectory, which all its tokens get."""
    returns: torch.Tensor | None = None
    """(N, T) the critic's targets; None without a critic."""

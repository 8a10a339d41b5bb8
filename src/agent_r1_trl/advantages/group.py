"""Advantages relative to the other trajectories of the same prompt: GRPO, Dr. GRPO, RLOO."""

from __future__ import annotations

import torch

from agent_r1_trl.advantages.masked import check_shapes, float_dtype

ZERO_VARIANCE = 1e-6
"""A group whose std is at most this times its largest |R| has no spread but float noise."""
STD_EPS = 1e-4
SCALES = ("group", "batch", "none")


class GroupStatistics:
    """Mean, std (ddof 1) and size of every row's group, over its rows in the baseline (those that are not NaN).

    Args:
        values: (N,), NaN for rows outside the baseline.
        group_ids: (N,) integers, in any order.
    """

    def __init__(self, values: torch.Tensor, group_ids: torch.Tensor):
        check_shapes(values=values, group_ids=group_ids)
        values = values.double()
        self.in_baseline = ~values.isnan()  # (N,)
        self.values = torch.where(self.in_baseline, values, 0.0)
        _, self.index = torch.unique(group_ids, return_inverse=True)  # (N,) 0..groups-1
        self.num_groups = int(self.index.max()) + 1 if len(self.index) else 0
        counts = self._sum(self.in_baseline.double())  # (groups,)
        self.count = counts[self.index]  # (N,)
        self.mean = (self._sum(self.values) / counts.clamp(min=1))[self.index]  # (N,)
        self.centred = torch.where(self.in_baseline, self.values - self.mean, 0.0)
        self.std = (self._sum(self.centred**2) / (counts - 1).clamp(min=1)).sqrt()[self.index]  # (N,)
        largest = torch.zeros(self.num_groups, dtype=torch.float64, device=values.device)
        largest = largest.scatter_reduce(0, self.index, self.values.abs(), "amax")
        has_spread = (self.count > 1) & (self.std > ZERO_VARIANCE * largest[self.index])
        self.is_compared = self.in_baseline & has_spread  # (N,) rows in the baseline, in groups with spread

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self.num_groups, dtype=torch.float64, device=x.device).index_add(0, self.index, x)

    def select(self, advantages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`advantages` for rows in the baseline whose group has spread, exactly 0 for the others."""
        return torch.where(self.is_compared, advantages, 0.0).to(dtype)

    def normalised(self) -> torch.Tensor:
        """(N,) float64: (value - group mean) / (group std + 1e-4), exactly 0 for rows that `select` leaves out."""
        return self.select(self.centred / (self.std + STD_EPS), torch.float64)


@torch.no_grad()
def compute_group_advantages(returns: torch.Tensor, group_ids: torch.Tensor, *, scale: str = "group") -> torch.Tensor:
    """(R - group mean) / (std + 1e-4): GRPO (arXiv 2402.03300, sec. 4.1.2); `none` is Dr. GRPO (arXiv 2503.20783).

    Args:
        returns: (N,) total rewards; NaN for trajectories outside the baseline (advantage 0, not counted).
        group_ids: (N,) which prompt; any integers in any order.
        scale: divide by the std of the `group`, of the whole `batch`, or by nothing (`none`).

    Returns:
        (N,) advantages to broadcast over each trajectory's action tokens. Exactly 0 in groups without spread (std at
        most 1e-6 of the largest |R|) or with a single member in the baseline.

    Raises:
        ValueError: for an unknown scale.

    >>> compute_group_advantages(torch.tensor([1.0, 0.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1]), scale="none").tolist()
    [0.5, -0.5, 0.0, 0.0]
    """
    if scale not in SCALES:
        raise ValueError(f"scale={scale!r} is not one of {', '.join(map(repr, SCALES))}. Set scale to one of them.")
    group = GroupStatistics(returns, group_ids)
    advantages = group.centred
    if scale == "group":
        advantages = advantages / (group.std + STD_EPS)
    elif scale == "batch":
        counted = group.values[group.in_baseline]
        std = counted.std() if len(counted) > 1 else torch.zeros((), dtype=torch.float64, device=returns.device)
        advantages = advantages / (std + STD_EPS)
    return group.select(advantages, float_dtype(returns))


@torch.no_grad()
def compute_rloo_advantages(returns: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """R minus the mean of the *other* members: n / (n - 1) * (R - group mean). RLOO (arXiv 2402.14740).

    Args:
        returns: (N,) total rewards; NaN for trajectories outside the baseline.
        group_ids: (N,) which prompt.

    Returns:
        (N,) advantages, 0 where a group has no spread or a single member in the baseline.
    """
    group = GroupStatistics(returns, group_ids)
    return group.select(group.centred * group.count / (group.count - 1).clamp(min=1), float_dtype(returns))

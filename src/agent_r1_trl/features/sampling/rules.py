"""Which groups of a batch are trained on: those whose trajectories earned different returns.

A group is all trajectories of one prompt. How much it can teach is read from the spread of its *raw* returns: as the
environment and the reward functions paid them, before any normalisation, truncation penalty or KL penalty. All
functions are pure and see the rows of all ranks; what the trainers do with the choice is in
`group_filter.py`.

Float noise is no spread: a std of at most 1e-6 (of float64 returns: 1e-9) of the group's largest |return| is 0, and
scores that differ by no more than that are equal.

Source: RAGEN (arXiv 2504.20073, section 4.2: `top_fraction`) and RAGEN-2 (arXiv 2604.06268: the gate, `top_p`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from agent_r1_trl.objects import OwnObject, OwnObjectError
from agent_r1_trl.trajectory import Trajectory

TIE = 1e-6
"""Scores are equal whose relative difference is at most this."""


def raw_returns(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """(B,) float32, what each trajectory earned without the penalty for truncation; NaN outside the baseline."""
    values = [
        item.total_reward - item.reward_parts.get("truncation_penalty", 0.0) if item.in_baseline else math.nan
        for item in trajectories
    ]
    return torch.tensor(values, dtype=torch.float32)  # the precision of TRL's rewards, and with it their noise


def passes(trajectories: Sequence[Trajectory], pass_reward: float) -> torch.Tensor:
    """(B,) 1 for trajectories that have passed: whose `success` is at least 1/2, where the environment reports it.

    Where it reports none: whose outcome, without the penalty for truncation, is at least `pass_reward`. What turns
    earned does not count, since a failed trajectory earns it as well. NaN outside the baseline.
    """

    def has_passed(item: Trajectory) -> bool:
        success = item.numbers.get("success")
        outcome = item.outcome_reward - item.reward_parts.get("truncation_penalty", 0.0)
        return outcome >= pass_reward if success is None else success >= 0.5

    return torch.tensor([float(has_passed(item)) if item.in_baseline else math.nan for item in trajectories])


def group_scores(returns: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """The standard deviation of each group's returns over its members in the baseline, with Bessel's correction.

    Args:
        returns: (B,) raw returns of all ranks, NaN for trajectories outside the baseline.
        group_ids: (B,) integers: which prompt, in any order.

    Returns:
        (G,) float64, one score per group in ascending order of its id: 0 for a group without spread, NaN for one with
        fewer than two members in the baseline.

    >>> group_scores(torch.tensor([1.0, 1, 0, 2]), torch.tensor([0, 0, 1, 1])).tolist()
    [0.0, 1.4142135623730951]
    """
    return _spreads(returns, group_ids)[0].sqrt()


def has_signal(returns: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """(G,) whether each group has something to teach: two members in the baseline with different returns."""
    return group_scores(returns, group_ids) > 0


def signal_to_noise(returns: torch.Tensor, group_ids: torch.Tensor) -> float:
    """Std(RV) / Mean(RV), where RV are the variances of the groups; both with Bessel's correction.

    It is large where a few groups hold all the spread, and small where all groups vary alike. 0 if no group has any
    spread; NaN with fewer than two groups of at least two members in the baseline.

    >>> signal_to_noise(torch.tensor([0.0, 0, 0, 1]), torch.tensor([0, 0, 1, 1]))
    1.4142135623730951
    """
    variances = _spreads(returns, group_ids)[0]
    variances = variances[~variances.isnan()]
    if len(variances) < 2:
        return math.nan
    mean = float(variances.mean())
    return float(variances.std()) / mean if mean > 0 else 0.0


@torch.no_grad()
def select_groups(
    returns: torch.Tensor, group_ids: torch.Tensor, *, rule: str = "top_fraction", value: float
) -> torch.Tensor:
    """The rows to train on: the members in the baseline of the groups that a rule keeps.

    With s the scores of the groups (`group_scores`) in descending order, equal ones by ascending id:

    - `top_fraction`: the first max(1, floor(value * G)) of the G groups that have members in the baseline.
    - `top_p`: the shortest prefix whose sum is at least value * sum(s); never a group with score 0.
    - `min_p`: every group with s >= value * max(s); never one with score 0.

    Returns:
        (B,) bool; all False if no group has any spread.

    >>> returns, groups = torch.tensor([1.0, 1, 0, 1, 0, 3]), torch.tensor([0, 0, 1, 1, 2, 2])
    >>> select_groups(returns, groups, rule="top_fraction", value=0.4).tolist()
    [False, False, False, False, True, True]
    """
    variances, noise, index = _spreads(returns, group_ids)
    scores = variances.sqrt().nan_to_num(0.0)
    in_baseline = ~returns.isnan()
    kept = torch.zeros_like(scores, dtype=torch.bool)
    if not bool((scores > 0).any()):
        return torch.zeros_like(in_baseline)
    counted = set(index[in_baseline].tolist())
    order = [group for group in _descending(scores, noise) if group in counted]
    if rule == "top_fraction":
        order = order[: max(1, math.floor(value * len(order) * (1 + TIE)))]
    else:
        order = [group for group in order if scores[group] > 0]
    if rule == "top_p":
        sums = scores[order].cumsum(0)
        order = order[: 1 + int((sums < value * sums[-1] * (1 - TIE)).sum())]
    elif rule == "min_p":
        order = [group for group in order if scores[group] >= value * scores.max() * (1 - TIE)]
    kept[order] = True
    return kept[index] & in_baseline


def apply_own(rule: OwnObject, returns: torch.Tensor, group_size: int) -> torch.Tensor:
    """The rows (B,) to train on, by a rule of the user's own, from (G, n) returns to the (G,) groups that it keeps.

    Raises:
        OwnObjectError: it raises, or returns something else.
    """
    groups = returns.view(-1, group_size)
    kept = rule(groups.clone())
    if not isinstance(kept, torch.Tensor) or kept.dtype != torch.bool or kept.shape != groups.shape[:1]:
        raise OwnObjectError(
            f"sampling.filter_groups={str(rule)!r} returned {kept!r:.200}. Return a bool tensor of shape "
            f"({len(groups)},), an entry for each group."
        )
    return kept.to(returns.device).repeat_interleave(group_size) & ~returns.isnan()


def _spreads(returns: torch.Tensor, group_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(G,) variance of each group, (G,) the float noise in its std, (B,) the place of each row's group among the G."""
    values = returns.double()
    precision = max(1e-9, 8 * torch.finfo(returns.dtype).eps) if returns.is_floating_point() else 1e-9
    groups, index = group_ids.unique(return_inverse=True)
    variances = torch.full((len(groups),), math.nan, dtype=torch.float64, device=returns.device)
    noise = torch.zeros_like(variances)
    for group in range(len(groups)):
        members = values[index == group]
        members = members[~members.isnan()]
        if len(members) < 2:
            continue
        noise[group] = precision * members.abs().max()
        variance = members.var()
        variances[group] = variance if variance.sqrt() > noise[group] else 0.0
    return variances, noise, index


def _descending(stds: torch.Tensor, noise: torch.Tensor) -> list[int]:
    """Places of the groups, the largest std first; equal ones (up to float noise) by ascending place."""
    values, margins = stds.tolist(), noise.tolist()
    order: list[int] = []
    ties: list[int] = []
    for group in sorted(range(len(values)), key=lambda place: -values[place]):
        if ties:
            first = ties[0]
            margin = TIE * values[first] + max(margins[first], margins[group])
            if values[first] - values[group] > margin or (values[group] == 0) != (values[first] == 0):
                order += sorted(ties)
                ties = []
        ties.append(group)
    return order + sorted(ties)

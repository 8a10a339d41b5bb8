"""Which groups of a batch are trained on: those whose trajectories earned different returns.

A group is all trajectories of one prompt. How much it can teach is read from the spread of its returns as they are
trained on: with the weights and schedules of process and outcome rewards, before any normalisation, truncation penalty
or KL penalty. All functions are pure and see the rows of all ranks; what the trainers do with the choice is in
`group_filter.py`.

Float noise is no spread: a std of at most 1e-6 (of float64 returns: 1e-9) of the group's largest |return| is 0, and
scores that differ by no more than that are equal. Returns below 1e-4 count as 1e-4 here: rewards that cancel out
leave 1e-17, and beside the 1e-4 that advantages add to a std such returns teach nothing.

Source: RAGEN (arXiv 2504.20073, section 4.2: `top_fraction`) and RAGEN-2 (arXiv 2604.06268: the gate, `top_p`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from accelerate import Accelerator

from agent_r1_trl.advantages.group import STD_EPS
from agent_r1_trl.objects import OwnObject, OwnObjectError
from agent_r1_trl.trajectory import Trajectory

TIE = 1e-6
"""Scores are equal whose relative difference is at most this."""


def raw_returns(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """(B,) float32, what each trajectory earned without the penalty for truncation; NaN outside the baseline."""
    values = [item.total_reward - item.truncation_penalty if item.in_baseline else math.nan for item in trajectories]
    return torch.tensor(values, dtype=torch.float32)  # the precision of TRL's rewards, and with it their noise


def passes(trajectories: Sequence[Trajectory], pass_reward: float) -> torch.Tensor:
    """(B,) 1 for trajectories that have passed: whose `success` is at least 1/2, where the environment reports it.

    Where it reports none: whose outcome, without the penalty for truncation, is at least `pass_reward`. What turns
    earned does not count, since a failed trajectory earns it as well. NaN outside the baseline.
    """

    def has_passed(item: Trajectory) -> bool:
        success = item.numbers.get("success")
        outcome = item.outcome_reward - item.truncation_penalty
        return outcome >= pass_reward if success is None else success >= 0.5

    return torch.tensor([float(has_passed(item)) if item.in_baseline else math.nan for item in trajectories])


def group_scores(groups: torch.Tensor) -> torch.Tensor:
    """The standard deviation of each group's returns over its members in the baseline, with Bessel's correction.

    Args:
        groups: (G, n) returns of all ranks, NaN for trajectories outside the baseline; or (G, n, C), of estimators
            that compare members by C returns, whose variances are added up.

    Returns:
        (G,) float64: 0 for a group without spread, NaN for one with fewer than two members in the baseline.

    >>> group_scores(torch.tensor([[1.0, 1], [0, 2]])).tolist()
    [0.0, 1.4142135623730951]
    """
    return _spreads(groups)[0].sqrt()


def has_signal(groups: torch.Tensor) -> torch.Tensor:
    """(G,) whether each group has something to teach: two members in the baseline with different returns."""
    return group_scores(groups) > 0


def signal_to_noise(groups: torch.Tensor) -> float:
    """Std(RV) / Mean(RV), where RV are the variances of the groups; both with Bessel's correction.

    It is large where a few groups hold all the spread, and small where all groups vary alike. 0 if no group has any
    spread; NaN with fewer than two groups of at least two members in the baseline.

    >>> signal_to_noise(torch.tensor([[0.0, 0], [0, 1]]))
    1.4142135623730951
    """
    variances, _ = _spreads(groups)
    variances = variances[~variances.isnan()]
    if len(variances) < 2:
        return math.nan
    mean = float(variances.mean())
    return float(variances.std()) / mean if mean > 0 else 0.0


@torch.no_grad()
def select_groups(groups: torch.Tensor, *, rule: str = "top_fraction", value: float) -> torch.Tensor:
    """(G,) bool, the groups that a rule keeps; none if no group has any spread.

    With s the scores of the groups (`group_scores`) in descending order, equal ones by ascending place:

    - `top_fraction`: the first max(1, floor(value * G)) of the G groups that have members in the baseline.
    - `top_p`: the shortest prefix whose sum is at least value * sum(s); never a group with score 0.
    - `min_p`: every group with s >= value * max(s); never one with score 0.

    >>> select_groups(torch.tensor([[1.0, 1], [0, 1], [0, 3]]), rule="top_fraction", value=0.4).tolist()
    [False, False, True]
    """
    variances, noise = _spreads(groups)
    scores = variances.sqrt().nan_to_num(0.0)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    if not bool((scores > 0).any()):
        return kept
    has_members = (~groups.isnan()).flatten(1).any(dim=1).tolist()
    order = [group for group in _descending(scores, noise) if has_members[group]]
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
    return kept


def apply_own(rule: OwnObject, groups: torch.Tensor) -> torch.Tensor:
    """(G,) bool, the groups that a rule of the user's own keeps.

    Raises:
        OwnObjectError: it raises, or returns something else.
    """
    kept = rule(groups.clone())
    if not isinstance(kept, torch.Tensor) or kept.dtype != torch.bool or kept.shape != groups.shape[:1]:
        raise OwnObjectError(
            f"sampling.filter_groups={str(rule)!r} returned {kept!r:.200}. Return a bool tensor of shape "
            f"({len(groups)},), an entry for each group."
        )
    return kept.to(groups.device)


def _spreads(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(G,) variance of each group, and (G,) the float noise in its std."""
    precision = max(1e-9, 8 * torch.finfo(groups.dtype).eps)
    variances = torch.full((len(groups),), math.nan, dtype=torch.float64, device=groups.device)
    noise = torch.zeros_like(variances)
    columns = groups.double() if groups.dim() == 3 else groups.double().unsqueeze(2)  # (G, n, C)
    for place, group in enumerate(columns):
        members = group[~group.isnan().any(dim=1)]  # (m, C)
        if len(members) < 2:
            continue
        noises = precision * members.abs().amax(dim=0).clamp(min=STD_EPS)  # (C,)
        spreads = members.var(dim=0)  # (C,)
        noise[place] = noises.max()
        variances[place] = torch.where(spreads.sqrt() > noises, spreads, 0.0).sum()
    return variances, noise


def trained_groups(
    returns: Sequence[Sequence[float]], in_baseline: torch.Tensor, accelerator: Accelerator, *, group_size: int
) -> torch.Tensor:
    """(G, n, C) float32, the C returns of the trajectories of all ranks; NaN outside the baseline.

    Args:
        returns: C of each of this rank's B trajectories. All ranks must call it.
        in_baseline: (B,) bool.
        accelerator: of the trainer.
        group_size: n, trajectories of one prompt.
    """
    own = torch.tensor(returns, dtype=torch.float32, device=in_baseline.device)  # the precision of TRL's rewards
    own = own.masked_fill(~in_baseline.unsqueeze(1), math.nan)  # (B, C)
    return accelerator.gather(own).view(-1, group_size, own.shape[1])


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

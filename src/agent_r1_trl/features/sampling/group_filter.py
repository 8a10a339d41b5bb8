"""Which groups of a rollout are trained on: those that can teach something (`sampling.filter_groups`).

Which these are: `rules.py`. What becomes of the others: `update/dealing.py`; of steps without any:
`trainers/policy_loss.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from agent_r1_trl.features.sampling.rules import apply_own, select_groups, signal_to_noise, trained_groups
from agent_r1_trl.features.sampling.settings import DEFAULT_VALUES, SamplingSettings
from agent_r1_trl.objects import OwnObject
from agent_r1_trl.trainers.callbacks import RolloutCallback
from agent_r1_trl.trainers.rollout_batch import ScoredBatch, UpdateBatch
from agent_r1_trl.update.entries import KEPT_SHARE, Inputs


class GroupFilter(RolloutCallback):
    """The filter of a run, which can be switched on and off between two rollouts."""

    name = "group_filter"

    def __init__(self, args: Any) -> None:
        self.settings: SamplingSettings = args.sampling
        """Settings that begin with `filter_`; may be replaced between two rollouts, on all ranks alike."""
        self._share: float | None = None
        """Share of the last rollout that is kept, where its loss is multiplied by it."""

    def keep(self, batch: ScoredBatch) -> torch.Tensor | None:
        """The trajectories of the groups that are trained on, and `filter/*`. All ranks must call it."""
        settings = self.settings
        rule = self.settings.filter_groups
        self._share = None
        if rule is None:
            return None
        accelerator, in_baseline = self.trainer.accelerator, batch.in_baseline
        size = batch.position.group_size
        compared = self.trainer.compared_returns(batch.trajectories)
        groups = trained_groups(compared, in_baseline, accelerator, group_size=size)  # (G, n, C)
        is_outside = groups.isnan().any(dim=2)  # (G, n)
        ratio = signal_to_noise(groups)
        is_applied = settings.filter_when is None or ratio > settings.filter_when
        if isinstance(rule, OwnObject):
            totals = self.trainer.credit.trained_returns(batch.trajectories, self.trainer._progress)
            returns = [[value] for value in totals]
            chosen = apply_own(rule, trained_groups(returns, in_baseline, accelerator, group_size=size).squeeze(2))
        else:
            value = DEFAULT_VALUES[rule] if settings.filter_value is None else settings.filter_value
            chosen = select_groups(groups, rule=rule, value=value)
            # Where nothing can be kept there is nothing to train on either, whatever the gate says.
            is_applied = is_applied or not bool(chosen.any())
        kept = (chosen.unsqueeze(1) & ~is_outside).flatten()  # (N,)
        share = int(kept.sum()) / max(1, int((~is_outside).sum())) if is_applied else 1.0
        metrics = {"kept_share": share, "signal_to_noise": ratio, "is_applied": float(is_applied)}
        self.trainer.add_metrics({f"filter/{name}": value for name, value in metrics.items()})
        if not is_applied:
            return None
        self._share = share if settings.filter_loss_scaling and share > 0 else None
        first = accelerator.process_index * len(compared)
        return kept[first : first + len(compared)]

    def rollout_end(self, batch: UpdateBatch, output: Inputs) -> None:
        """Say what the loss of this rollout is multiplied by."""
        if self._share is not None:
            output[KEPT_SHARE] = torch.tensor(self._share, device=batch.in_baseline.device)

    def check_loss(self, loss: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """The loss of a micro-batch times the share that is kept, if that was asked for.

        Loss terms over tokens of their own, which are not filtered, were divided by it (`add_terms`).
        """
        return loss * inputs.get(KEPT_SHARE, 1.0)

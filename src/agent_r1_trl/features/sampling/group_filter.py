"""Which groups of a rollout are trained on: those that can teach something (`sampling.filter_groups`).

Which these are: `rules.py`. What becomes of the others: `update/layout.py`; of steps without any:
`trainers/policy_loss.py`.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch

from agent_r1_trl.features.sampling.checks import CLASHES, find_rule
from agent_r1_trl.features.sampling.rules import apply_own, raw_returns, select_groups, signal_to_noise
from agent_r1_trl.features.sampling.settings import DEFAULT_VALUES, SamplingSettings
from agent_r1_trl.objects import OwnObject
from agent_r1_trl.settings import find_clashes, refuse
from agent_r1_trl.trainers.callbacks import RolloutCallback
from agent_r1_trl.trainers.rollouts import RolloutBatch

KEPT_SHARE = "kept_share"
"""Entry of TRL's batch: what its loss is multiplied by."""


@dataclass(frozen=True)
class FilterSettings:
    """What the filter does; the fields are those of the setting `sampling` that begin with `filter_`."""

    rule: str | None = None
    """None: nothing is filtered."""
    value: float = 0.0
    statistic: str = "std"
    when: float | None = None
    loss_scaling: bool = False


class GroupFilter(RolloutCallback):
    """The filter of a run, which can be switched on and off between two rollouts.

    Args:
        args: of the trainer.
    """

    name = "group_filter"

    def __init__(self, args: Any) -> None:
        self.settings = FilterSettings()
        self._share: float | None = None
        """Share of the last rollout that is kept, where its loss is multiplied by it."""
        self._args = args
        asked = args.sampling
        if asked.filter_groups is not None:
            self.enable(
                asked.filter_groups,
                asked.filter_value,
                statistic=asked.filter_statistic,
                when=asked.filter_when,
                loss_scaling=asked.filter_loss_scaling,
            )

    def enable(
        self,
        rule: Any,
        value: float | None = None,
        *,
        statistic: str = "std",
        when: float | None = None,
        loss_scaling: bool = False,
    ) -> None:
        """Filter from the next rollout on. All ranks must do so in the same step.

        Args:
            rule: `top_fraction`, `top_p` or `min_p`, as for `select_groups`; or a function of your own, or its path.
            value: of the rule; None for its usual one.
            statistic: `std` or `var`.
            when: filter only where the signal-to-noise ratio is above this.
            loss_scaling: multiply the loss by the share of rows that are kept.

        Raises:
            ValueError: the run cannot be filtered, or not so; names the option and the cure.
        """
        rule = find_rule(rule)
        given = {"groups": rule, "value": value, "statistic": statistic, "when": when, "loss_scaling": loss_scaling}
        asked = copy.copy(self._args)
        asked.sampling = SamplingSettings.read("sampling", {f"filter_{key}": item for key, item in given.items()})
        refuse(find_clashes(asked, CLASHES))
        value = DEFAULT_VALUES.get(rule, math.nan) if value is None else value
        self.settings = FilterSettings(rule, value, statistic, when, loss_scaling)

    def disable(self) -> None:
        """Train on everything from the next rollout on."""
        self.settings = FilterSettings()

    def keep(self, batch: RolloutBatch) -> torch.Tensor | None:
        """The trajectories of the groups that are trained on, and `filter/*`. All ranks must call it."""
        settings, self._share = self.settings, None
        if settings.rule is None:
            return None
        accelerator, in_baseline = self.trainer.accelerator, batch.in_baseline
        own = raw_returns(batch.trajectories).to(in_baseline.device).masked_fill(~in_baseline, math.nan)
        returns = accelerator.gather(own)  # (N,)
        group_ids = torch.arange(len(returns), device=returns.device) // batch.position.group_size
        ratio = signal_to_noise(returns, group_ids)
        is_applied = settings.when is None or ratio > settings.when
        if isinstance(settings.rule, OwnObject):
            kept = apply_own(settings.rule, returns, batch.position.group_size)
        else:
            kept = select_groups(
                returns, group_ids, rule=settings.rule, value=settings.value, statistic=settings.statistic
            )
            # Where nothing can be kept there is nothing to train on either, whatever the gate says.
            is_applied = is_applied or not bool(kept.any())
        share = int(kept.sum()) / max(1, int((~returns.isnan()).sum())) if is_applied else 1.0
        metrics = {"kept_share": share, "signal_to_noise": ratio, "is_applied": float(is_applied)}
        self.trainer.add_metrics({f"filter/{name}": value for name, value in metrics.items()})
        if not is_applied:
            return None
        self._share = share if settings.loss_scaling else None
        first = accelerator.process_index * len(own)
        return kept[first : first + len(own)]

    def rollout_end(self, batch: RolloutBatch, output: dict[str, Any]) -> None:
        """Say what the loss of this rollout is multiplied by."""
        if self._share is not None:
            output[KEPT_SHARE] = torch.tensor(self._share, device=batch.in_baseline.device)

    def check_loss(self, loss: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """The loss of a micro-batch times the share that is kept, if that was asked for."""
        return loss * inputs.get(KEPT_SHARE, 1.0)

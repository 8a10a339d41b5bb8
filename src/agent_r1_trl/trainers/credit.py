"""From the rewards of trajectories to the advantages of this rank's rows.

Baselines and whitening need every row of the generation batch, so the rows of all ranks are gathered first and each
rank keeps its own slice of the result. The estimators themselves are in `agent_r1_trl.advantages`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object

from agent_r1_trl.advantages import masked_mean
from agent_r1_trl.advantages.estimators import Credit, CreditInputs, CreditSettings
from agent_r1_trl.advantages.gae import turn_starts
from agent_r1_trl.advantages.group import ZERO_VARIANCE
from agent_r1_trl.advantages.masked import whiten_by, whitening
from agent_r1_trl.advantages.seats import SeatRows
from agent_r1_trl.trainers.config import MultiTurnConfig
from agent_r1_trl.trainers.log_means import TokenMean
from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.credit_inputs import read_credit_inputs, weighted_turn_rewards
from agent_r1_trl.update.entries import Inputs
from agent_r1_trl.update.losses import kl_in_reward
from agent_r1_trl.update.rows import TrainingRows

if TYPE_CHECKING:
    from accelerate import Accelerator

    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

READ = ("gamma", "gamma_turn", "lam", "lam_turn", "step_weight")
"""Settings of estimators whose values are recorded where they are read."""


class CreditEstimator:
    """Estimates advantages with the estimator and the weights that the training arguments name."""

    def __init__(self, args: MultiTurnConfig, accelerator: Accelerator):
        self.args = args
        self.accelerator = accelerator
        self.estimator = args.estimator
        self.facts: dict[str, Any] = {}
        """The facts behind the last result, besides the trajectories; for the record."""
        self.bootstrap_values: torch.Tensor | None = None
        """(B,) the critic's values that stood behind the last tokens of truncated trajectories in that result, 0 for
        others; None without any."""

    # ---------------------------------------------------------------- returns as they are trained on

    def weights(self, progress: float) -> dict[str, float]:
        """The weights of process and outcome rewards, at a share of the run."""
        process = self.args.process_reward_weight * schedule_factor(self.args.process_reward_schedule, progress)
        return {"process": process, "outcome": self.args.outcome_reward_weight}

    @property
    def weighs_parts(self) -> bool:
        """Whether advantages of process and outcome rewards are estimated apart."""
        return self.args.separate_process_advantages or self.estimator.weighs_parts

    def compared_returns(
        self, trajectories: Sequence[Trajectory], progress: float, *, with_penalty: bool
    ) -> list[list[float]]:
        """Per trajectory, the returns by which the estimator compares it with the others; C of them.

        They are weighted as they are trained on, before any normalisation. Most estimators compare one return. Where
        the parts are estimated apart, process and outcome are two (that of `turn_grpo` discounted per turn). `gigpo`
        compares the whole return, and what follows the state that all members of a group begin in.

        Where any rank has seats, each of them is compared by its own, in the order of their names. All ranks must call
        it.

        Args:
            trajectories: B of them.
            progress: share of the run that is over.
            with_penalty: whether `truncation_penalty` counts, which is no signal to a filter.
        """
        weights = self.weights(progress)
        everywhere = gather_object([list(item.seat_rewards) for item in trajectories])
        seats = sorted({seat for of_item in everywhere for seat in of_item})
        compared = []
        for item in trajectories:
            penalty = 0.0 if with_penalty else item.truncation_penalty
            row: list[float] = []
            for seat in seats or [None]:
                own = [turn for turn in item.turns if not item.seat_rewards or turn.seat == seat]
                turns = [weights["process"] * turn.reward for turn in own]
                row += self._compared(turns, weights["outcome"] * (item.outcome_of(seat) - penalty))
            compared.append(row)
        return compared

    def _compared(self, turns: list[float], outcome: float) -> list[float]:
        """The returns that a row of the estimator is compared by; weighted rewards of its turns, and its outcome."""
        gamma, process = credit_settings(self.args).gamma_turn, math.fsum(turns)
        if self.estimator.name == "turn_grpo":
            return [_discounted(turns, gamma), outcome]
        if self.weighs_parts:
            return [process, outcome]
        if self.estimator.name == "gigpo":
            rewards = turns or [0.0]
            return [process + outcome, _discounted([*rewards[:-1], rewards[-1] + outcome], gamma)]
        return [process + outcome]

    def trained_returns(self, trajectories: Sequence[Trajectory], progress: float) -> list[float]:
        """Per trajectory, its return with the weights of process and outcome, without `truncation_penalty`."""
        weights, returns = self.weights(progress), []
        for item in trajectories:
            paid = weights["outcome"] * item.truncation_penalty
            total = weights["process"] * item.process_reward + weights["outcome"] * item.outcome_reward
            returns.append(total - paid)
        return returns

    # ---------------------------------------------------------------- advantages

    def estimate(
        self,
        trajectories: Sequence[Trajectory],
        *,
        mask: torch.Tensor,
        in_baseline: torch.Tensor,
        group_size: int,
        progress: float,
        bootstrap_values: torch.Tensor | None = None,
        **given: object,
    ) -> tuple[Credit, dict[str, float]]:
        """This rank's slice of the estimator's result on the rows of all ranks, and `credit/*` metrics.

        All ranks must call it. What is not named here is as in `CreditInputs`, for this rank's B rows.

        Args:
            trajectories: B of them.
            mask: (B, T) positions that estimators see; empty for rows that are not in the loss.
            in_baseline: (B,) bool; the rows of the others get advantage 0.
            group_size: trajectories of one prompt, which are consecutive rows.
            progress: share of the run that is over.
            bootstrap_values: (B,), as in `CreditInputs`; kept for the record.
            **given: `kl_rewards` and `values`, (B, T), `is_kept`, (B,), `columns`.
        """
        self.bootstrap_values = bootstrap_values
        weights = self.weights(progress)
        weighs_parts = self.weighs_parts
        factors = dict.fromkeys(weights, 1.0) if weighs_parts else weights
        scales: dict[str, float] = {}
        if self.args.normalize_process_rewards:
            counted = [item for item, counts in zip(trajectories, in_baseline.tolist(), strict=True) if counts]
            scales = source_scales(gather_object(source_values(counted)))
        first = self.accelerator.process_index * len(trajectories)
        local = read_credit_inputs(
            trajectories,
            mask=mask,
            in_baseline=in_baseline,
            group_ids=torch.arange(first, first + len(trajectories), device=mask.device) // group_size,
            turn_rewards=weighted_turn_rewards(trajectories, weight=factors["process"], source_scales=scales),
            outcome_weight=factors["outcome"],
            settings=credit_settings(self.args),
            bootstrap_values=bootstrap_values,
            **given,
        )
        seats = SeatRows(gather_credit_inputs(local, self.accelerator))
        inputs = seats.inputs
        metrics = {"credit/process_weight": weights["process"]}
        if weighs_parts:
            credits = {name: self.estimator.estimate(inputs.only(name)) for name in weights}
            parts = {name: weights[name] * item.advantages for name, item in credits.items()}
            sizes = {name: masked_mean(part.abs(), inputs.mask).item() for name, part in parts.items()}  # of (N, T)
            metrics |= {f"credit/{name}_advantage_abs": size for name, size in sizes.items()}
            credit = Credit(advantages=parts["process"] + parts["outcome"])
        else:
            credit = self._whitened(self.estimator.estimate(inputs), inputs)
            credits = {"": credit}
        if self.estimator.name == "gigpo":
            metrics["credit/step_group_size"] = mean_step_group_size(inputs)
        self.facts = {
            **{name: getattr(inputs.settings, name) for name in self.estimator.options if name in READ},
            **{f"{name}_weight": weight for name, weight in weights.items()},
            "has_parts": weighs_parts,
            "source_scales": scales,
            "whitening": {name: item.whitening for name, item in credits.items() if item.whitening is not None},
        }
        credit = seats.joined(credit)
        own, length = slice(first, first + len(trajectories)), mask.shape[1]
        returns = None if credit.returns is None else credit.returns[own, :length].float()
        return Credit(advantages=credit.advantages[own, :length].float(), returns=returns), metrics

    def _whitened(self, credit: Credit, inputs: CreditInputs) -> Credit:
        if not inputs.settings.whiten_advantages:
            return credit
        raw, mask = credit.advantages, inputs.mask
        # Where all tokens of a turn have one advantage, mean and variance are those of turns.
        counted = turn_starts(inputs.turn_ids, mask) if self.estimator.weighs_turns else mask
        credit.whitening = whitening(raw, counted, inputs.kept_mask)
        credit.advantages = whiten_by(raw, mask, *credit.whitening)
        return credit


def credit_settings(args: MultiTurnConfig) -> CreditSettings:
    """The arguments that estimators read. Those of the PPO trainer keep their defaults in the other one."""
    names = [item.name for item in dataclasses.fields(CreditSettings)]
    return CreditSettings(**{name: getattr(args, name) for name in names if hasattr(args, name)})


# -------------------------------------------------------------------- reading trajectories


def _discounted(rewards: Sequence[float], gamma: float) -> float:
    """The discounted sum of the rewards of a trajectory's turns."""
    total = 0.0
    for reward in reversed(rewards):
        total = reward + gamma * total
    return total


def source_values(trajectories: Sequence[Trajectory]) -> list[dict[str, float]]:
    """Per trajectory, the sum of its process rewards by source; "" is what the environment did not attribute."""
    rows = []
    for trajectory in trajectories:
        paid: dict[str, list[float]] = {"": []} if trajectory.turns else {}
        for turn in trajectory.turns:
            for name, part in turn.reward_parts.items():
                paid.setdefault(name, []).append(part)
            paid[""] += [turn.reward, *(-part for part in turn.reward_parts.values())]
        rows.append({name: _sum(parts) for name, parts in paid.items()})
    return rows


def _sum(parts: Sequence[float]) -> float:
    """The sum; 0 where it is the rounding of parts that cancel out."""
    total = math.fsum(parts)
    return total if abs(total) > ZERO_VARIANCE * math.fsum(map(abs, parts)) else 0.0


def source_scales(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Standard deviation (ddof 1) over trajectories of each process reward source; sources without spread keep 1."""
    scales = {}
    for name in sorted({name for row in rows for name in row}):
        values = torch.tensor([row.get(name, 0.0) for row in rows], dtype=torch.float64)
        std = float(values.std()) if len(values) > 1 else 0.0
        scales[name] = std if std > ZERO_VARIANCE * float(values.abs().max()) else 1.0
    return scales


def mean_step_group_size(inputs: CreditInputs) -> float:
    """Mean number of turns in the groups that GiGPO compares; 1 says that no state recurs."""
    is_counted = (inputs.anchor_ids >= 0) & inputs.in_baseline.unsqueeze(1)  # (N, K)
    groups = inputs.group_ids.unsqueeze(1).expand_as(inputs.anchor_ids)
    states = torch.stack([groups[is_counted], inputs.anchor_ids[is_counted]], dim=-1)
    return len(states) / max(1, len(torch.unique(states, dim=0)))


def gather_credit_inputs(inputs: CreditInputs, accelerator: Accelerator) -> CreditInputs:
    """The rows of all ranks in data order, ragged T and K padded to the longest."""
    if accelerator.num_processes == 1:
        return inputs
    padding = {"turn_ids": -1, "anchor_ids": -1, "turn_seats": -1}

    def gathered(name: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = tensor.dtype
        if dtype == torch.bool:
            tensor = tensor.to(torch.uint8)  # padding turns bool into int64, on the ranks that it lengthens alone
        if tensor.dim() == 2:
            tensor = accelerator.pad_across_processes(tensor, dim=1, pad_index=padding.get(name, 0))
        return accelerator.gather(tensor).to(dtype)

    tensors: dict[str, Any] = {name: x for name, x in vars(inputs).items() if isinstance(x, torch.Tensor)}
    tensors = {name: gathered(name, tensor) for name, tensor in tensors.items()}
    columns = {name: gathered(name, column) for name, column in inputs.columns.items()}
    return dataclasses.replace(inputs, columns=columns, **tensors)


def kl_rewards(
    trainer: MultiTurnTrainer, output: Inputs, mask: torch.Tensor, rows: TrainingRows
) -> torch.Tensor | None:
    """(B, T) -beta * k1 on the estimator's positions, and the metric `kl`; None with the KL term in the loss."""
    if trainer.args.kl_placement == "loss" or trainer.beta == 0.0:
        return None
    old = rows.to_time(output["old_per_token_logps"])
    reference = rows.to_time(output["ref_per_token_logps"])
    penalties = kl_in_reward(torch.zeros_like(old), old, reference, mask, beta=trainer.beta)
    sums = trainer.accelerator.reduce(torch.stack([penalties.sum(), mask.sum().to(penalties)]), reduction="sum")
    total, num_tokens = sums.tolist()
    trainer.add_metrics({"kl": TokenMean(-total / trainer.beta / max(1.0, num_tokens), num_tokens)})
    return penalties


def schedule_factor(schedule: str, progress: float) -> float:
    """1 at the start of a run; with `linear` and `cosine` 0 at its end. `progress`: share of the run that is over.

    >>> schedule_factor("linear", 0.25), schedule_factor("constant", 0.25)
    (0.75, 1.0)
    """
    progress = min(1.0, max(0.0, progress))
    return {"linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}.get(schedule, 1.0)

"""From rewards to advantages: one table of estimators over the rows of all ranks.

prompt -> environment reset -> rollout (policy <-> tools) -> Trajectory -> [rewards on tokens] -> filter
       -> batch -> [advantages] -> loss -> step -> sync weights -> next rollout

Baselines and whitening need every row of the generation batch, so rows are gathered first and each rank keeps its own
slice of the result. Covered here: weights of process and outcome rewards, gathering, estimators, their two parts.
Not covered: the estimators' mathematics (`agent_r1_trl.advantages`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agent_r1_trl.advantages import (
    compute_bilevel_gae,
    compute_gae,
    compute_gigpo_advantages,
    compute_group_advantages,
    compute_reinforce_pp_advantages,
    compute_reinforce_pp_baseline_advantages,
    compute_rloo_advantages,
    compute_turn_group_advantages,
    masked_whiten,
)
from agent_r1_trl.advantages.gae import extend_turn_ids
from agent_r1_trl.trajectory import Message, Trajectory
from agent_r1_trl.update.batching import pad_right


@dataclass(kw_only=True)
class CreditInputs:
    """What estimators read: N rows, T completion tokens, K turns."""

    mask: torch.Tensor
    """(N, T) positions that estimators see: action tokens of live rows, or all their tokens in the ablation."""
    turn_ids: torch.Tensor
    """(N, T) -1 outside action tokens."""
    process: torch.Tensor
    """(N, T) process rewards on tokens."""
    outcome: torch.Tensor
    """(N, T) outcome rewards on tokens."""
    turn_rewards: torch.Tensor
    """(N, K) process rewards by turn."""
    outcome_rewards: torch.Tensor
    """(N,) NaN for rows that leave the baseline."""
    anchor_ids: torch.Tensor
    """(N, K) which observation stood before the turn; -1 behind a row's last turn."""
    kl_rewards: torch.Tensor | None = None
    """(N, T) the KL penalty as a reward, <= 0 on average; None with the KL term in the loss."""
    values: torch.Tensor | None = None
    """(N, T) the critic's values of action tokens."""
    bootstrap_values: torch.Tensor | None = None
    """(N,) the critic's value behind the last token of truncated rows, 0 for the others."""

    @property
    def returns(self) -> torch.Tensor:
        """(N,) turn rewards + outcome; NaN for rows that leave the baseline."""
        return self.turn_rewards.sum(dim=1) + self.outcome_rewards

    @property
    def token_rewards(self) -> torch.Tensor:
        """(N, T) everything that stands on tokens, the KL penalty included."""
        rewards = self.process + self.outcome
        return rewards if self.kl_rewards is None else rewards + self.kl_rewards

    def only(self, part: str) -> CreditInputs:
        """A copy with the `process` or the `outcome` rewards alone; values and KL stay with the outcome."""
        if part == "outcome":
            zero = {"process": torch.zeros_like(self.process), "turn_rewards": torch.zeros_like(self.turn_rewards)}
            return dataclasses.replace(self, **zero)  # type: ignore[arg-type]
        return dataclasses.replace(
            self,
            outcome=torch.zeros_like(self.outcome),
            outcome_rewards=torch.zeros_like(self.outcome_rewards) + 0 * self.outcome_rewards,  # NaN stays
            kl_rewards=None,
            values=None if self.values is None else torch.zeros_like(self.values),
            bootstrap_values=None,
        )


@dataclass(kw_only=True)
class Credit:
    """What an estimator returns: (N, T) tensors, 0 outside the mask."""

    advantages: torch.Tensor
    returns: torch.Tensor | None = None
    """The critic's targets."""


# -------------------------------------------------------------------- reading trajectories


def weighted_turn_rewards(
    trajectories: Sequence[Trajectory], *, weight: float, source_scales: dict[str, float]
) -> list[list[float]]:
    """Per trajectory, its turns' process rewards times `weight`, every source divided by its scale (if it has one)."""

    def value(parts: dict[str, float], total: float) -> float:
        if not source_scales:
            return weight * total
        rest = total - math.fsum(parts.values())  # what the environment did not attribute
        scaled = math.fsum(part / source_scales.get(name, 1.0) for name, part in parts.items())
        return weight * (scaled + rest / source_scales.get("", 1.0))

    return [[value(turn.reward_parts, turn.reward) for turn in item.turns] for item in trajectories]


def source_values(trajectories: Sequence[Trajectory]) -> list[dict[str, float]]:
    """Per trajectory, the sum of its process rewards by source; "" is what the environment did not attribute."""
    rows = []
    for trajectory in trajectories:
        row: dict[str, float] = {}
        for turn in trajectory.turns:
            for name, part in turn.reward_parts.items():
                row[name] = row.get(name, 0.0) + part
            row[""] = row.get("", 0.0) + turn.reward - math.fsum(turn.reward_parts.values())
        rows.append(row)
    return rows


def source_scales(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Standard deviation (ddof 1) over trajectories of each process reward source; sources without spread keep 1."""
    scales = {}
    for name in sorted({name for row in rows for name in row}):
        values = torch.tensor([row.get(name, 0.0) for row in rows], dtype=torch.float64)
        std = float(values.std()) if len(values) > 1 else 0.0
        scales[name] = std if std > 1e-6 * float(values.abs().max()) else 1.0
    return scales


def read_credit_inputs(
    trajectories: Sequence[Trajectory],
    *,
    mask: torch.Tensor,
    lost: torch.Tensor,
    turn_rewards: list[list[float]],
    outcome_weight: float,
) -> CreditInputs:
    """Tensors of this rank's trajectories, on the device of `mask`.

    Args:
        trajectories: B of them.
        mask: (B, T) positions that estimators see; rows of `lost` trajectories are emptied here.
        lost: (B,) bool, trajectories that leave every baseline.
        turn_rewards: per trajectory one (weighted) value per turn.
        outcome_weight: factor of the outcome.
    """
    length, device = mask.shape[1], mask.device
    width = max([1, *(len(item.turns) for item in trajectories)])

    def on_tokens(rows: list[list[float]]) -> torch.Tensor:
        return pad_right(rows, 0.0, length=length, dtype=torch.float32).to(device)

    process = [t.token_rewards(turn_rewards=r, outcome=0.0) for t, r in zip(trajectories, turn_rewards, strict=True)]
    outcome = [
        t.token_rewards(turn_rewards=[0.0] * len(t.turns), outcome=outcome_weight * t.outcome_reward)
        for t in trajectories
    ]
    outcome_rewards = torch.tensor([outcome_weight * t.outcome_reward for t in trajectories], device=device)
    return CreditInputs(
        mask=mask.bool() & ~lost.unsqueeze(1),
        turn_ids=pad_right([t.turn_ids for t in trajectories], -1, length=length, dtype=torch.long).to(device),
        process=on_tokens(process),
        outcome=on_tokens(outcome),
        turn_rewards=pad_right(turn_rewards, 0.0, length=width, dtype=torch.float32).to(device),
        outcome_rewards=outcome_rewards.float().masked_fill(lost, float("nan")),
        anchor_ids=pad_right([anchors(t) for t in trajectories], -1, length=width, dtype=torch.long).to(device),
    )


def anchors(trajectory: Trajectory) -> list[int]:
    """Per turn a number that names the observation before it (GiGPO's anchor state), equal on every rank."""
    before = [trajectory.prompt_messages, *(turn.observations for turn in trajectory.turns)]
    return [_digest(messages) for messages in before[: len(trajectory.turns)]]


def _digest(messages: Sequence[Message]) -> int:
    text = json.dumps([[message.get("role"), message.get("content")] for message in messages], default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def gather_credit_inputs(inputs: CreditInputs, accelerator: Any) -> CreditInputs:
    """The rows of all ranks in data order, ragged T and K padded to the longest."""
    if accelerator.num_processes == 1:
        return inputs
    padding = {"turn_ids": -1, "anchor_ids": -1}
    gathered = {}
    for item in dataclasses.fields(inputs):
        tensor = getattr(inputs, item.name)
        if tensor is None:
            continue
        dtype = tensor.dtype
        if dtype == torch.bool:
            tensor = tensor.to(torch.uint8)  # padding turns bool into int64, on the ranks that it lengthens alone
        if tensor.dim() == 2:
            tensor = accelerator.pad_across_processes(tensor, dim=1, pad_index=padding.get(item.name, 0))
        gathered[item.name] = accelerator.gather(tensor).to(dtype)
    return CreditInputs(**gathered)


# -------------------------------------------------------------------- estimators


def _broadcast(compute: Callable[[CreditInputs, torch.Tensor, Any], torch.Tensor]) -> Callable[..., Credit]:
    """An estimator of one number per trajectory, spread over its tokens."""

    def estimate(inputs: CreditInputs, group_ids: torch.Tensor, args: Any) -> Credit:
        advantages = compute(inputs, group_ids, args).unsqueeze(1)  # (N, 1)
        return Credit(advantages=torch.where(inputs.mask, advantages, 0.0))

    return estimate


def _reinforce_pp(inputs: CreditInputs, group_ids: torch.Tensor, args: Any) -> Credit:
    return Credit(advantages=compute_reinforce_pp_advantages(inputs.token_rewards, inputs.mask, gamma=args.gamma))


def _reinforce_pp_baseline(inputs: CreditInputs, group_ids: torch.Tensor, args: Any) -> Credit:
    return Credit(
        advantages=compute_reinforce_pp_baseline_advantages(
            inputs.returns, group_ids, inputs.mask, kl_rewards=inputs.kl_rewards, gamma=args.gamma
        )
    )


def _turn_ids(inputs: CreditInputs) -> torch.Tensor:
    return extend_turn_ids(inputs.turn_ids, inputs.mask)


def _turn_grpo(inputs: CreditInputs, group_ids: torch.Tensor, args: Any) -> Credit:
    return Credit(
        advantages=compute_turn_group_advantages(
            inputs.turn_rewards,
            inputs.outcome_rewards,
            _turn_ids(inputs),
            group_ids,
            gamma_turn=args.gamma_turn,
            process_weight=1.0,  # both parts are weighted in `estimate_credit`
        )
    )


def _gigpo(inputs: CreditInputs, group_ids: torch.Tensor, args: Any) -> Credit:
    turn_rewards = inputs.turn_rewards.clone()
    last = (inputs.anchor_ids >= 0).sum(dim=1, keepdim=True).clamp(min=1) - 1  # (N, 1)
    turn_rewards.scatter_add_(1, last, inputs.outcome_rewards.unsqueeze(1))
    return Credit(
        advantages=compute_gigpo_advantages(
            turn_rewards,
            inputs.anchor_ids,
            _turn_ids(inputs),
            group_ids,
            gamma_turn=args.gamma_turn,
            step_weight=args.step_weight,
        )
    )


def _gae(inputs: CreditInputs, group_ids: torch.Tensor, args: Any) -> Credit:
    assert inputs.values is not None
    advantages, returns = compute_gae(
        inputs.token_rewards,
        inputs.values,
        inputs.mask,
        gamma=args.gamma,
        lam=args.lam,
        bootstrap_values=inputs.bootstrap_values,
    )
    return Credit(advantages=advantages, returns=returns)


def _bilevel_gae(inputs: CreditInputs, group_ids: torch.Tensor, args: Any) -> Credit:
    assert inputs.values is not None
    advantages, returns = compute_bilevel_gae(
        inputs.token_rewards,
        inputs.values,
        inputs.mask,
        inputs.turn_ids,
        gamma_turn=args.gamma_turn,
        lam_turn=args.lam_turn,
        gamma=args.gamma,
        lam=args.lam,
        bootstrap_values=inputs.bootstrap_values,
    )
    return Credit(advantages=advantages, returns=returns)


ESTIMATORS: dict[str, Callable[[CreditInputs, torch.Tensor, Any], Credit]] = {
    "grpo": _broadcast(lambda i, groups, args: compute_group_advantages(i.returns, groups, scale=args.scale_rewards)),
    "dr_grpo": _broadcast(lambda i, groups, args: compute_group_advantages(i.returns, groups, scale="none")),
    "rloo": _broadcast(lambda i, groups, args: compute_rloo_advantages(i.returns, groups)),
    "reinforce_pp": _reinforce_pp,
    "reinforce_pp_baseline": _reinforce_pp_baseline,
    "turn_grpo": _turn_grpo,
    "gigpo": _gigpo,
    "gae": _gae,
    "bilevel_gae": _bilevel_gae,
}


def weighs_advantages(args: Any) -> bool:
    """Whether process and outcome rewards are normalised apart and weighted afterwards (turn-level GRPO always)."""
    return args.separate_process_advantages or args.advantage_estimator == "turn_grpo"


def estimate_credit(
    inputs: CreditInputs, group_ids: torch.Tensor, args: Any, *, process_weight: float, outcome_weight: float
) -> tuple[Credit, dict[str, torch.Tensor]]:
    """Advantages of all rows, and what process and outcome rewards contribute to them.

    Args:
        inputs: rows of all ranks; rewards carry their weights already unless `weighs_advantages(args)`.
        group_ids: (N,) which prompt.
        args: the training arguments (`advantage_estimator` and its parameters).
        process_weight: weight of the process part where advantages are weighted.
        outcome_weight: weight of the outcome part where advantages are weighted.

    Returns:
        the credit, and (N, T) `process` and `outcome` parts as the same estimator sees them alone.
    """
    estimate = ESTIMATORS[args.advantage_estimator]
    parts = {name: estimate(inputs.only(name), group_ids, args).advantages for name in ("process", "outcome")}
    if weighs_advantages(args):
        parts = {"process": process_weight * parts["process"], "outcome": outcome_weight * parts["outcome"]}
        return Credit(advantages=parts["process"] + parts["outcome"]), parts
    credit = estimate(inputs, group_ids, args)
    if getattr(args, "whiten_advantages", False):
        credit.advantages = masked_whiten(credit.advantages, inputs.mask)
    return credit, parts

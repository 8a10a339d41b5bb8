"""From trajectories, as they were sampled or as they were recorded, to what estimators read."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from agent_r1_trl.advantages.estimators import CreditInputs
from agent_r1_trl.trajectory import Message, Trajectory
from agent_r1_trl.update.batching import pad_lists


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


def read_credit_inputs(
    trajectories: Sequence[Trajectory],
    *,
    mask: torch.Tensor,
    in_baseline: torch.Tensor,
    group_ids: torch.Tensor,
    turn_rewards: list[list[float]],
    outcome_weight: float,
    **given: Any,
) -> CreditInputs:
    """Tensors of this rank's B trajectories, on the device of `mask`; rows outside the baseline are emptied here.

    Per trajectory, `turn_rewards` has a (weighted) value for each turn, and the outcome is multiplied by its weight.
    """
    length, device = mask.shape[1], mask.device
    width = max([1, *(len(item.turns) for item in trajectories)])

    def on_tokens(rows: list[list[float]]) -> torch.Tensor:
        return pad_lists(rows, 0.0, length=length, dtype=torch.float32).to(device)

    outcomes = [outcome_weight * t.outcome_reward for t in trajectories]
    process = [t.token_rewards(turn_rewards=r, outcome=0.0) for t, r in zip(trajectories, turn_rewards, strict=True)]
    outcome = [
        t.token_rewards(turn_rewards=[0.0] * len(t.turns), outcome=o)
        for t, o in zip(trajectories, outcomes, strict=True)
    ]
    return CreditInputs(
        mask=mask.bool() & in_baseline.unsqueeze(1),
        turn_ids=pad_lists([t.turn_ids for t in trajectories], -1, length=length, dtype=torch.long).to(device),
        group_ids=group_ids,
        process_token_rewards=on_tokens(process),
        outcome_token_rewards=on_tokens(outcome),
        turn_rewards=pad_lists(turn_rewards, 0.0, length=width, dtype=torch.float32).to(device),
        outcome_rewards=torch.tensor(outcomes, device=device).float().masked_fill(~in_baseline, float("nan")),
        anchor_ids=pad_lists([anchors(t) for t in trajectories], -1, length=width, dtype=torch.long).to(device),
        **given,
    )


def anchors(trajectory: Trajectory) -> list[int]:
    """Per turn a number that names what it read (GiGPO's anchor state), equal on every rank.

    That is the context that the environment gave for the turn (`next_context`), else the observations before it. A
    summary's is a state of its own kind, with the request; the turn after it stands where the summary stood.
    """
    found, before = [], trajectory.prompt_messages
    for turn in trajectory.turns:
        if turn.summary_request is not None:
            found.append(_digest([*before, turn.summary_request]))
            continue
        found.append(_digest(before))
        before = turn.observations if turn.next_context is None else turn.next_context
    return found


def _digest(messages: Sequence[Message]) -> int:
    text = json.dumps([*map(_without_ids, messages)], default=str, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _without_ids(message: Message) -> list[Any]:
    """What a message says, calls included; their ids differ wherever the same was done twice."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return [{name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}, calls]

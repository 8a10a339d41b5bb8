"""From trajectories to the tensors that advantage estimators read (`CreditInputs`)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from agent_r1_trl.advantages.estimators import CreditInputs
from agent_r1_trl.trajectory import Message, Trajectory
from agent_r1_trl.update.rows import pad_lists


def weighted_turn_rewards(
    trajectories: Sequence[Trajectory], *, weight: float, source_scales: dict[str, float]
) -> list[list[float]]:
    """Per trajectory, its turns' process rewards times `weight`, every source divided by its scale (if it has one)."""

    def scaled(parts: dict[str, float], total: float) -> float:
        if not source_scales:
            return total
        unattributed = total - math.fsum(parts.values())  # by the environment
        attributed = math.fsum(part / source_scales.get(name, 1.0) for name, part in parts.items())
        return attributed + unattributed / source_scales.get("", 1.0)

    rewards = []
    for trajectory in trajectories:
        rewards.append([weight * scaled(turn.reward_parts, turn.reward) for turn in trajectory.turns])
    return rewards


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
    device = mask.device
    length = mask.shape[1]
    num_turns = max([1, *(len(item.turns) for item in trajectories)])

    def of_tokens(rows: list[list[float]]) -> torch.Tensor:
        return pad_lists(rows, 0.0, length=length, dtype=torch.float32).to(device)

    def of_turns(rows: list[list[float]]) -> torch.Tensor:
        return pad_lists(rows, 0.0, length=num_turns, dtype=torch.float32).to(device)

    def numbers(rows: list[list[int]], width: int) -> torch.Tensor:
        return pad_lists(rows, -1, length=width, dtype=torch.long).to(device)

    outcomes = []
    seat_outcomes = []
    process_on_tokens = []
    outcome_on_tokens = []
    for trajectory, rewards in zip(trajectories, turn_rewards, strict=True):
        outcome = outcome_weight * trajectory.outcome_reward
        outcomes.append(outcome)
        seat_outcomes.append([outcome_weight * trajectory.outcome_of(turn.seat) for turn in trajectory.turns])
        process_on_tokens.append(trajectory.token_rewards(turn_rewards=rewards, outcome=0.0))
        no_rewards = [0.0] * len(trajectory.turns)
        outcome_on_tokens.append(trajectory.token_rewards(turn_rewards=no_rewards, outcome=outcome))
    outcome_rewards = torch.tensor(outcomes, device=device).float()
    return CreditInputs(
        mask=mask.bool() & in_baseline.unsqueeze(1),
        turn_ids=numbers([item.turn_ids for item in trajectories], length),
        group_ids=group_ids,
        process_token_rewards=of_tokens(process_on_tokens),
        outcome_token_rewards=of_tokens(outcome_on_tokens),
        turn_rewards=of_turns(turn_rewards),
        outcome_rewards=outcome_rewards.masked_fill(~in_baseline, torch.nan),
        anchor_ids=numbers([anchors(item) for item in trajectories], num_turns),
        turn_seats=numbers([seat_numbers(item) for item in trajectories], num_turns),
        seat_outcomes=of_turns(seat_outcomes),
        **given,
    )


def seat_numbers(trajectory: Trajectory) -> list[int]:
    """Per turn a number that names its seat, equal on every rank; 0 where all turns share one reward."""
    if not trajectory.seat_rewards:
        return [0] * len(trajectory.turns)
    return [1 + _digest([{"seat": turn.seat}]) // 2 for turn in trajectory.turns]


def anchors(trajectory: Trajectory) -> list[int]:
    """Per turn a number that names what it read (GiGPO's anchor state), equal on every rank.

    That is the context that the environment gave for the turn (`next_context`), else the observations before it. A
    summary's is a state of its own kind, with the request; the turn after it stands where the summary stood.
    """
    found = []
    before = trajectory.prompt_messages
    for turn in trajectory.turns:
        if turn.summary_request is not None:
            found.append(_digest([*before, turn.summary_request]))
            continue
        found.append(_digest(before))
        before = turn.observations if turn.next_context is None else turn.next_context
    return found


def _digest(messages: Sequence[Message]) -> int:
    """A number of 63 bits that names some messages."""
    said = [_without_ids(message) for message in messages]
    text = json.dumps(said, default=str, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _without_ids(message: Message) -> list[Any]:
    """A message and its calls without the calls' ids, which differ wherever the same was done twice."""
    plain = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return [plain, calls]

"""How far sampler and trainer disagree on a batch, and the weights that correct for it.

prompt -> environment reset -> rollout (policy <-> tools) -> Trajectory -> rewards on tokens -> filter
       -> batch -> advantages -> [loss] -> step -> sync weights -> next rollout

Not covered: the ratios themselves (`importance.py`).
"""

from __future__ import annotations

import torch
from accelerate.utils import gather_object

from agent_r1_trl.trainers.config import MultiTurnConfig
from agent_r1_trl.update.importance import ratio_by_turn, sampling_ratio


def mismatch_metrics(difference: torch.Tensor, mask: torch.Tensor, turn_ids: torch.Tensor) -> dict[str, float]:
    """Mean ratio of the trainer's probability to the sampler's, turn by turn, over the rows of all ranks.

    Args:
        difference: (B, T) trainer's minus sampler's log-probability.
        mask: (B, T) action tokens.
        turn_ids: (B, T) which turn, -1 outside action tokens.
    """
    sums: dict[int, list[float]] = {}
    for local in gather_object([ratio_by_turn(difference, mask, turn_ids)]):
        for turn, (total, count) in local.items():
            entry = sums.setdefault(turn, [0.0, 0])
            entry[0] += total
            entry[1] += count
    return {f"sampling/ratio_turn_{turn}": total / count for turn, (total, count) in sorted(sums.items())}


def mismatch_ratio(
    difference: torch.Tensor, mask: torch.Tensor, turn_ids: torch.Tensor, args: MultiTurnConfig
) -> torch.Tensor | None:
    """(B, T) ratios where our settings ask for another unit than TRL's; None where TRL's own ratios stand."""
    if args.importance_sampling_unit is None and not args.importance_sampling_length_normalized:
        return None
    unit, _, constraint = args.vllm_importance_sampling_mode.partition("_")
    return sampling_ratio(
        difference,
        mask,
        turn_ids,
        unit=args.importance_sampling_unit or unit,
        length_normalized=args.importance_sampling_length_normalized,
        bounds=(args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max),
        is_masked=constraint == "mask",
    )

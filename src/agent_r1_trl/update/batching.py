"""From trajectories to padded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from agent_r1_trl.trajectory import Trajectory

Inputs = dict[str, Any]
"""TRL's batch: tensors of B rows, scalars, None."""
_CRITIC_PREFIX = ("privileged_ids", "privileged_mask")
"""Padded on the left, and by chance perhaps as wide as the completions."""


def trim_padding(inputs: Inputs) -> Inputs:
    """Drop the columns of prompts (left) and completions (right) that are padding in every row."""
    prompt, completion = inputs["prompt_mask"], inputs["completion_mask"]
    first = int(prompt.any(dim=0).int().argmax())
    last = completion.shape[1] - int(completion.any(dim=0).flip(0).int().argmax())
    trimmed = {}
    for name, value in inputs.items():
        if name in ("prompt_ids", "prompt_mask"):
            value = value[:, first:]
        elif (
            name not in _CRITIC_PREFIX
            and has_rows(value)
            and value.dim() == 2
            and value.shape[1] == completion.shape[1]
        ):
            value = value[:, :last]
        trimmed[name] = value
    return trimmed


def has_rows(value: Any) -> bool:
    """Whether an entry of TRL's batch has an element per row."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def join_rows(parts: list[Inputs]) -> Inputs:
    """The rows of several micro-batches of the same widths in one; what has no rows is that of the first."""
    joined = {}
    for name, value in parts[0].items():
        if isinstance(value, list):  # an entry of a subclass
            value = [item for part in parts for item in part[name]]
        joined[name] = torch.cat([part[name] for part in parts]) if has_rows(value) else value
    return joined


def take_rows(rows: Inputs, index: Any) -> Inputs:
    """Some rows of a batch; what has no rows stays."""
    taken = {}
    for name, value in rows.items():
        if isinstance(value, list):
            value = [value[place] for place in torch.arange(len(value))[index].tolist()]
        taken[name] = value[index] if has_rows(value) else value
    return taken


def set_live_scales(buffer: list[dict[str, Any]], *, steps_per_update: int, accelerator: Any) -> None:
    """Put `row_scale`, `micro_batch_scale` and `turn_scale` into micro-batches.

    They are rows per trajectory in the baseline, micro-batches per one with such a row, and with `turn_shares`
    micro-batches per turn in the loss. They are counted over the micro-batches of each optimizer step on all ranks
    (over the whole buffer if the steps do not divide it), so all ranks must call this.

    Args:
        buffer: TRL's micro-batches, in the order of training.
        steps_per_update: micro-batches of one optimizer step.
        accelerator: of the trainer.
    """
    width = steps_per_update if len(buffer) % steps_per_update == 0 else len(buffer)
    has_turns = "turn_shares" in buffer[0]
    own = []
    for inputs in buffer:
        live = inputs["in_baseline"]
        turns = [(inputs["turn_shares"] * inputs["tool_mask"]).sum()] if has_turns else []
        own.append(torch.stack([(live & inputs["is_first_row"]).sum().float(), live.any().float(), *turns]))
    counts = torch.stack(own).view(-1, width, len(own[0])).sum(dim=1)  # (steps, 2 or 3)
    counts = accelerator.reduce(counts, reduction="sum")
    for step, (trajectories, batches, *turns) in enumerate(counts.round().clamp(min=1).tolist()):
        num_batches = width * accelerator.num_processes
        for inputs in buffer[step * width : (step + 1) * width]:
            # Micro-batches may differ in size, but not between ranks.
            inputs["row_scale"] = torch.tensor(len(inputs["in_baseline"]) * num_batches / trajectories)
            inputs["micro_batch_scale"] = torch.tensor(num_batches / batches)
            if has_turns:
                inputs["turn_scale"] = torch.tensor(num_batches / turns[0])


def loss_weights(inputs: Inputs, trainer: Any) -> torch.Tensor | float:
    """What TRL's loss of a micro-batch of M rows is multiplied by: a number, or (M, 1), or (M, T) with turns.

    TRL's loss types divide by rows, by micro-batches, or by tokens. Here every token gets the weight that it would
    have if its trajectory were one row and nothing were lost, or that `loss_unit` asks for.

    Args:
        inputs: M rows.
        trainer: in whose loss they are.
    """
    if "row_scale" not in inputs:  # a rollout of TRL's own
        return 1.0
    mask, _ = loss_masks(inputs)
    tokens = mask.sum(dim=1).clamp(min=1).float()  # (M,)
    of_trajectory = tokens + inputs["tokens_in_other_rows"]
    kind = {"sapo": "grpo", "cispo": "dapo", "vespo": "dapo"}.get(trainer.loss_type, trainer.loss_type)
    row_scale, unit = float(inputs["row_scale"]), trainer.args.loss_unit
    if unit is None and kind == "grpo":
        return (tokens / of_trajectory * row_scale).unsqueeze(1)
    if unit is None:
        return {"bnpo": float(inputs["micro_batch_scale"]), "dapo": 1.0}.get(kind, row_scale)
    num_steps = trainer.args.steps_per_generation if trainer.model.training else 1  # of micro-batches in a rollout
    per_batch = inputs["num_items_in_batch"].clamp(min=1).float() / trainer.accelerator.num_processes / num_steps
    divisor = {  # TRL's, of a token
        "grpo": tokens * len(tokens),
        "dr_grpo": torch.full_like(tokens, len(tokens) * trainer.max_completion_length),
        "luspo": torch.full_like(tokens, len(tokens)),
        "bnpo": mask.sum().clamp(min=1).float().expand_as(tokens),
        "dapo": per_batch.expand_as(tokens),
    }[kind].unsqueeze(1)  # (M, 1)
    if unit == "turn":
        return divisor * inputs["turn_scale"] * inputs["turn_shares"]
    return divisor / (per_batch if unit == "token" else len(tokens) / row_scale * of_trajectory.unsqueeze(1))


@dataclass(kw_only=True)
class TrajectoryBatch:
    """Tensors of B trajectories, padded on the right to T completion tokens.

    A trajectory without completion tokens is a row of padding: mask 0 everywhere.
    """

    action_mask: torch.Tensor
    """(B, T) int64."""
    turn_ids: torch.Tensor
    """(B, T) int64, -1 outside action tokens."""

    def to(self, device: torch.device) -> TrajectoryBatch:
        """A copy on `device`."""
        return TrajectoryBatch(action_mask=self.action_mask.to(device), turn_ids=self.turn_ids.to(device))


def pad_lists(
    rows: Sequence[Sequence[float]], value: float, *, length: int, dtype: torch.dtype, side: str = "right"
) -> torch.Tensor:
    """Stack ragged rows into (B, length), filled up with `value` on the `right` or the `left`."""
    out = torch.full((len(rows), length), value, dtype=dtype)  # (B, T)
    for index, row in enumerate(rows):
        if row:
            out[index, slice(len(row)) if side == "right" else slice(-len(row), None)] = torch.tensor(row, dtype=dtype)
    return out


def batch_trajectories(trajectories: Sequence[Trajectory], *, length: int | None = None) -> TrajectoryBatch:
    """Pad trajectories into a `TrajectoryBatch`.

    Args:
        trajectories: B of them.
        length: T; None takes the longest completion (at least 1).

    Raises:
        ValueError: if a completion is longer than `length`.
    """
    longest = max([1, *(len(trajectory.completion_ids) for trajectory in trajectories)])
    length = longest if length is None else length
    if longest > length:
        raise ValueError(f"length={length} is shorter than the longest completion ({longest} tokens).")

    def pad(name: str, value: float, dtype: torch.dtype) -> torch.Tensor:
        rows: list[Any] = [getattr(trajectory, name) for trajectory in trajectories]
        return pad_lists(rows, value, length=length, dtype=dtype)

    return TrajectoryBatch(
        action_mask=pad("action_mask", 0, torch.long),
        turn_ids=pad("turn_ids", -1, torch.long),
    )


def whole_rows(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, (B, P + T) each, of prompts and completions in TRL's batch.

    A prefix that only the critic reads, (B, Q), stands right before each prompt where there is one: the padding of
    both is on the left, so that no position depends on how long the others are.
    """
    ids, mask = inputs["prompt_ids"], inputs["prompt_mask"]
    if "privileged_ids" in inputs:
        ids = torch.cat([inputs["privileged_ids"], ids], dim=1)
        mask = torch.cat([inputs["privileged_mask"], mask], dim=1)
        order = mask.argsort(dim=1, stable=True)  # padding first, tokens in their order
        ids, mask = ids.gather(1, order), mask.gather(1, order)
    return torch.cat([ids, inputs["completion_ids"]], dim=1), torch.cat([mask, inputs["completion_mask"]], dim=1)


def with_one_more(inputs: dict[str, torch.Tensor], has_more: torch.Tensor) -> dict[str, torch.Tensor]:
    """The columns of TRL's batch with a completion token of id 0 behind the last one of some rows.

    Args:
        inputs: completions of (B, T); other columns stay.
        has_more: (B,) bool.

    Returns:
        Completions of (B, T + 1).
    """
    ids, mask = (functional.pad(inputs[f"completion_{name}"], (0, 1)) for name in ("ids", "mask"))
    ends = mask.sum(dim=1, keepdim=True)  # (B, 1)
    mask = mask.scatter(1, ends, has_more.to(mask).unsqueeze(1))
    return {**inputs, "completion_ids": ids, "completion_mask": mask}


def loss_masks(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) the tokens of the policy's loss in TRL's batch, and these with those of the critic's."""
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    return mask, mask.bool() | inputs["value_mask"].bool() if "value_mask" in inputs else mask.bool()


def neutral_outside(inputs: Inputs, mask: torch.Tensor) -> Inputs:
    """A micro-batch that is read at its loss mask, (B, T), alone: elsewhere ratios are 1, log-probs and advantages 0.

    It goes with log-probs of the policy that are 0 there (`LossPass.masked`).
    """
    fills = {name: 0.0 for name in inputs if name == "advantages" or name.endswith("per_token_logps")}
    fills |= {name: 1.0 for name in inputs if name == "importance_sampling_ratio"}
    given = {name: inputs[name] for name in fills if inputs[name] is not None}
    return {**inputs, **{name: torch.where(mask.bool(), value, fills[name]) for name, value in given.items()}}


def row_means(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of each row over its masked entries, (B, T) -> (B,); 0 for a row without any.

    >>> row_means(torch.tensor([[1.0, 9.0, 2.0], [9.0, 9.0, 9.0]]), torch.tensor([[1, 0, 1], [0, 0, 0]])).tolist()
    [1.5, 0.0]
    """
    keep = mask.bool()
    return torch.where(keep, x, 0.0).sum(dim=1) / keep.sum(dim=1).clamp(min=1)

"""How much each token counts in the loss: the masks of the rows that count, and weights beside TRL's normalisation.

TRL's loss types divide by rows, by micro-batches, or by tokens. Rows may be lost, and trajectories may have several
rows. So every token gets the weight that it would have if its trajectory were one row and nothing were lost, or that
`loss_unit` asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agent_r1_trl.advantages.gae import extend_turn_ids
from agent_r1_trl.update.batches import loss_masks
from agent_r1_trl.update.entries import IS_FIRST, OTHER_TOKENS, TURN_SHARES, Inputs
from agent_r1_trl.update.rows import TrainingRows, pad_tokens

if TYPE_CHECKING:
    from accelerate import Accelerator

    from agent_r1_trl.trainers.config import MultiTurnConfig
    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

_LIKE = {"sapo": "grpo", "cispo": "dapo", "vespo": "dapo"}
"""Loss types of TRL that divide as another one does."""


def add_masks(
    output: Inputs,
    rows: TrainingRows,
    in_baseline: torch.Tensor,
    in_loss: torch.Tensor,
    *,
    args: MultiTurnConfig,
    accelerator: Accelerator,
) -> None:
    """Put into TRL's batch which rows and tokens count, (B,) each, once every reward is known. All ranks must call it.

    The batch gets `tool_mask`, `num_items_in_batch`, `in_baseline`, and what `loss_weights` is made of.
    """
    device = in_loss.device
    tokens = output["completion_mask"]  # (R, T)
    if args.loss_mask:  # observation tokens stay out of the loss
        tokens = pad_tokens(rows.rows, "action_mask", 0, tokens.shape[1]).to(device)
    mask = tokens * rows.expand(in_loss).unsqueeze(1)
    output["tool_mask"] = mask
    output["num_items_in_batch"] = accelerator.gather(mask.sum()).sum()
    output["in_baseline"] = rows.expand(in_baseline)
    output[IS_FIRST] = rows.is_first.to(device)
    own = (output["completion_mask"] * mask).sum(dim=1)  # (R,)
    own_of_trajectories = own * (rows.index >= 0).to(device)
    output[OTHER_TOKENS] = rows.expand(rows.total(own)) - own_of_trajectories
    if args.loss_unit == "turn":
        output[TURN_SHARES] = turn_shares(output, rows)
    set_valid_scales([output], steps_per_update=1, accelerator=accelerator)


def turn_shares(output: Inputs, rows: TrainingRows) -> torch.Tensor:
    """(R, T) one over the tokens of its turn that are in the loss, at each of these; 0 elsewhere."""
    mask = output["completion_mask"] * output["tool_mask"]  # (R, T)
    turn_ids = pad_tokens(rows.rows, "turn_ids", -1, mask.shape[1])
    turns = extend_turn_ids(turn_ids.to(mask.device), mask).clamp(min=0)  # (R, T)
    in_loss = mask.float()
    num_turns = int(turns.max()) + 1
    counts = in_loss.new_zeros(len(turns), num_turns).scatter_add(1, turns, in_loss)  # (R, K)
    of_tokens = counts.gather(1, turns).clamp(min=1)
    return in_loss / of_tokens


def set_valid_scales(buffer: list[Inputs], *, steps_per_update: int, accelerator: Accelerator) -> None:
    """Put `row_scale`, `micro_batch_scale` and `turn_scale` into TRL's micro-batches, in the order of training.

    `row_scale` is the number of rows divided by the number of trajectories in the baseline. `micro_batch_scale` is the
    number of micro-batches divided by the number of those with such a trajectory. `turn_scale`, which needs
    `turn_shares`, is the number of micro-batches divided by the number of turns in the loss. Each optimizer step is
    counted over all ranks (or the whole buffer, if the steps do not divide it), so all ranks must call this.
    """
    width = steps_per_update if len(buffer) % steps_per_update == 0 else len(buffer)
    own = torch.stack([_valid_counts(inputs) for inputs in buffer])  # (M, 2), or (M, 3) with turns
    of_steps = own.view(-1, width, own.shape[1]).sum(dim=1)  # (steps, 2 or 3)
    of_steps = accelerator.reduce(of_steps, reduction="sum").round().clamp(min=1)
    num_batches = width * accelerator.num_processes
    for step, (num_trajectories, num_valid_batches, *num_turns) in enumerate(of_steps.tolist()):
        for inputs in buffer[step * width : (step + 1) * width]:
            # Micro-batches may differ in size, but not between ranks.
            num_rows = len(inputs["in_baseline"]) * num_batches
            inputs["row_scale"] = torch.tensor(num_rows / num_trajectories)
            inputs["micro_batch_scale"] = torch.tensor(num_batches / num_valid_batches)
            if num_turns:
                inputs["turn_scale"] = torch.tensor(num_batches / num_turns[0])


def _valid_counts(inputs: Inputs) -> torch.Tensor:
    """Trajectories in the baseline, 1 if there is any such row, and with turns those in the loss: (2,) or (3,)."""
    in_baseline = inputs["in_baseline"]
    num_trajectories = (in_baseline & inputs[IS_FIRST]).sum().float()
    has_any = in_baseline.any().float()
    counts = [num_trajectories, has_any]
    if TURN_SHARES in inputs:
        counts.append((inputs[TURN_SHARES] * inputs["tool_mask"]).sum())
    return torch.stack(counts)


def loss_weights(inputs: Inputs, trainer: MultiTurnTrainer) -> torch.Tensor | float:
    """The factor of TRL's loss of a micro-batch of M rows: a number, or (M, 1), or (M, T) with turns."""
    if "row_scale" not in inputs:  # a rollout of TRL's own
        return 1.0
    loss_type: str = trainer.loss_type
    kind = _LIKE.get(loss_type, loss_type)
    unit = trainer.args.loss_unit
    if unit is None:
        return _whole_trajectories(inputs, kind)
    mask, _ = loss_masks(inputs)
    num_tokens = mask.sum(dim=1).clamp(min=1).float()  # (M,)
    per_batch = _tokens_per_micro_batch(inputs, trainer)
    divisor = _divisor_of_trl(kind, mask, num_tokens, per_batch, trainer).unsqueeze(1)  # (M, 1)
    if unit == "turn":
        return divisor * inputs["turn_scale"] * inputs[TURN_SHARES]
    if unit == "token":
        return divisor / per_batch
    of_trajectory = (num_tokens + inputs[OTHER_TOKENS]).unsqueeze(1)  # (M, 1)
    return divisor / (len(num_tokens) / float(inputs["row_scale"]) * of_trajectory)


def _whole_trajectories(inputs: Inputs, kind: str) -> torch.Tensor | float:
    """TRL's normalisation as if each trajectory were one row, and none were lost."""
    row_scale = float(inputs["row_scale"])
    if kind == "dapo":
        return 1.0
    if kind == "bnpo":
        return float(inputs["micro_batch_scale"])
    if kind != "grpo":
        return row_scale
    mask, _ = loss_masks(inputs)
    num_tokens = mask.sum(dim=1).clamp(min=1).float()  # (M,)
    of_trajectory = num_tokens + inputs[OTHER_TOKENS]
    return (num_tokens / of_trajectory * row_scale).unsqueeze(1)


def _tokens_per_micro_batch(inputs: Inputs, trainer: MultiTurnTrainer) -> torch.Tensor:
    """() tokens in the loss of a micro-batch on one rank, on average over the rollout."""
    num_steps = trainer.args.steps_per_generation if trainer.model.training else 1
    num_tokens = inputs["num_items_in_batch"].clamp(min=1).float()
    return num_tokens / trainer.accelerator.num_processes / num_steps


def _divisor_of_trl(
    kind: str, mask: torch.Tensor, num_tokens: torch.Tensor, per_batch: torch.Tensor, trainer: MultiTurnTrainer
) -> torch.Tensor:
    """(M,) the number by which TRL divides each token's loss in the M rows of a micro-batch."""
    num_rows = len(num_tokens)
    if kind == "grpo":
        return num_tokens * num_rows
    if kind == "dr_grpo":
        return torch.full_like(num_tokens, num_rows * trainer.max_completion_length)
    if kind == "luspo":
        return torch.full_like(num_tokens, num_rows)
    if kind == "bnpo":
        return mask.sum().clamp(min=1).float().expand_as(num_tokens)
    assert kind == "dapo", kind
    return per_batch.expand_as(num_tokens)

"""Deals the training rows of a rollout to optimizer steps, micro-batches and ranks, and weighs them in the loss.

TRL shuffles trajectories and divides them into micro-batches. Where trajectories have several rows, it does so with
their numbers alone; then all rows of a trajectory are put into the optimizer step that it fell into, and within that
step spread evenly over micro-batches and ranks (`update/spreading.py`). The number of micro-batches stays.

Covered here: dealing rows, their weights (`loss_unit`). Not covered: which rows there are (`training_rows.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object

from agent_r1_trl.advantages.gae import extend_turn_ids
from agent_r1_trl.trainers.group_filter import IS_KEPT, GroupFilter
from agent_r1_trl.trainers.lookahead import ROW_INDEX
from agent_r1_trl.trainers.nonfinite import TRAJECTORY_ROW
from agent_r1_trl.trainers.training_rows import TrainingRows
from agent_r1_trl.update.batching import pad_right
from agent_r1_trl.update.live_rows import policy_scale
from agent_r1_trl.update.rows import Inputs
from agent_r1_trl.update.spreading import spread_rows

TRAJECTORY_INDEX = "trajectory_index"
"""Entry of TRL's batch, (B,): the trajectories in the order in which they are trained on."""
NUM_TOKENS = "trajectory_tokens"
"""Entry of a micro-batch, (R,): tokens in the loss of the trajectory that the row belongs to."""
NUM_TRAJECTORIES = "num_trajectories"
"""Entry of a micro-batch: trajectories in the baseline of its optimizer step, on all ranks, per micro-batch of TRL's
accumulation (their number, unless a rollout is a part of an optimizer step)."""
TURN_SHARES = "turn_shares"
"""Entry of a micro-batch with `loss_unit="turn"`, (R, T): one over the tokens of its turn, at tokens in the loss."""
NUM_TURNS = "num_turns"
"""As `NUM_TRAJECTORIES`, the turns that have tokens in the loss."""
_IS_FIRST = "is_first_row"


class RowBatches:
    """Holds the rows of a rollout while TRL shuffles its trajectories.

    Args:
        group_filter: of the run.
        args: a `MultiTurnConfig`.
        accelerator: of the trainer.
    """

    def __init__(self, group_filter: GroupFilter, args: Any, accelerator: Any) -> None:
        self._filter, self._args, self._accelerator = group_filter, args, accelerator
        self._rows: Inputs = {}
        self._index: list[int] = []

    def hold(self, output: Inputs, rows: TrainingRows, *, is_training: bool) -> Inputs:
        """What TRL gets in place of a batch of R rows: in training the numbers of B trajectories, else the rows.

        All ranks must call it.

        Args:
            output: TRL's batch; `IS_KEPT`, `TRAJECTORY_ROW` and `ROW_INDEX` in it belong to trajectories, all else to
                rows.
            rows: of the batch.
            is_training: whether the batch will be shuffled and divided.
        """
        if not rows.is_split:
            return output
        device = output["completion_ids"].device
        loss_tokens = (output["completion_mask"] * output["tool_mask"]).sum(dim=1)  # (R,)
        output[NUM_TOKENS] = rows.expand(rows.total(loss_tokens))
        if self._args.loss_unit == "turn":
            output[TURN_SHARES] = turn_shares(output, rows)
        output[_IS_FIRST] = torch.tensor(rows.is_first, device=device)
        for name in (IS_KEPT, TRAJECTORY_ROW):
            if name in output:
                output[name] = rows.expand(output[name])
        if not is_training:
            self._count(output, torch.ones_like(output[_IS_FIRST]), [output], share=1.0)
            return output
        index = {TRAJECTORY_INDEX: torch.arange(len(rows.trajectories), device=device)}
        if ROW_INDEX in output:
            index[ROW_INDEX] = output.pop(ROW_INDEX)
        self._rows, self._index = output, rows.index
        return index

    def deal(self, buffer: list[Inputs]) -> list[Inputs]:
        """Micro-batches of rows for TRL's micro-batches of trajectories. All ranks must call it.

        Rows of groups that are filtered leave the update here, as `GroupFilter.apply` has it for whole trajectories.
        """
        if TRAJECTORY_INDEX not in buffer[0]:
            return buffer
        rows, self._rows = self._rows, {}
        per_step = self._args.gradient_accumulation_steps
        width = per_step if len(buffer) % per_step == 0 else len(buffer)
        num_steps, num_kept = len(buffer) // width, None
        step_of = {
            index: number // width
            for number, inputs in enumerate(buffer)
            for index in inputs[TRAJECTORY_INDEX].tolist()
        }
        is_trained = torch.ones_like(rows[_IS_FIRST])
        if IS_KEPT in rows:
            kept, for_critic = self._filter.take_out(rows)
            is_trained = is_trained if for_critic else kept
            of_kept = {index for index, is_kept in zip(self._index, kept.tolist(), strict=True) if is_kept}
            step_of, num_kept = self._take_turns([*step_of], of_kept, num_steps)
        # Rows that fill up are in no step.
        steps = torch.tensor([step_of.get(index, -1) for index in self._index], device=is_trained.device)
        dealt: list[Inputs] = []
        for step in range(num_steps):
            in_step = steps == step
            window, _ = spread_rows(
                rows,
                in_step & is_trained,
                num_micro_batches=width,
                steps_per_update=width,
                accelerator=self._accelerator,
            )
            self._count(rows, in_step, window, share=width / per_step)
            dealt += window
        if num_kept is None:
            return dealt
        return self._filter.mark_signal(dealt, [number // width < num_kept for number in range(len(dealt))])

    def _take_turns(self, order: list[int], kept: set[int], num_steps: int) -> tuple[dict[int, int], int]:
        """Spread trajectories evenly over the optimizer steps, first those that are kept and then the others.

        All ranks must call it.

        Args:
            order: this rank's trajectories in the order of training.
            kept: those that the filter leaves in the update.
            num_steps: optimizer steps of this rollout.

        Returns:
            The step of each trajectory, and how many are kept on all ranks: with fewer of them than steps, the steps
            from that number on have none.
        """
        own = [[index for index in order if index in kept], [index for index in order if index not in kept]]
        counts = gather_object([[len(part) for part in own]])  # (ranks, 2)
        step_of: dict[int, int] = {}
        before = 0
        for part, of_ranks in zip(own, zip(*counts, strict=True), strict=True):
            first = before + sum(of_ranks[: self._accelerator.process_index])
            step_of |= {index: (first + place) % num_steps for place, index in enumerate(part)}
            before += sum(of_ranks)
        return step_of, sum(num_kept for num_kept, _ in counts)

    def _count(self, rows: Inputs, in_step: torch.Tensor, window: list[Inputs], *, share: float) -> None:
        """Count the trajectories of an optimizer step, and its turns if the loss weighs these.

        Args:
            rows: this rank's R.
            in_step: (R,) bool, those of the step.
            window: its micro-batches.
            share: micro-batches of the step in this rollout, by those of TRL's accumulation.
        """
        live = (rows["in_baseline"] & rows[_IS_FIRST] & in_step).sum().float()
        live = self._accelerator.reduce(live, reduction="sum").clamp(min=1) / share
        for inputs in window:
            inputs.pop(_IS_FIRST, None)
            inputs[NUM_TRAJECTORIES] = live
        if TURN_SHARES in rows:
            shares = (rows[TURN_SHARES] * rows["tool_mask"])[in_step]  # filtered ones have left the mask
            turns = self._accelerator.reduce(shares.sum(), reduction="sum").round().clamp(min=1) / share
            for inputs in window:
                inputs[NUM_TURNS] = turns


# -------------------------------------------------------------------- weights in the loss


def turn_shares(output: Inputs, rows: TrainingRows) -> torch.Tensor:
    """(R, T) one over the tokens of its turn that are in the loss, at each of these; 0 elsewhere.

    Args:
        output: TRL's batch of R rows.
        rows: of the batch.
    """
    mask = output["completion_mask"] * output["tool_mask"]  # (R, T)
    turn_ids = pad_right([row.turn_ids for row in rows.rows], -1, length=mask.shape[1], dtype=torch.long)
    turns = extend_turn_ids(turn_ids.to(mask.device), mask).clamp(min=0)  # (R, T)
    in_loss = mask.float()
    counts = in_loss.new_zeros(len(turns), int(turns.max()) + 1).scatter_add(1, turns, in_loss)  # (R, K)
    return in_loss / counts.gather(1, turns).clamp(min=1)


def row_weights(inputs: Inputs, trainer: Any) -> torch.Tensor | None:
    """(M, 1) what the loss of each row of a micro-batch is multiplied by; None where TRL's own weights stand.

    With `loss_unit="turn"`, (M, T): what that of each token is multiplied by.

    TRL's loss types divide by rows, by micro-batches, or by tokens. Here every token gets the weight that it would
    have if its trajectory were one row, or that `loss_unit` asks for.

    Args:
        inputs: M rows.
        trainer: in whose loss they are.
    """
    if NUM_TOKENS not in inputs:
        return None
    args, kind, unit = trainer.args, trainer.loss_type, trainer.args.loss_unit
    is_training, num_ranks = trainer.model.training, trainer.accelerator.num_processes
    tokens = (inputs["completion_mask"] * inputs["tool_mask"]).sum(dim=1).clamp(min=1).float()  # (M,)
    of_trajectory = inputs[NUM_TOKENS].clamp(min=1).float()  # (M,)
    per_trajectory = num_ranks / inputs[NUM_TRAJECTORIES]
    steps = trainer.current_gradient_accumulation_steps if is_training else 1
    batch = inputs["num_items_in_batch"].clamp(min=1).float() / num_ranks
    per_token = 1 / (batch * steps / args.steps_per_generation if is_training else batch)
    length = trainer.max_completion_length
    natural = {  # the weight of a token that TRL gives, and that of a trajectory which is one row
        "grpo": (1 / (tokens * len(tokens) * steps), per_trajectory / of_trajectory),
        "dr_grpo": (1 / (len(tokens) * length * steps) + 0 * tokens, per_trajectory / length + 0 * tokens),
        "luspo": (1 / (len(tokens) * steps) + 0 * tokens, per_trajectory + 0 * tokens),
        "bnpo": (1 / (tokens_of(inputs) * steps) + 0 * tokens, None),
        "dapo": (per_token + 0 * tokens, None),
    }
    given, wanted = natural[{"sapo": "grpo", "cispo": "dapo", "vespo": "dapo"}.get(kind, kind)]
    if unit == "turn":
        return num_ranks / inputs[NUM_TURNS] * inputs[TURN_SHARES] / given.unsqueeze(1)
    if unit == "token":
        wanted = per_token + 0 * tokens
    elif unit == "trajectory":
        wanted = per_trajectory / of_trajectory
    elif wanted is None:
        wanted = given * (inputs["micro_batch_scale"] if kind == "bnpo" and "micro_batch_scale" in inputs else 1.0)
    return (wanted / given).unsqueeze(1)


def tokens_of(inputs: Inputs) -> torch.Tensor:
    """Number of tokens in the loss, at least 1."""
    return (inputs["completion_mask"] * inputs["tool_mask"]).sum().clamp(min=1).float()


def policy_weights(inputs: Inputs, trainer: Any) -> tuple[Any, Any]:
    """What the advantages of a micro-batch are multiplied by, and the weight of its KL term."""
    weights = row_weights(inputs, trainer)
    if weights is not None:
        return weights, WeightedBeta(trainer.beta, weights)
    scale = policy_scale(inputs, trainer.loss_type)
    return scale, trainer.beta * scale


class WeightedBeta:
    """The weight of the KL term, times one of each row or token, as TRL's loss reads it."""

    def __init__(self, beta: float, weights: torch.Tensor) -> None:
        self._beta, self._weights = beta, weights

    def __eq__(self, other: object) -> bool:
        return self._beta == other

    __hash__ = None  # type: ignore[assignment]

    def __mul__(self, kl: torch.Tensor) -> torch.Tensor:
        return self._beta * self._weights * kl

"""Optimizer steps whose numbers are not finite are skipped, counted, and end the run after some in a row.

A loss that is not finite, or that was computed from log-probs, advantages or values that are not, is multiplied by
NaN. All its gradients are NaN then, and so is the gradient norm, which is the same number on every rank. Whether a
step is healthy therefore costs one look at that norm, and no rank has to ask another one. A skipped step leaves
weights, optimizer and learning rate schedule as they were. DeepSpeed, which makes the optimizer step inside the
backward pass, skips steps with such a norm by itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from agent_r1_trl.errors import RunError
from agent_r1_trl.features.reliability.failures import MAX_WARNINGS
from agent_r1_trl.trainers.callbacks import OptimizerStep, RolloutCallback, is_main_process
from agent_r1_trl.trainers.checkpoints import last_checkpoint, own_part
from agent_r1_trl.trainers.rollout_batch import UpdateBatch
from agent_r1_trl.update.entries import TRAJECTORY_ROW, Inputs

logger = logging.getLogger(__name__)

BATCH = {
    "sampling_per_token_logps": "the sampler's log-probs",
    "old_per_token_logps": "the old log-probs",
    "ref_per_token_logps": "the reference's log-probs",
    "importance_sampling_ratio": "the importance ratios",
    "old_values": "the critic's old values",
    "returns": "the critic's targets",
    "advantages": "the advantages",
}
"""Entries of TRL's batch that enter the loss, in the order in which they are computed, and their names in messages."""
_CRITICS = ("old_values", "returns")
"""Quantities under the critic's mask."""
FORWARD = {"log_probs": "the policy's log-probs", "values": "the critic's values"}
"""Results of a forward pass, and their names in messages."""
INPUTS = (*BATCH.values(), *FORWARD.values())
"""The first of these that is not finite is named; behind them come loss terms of the user's, then the whole loss."""
LOSS = "the loss"
TERM = "the loss term "
"""Stands before the name of a user's function."""
REMEDY = "Lower learning_rate, use bf16 instead of fp16, or look at the rewards."


class NonFiniteError(RunError):
    """Numbers of the training are not finite, and going on would not heal them."""


class NumberWatch(RolloutCallback):
    """Numbers that were not finite in the optimizer step in flight, and the number of skipped steps.

    Args:
        max_in_a_row: the run ends with this many skipped steps in a row.
        output_dir: of the run, where its checkpoints are.
    """

    name = "numbers"

    def __init__(self, max_in_a_row: int, output_dir: str) -> None:
        self._max_in_a_row, self._output_dir = max_in_a_row, Path(output_dir)
        self.begin_run()

    def begin_run(self) -> None:
        """Forget the steps of an earlier run."""
        self.num_skipped = 0
        """Optimizer steps skipped in this run, or since it was resumed."""
        self._last_healthy_step = 0
        self.go_back(0, 0)

    def go_back(self, step: int, micro_step: int) -> None:
        """Forget the steps behind the checkpoint."""
        self._in_a_row, self._last_healthy_step = 0, min(step, self._last_healthy_step)
        self._names: list[str] = []
        """Names of the trajectories of the rollout that is trained on."""
        self._pending: dict[str, torch.Tensor] = {}
        """By quantity (B,) bool: whether a row of the micro-batch in flight holds what is not finite."""
        self._terms: dict[str, torch.Tensor] = {}
        """By loss term of the user's a bool: whether it is not finite in the micro-batch in flight."""
        self._found: list[tuple[list[str], torch.Tensor, dict[str, torch.Tensor]]] = []
        """Per micro-batch of the step: the names of its rollout, of which an optimizer step may take several; (B,)
        number of the trajectory; by quantity (B,) whether it is broken."""

    def rollout_end(self, batch: UpdateBatch, output: Inputs) -> None:
        """Remember whose rows the next micro-batches hold, on whatever rank they lie then."""
        names = [f"example {item.example_id!r}, generation {item.generation}" for item in batch.trajectories]
        self._names = gather_object(names)

    def on_values(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Look at what the forward pass of a micro-batch gave."""
        if name in FORWARD:
            self._take(FORWARD[name], values, mask)

    def on_term(self, source: str, value: torch.Tensor) -> None:
        """Look at a loss term of the user's."""
        self._terms[TERM + source] = ~torch.isfinite(value)

    def _take(self, quantity: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        self._pending[quantity] = ((~torch.isfinite(values.detach())) & mask.bool()).any(dim=1)

    def check_loss(self, loss: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """The loss of a micro-batch, NaN with all its gradients if something that it was computed from is not finite.

        Asks the device nothing: what was found is read when a step is skipped.
        """
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)  # (B, T)
        for name, text in BATCH.items():
            values = inputs.get(name)
            if values is None:
                continue
            if values.dim() == 1:
                values = values.unsqueeze(1)
            self._take(text, values.expand_as(mask), inputs["value_mask"] if name in _CRITICS else mask)
        found, self._pending = self._pending, {}
        wholes, self._terms = self._terms, {}
        rows = inputs.get(TRAJECTORY_ROW, torch.full_like(mask[:, 0], -1))
        wholes[LOSS] = ~torch.isfinite(loss.detach())
        found_of_rows = found | {name: flag.expand(len(rows)) for name, flag in wholes.items()}
        self._found.append((self._names, rows, found_of_rows))
        is_broken = wholes[LOSS] | torch.stack([*found.values()]).any()
        return loss * torch.where(is_broken, math.nan, 1.0).to(loss.dtype)

    def before_step(self, step: OptimizerStep) -> None:
        """Skip a step that is not finite.

        Raises:
            NonFiniteError: too many were skipped in a row; names the last healthy checkpoint.
        """
        found, self._found = self._found, []
        if step.is_finite and not step.lacks_tokens:
            self._in_a_row, self._last_healthy_step = 0, step.number + 1
        elif not step.lacks_tokens:  # one without tokens is neither healthy nor broken
            self._skip(step, found)
        if self.num_skipped:
            self.trainer._metrics["train"]["nonfinite/skipped_steps"] = [float(self.num_skipped)]

    def before_save(self, folder: str) -> None:
        """Refuse to save weights that are not finite; names the first of them and the last healthy checkpoint."""
        bad = nonfinite_weights(self.trainer.model)
        if self.trainer.is_deepspeed_enabled or self.trainer.is_fsdp_enabled:  # then all ranks save together
            bad = [name for names in gather_object([bad]) for name in names]
        if bad:
            raise NonFiniteError(
                f"{len(bad)} tensors of the model hold NaN or infinity (first {bad[0]}); {folder} was not written. "
                f"{self._advice()} {REMEDY}"
            )

    def _skip(self, step: OptimizerStep, found: Sequence[Any]) -> None:
        causes = [cause for cause in gather_object([_first_cause(found)]) if cause is not None]
        if step.is_scaled and not causes:  # float16 skips steps by itself until the scale of the loss fits
            return
        cause = min(causes)[1] if causes else "the gradients alone (the loss was finite)"
        if self._in_a_row == 0:
            self._last_healthy_step = step.number
        self._in_a_row += 1
        self.num_skipped += 1
        if is_main_process() and self.num_skipped <= MAX_WARNINGS:
            logger.warning(
                "Optimizer step %d was skipped: its numbers are not finite. First: %s. %d in a row "
                "(failures.max_nonfinite_steps=%d).",
                step.number + 1,
                cause,
                self._in_a_row,
                self._max_in_a_row,
            )
        if self._in_a_row >= self._max_in_a_row:
            remedy = "Correct the function: its sum must be finite." if cause.startswith(TERM) else REMEDY
            raise NonFiniteError(
                f"{self._in_a_row} optimizer steps in a row had numbers that are not finite, as many as "
                f"failures.max_nonfinite_steps={self._max_in_a_row} allows. First in the last one: {cause}. "
                f"{self._advice()} {remedy}"
            )
        step.is_skipped = True

    def _advice(self) -> str:
        path = last_checkpoint(self._output_dir, self._last_healthy_step, self.trainer.run_id)
        return "There is no healthy checkpoint." if path is None else f"The last healthy checkpoint is {path}."


def _first_cause(found: Sequence[tuple[list[str], torch.Tensor, dict[str, torch.Tensor]]]) -> tuple[int, str] | None:
    """The first quantity of this rank's micro-batches that is not finite, and its place in their order."""
    quantities = dict.fromkeys(quantity for *_, broken in found for quantity in broken)
    terms = [quantity for quantity in quantities if quantity not in (*INPUTS, LOSS)]
    for place, quantity in enumerate([*INPUTS, *terms, LOSS]):
        for names, rows, broken in found:
            if quantity not in broken or not broken[quantity].any():
                continue
            if quantity not in INPUTS:
                return place, quantity
            number = int(rows[broken[quantity]][0])
            is_known = 0 <= number < len(names)
            name = names[number] if is_known else f"row {number} of a rollout that was resumed"
            return place, f"{quantity} of {name}"
    return None


def nonfinite_weights(model: torch.nn.Module) -> list[str]:
    """Names of the trainable parameters that hold NaN or infinity; of sharded ones this rank's part is looked at."""
    trained = {name: own_part(value) for name, value in model.named_parameters() if value.requires_grad}
    flags = [part.isfinite().all() for part in trained.values()]
    if not flags:  # all are frozen
        return []
    is_finite = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()  # one copy to the host
    return [name for name, finite in zip(trained, is_finite, strict=True) if not finite]

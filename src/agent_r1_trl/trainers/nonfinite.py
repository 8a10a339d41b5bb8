"""Optimizer steps whose numbers are not finite are skipped, counted, and end the run after some in a row.

A loss that is not finite, or that was computed from log-probs, advantages or values that are not, is multiplied by
NaN. All its gradients are NaN then, and so is the gradient norm, which is the same number on every rank. Whether a
step is healthy therefore costs one look at that norm, and no rank has to ask another one. A skipped step leaves
weights, optimizer and learning rate schedule as they were. DeepSpeed, which makes the optimizer step inside the
backward pass, skips steps with such a norm by itself.

transformers 5.17 and accelerate 1.15 names that this file touches: `compute_loss`, `training_step`, `_get_grad_norm`
and `save_model` (overridden), `optimizer` and its `_is_overflow`, `accelerator.optimizer_step_was_skipped`,
`accelerator.sync_gradients`, `state`, `args`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object
from torch import nn
from trl import GRPOTrainer

from agent_r1_trl.trainers.failures import MAX_WARNINGS, is_main_process
from agent_r1_trl.trainers.group_filter import GroupFilter
from agent_r1_trl.trajectory import Trajectory

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
"""Those that the critic's mask holds for."""
LOG_PROBS, VALUES = "the policy's log-probs", "the critic's values"
QUANTITIES = (*BATCH.values(), LOG_PROBS, VALUES)
TRAJECTORY_ROW = "trajectory_row"
"""Entry of TRL's batch, (B,): the place of each row's trajectory in the rollout of all ranks."""


class NonFiniteError(RuntimeError):
    """Numbers of the training are not finite, and going on would not heal them."""


class NumberWatch:
    """What was not finite in the optimizer step under way, and how many steps were skipped.

    Args:
        max_in_a_row: the run ends with this many skipped steps in a row.
        output_dir: of the run, where its checkpoints are.
    """

    def __init__(self, max_in_a_row: int, output_dir: str) -> None:
        self.num_skipped = 0
        """Of this run, or since it was resumed."""
        self._max_in_a_row = max_in_a_row
        self._output_dir = Path(output_dir)
        self._in_a_row = 0
        self._last_healthy_step = 0
        self._names: list[str] = []
        """Of the trajectories of the rollout that is trained on."""
        self._pending: dict[str, torch.Tensor] = {}
        """By quantity (B,) bool: whether a row of the micro-batch under way holds what is not finite."""
        self._found: list[tuple[torch.Tensor, list[str]]] = []
        """Per micro-batch of the step (B, 1 + Q + 1): number of the trajectory, whether each quantity is broken, the
        loss; and the names of its rollout, of which an optimizer step may take several."""

    def begin_run(self) -> None:
        """Forget the steps of an earlier run."""
        self.num_skipped = self._in_a_row = self._last_healthy_step = 0
        self._pending, self._found, self._names = {}, [], []

    def go_back(self, step: int) -> None:
        """The run goes back to a checkpoint, whose next steps are other ones.

        Args:
            step: number of optimizer steps behind it.
        """
        self._in_a_row, self._last_healthy_step = 0, min(step, self._last_healthy_step)
        self._pending, self._found, self._names = {}, [], []

    def begin_rollout(self, trajectories: Sequence[Trajectory]) -> None:
        """Remember whose rows the next micro-batches hold, on whatever rank they lie then. All ranks must call it.

        Args:
            trajectories: this rank's.
        """
        names = [f"example {item.example_id!r}, generation {item.generation}" for item in trajectories]
        self._names = gather_object(names)

    def take(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Look at what a forward pass gave for a micro-batch.

        Args:
            name: one of `QUANTITIES`.
            values: (B, T).
            mask: (B, T); nothing else is looked at.
        """
        self._pending[name] = ((~torch.isfinite(values.detach())) & mask.bool()).any(dim=1)

    def weigh(self, loss: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """The loss of a micro-batch, NaN with all its gradients if something that it was computed from is not finite.

        Asks the device nothing: what was found is read when a step is skipped.

        Args:
            loss: a scalar.
            inputs: TRL's micro-batch of B rows.
        """
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)  # (B, T)
        for name, text in BATCH.items():
            values = inputs.get(name)
            if values is not None:
                values = values.unsqueeze(1) if values.dim() == 1 else values
                self.take(text, values.expand_as(mask), inputs["value_mask"] if name in _CRITICS else mask)
        none = torch.zeros_like(mask[:, 0], dtype=torch.bool)
        found = torch.stack([self._pending.get(name, none) for name in QUANTITIES], dim=1)  # (B, Q)
        self._pending = {}
        rows = inputs.get(TRAJECTORY_ROW, torch.full_like(mask[:, 0], -1))
        is_finite = torch.isfinite(loss.detach())
        bad_loss = torch.zeros_like(rows) + (~is_finite).to(rows.dtype)
        table = torch.cat([rows.unsqueeze(1), found.to(rows.dtype), bad_loss.unsqueeze(1)], dim=1)
        self._found.append((table, self._names))
        return loss * torch.where(is_finite & ~found.any(), 1.0, math.nan).to(loss.dtype)

    def end_step(self, *, is_finite: bool, is_scaled: bool, step: int) -> bool:
        """Judge an optimizer step. Where it is not finite, all ranks must call it; they all know.

        Args:
            is_finite: whether the gradients of all ranks are.
            is_scaled: float16 scales the loss, and skips steps by itself until the scale fits.
            step: number of optimizer steps before this one.

        Returns:
            Whether to skip the step.

        Raises:
            NonFiniteError: too many were skipped in a row; names the last healthy checkpoint.
        """
        found, self._found = self._found, []
        if is_finite:
            self._in_a_row, self._last_healthy_step = 0, step + 1
            return False
        causes = [cause for cause in gather_object([self._first_cause(found)]) if cause is not None]
        if is_scaled and not causes:
            return False
        cause = min(causes)[1] if causes else "the gradients alone (the loss was finite)"
        if self._in_a_row == 0:
            self._last_healthy_step = step
        self._in_a_row += 1
        self.num_skipped += 1
        if is_main_process() and self.num_skipped <= MAX_WARNINGS:
            logger.warning(
                "Optimizer step %d was skipped: its numbers are not finite. First: %s. %d in a row "
                "(max_nonfinite_steps=%d).%s",
                step + 1,
                cause,
                self._in_a_row,
                self._max_in_a_row,
                " Further ones are only counted." if self.num_skipped == MAX_WARNINGS else "",
            )
        if self._in_a_row >= self._max_in_a_row:
            raise NonFiniteError(
                f"{self._in_a_row} optimizer steps in a row had numbers that are not finite, as many as "
                f"max_nonfinite_steps={self._max_in_a_row} allows. First in the last one: {cause}. {self.advice()} "
                "Lower learning_rate, use bf16 instead of fp16, or look at the rewards."
            )
        return True

    def drop_step(self) -> None:
        """Pass over an optimizer step that is not made for another reason: it was neither healthy nor broken."""
        self._found = []

    def advice(self) -> str:
        """Where to go on from."""
        path = last_checkpoint(self._output_dir, self._last_healthy_step)
        if path is None:
            return "There is no healthy checkpoint."
        return f"The last healthy checkpoint is {path}."

    def _first_cause(self, found: Sequence[tuple[torch.Tensor, list[str]]]) -> tuple[int, str] | None:
        """What in this rank's micro-batches was the first to be not finite, and its place among `QUANTITIES`."""
        rows = [(row, names) for table, names in found for row in table.tolist()]
        for column, quantity in enumerate((*QUANTITIES, "the loss"), start=1):
            for row, names in rows:
                if row[column]:
                    is_whole = column > len(QUANTITIES)
                    return column, quantity if is_whole else f"{quantity} of {_name(int(row[0]), names)}"
        return None


def _name(number: int, names: Sequence[str]) -> str:
    return names[number] if 0 <= number < len(names) else f"row {number} of a rollout that was resumed"


def last_checkpoint(folder: Path, step: int) -> Path | None:
    """The newest checkpoint of a run that was written after at most `step` optimizer steps."""
    numbered = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _NUMBER.search(path.name))]
    return max([pair for pair in numbered if pair[0] <= step], default=(0, None))[1]


_NUMBER = re.compile(r"^checkpoint-(\d+)$")


def nonfinite_weights(model: nn.Module) -> list[str]:
    """Names of the trainable parameters that hold NaN or infinity; of sharded ones this rank's part is looked at."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        return []
    device = named[0][1].device
    is_finite = torch.stack([torch.isfinite(_own_part(p)).all().to(device) for _, p in named]).tolist()
    return [name for (name, _), finite in zip(named, is_finite, strict=True) if not finite]


def _own_part(parameter: Any) -> torch.Tensor:
    """The values of a parameter that lie on this rank."""
    if hasattr(parameter, "ds_tensor"):  # ZeRO-3; what fills up the last rank's part was never written
        rank = torch.distributed.get_rank(parameter.ds_process_group)
        size = parameter.ds_tensor.ds_numel
        return parameter.ds_tensor.detach().flatten()[: max(0, parameter.ds_numel - rank * size)]
    data = parameter.detach()
    return data.to_local() if hasattr(data, "to_local") else data  # FSDP2


class NumberWatchingTrainer(GRPOTrainer):
    """TRL's trainer with a `NumberWatch`; without an environment, TRL's own."""

    env_factory: Any
    numbers: NumberWatch | None = None
    """None leaves everything to TRL."""
    last_norms: tuple[Any, ...] = ()
    """Gradient norms of the last optimizer step: the policy's first, the critic's where it has one of its own."""
    group_filter: GroupFilter
    """Set where `numbers` is; steps without signal are skipped like those that are not finite."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's; in training NaN with all gradients if anything in it is not finite."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.numbers is None or not self.model.training:
            return loss
        return self.group_filter.weigh(self.numbers.weigh(loss, inputs), inputs)

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's; gradients of a step over several rollouts do not shrink where one of them has nothing to teach."""
        loss = super().training_step(model, *args, **kwargs)
        if self.numbers is not None and self.accelerator.sync_gradients:
            self.group_filter.rescale(model)
        return loss

    def _number_rows(self, trajectories: Sequence[Trajectory], output: dict[str, Any]) -> None:
        """Let the rows of TRL's batch say which trajectory each is."""
        if self.numbers is None or not self.model.training:
            return
        self.numbers.begin_rollout(trajectories)
        first = self.accelerator.process_index * len(trajectories)
        rows = torch.arange(first, first + len(trajectories), device=output["completion_ids"].device)
        output[TRAJECTORY_ROW] = rows

    def _watch_numbers(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Look at what the forward pass of a micro-batch gave, (B, T) like its mask."""
        if self.numbers is not None and self.model.training:
            self.numbers.take(name, values, mask)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        return None if self._judge_step(model, norm) else norm

    def _judge_step(self, model: Any, *norms: Any) -> bool:
        """Leave weights, optimizer and schedule alone in the next optimizer step if a gradient norm is not finite.

        The same for a step that has nothing to train on. Returns whether that is so: then no norm means anything.
        """
        self.last_norms = norms
        if self.numbers is None:
            return False
        is_engine = self.accelerator.distributed_type == DistributedType.DEEPSPEED  # it has made its step already
        has_skipped = is_engine and self.accelerator.optimizer_step_was_skipped
        is_finite = not has_skipped and all(norm is None or bool(_is_finite(norm)) for norm in norms)
        is_scaled = self.accelerator.mixed_precision == "fp16"
        step = self.state.global_step
        must_skip = lacks_signal = self.group_filter.ends_without_signal(step)
        if lacks_signal:
            self.numbers.drop_step()
        else:
            must_skip = self.numbers.end_step(is_finite=is_finite, is_scaled=is_scaled, step=step)
        if self.group_filter.num_skipped:
            self._metrics["train"]["filter/skipped_steps"] = [float(self.group_filter.num_skipped)]
        if self.numbers.num_skipped:
            self._metrics["train"]["nonfinite/skipped_steps"] = [float(self.numbers.num_skipped)]
        if is_engine:
            if must_skip and not has_skipped:
                raise NonFiniteError(
                    "DeepSpeed made an optimizer step from gradients that are not finite, so the weights are lost. "
                    f"{self.numbers.advice()} Update deepspeed, or set bf16.check_grad_overflow in its configuration."
                )
        elif not is_scaled:  # the scaler skips by itself
            if must_skip:
                model.zero_grad(set_to_none=True)  # neither momentum nor weight decay moves what has no gradient
            self.optimizer._is_overflow = must_skip  # the schedule waits as well
        return lacks_signal

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """TRL's; weights that are not finite are not saved.

        Raises:
            NonFiniteError: some are not; names the first of them and the last healthy checkpoint.
        """
        if bad := self._lost_weights():
            where = output_dir or self.args.output_dir
            text = f"{len(bad)} tensors of the model hold NaN or infinity (first {bad[0]})"
            if self.numbers is not None:
                raise NonFiniteError(f"{text}; {where} was not written. {self.numbers.advice()}")
            logger.warning("%s, and are saved to %s.", text, where)
        super().save_model(output_dir, _internal_call)

    def _lost_weights(self) -> list[str]:
        bad = nonfinite_weights(self.model)
        is_sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled  # then all ranks save together
        return [name for names in gather_object([bad]) for name in names] if is_sharded else bad


def _is_finite(norm: Any) -> Any:
    return torch.isfinite(norm) if isinstance(norm, torch.Tensor) else math.isfinite(norm)

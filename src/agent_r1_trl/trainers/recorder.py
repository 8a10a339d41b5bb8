"""The record of a run while it trains: trajectories, the numbers of their tokens, and what was logged.

A rollout is written as soon as its advantages are known. What its update gives for each token
(`recording.store.encode`) is taken from the first pass of the loss over it, lies on the device until all of the
rollout has been trained on once, and is written then. Rows may be trained on by another rank than the one that
sampled them; each rank writes what it has sampled. A rollout that an earlier process has begun to train on gets no
columns: who resumes does not have its trajectories.

With `log_completions` trackio gets the first trajectories of the last rollout at each log, as traces.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.nn import functional

from agent_r1_trl.recording.events import METRICS_FILE, STEPS_FILE
from agent_r1_trl.recording.lines import LineWriter
from agent_r1_trl.recording.store import TrajectoryStore, encode, sidecar
from agent_r1_trl.safe_text import shown_all
from agent_r1_trl.trainers.callbacks import RolloutCallback
from agent_r1_trl.trainers.rollout_batch import UpdateBatch
from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.entries import TRAINING_ROW, Inputs
from agent_r1_trl.update.rows import TrainingRows

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RolloutInUpdate:
    """A rollout whose columns are being collected."""

    path: Path | None
    """The file of its trajectories; None if they could not be written."""
    first_line: int
    """Where they begin in it."""
    micro_step: int
    """Micro-batches that were trained on before it."""
    rows: TrainingRows
    columns: dict[str, torch.Tensor]
    """Name -> (B, T') over time: what was known before the update."""
    parts: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """For each micro-batch of M rows, on the device: (M,) their `TRAINING_ROW`, and (3, M, T) its `PART`."""


PART = ("log_probs", "entropies", "mask")
NUM_TRACES = 8
"""Trajectories that trackio gets at a log, unless `num_completions_to_print` says how many."""


class Recorder(RolloutCallback):
    """Writes the record of this rank; the first process also writes steps and metrics."""

    def __init__(self, store: TrajectoryStore) -> None:
        self.store = store
        self._columns, self._steps, self._metrics = map(LineWriter, ("Columns of tokens", "Steps", "Metrics"))
        self.begin_run()

    def begin_run(self) -> None:
        """Forget an earlier run of the same trainer."""
        self.go_back(0, 0)

    def go_back(self, step: int, micro_step: int) -> None:
        """Forget the rollouts that the run goes back behind; the files of later steps will be put aside."""
        self.store.forget_after(step)
        self._rollouts: list[RolloutInUpdate] = []
        """Trajectories whose update has begun and not ended."""
        self._pass: dict[str, torch.Tensor] = {}
        """The results of the loss's pass in flight, (M, T) each."""
        self._groups_of_step = (-1, 0)
        """The last step, and how many group numbers its rollouts have used."""
        self._traces: list[dict[str, Any]] = []
        """Arguments of `trackio.Trace` that were not logged yet."""

    # ---------------------------------------------------------------- the run begins

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Drop what the run will repeat, and save the tokenizer, with which ids can be read while it goes on."""
        if not state.is_world_process_zero:
            return
        self._steps.keep_until(self.store.folder / STEPS_FILE, state.global_step)
        self._metrics.keep_until(Path(args.output_dir) / METRICS_FILE, state.global_step)
        if not any(Path(args.output_dir).glob("tokenizer*")):
            try:
                self.trainer.processing_class.save_pretrained(args.output_dir)
            except Exception as error:  # a full disk; tokenizers raises a plain Exception
                logger.warning("The tokenizer could not be saved to %s yet: %s.", args.output_dir, error)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Write what is logged."""
        if state.is_world_process_zero and logs:
            known = {name: _finite(value) for name, value in logs.items()}
            item = {"step": state.global_step, "time": datetime.now(UTC).isoformat(timespec="seconds"), **known}
            self._metrics.append(Path(args.output_dir) / METRICS_FILE, [item])
        if self._traces:
            import trackio

            trackio.log({"trajectories": [trackio.Trace(**trace) for trace in self._traces]})
            self._traces = []

    # ---------------------------------------------------------------- a rollout

    def write(self, batch: UpdateBatch, trajectories: Sequence[Trajectory], output: Inputs) -> None:
        """Write a rollout, or those of its trajectories that an evaluation counts; `output` is TRL's batch of rows."""
        trainer = self.trainer
        is_training = batch.position.is_training
        rows = batch.training_rows
        advantages = rows.to_time(output["advantages"]).tolist()
        for trajectory, row in zip(trajectories, advantages, strict=False):
            trajectory.advantages = row[: len(trajectory.completion_ids)]
        # A rollout has the number of the first step that trains on it, under which its metrics are logged.
        step = trainer.state.global_step + is_training
        split = "train" if is_training else "eval"
        first_line = self.store.num_lines.get((split, step), 0)
        fields = self._fields(batch, output, step) if is_training else None
        path = self.store.write(step, [*trajectories, *batch.replaced], split=split, fields=fields)
        if self.store.num_lost:
            trainer._metrics[split]["recording/lost_trajectories"] = [self.store.num_lost]
        if not is_training:
            return
        if trainer.is_world_process_zero():
            self._steps.append(self.store.folder / STEPS_FILE, [self._describe_step(step, batch, fields or [])])
            if trainer.args.log_completions and "trackio" in (trainer.args.report_to or ()):
                pairs = zip(trajectories, fields or (), strict=False)
                chosen = islice(pairs, trainer.args.num_completions_to_print or NUM_TRACES)
                self._traces = [make_trace(item, step, own["group"]) for item, own in chosen]
        columns = {"reference": output.get("ref_per_token_logps"), "value": output.get("old_values")}
        if trainer.args.kl_placement == "reward" and trainer.beta != 0.0:
            columns["kl_reward"] = trainer.beta * (output["ref_per_token_logps"] - output["old_per_token_logps"])
        if "returns" in output:
            columns["return"] = torch.where(output["value_mask"].bool(), output["returns"], torch.nan)
        self._rollouts.append(
            RolloutInUpdate(
                path=path,
                first_line=first_line,
                micro_step=batch.position.micro_step,
                rows=rows,
                columns={name: rows.to_time(x.float()) for name, x in columns.items() if x is not None},
            )
        )

    def _fields(self, batch: UpdateBatch, output: Inputs, step: int) -> list[dict[str, Any]]:
        """`group`, `is_kept`, `in_loss` and perhaps `bootstrap_value` of each trajectory, replaced ones at the end."""
        size, num = batch.position.group_size, len(batch.trajectories)
        accelerator = self.trainer.accelerator
        num_groups = -(-accelerator.num_processes * num // size)
        last_step, used = self._groups_of_step
        first_group = used if last_step == step else 0
        num_rounds = 1 + int(batch.metrics.get("sampling/resample_rounds", 0))
        self._groups_of_step = (step, first_group + num_groups * num_rounds)
        kept = torch.ones_like(batch.in_loss) if batch.is_kept is None else batch.is_kept
        tokens = batch.training_rows.total((output["completion_mask"] * output["tool_mask"]).sum(dim=1))  # (B,)
        flags = torch.stack([kept, kept & (tokens > 0)], dim=1).tolist()
        fields: list[dict[str, Any]] = []
        for place, (is_kept, in_loss) in enumerate(flags, start=accelerator.process_index * num):
            fields.append({"group": first_group + place // size, "is_kept": is_kept, "in_loss": in_loss})
        bootstrap_values = self.trainer.credit.bootstrap_values
        if bootstrap_values is not None:
            for item, value in zip(fields, bootstrap_values.tolist(), strict=True):
                if value:
                    item["bootstrap_value"] = value
        for group in batch.replaced_groups:
            fields.append({"group": first_group + group, "is_kept": True, "in_loss": False})
        return fields

    def _describe_step(self, step: int, batch: UpdateBatch, fields: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The facts behind a rollout's advantages that its lines do not hold."""
        trainer, facts = self.trainer, dict(self.trainer.credit.facts)
        parts = {
            name: dict(zip(("mean", "std"), map(_number, both), strict=True))
            for name, both in facts.pop("whitening", {}).items()
        }
        return {
            "step": step,
            **self.store.credit,
            "first_group": fields[0]["group"] if fields else 0,
            "group_size": batch.position.group_size,
            **facts,
            "kl_in_reward": trainer.beta if trainer.args.kl_placement == "reward" else 0.0,
            "advantage_mask": trainer.args.advantage_mask,
            "truncated_trajectories": trainer.args.truncated_trajectories,
            "whitening": parts.get("", parts or None),
        }

    # ---------------------------------------------------------------- its update

    def on_values(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Take note of what the first pass of a loss gave."""
        if name in PART and name not in self._pass:
            self._pass |= {name: values.detach(), "mask": mask}

    def check_loss(self, loss: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """Put it to the rollout, if this is its first pass; the device is asked nothing."""
        found, self._pass = self._pass, {}
        if self._is_first_pass() and "log_probs" in found and TRAINING_ROW in inputs:
            missing = torch.full_like(found["log_probs"], torch.nan)
            part = torch.stack([found.get(name, missing).float() for name in PART])
            self._rollouts[-1].parts.append((inputs[TRAINING_ROW], part))
        return loss

    def _is_first_pass(self) -> bool:
        return bool(self._rollouts) and not self._has_passed(self._rollouts[-1])

    def _has_passed(self, rollout: RolloutInUpdate) -> bool:
        """Whether each of its micro-batches was trained on."""
        return self.trainer._step - rollout.micro_step >= self.trainer.args.steps_per_generation

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Write the columns of rollouts that were trained on once. All ranks must call it."""
        done = [rollout for rollout in self._rollouts if self._has_passed(rollout)]
        self._rollouts = [rollout for rollout in self._rollouts if rollout not in done]
        for rollout in done:
            self._write_columns(rollout)

    def end_run(self) -> None:
        """Write those of rollouts that the run ended in the middle of."""
        for rollout in self._rollouts:
            self._write_columns(rollout)
        self._rollouts = []

    def _write_columns(self, rollout: RolloutInUpdate) -> None:
        columns = self._collect(rollout)
        if rollout.path is None:
            return
        lines = []
        for place, trajectory in enumerate(rollout.rows.trajectories):
            is_policy = np.array(trajectory.action_mask, dtype=bool)  # (T,)
            found = {name: x[place, : len(is_policy)][is_policy] for name, x in columns.items()}
            found["log_ratio"] = found.pop("log_probs") - np.array(trajectory.logprobs)[is_policy]
            texts = {name: encode(x) for name, x in found.items() if np.isfinite(x).any()}
            if texts:
                lines.append({"line": rollout.first_line + place, **texts})
        self._columns.append(sidecar(rollout.path), lines, is_text=False)

    def _collect(self, rollout: RolloutInUpdate) -> dict[str, np.ndarray]:
        """Name -> (B, T') over time, of this rank's trajectories, wherever their rows were trained on."""
        rows = rollout.rows
        rank = self.trainer.accelerator.process_index
        length = max([1, *(len(row.completion_ids) for row in rows.rows)])
        table = np.full((2, len(rows), length), np.nan, dtype=np.float32)
        for numbers, parts in self._pieces(rollout):
            is_own = numbers // len(rows) == rank
            for place in np.flatnonzero(is_own & parts[2].any(axis=1)):
                is_known = parts[2, place, :length].astype(bool)
                row = table[:, numbers[place] - rank * len(rows), : len(is_known)]  # a view
                row[:, is_known] = parts[:2, place, :length][:, is_known]
        log_probs, entropies = map(rows.to_time, torch.from_numpy(table))
        columns = {"log_probs": log_probs, "entropy": entropies, **rollout.columns}
        return {name: values.cpu().numpy() for name, values in columns.items()}

    def _pieces(self, rollout: RolloutInUpdate) -> list[tuple[np.ndarray, np.ndarray]]:
        """Numbers of rows, (M,), and their parts, (3, M, T): of this rank's passes, and of its rows elsewhere."""
        accelerator = self.trainer.accelerator
        width = max([1, *(part.shape[2] for _, part in rollout.parts)])
        numbers = np.zeros(0, dtype=int)
        parts = np.zeros((len(PART), 0, width), dtype=np.float32)
        if rollout.parts:
            numbers = torch.cat([found for found, _ in rollout.parts]).cpu().numpy()
            wide = [functional.pad(part, (0, width - part.shape[2])) for _, part in rollout.parts]
            parts = torch.cat(wide, dim=1).cpu().numpy()
        pieces = [(numbers, parts)]
        if accelerator.num_processes > 1:
            is_of_another = numbers // len(rollout.rows) != accelerator.process_index
            is_sent = is_of_another & parts[2].any(axis=1)
            pieces += gather_object([(numbers[is_sent], parts[:, is_sent])])
        return pieces


def make_trace(item: Trajectory, step: int, group: int) -> dict[str, Any]:
    """Arguments of `trackio.Trace`, with a span for each call; secrets are masked, control characters visible."""
    metadata = {
        "step": step,
        "group": group,
        "generation": item.generation,
        "example": item.example_id,
        "reward": item.total_reward,
        "success": item.is_solved,
        "stop_reason": item.stop_reason.value,
        "duration_ms": 1000 * item.duration_s,
        "inspector": f"#{step}/{group}/{item.generation}",
    }
    spans = [
        {
            "id": f"{number}",
            "name": result.call.name or "unreadable call",
            "kind": "tool",
            "input": result.call.arguments,
            "output": result.content,
            "duration_ms": 1000 * result.latency_s,
            "status": "error" if result.is_error else "ok",
            "error": result.error_label or None,
        }
        for number, result in enumerate(item.tool_results)
    ]
    found: dict[str, Any] = shown_all({"messages": item.messages, "metadata": metadata, "spans": spans})
    return found


def _finite(value: object) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: torch.Tensor) -> float | None:
    return _finite(value.item())

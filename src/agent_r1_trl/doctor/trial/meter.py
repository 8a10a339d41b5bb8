"""Measures a trainer while it trains: seconds, tokens, bytes, and the gap between sampler and trainer.

The methods it listens to are replaced on the trainer object: `_generate_and_score_completions`, `resampling.play`,
`row_batches.hold` and `layout.arrange`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from agent_r1_trl.trainers.precision import problem_of_run
from agent_r1_trl.update.batching import loss_masks, whole_rows
from agent_r1_trl.update.rows import Inputs, take_rows

_GAP_ROWS = 8
"""Rows on which the log-probs of sampler and trainer are compared."""
_POLL_S = 0.02


@dataclass(kw_only=True)
class Step:
    """One optimizer step."""

    seconds: float = 0.0
    rollout_s: float = 0.0
    scoring_s: float = 0.0
    """Rewards, old and reference log-probs, values, advantages."""
    sampled_tokens: int = 0
    loss_tokens: int = 0
    logs: dict[str, float] = field(default_factory=dict)
    """What the trainer logged for the step."""

    @property
    def update_s(self) -> float:
        """Forward and backward passes, and the optimizer."""
        return max(0.0, self.seconds - self.rollout_s - self.scoring_s)

    @property
    def tools_s(self) -> float:
        """The part of the rollout in which trajectories waited for their environment instead of the sampler."""
        waits = [self.logs.get(f"time/{name}_s", 0.0) for name in ("env", "generate")]
        return self.rollout_s * waits[0] / sum(waits) if sum(waits) > 0 else 0.0


@dataclass(kw_only=True)
class Trial:
    """What was measured."""

    steps: list[Step] = field(default_factory=list)
    device: str = "cpu"
    peak_bytes: float = 0.0
    """Of torch's allocator on a GPU; on a CPU what the process grew by."""
    used_bytes: float = 0.0
    """Largest use of the whole GPU, other processes included; 0 on a CPU."""
    total_bytes: float = 0.0
    """Memory of the GPU."""
    widest: tuple[int, int, int] = (0, 0, 0)
    """Rows, and padded tokens of prompts and completions, of the micro-batch with the most."""
    row_tokens: int = 0
    """Length of the longest row without padding."""
    pass_tokens: int = 0
    """Tokens without padding of the largest forward pass."""
    rounding: str = ""
    """Why rounding undoes most of the training; empty if it does not."""
    gap: float | None = None
    """Mean absolute difference of the sampler's and the trainer's log-probs of the tokens that were sampled."""
    num_gap_tokens: int = 0
    num_trajectories: int = 0
    """Of the last rollout."""
    num_failed: int = 0
    num_processes: int = 1
    """Whose trials this is."""
    buffer: list[Inputs] = field(default_factory=list)
    """The last rollout's micro-batches before they were laid out."""


def of_all_processes(trial: Trial) -> Trial:
    """What all processes measured, as one: sums of counts, the largest use of memory, times of the slowest rollout.

    All processes must call it. The micro-batches stay this one's.
    """
    trials: list[Trial] = gather_object([replace(trial, buffer=[])])
    if len(trials) == 1:
        return trial
    slowest = max(trials, key=lambda one: one.steps[-1].rollout_s)
    fullest = max(trials, key=lambda one: one.peak_bytes)
    num_gap_tokens = sum(one.num_gap_tokens for one in trials)
    gaps = [one.gap * one.num_gap_tokens for one in trials if one.gap is not None]
    return replace(
        fullest,
        steps=[
            replace(
                step,
                sampled_tokens=sum(one.steps[number].sampled_tokens for one in trials),
                loss_tokens=sum(one.steps[number].loss_tokens for one in trials),
                logs=trials[0].steps[number].logs,  # the Trainer logs what is of all processes, in the first
            )
            for number, step in enumerate(slowest.steps)
        ],
        gap=sum(gaps) / num_gap_tokens if num_gap_tokens else None,
        num_gap_tokens=num_gap_tokens,
        num_trajectories=sum(one.num_trajectories for one in trials),
        num_failed=sum(one.num_failed for one in trials),
        num_processes=len(trials),
        buffer=trial.buffer,
    )


def filters_of(settings: dict[str, Any]) -> dict[str, float]:
    """The settings by which a sampler leaves tokens out or weighs them anew, with the values that switch them off."""
    off: dict[str, float] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    return {name: value for name, value in off.items() if settings.get(name) not in (None, value)}


class Meter(TrainerCallback):
    """Listens to a trainer from its construction to the end of `train`.

    Args:
        trainer: a multi-turn trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self.trial = Trial(device=trainer.accelerator.device.type)
        self._trainer, self._step, self._start = trainer, Step(), 0.0
        self._done = threading.Event()
        self._before = _resident_bytes()
        play, score = trainer.resampling.play, trainer._generate_and_score_completions
        trainer.resampling.play = self._timed(play, "rollout_s")
        trainer._generate_and_score_completions = self._timed(score, "scoring_s")
        trainer.row_batches.hold = self._compared(trainer.row_batches.hold)
        trainer.layout.arrange = self._seen(trainer.layout.arrange)
        trainer.add_callback(self)

    # ---------------------------------------------------------------- what the trainer calls

    def _timed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            inside, start = self._step.rollout_s, time.perf_counter()
            result = method(*args, **kwargs)
            _wait(self.trial.device)
            seconds = time.perf_counter() - start
            if name == "scoring_s":  # the rollout is inside
                seconds -= self._step.rollout_s - inside
                self._step.sampled_tokens += sum(sum(t.action_mask) for t in self._trainer.last_trajectories)
                self.trial.num_trajectories = len(self._trainer.last_trajectories)
                failed = [t for t in self._trainer.last_trajectories if t.stop_reason.is_infrastructure_failure]
                self.trial.num_failed += len(failed)
            setattr(self._step, name, getattr(self._step, name) + seconds)
            return result

        return call

    def _compared(self, hold: Callable[..., Any]) -> Callable[..., Any]:
        def call(output: Inputs, rows: Any, *, is_training: bool) -> Any:
            start = time.perf_counter()
            if self.trial.gap is None and is_training:
                self._measure_gap(output, rows)
            self._step.scoring_s -= time.perf_counter() - start
            self._start += time.perf_counter() - start  # the doctor's own time is not the step's
            return hold(output, rows, is_training=is_training)

        return call

    def _measure_gap(self, output: Inputs, rows: Any) -> None:
        trainer, sampled = self._trainer, [row.logprobs for row in rows.rows[:_GAP_ROWS]]
        args, width = trainer.args, output["completion_mask"].shape[1]
        is_missing = not any(sampled) or any(value is None for row in sampled for value in row)
        count = min(gather_object([0 if is_missing or filters_of(vars(args)) else len(sampled)]))
        if not count:  # all processes pass as many rows, since sharded weights are gathered by all of them
            return
        sampled = sampled[:count]
        some = take_rows({name: output[name] for name in _COLUMNS}, slice(0, len(sampled)))
        was_training = trainer.model.training
        trainer.model.eval()
        try:
            with torch.no_grad():
                logps, *_ = trainer._get_per_token_logps_and_entropies(
                    trainer.model, *whole_rows(some), width, batch_size=args.per_device_train_batch_size
                )
        finally:
            trainer.model.train(was_training)
        total = 0.0
        for index, row in enumerate(rows.rows[:count]):
            ours = logps[index, : len(row.logprobs)].float().cpu().tolist()
            pairs = zip(ours, row.logprobs, row.action_mask, strict=True)
            found = [abs(one - other) for one, other, is_action in pairs if is_action]
            total, self.trial.num_gap_tokens = total + sum(found), self.trial.num_gap_tokens + len(found)
        if self.trial.num_gap_tokens:
            self.trial.gap = total / self.trial.num_gap_tokens

    def _seen(self, arrange: Callable[..., Any]) -> Callable[..., Any]:
        def call(buffer: list[Inputs], accelerator: Any) -> Any:
            self.trial.buffer = [dict(inputs) for inputs in buffer]
            self._step.loss_tokens += sum(int(loss_masks(inputs)[0].sum()) for inputs in buffer)
            arranged = arrange(buffer, accelerator)
            for inputs in arranged:
                for one in inputs.get("passes", [inputs]):
                    self._measure_pass(one)
            return arranged

        return call

    def _measure_pass(self, inputs: Inputs) -> None:
        inputs = self._trainer.layout.trim(inputs)
        trial, lengths = self.trial, whole_rows(inputs)[1].sum(dim=1)
        sizes = (len(lengths), inputs["prompt_ids"].shape[1], inputs["completion_ids"].shape[1])
        trial.widest = max(trial.widest, sizes, key=lambda size: size[0] * (size[1] + size[2]))
        trial.row_tokens = max(trial.row_tokens, int(lengths.max()))
        trial.pass_tokens = max(trial.pass_tokens, int(lengths.sum()))

    # ---------------------------------------------------------------- the Trainer's events

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Look at the optimizer, and start to watch memory."""
        self.trial.rounding = problem_of_run(self._trainer.args, optimizer)
        if self.trial.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            gpu = torch.cuda.current_device()  # a property of the thread: others begin with GPU 0
            self.trial.total_bytes = torch.cuda.mem_get_info(gpu)[1]
            threading.Thread(target=self._watch_gpu, args=(gpu,), daemon=True).start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step begins."""
        self._step, self._start = Step(), time.perf_counter()
        self.trial.steps.append(self._step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step ends."""
        _wait(self.trial.device)
        self._step.seconds = time.perf_counter() - self._start
        self._read_peak()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Keep what is logged for the step."""
        self._step.logs.update({name: value for name, value in (logs or {}).items() if isinstance(value, int | float)})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop watching."""
        self.close()

    def close(self) -> None:
        """Stop watching; also called after an error."""
        self._done.set()
        self._read_peak()

    def _watch_gpu(self, gpu: int) -> None:
        while not self._done.wait(_POLL_S):
            free, total = torch.cuda.mem_get_info(gpu)
            self.trial.used_bytes = max(self.trial.used_bytes, total - free)

    def _read_peak(self) -> None:
        is_gpu = self.trial.device == "cuda"
        now = torch.cuda.max_memory_allocated() if is_gpu else _resident_bytes() - self._before
        self.trial.peak_bytes = max(self.trial.peak_bytes, float(now))


_COLUMNS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _resident_bytes() -> float:
    """Of this process; 0 where the system does not say."""
    path = Path("/proc/self/statm")
    return float(path.read_text().split()[1]) * 4096 if path.exists() else 0.0

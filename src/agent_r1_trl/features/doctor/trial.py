"""What two real steps of a recipe took, and what that says: the findings of `agent-r1-trl doctor --run`.

`Meter` measures a trainer while it trains, and `judge` makes findings of it; each fix is a setting with its value.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerCallback

from agent_r1_trl.errors import RunError
from agent_r1_trl.features.doctor.memory import GIB, Estimate, report_memory
from agent_r1_trl.features.doctor.report import Report, describe_error
from agent_r1_trl.trainers.metrics import REMEDY, problem_of_run

LARGE_SHARE = 0.5
"""Above this share of a step, a part is worth looking at."""
EXACT_GAP, ROUNDED_GAP = 1e-3, 0.05
"""What sampler and trainer may differ by in float32, and where numbers are rounded to 16 bits."""
FILTERS_OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings by which a sampler leaves tokens out or weighs them anew, with the values that switch them off."""
_POLL_S = 0.02
_LONGER = (
    "Raise --run_tokens and --run_turns to what the recipe allows. If it stays so, bring the policy nearer to the "
    "task first (SFT), or the task nearer to the policy."
)


@dataclass(kw_only=True)
class TrialStep:
    """One optimizer step."""

    seconds: float = 0.0
    rollout_s: float = 0.0
    scoring_s: float = 0.0
    """Rewards, old and reference log-probs, values, advantages."""
    sampled_tokens: int = 0
    logs: dict[str, float] = field(default_factory=dict)
    """What the trainer logged for the step."""

    @property
    def update_s(self) -> float:
        """Seconds of forward and backward passes, and of the optimizer."""
        return max(0.0, self.seconds - self.rollout_s - self.scoring_s)

    @property
    def tools_s(self) -> float:
        """The part of the rollout in which trajectories waited for their environment instead of the sampler."""
        waits = [self.logs.get(f"time/{name}_s", 0.0) for name in ("env", "generate")]
        return self.rollout_s * waits[0] / sum(waits) if sum(waits) > 0 else 0.0


@dataclass(kw_only=True)
class RunTrial:
    """What was measured."""

    steps: list[TrialStep] = field(default_factory=list)
    device: str = "cpu"
    used_bytes: float = 0.0
    """Largest use of the whole GPU, other processes included; 0 on a CPU."""
    total_bytes: float = 0.0
    """Memory of the GPU."""
    rounding: str = ""
    """Why rounding undoes most of the training; empty if it does not."""
    num_trajectories: int = 0
    """The number of trajectories in the last rollout."""
    num_failed: int = 0


class Meter(TrainerCallback):
    """Listens to a trainer from its construction to the end of `train`.

    The methods it listens to are replaced on the trainer object.

    Args:
        trainer: a multi-turn trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self.trial = RunTrial(device=trainer.accelerator.device.type)
        self._trainer, self._step, self._start = trainer, TrialStep(), 0.0
        self._done = threading.Event()
        generate, score = trainer._generate_and_score, trainer._generate_and_score_completions
        trainer._generate_and_score = self._timed(generate, "rollout_s")
        trainer._generate_and_score_completions = self._timed(score, "scoring_s")
        trainer.add_callback(self)

    def _timed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            inside, start = self._step.rollout_s, time.perf_counter()
            result = method(*args, **kwargs)
            self._wait()
            seconds = time.perf_counter() - start
            if name == "scoring_s":  # the rollout is inside
                seconds -= self._step.rollout_s - inside
                trajectories = self._trainer.last_trajectories
                self._step.sampled_tokens += sum(sum(one.action_mask) for one in trajectories)
                self.trial.num_trajectories = len(trajectories)
                self.trial.num_failed += sum(one.stop_reason.is_infrastructure_failure for one in trajectories)
            setattr(self._step, name, getattr(self._step, name) + seconds)
            return result

        return call

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Look at the optimizer, and start to watch memory."""
        self.trial.rounding = problem_of_run(self._trainer.args, optimizer)
        if self.trial.device == "cuda":
            gpu = torch.cuda.current_device()  # a property of the thread: others begin with GPU 0
            self.trial.total_bytes = torch.cuda.mem_get_info(gpu)[1]
            threading.Thread(target=self._watch_gpu, args=(gpu,), daemon=True).start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step begins."""
        self._step, self._start = TrialStep(), time.perf_counter()
        self.trial.steps.append(self._step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step ends."""
        self._wait()
        self._step.seconds = time.perf_counter() - self._start

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Keep what is logged for the step."""
        self._step.logs.update({name: value for name, value in (logs or {}).items() if isinstance(value, int | float)})

    def close(self) -> None:
        """Stop watching; also called after an error."""
        self._done.set()

    def _watch_gpu(self, gpu: int) -> None:
        while not self._done.wait(_POLL_S):
            free, total = torch.cuda.mem_get_info(gpu)
            self.trial.used_bytes = max(self.trial.used_bytes, total - free)

    def _wait(self) -> None:
        if self.trial.device == "cuda":
            torch.cuda.synchronize()


# ---------------------------------------------------------------- verdicts


def judge(
    report: Report,
    trial: RunTrial,
    *,
    settings: dict[str, Any],
    has_vllm: bool = False,
    estimate: Estimate | None = None,
    savings: dict[str, float] | None = None,
) -> None:
    """Add a finding for everything that was measured.

    A share or a difference is a warning only where a change that exists would help.

    Args:
        report: collects the findings.
        trial: of two steps.
        settings: of the recipe, by their names.
        has_vllm: whether vLLM is installed.
        estimate: memory of the whole recipe; None if it cannot be estimated.
        savings: what would make the recipe smaller.
    """
    _judge_steps(report, trial)
    if trial.rounding:
        report.warning("precision", trial.rounding, REMEDY)
    _judge_time(report, trial, settings, has_vllm=has_vllm)
    if estimate is not None:
        used, total = trial.used_bytes / GIB, trial.total_bytes / GIB
        measured = f" In the trial the whole GPU held {used:.1f} of {total:.0f} GiB." if trial.device == "cuda" else ""
        report_memory(report, estimate, savings or {}, has_gpu=trial.device == "cuda", note=measured)
    _judge_gap(report, trial, settings)


def report_failure(
    report: Report, error: BaseException, *, settings: dict[str, Any], savings: dict[str, float] | None = None
) -> None:
    """Add what a trial ended with, and what would help.

    That is what the package itself says of a mistake (it names place and example), else the first cause of the error.
    """
    chain, cause = [error], error.__cause__ or error.__context__
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    error = next((one for one in chain if isinstance(one, RunError)), chain[-1])
    text, trace = describe_error(error, limit=900), error.__traceback__
    no_memory = ("out of memory", "OutOfMemoryError", "not enough memory", "can't allocate memory")
    if any(words in f"{type(one).__name__} {one}" for words in no_memory for one in chain):
        report.error("trial", f"The memory was not enough: {text}.", _smaller(settings, savings))
        return
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"
    text = f"The run ended with {text}{'' if isinstance(error, RunError) else where}."
    report.error("trial", text, "Correct what the message names. AGENT_R1_TRL_DEBUG=1 shows where it was raised.")


def _smaller(settings: dict[str, Any], savings: dict[str, float] | None) -> str:
    """What makes a recipe smaller: the largest saving that `memory` knows, else a smaller micro-batch."""
    if savings:
        return f"Set, or launch with, {next(iter(savings))}. agent-r1-trl memory lists what else would help."
    rows = settings.get("per_device_train_batch_size", 1) * settings.get("gradient_accumulation_steps", 1)
    if settings.get("per_device_train_batch_size", 1) > 1:
        return f"Set per_device_train_batch_size: 1 and gradient_accumulation_steps: {rows}."
    return "Set gradient_checkpointing: true."


def _judge_steps(report: Report, trial: RunTrial) -> None:
    """Speed, failures, and whether the numbers are finite and say something."""

    def rate(seconds: float) -> str:
        return f"{step.sampled_tokens / seconds:,.0f}" if seconds > 0 else "0"

    first, step = trial.steps[0], trial.steps[-1]
    warm_up = f"; the first step took {first.seconds:.1f} s, with all that is loaded once" if step is not first else ""
    report.ok(
        "speed",
        f"Sampled tokens per second: rollout {rate(step.rollout_s)}, update {rate(step.update_s)}, on {trial.device}; "
        f"a step of {trial.num_trajectories} trajectories took {step.seconds:.1f} s{warm_up}.",
    )
    if trial.num_failed:
        text = f"{trial.num_failed} trajectories failed for no fault of the policy (environment, tool or sampler)."
        fix = "Run agent-r1-trl doctor without --run: it plays the environment alone and says what it raised."
        report.warning("rollout", text, fix)
    logs = [one.logs for one in trial.steps]
    names = ("loss", "grad_norm", "critic/grad_norm")
    bad = [name for name in names if not all(math.isfinite(one.get(name, 0.0)) for one in logs)]
    norms = [one["grad_norm"] for one in logs if "grad_norm" in one]
    if bad or any(one.get("nonfinite/skipped_steps") for one in logs):
        report.error("numbers", f"{' and '.join(bad) or 'A step'} is not finite.", "Set bf16: true and fp16: false.")
    elif not any(norms):
        text = (
            "The gradients were 0 or not logged, so they say nothing: trajectories of one prompt earned the same, or "
            "none has a token in the loss, because what is truncated may be masked."
        )
        report.warning("numbers", text, _LONGER)
    else:
        report.ok("numbers", f"Loss {logs[-1].get('loss', 0.0):.3g}, gradient norm {norms[-1]:.3g}: finite.")


def _judge_time(report: Report, trial: RunTrial, settings: dict[str, Any], *, has_vllm: bool) -> None:
    step = trial.steps[-1]
    names = ("sampling", "tools and environment", "scoring", "update")
    parts = (step.rollout_s - step.tools_s, step.tools_s, step.scoring_s, step.update_s)
    sampling, tools, _, update = shares = [seconds / max(sum(parts), 1e-9) for seconds in parts]
    rows, at_once = settings.get("generation_batch_rows"), settings.get("max_concurrency")
    uses_vllm, own = bool(settings.get("use_vllm")), trial.num_trajectories
    samples_slowly = sampling > LARGE_SHARE and not uses_vllm
    fix = ""
    if tools > LARGE_SHARE and at_once is not None and at_once < own:
        fix = f"Set max_concurrency: {own}, so that all trajectories wait for their tools at once."
    elif samples_slowly and rows is not None and rows < own:
        fix = f"Set generation_batch_rows: {own}, so that all are sampled in one forward pass."
    elif samples_slowly and trial.device == "cuda":
        install = "Set " if has_vllm else "Install vLLM (pip install 'agent-r1-trl[vllm]') and set "
        fix = f"{install}use_vllm: true."
    elif uses_vllm and not settings.get("overlap_rollout") and min(sampling + tools, update) > 0.2:
        fix = "Set overlap_rollout: true: the next rollout is then sampled during the update."
    words = ", ".join(f"{name} {share:.0%}" for name, share in zip(names, shares, strict=True))
    report.add("warning" if fix else "ok", "time", f"A step is {words}.", fix)


def _judge_gap(report: Report, trial: RunTrial, settings: dict[str, Any]) -> None:
    """Whether a sampler of its own draws from what is trained; the trainer compares and logs that."""
    name = "sampling/sampling_logp_difference/mean"
    gaps = [step.logs[name] for step in trial.steps if name in step.logs]
    filters = [name for name, off in FILTERS_OFF.items() if settings.get(name) not in (None, off)]
    if not settings.get("use_vllm"):
        report.skip("sampler", "The model that is trained samples by itself: there is nothing to compare it with.")
    elif filters or not gaps:
        why = f"{' and '.join(filters)} filter what is drawn" if filters else "it gave none"
        report.skip("sampler", f"The log-probs of sampler and trainer were not compared: {why}.")
    else:
        is_exact = not (settings.get("bf16") or settings.get("fp16")) and settings.get("dtype") == "float32"
        limit, gap = EXACT_GAP if is_exact else ROUNDED_GAP, max(gaps)
        fix = "Set dtype: float32, and see whether the gap goes away."
        if not settings.get("vllm_importance_sampling_correction", True):
            fix = "Set vllm_importance_sampling_correction: true."
        text = f"Log-probs of sampler and trainer differ by {gap:.2g} on average ({limit:g} is usual)."
        report.add("ok" if gap <= limit else "warning", "sampler", text, "" if gap <= limit else fix)

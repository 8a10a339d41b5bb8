"""Two real steps of a recipe, measured and judged: what `agent-r1-trl doctor --run` says.

`Meter` measures a trainer while it trains, `time_variants` times its update in other layouts and with other attention
kernels, and `judge` makes findings of both; each cure is a setting with its value.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_torch_flex_attn_available

from agent_r1_trl.critic import base_causal_lm
from agent_r1_trl.features.doctor.memory import GIB, Estimate, Saving
from agent_r1_trl.features.doctor.report import Level, Report, describe_error
from agent_r1_trl.trainers.weights import REMEDY, problem_of_run
from agent_r1_trl.update.batching import Inputs, loss_masks, take_rows, whole_rows
from agent_r1_trl.update.layout import PACKED_LAYOUTS, UpdateLayout
from agent_r1_trl.update.packed_attention import PACKED_ATTENTION

LARGE_SHARE = 0.5
"""Above this share of a step, a part is worth looking at."""
WORTH_IT = 0.9
"""Another layout or kernel is recommended if it takes at most this part of the time."""
TOLERANCE = 0.15
"""Share of the estimated memory by which the peak may exceed it."""
EXACT_GAP, ROUNDED_GAP = 1e-3, 0.05
"""What sampler and trainer may differ by in float32, and where numbers are rounded to 16 bits."""
FILTERS_OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings by which a sampler leaves tokens out or weighs them anew, with the values that switch them off."""
_GAP_ROWS = 8  # on which the log-probs of sampler and trainer are compared
_POLL_S = 0.02
_SHORT_S = 3.0
_COLUMNS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
_ALONE = "Run agent-r1-trl doctor --run in one process, with one GPU, to have them compared."
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
    loss_tokens: int = 0
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
    peak_bytes: float = 0.0
    """The peak of torch's allocator on a GPU; on a CPU what the process grew by."""
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
    """The number of trajectories in the last rollout."""
    num_failed: int = 0
    num_processes: int = 1
    """Whose trials this is."""
    buffer: list[Inputs] = field(default_factory=list)
    """The last rollout's micro-batches before they were laid out."""


def of_all_processes(trial: RunTrial) -> RunTrial:
    """What all processes measured, as one: sums of counts, the largest use of memory, times of the slowest rollout.

    All processes must call it. The micro-batches stay this one's.
    """
    trials: list[RunTrial] = gather_object([replace(trial, buffer=[])])
    if len(trials) == 1:
        return trial
    slowest = max(trials, key=lambda one: one.steps[-1].rollout_s)
    num_gap_tokens = sum(one.num_gap_tokens for one in trials)
    gaps = [one.gap * one.num_gap_tokens for one in trials if one.gap is not None]
    steps = [
        replace(
            step,
            sampled_tokens=sum(one.steps[number].sampled_tokens for one in trials),
            loss_tokens=sum(one.steps[number].loss_tokens for one in trials),
            logs=trials[0].steps[number].logs,  # the Trainer logs what is of all processes, in the first
        )
        for number, step in enumerate(slowest.steps)
    ]
    return replace(
        max(trials, key=lambda one: one.peak_bytes),
        steps=steps,
        gap=sum(gaps) / num_gap_tokens if num_gap_tokens else None,
        num_gap_tokens=num_gap_tokens,
        num_trajectories=sum(one.num_trajectories for one in trials),
        num_failed=sum(one.num_failed for one in trials),
        num_processes=len(trials),
        buffer=trial.buffer,
    )


def filters_of(settings: dict[str, Any]) -> dict[str, float]:
    """The settings that filter what is sampled, with the values that switch them off."""
    return {name: off for name, off in FILTERS_OFF.items() if settings.get(name) not in (None, off)}


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
        self._before = _resident_bytes()
        generate, score = trainer._generate_and_score, trainer._generate_and_score_completions
        trainer._generate_and_score = self._timed(generate, "rollout_s")
        trainer._generate_and_score_completions = self._timed(score, "scoring_s")
        trainer._record = self._compared(trainer._record)
        trainer.layout.arrange = self._seen(trainer.layout.arrange)
        trainer.add_callback(self)

    def _timed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            inside, start = self._step.rollout_s, time.perf_counter()
            result = method(*args, **kwargs)
            _wait(self.trial.device)
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

    def _compared(self, record: Callable[..., Any]) -> Callable[..., Any]:
        def call(batch: Any, output: Inputs) -> Any:
            start = time.perf_counter()
            if self.trial.gap is None and self._trainer.model.training:
                self._measure_gap(output, batch.training_rows)
            self._step.scoring_s -= time.perf_counter() - start
            self._start += time.perf_counter() - start  # the doctor's own time is not the step's
            return record(batch, output)

        return call

    def _measure_gap(self, output: Inputs, rows: Any) -> None:
        trainer, sampled = self._trainer, [row.logprobs for row in rows.rows[:_GAP_ROWS]]
        args, width = trainer.args, output["completion_mask"].shape[1]
        is_missing = not any(sampled) or any(value is None for row in sampled for value in row)
        count = min(gather_object([0 if is_missing or filters_of(vars(args)) else len(sampled)]))
        if not count:  # all processes pass as many rows, since sharded weights are gathered by all of them
            return
        some = take_rows({name: output[name] for name in _COLUMNS}, slice(0, count))
        was_training = trainer.model.training
        trainer.model.eval()
        try:
            with torch.no_grad():
                logps, *_ = trainer._get_per_token_logps_and_entropies(
                    trainer.model, *whole_rows(some), width, batch_size=args.per_device_train_batch_size
                )
        finally:
            trainer.model.train(was_training)
        found = []
        for ours, row in zip(logps, rows.rows[:count], strict=True):
            ours = ours[: len(row.logprobs)].float().cpu().tolist()
            pairs = zip(ours, row.logprobs, row.action_mask, strict=True)
            found += [abs(one - other) for one, other, is_action in pairs if is_action]
        self.trial.num_gap_tokens = len(found)
        self.trial.gap = sum(found) / len(found) if found else None

    def _seen(self, arrange: Callable[..., Any]) -> Callable[..., Any]:
        def call(buffer: list[Inputs], accelerator: Any) -> Any:
            trial, arranged = self.trial, arrange(buffer, accelerator)
            trial.buffer = [dict(inputs) for inputs in buffer]
            self._step.loss_tokens += sum(int(loss_masks(inputs)[0].sum()) for inputs in buffer)
            for one in (one for inputs in arranged for one in inputs.get("passes", [inputs])):
                inputs = self._trainer.layout.trim(one)
                lengths = whole_rows(inputs)[1].sum(dim=1)
                sizes = (len(lengths), inputs["prompt_ids"].shape[1], inputs["completion_ids"].shape[1])
                trial.widest = max(trial.widest, sizes, key=lambda size: size[0] * (size[1] + size[2]))
                trial.row_tokens = max(trial.row_tokens, int(lengths.max()))
                trial.pass_tokens = max(trial.pass_tokens, int(lengths.sum()))
            return arranged

        return call

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
        self._step, self._start = TrialStep(), time.perf_counter()
        self.trial.steps.append(self._step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step ends."""
        _wait(self.trial.device)
        self._step.seconds = time.perf_counter() - self._start
        self._read_peak()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Keep what is logged for the step."""
        self._step.logs.update({name: value for name, value in (logs or {}).items() if isinstance(value, int | float)})

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


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _resident_bytes() -> float:
    """Bytes of this process; 0 where the system does not say."""
    path = Path("/proc/self/statm")
    return float(path.read_text().split()[1]) * 4096 if path.exists() else 0.0


# ---------------------------------------------------------------- layouts and kernels


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to compute the update."""

    settings: dict[str, Any]
    """Settings of a recipe: `update_layout` and `attn_implementation`."""
    seconds: float | None = None
    """Seconds that the passes of one rollout take, forward and backward; None if it cannot be run."""
    reason: str = ""
    """Why it cannot."""
    is_current: bool = False

    def __str__(self) -> str:
        return " on ".join(map(str, self.settings.values()))


def attention_kernels(device: str) -> list[str]:
    """The attention implementations that are installed and can train on this device."""
    has = {
        "flash_attention_2": is_flash_attn_2_available,
        "flash_attention_3": is_flash_attn_3_available,
        "flex_attention": is_torch_flex_attn_available,
    }
    return ["sdpa", *(name for name, is_there in has.items() if device == "cuda" and is_there())]


def time_variants(
    trainer: Any, buffer: list[Inputs], *, layouts: Sequence[str], kernels: Sequence[str], repeats: int = 2
) -> list[Variant]:
    """Time the update of one rollout, the current way first. Gradients are computed and thrown away.

    Args:
        trainer: that has trained.
        buffer: the rollout's micro-batches before they were laid out.
        layouts: values of `update_layout` to try.
        kernels: values of `attn_implementation` to try.
        repeats: timed passes over the rollout, of which the fastest counts, after one that warms up; where a pass
            takes several seconds, one is enough.
    """
    unwrap = trainer.accelerator.unwrap_model
    models = [base_causal_lm(unwrap(model)) for model in (trainer.model, trainer.ref_model) if model is not None]
    critic = getattr(models[0], "critic_backbone", None)
    models += [critic] if critic is not None else []
    used = str(models[0].config._attn_implementation).replace(PACKED_ATTENTION, "sdpa")
    now = (trainer.layout.name, used)
    found = []
    for layout, kernel in dict.fromkeys(
        [now, *((layout, kernel) for kernel in (used, *kernels) for layout in layouts)]
    ):
        settings, seconds, reason = {"update_layout": layout, "attn_implementation": kernel}, None, ""
        try:
            with _prepared(trainer, models, layout, kernel):
                seconds = _time_update(trainer, buffer)
                if seconds < _SHORT_S:  # the first one warms up
                    seconds = min(_time_update(trainer, buffer) for _ in range(repeats))
        except Exception as error:  # another kernel or layout may not fit this model: a finding, not a crash
            reason = describe_error(error)
        is_current = (layout, kernel) == now
        found.append(Variant(settings=settings, seconds=seconds, reason=reason, is_current=is_current))
        trainer.model.zero_grad(set_to_none=True)
    return found


@contextmanager
def _prepared(trainer: Any, models: list[Any], layout: str, kernel: str) -> Iterator[None]:
    before, own_layout = [model.config._attn_implementation for model in models], trainer.layout
    try:
        args = copy.copy(trainer.args)
        args.update_layout = layout
        if layout not in PACKED_LAYOUTS:
            args.max_tokens_per_micro_batch = None
        args.check_multi_turn()
        other = UpdateLayout(args)
        for model in models:
            model.set_attn_implementation(kernel)
        other.prepare(*models, has_router_loss=trainer.aux_loss_enabled)
        trainer.layout = other
        yield
    finally:
        trainer.layout = own_layout
        for model, name in zip(models, before, strict=True):
            model.config._attn_implementation = name


def _time_update(trainer: Any, buffer: list[Inputs]) -> float:
    """Seconds of all forward and backward passes of a rollout."""
    trainer.model.train()
    device = trainer.accelerator.device.type
    _wait(device)
    start = time.perf_counter()
    for inputs in trainer.layout.arrange([dict(one) for one in buffer], trainer.accelerator):
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model, trainer.layout.trim(inputs))
        trainer.accelerator.backward(loss)
    _wait(device)
    seconds = time.perf_counter() - start
    trainer.model.zero_grad(set_to_none=True)
    return seconds


# ---------------------------------------------------------------- verdicts


def judge(
    report: Report,
    trial: RunTrial,
    *,
    settings: dict[str, Any],
    variants: Sequence[Variant] | None,
    not_timed: str = "",
    has_vllm: bool = False,
    of_trial: Estimate | None = None,
    of_recipe: Estimate | None = None,
    savings: Sequence[Saving] = (),
) -> None:
    """Add a finding for everything that was measured.

    A share or a difference is a warning only where a change that exists would help.

    Args:
        report: collects the findings.
        trial: of two steps.
        settings: of the recipe, by their names.
        variants: what `time_variants` found; None if it was not run.
        not_timed: why it was not.
        has_vllm: whether vLLM is installed.
        of_trial: estimated memory of what the trial really computed.
        of_recipe: estimated memory of the whole recipe.
        savings: what would make the recipe smaller.
    """
    _judge_steps(report, trial)
    if trial.rounding:
        report.warning("precision", trial.rounding, REMEDY)
    _judge_time(report, trial, settings, has_vllm=has_vllm)
    _judge_memory(report, trial, settings, of_trial, of_recipe, savings)
    _judge_gap(report, trial, settings)
    if variants is None:
        report.skip("update", f"Layouts and attention kernels were not compared: {not_timed}. {_ALONE}")
        return
    (current,) = (variant for variant in variants if variant.is_current)
    timed = sorted((v for v in variants if v.seconds is not None), key=lambda v: v.seconds or 0.0)
    refused = ", ".join(str(variant) for variant in variants if variant.seconds is None)
    words = "; ".join(f"{variant} {variant.seconds:.2f} s" for variant in timed)
    text = f"An update with {current}; one rollout's passes took: {words}."
    text += f" Not possible here: {refused}." if refused else ""
    if current.seconds is None:
        report.warning("update", f"The update could not be repeated: {current.reason}.", _ALONE)
    elif (timed[0].seconds or 0.0) <= WORTH_IT * current.seconds:
        pairs = {name: value for name, value in timed[0].settings.items() if value != current.settings[name]}
        cure = " and ".join(f"{name}: {value}" for name, value in pairs.items())
        report.warning("update", text, f"Set {cure}.")
    else:
        report.ok("update", text + " None is worth a change.")


def report_failure(
    report: Report, error: BaseException, *, settings: dict[str, Any], savings: Sequence[Saving] = ()
) -> None:
    """Add what a trial ended with: the first cause of the error and its place, and what would help."""
    seen = {id(error)}
    while (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        if id(cause) in seen:
            break
        seen.add(id(cause))
        error = cause
    text, trace = describe_error(error, limit=600), error.__traceback__
    no_memory = ("out of memory", "OutOfMemoryError", "not enough memory", "can't allocate memory")
    if any(words in f"{type(error).__name__} {error}" for words in no_memory):
        report.error("trial", f"The memory was not enough: {text}.", _smaller(settings, savings))
        return
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"
    cure = "Correct what the message names. AGENT_R1_TRL_DEBUG=1 shows where it was raised."
    report.error("trial", f"The run ended with {text}{where}.", cure)


def _smaller(settings: dict[str, Any], savings: Sequence[Saving]) -> str:
    """What makes a recipe smaller: the largest saving that `memory` knows, else a smaller micro-batch."""
    if savings:
        return f"Set, or launch with, {savings[0].change}. agent-r1-trl memory lists what else would help."
    rows = settings.get("per_device_train_batch_size", 1) * settings.get("gradient_accumulation_steps", 1)
    if settings.get("per_device_train_batch_size", 1) > 1:
        return f"Set per_device_train_batch_size: 1 and gradient_accumulation_steps: {rows}."
    return "Set gradient_checkpointing: true."


def _judge_steps(report: Report, trial: RunTrial) -> None:
    """Speed, failures, and whether the numbers are finite and say something."""

    def rate(count: int, seconds: float) -> str:
        return f"{count / seconds:,.0f}" if seconds > 0 else "0"

    first, step = trial.steps[0], trial.steps[-1]
    warm_up = f"; the first step took {first.seconds:.1f} s, with all that is loaded once" if step is not first else ""
    together = f" ({trial.num_processes} processes together)" if trial.num_processes > 1 else ""
    report.ok(
        "speed",
        f"Rollout {rate(step.sampled_tokens, step.rollout_s)} sampled tokens/s, update "
        f"{rate(step.loss_tokens, step.update_s)} tokens in the loss/s, on {trial.device}; a step of "
        f"{trial.num_trajectories} trajectories{together} took {step.seconds:.1f} s{warm_up}.",
    )
    if trial.num_failed:
        text = f"{trial.num_failed} trajectories failed for no fault of the policy (environment, tool or sampler)."
        cure = "Run agent-r1-trl doctor without --run: it plays the environment alone and says what it raised."
        report.warning("rollout", text, cure)
    logs = [one.logs for one in trial.steps]
    names = ("loss", "grad_norm", "critic/grad_norm")
    bad = [name for name in names if not all(math.isfinite(one.get(name, 0.0)) for one in logs)]
    norms = [one["grad_norm"] for one in logs if "grad_norm" in one]
    if bad or any(one.get("nonfinite/skipped_steps") for one in logs):
        report.error("numbers", f"{' and '.join(bad) or 'A step'} is not finite.", "Set bf16: true and fp16: false.")
    elif not any(one.loss_tokens for one in trial.steps):
        why = "No token was in the loss, so loss and gradients say nothing: what is cut off may be masked."
        report.warning("numbers", why, _LONGER)
    elif not any(norms):
        why = "The gradients were 0 or not logged, so they say nothing: trajectories of one prompt earned the same."
        report.warning("numbers", why, _LONGER)
    else:
        report.ok("numbers", f"Loss {logs[-1].get('loss', 0.0):.3g}, gradient norm {norms[-1]:.3g}: finite.")


def _judge_time(report: Report, trial: RunTrial, settings: dict[str, Any], *, has_vllm: bool) -> None:
    step = trial.steps[-1]
    names = ("sampling", "tools and environment", "scoring", "update")
    parts = (step.rollout_s - step.tools_s, step.tools_s, step.scoring_s, step.update_s)
    sampling, tools, _, update = shares = [seconds / max(sum(parts), 1e-9) for seconds in parts]
    rows, at_once = settings.get("generation_batch_rows"), settings.get("max_concurrency")
    uses_vllm, own = bool(settings.get("use_vllm")), trial.num_trajectories // trial.num_processes
    samples_slowly = sampling > LARGE_SHARE and not uses_vllm
    cure = ""
    if tools > LARGE_SHARE and at_once is not None and at_once < own:
        cure = f"Set max_concurrency: {own}, so that all trajectories wait for their tools at once."
    elif samples_slowly and rows is not None and rows < own:
        cure = f"Set generation_batch_rows: {own}, so that all are sampled in one forward pass."
    elif samples_slowly and trial.device == "cuda":
        install = "Set " if has_vllm else "Install vLLM (pip install 'agent-r1-trl[vllm]') and set "
        cure = f"{install}use_vllm: true."
    elif uses_vllm and not settings.get("overlap_rollout") and min(sampling + tools, update) > 0.2:
        cure = "Set overlap_rollout: true: the next rollout is then sampled during the update."
    words = ", ".join(f"{name} {share:.0%}" for name, share in zip(names, shares, strict=True))
    report.add("warning" if cure else "ok", "time", f"A step is {words}.", cure)


def _judge_memory(
    report: Report,
    trial: RunTrial,
    settings: dict[str, Any],
    of_trial: Estimate | None,
    of_recipe: Estimate | None,
    savings: Sequence[Saving],
) -> None:
    peak, total = trial.peak_bytes / GIB, trial.total_bytes / GIB
    if trial.device != "cuda":
        text = f"The process grew by {peak:.2f} GiB. `memory` estimates GPUs, so this was not compared."
        report.skip("memory", text)
        return
    used = f"; the whole GPU held {trial.used_bytes / GIB:.2f} of {total:.0f} GiB"
    if of_trial is None or of_recipe is None:
        report.skip("memory", f"Peak {peak:.2f} GiB{used}. Not compared: `memory` cannot estimate this recipe.")
        return
    # What torch's allocator in this process does not hold.
    others = ("CUDA context, workspaces", "vLLM")
    expected = replace(of_trial, lines=tuple(one for one in of_trial.lines if one.name not in others)).peak / GIB
    more = max(1.0, peak / expected)
    whole = of_recipe.peak / GIB * more
    text = f"Peak {peak:.2f} GiB where `memory` expects {expected:.2f} for what the trial computed{used}. "
    text += f"The whole recipe: {whole:.1f} GiB" + (f" (the estimate times {more:.2f})" * (more > 1 + TOLERANCE)) + "."
    if whole > 0.9 * total or of_recipe.problems:
        level: Level = "error" if whole > total or of_recipe.problems else "warning"
        report.add(level, "memory", " ".join([text, *of_recipe.problems]), _smaller(settings, savings))
    elif more > 1 + TOLERANCE:
        cure = f"Pass --gpu_memory_gb {total / more:.0f} to agent-r1-trl memory for this model."
        report.warning("memory", text, cure)
    else:
        report.ok("memory", text)


def _judge_gap(report: Report, trial: RunTrial, settings: dict[str, Any]) -> None:
    name = "sampling/sync_logprob_gap"
    synced = [step.logs[name] for step in trial.steps if name in step.logs]
    probe = f" The probe after a weight sync found {max(synced):.2g}." if synced else ""
    if filters := filters_of(settings):
        given = ", ".join(f"{name}={settings[name]}" for name in filters)
        report.warning(
            "sampler",
            "The log-probs of sampler and trainer were not compared: the sampler draws from a filtered distribution "
            f"({given}), and the loss from the whole one.{probe}",
            f"Set {', '.join(f'{name}: {value}' for name, value in filters.items())} to have them compared.",
        )
        return
    if trial.gap is None:
        why = "on some process, no trajectory came with log-probs of all its tokens"
        report.skip("sampler", f"The log-probs of sampler and trainer were not compared: {why}.{probe}")
        return
    is_exact = not (settings.get("bf16") or settings.get("fp16")) and settings.get("dtype") == "float32"
    limit = EXACT_GAP if is_exact else ROUNDED_GAP
    text = (
        f"Log-probs of sampler and trainer differ by {trial.gap:.2g} on average over {trial.num_gap_tokens} sampled "
        f"tokens ({limit:g} is usual).{probe}"
    )
    cure = "Set dtype: float32, and see whether the gap goes away."
    if settings.get("use_vllm") and not settings.get("vllm_importance_sampling_correction", True):
        cure = "Set vllm_importance_sampling_correction: true."
    if trial.gap <= limit:
        report.ok("sampler", text)
    else:
        report.warning("sampler", text, cure)

"""What a trial says about a recipe, as findings; each cure is a setting with its value.

A share or a difference is called a problem only where a change that exists would help.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from agent_r1_trl.doctor.report import Report, describe_error
from agent_r1_trl.doctor.trial.meter import Step, Trial, filters_of
from agent_r1_trl.doctor.trial.variants import Variant
from agent_r1_trl.memory import Estimate, Saving
from agent_r1_trl.trainers.precision import REMEDY

GIB = 2**30
LARGE_SHARE = 0.5
"""Above this share of a step, a part is worth looking at."""
WORTH_IT = 0.9
"""Another layout or kernel is recommended if it takes at most this part of the time."""
TOLERANCE = 0.15
"""Of the estimated memory."""
EXACT_GAP, ROUNDED_GAP = 1e-3, 0.05
"""What sampler and trainer may differ by in float32, and where numbers are rounded to 16 bits."""
_OUT_OF_MEMORY = ("out of memory", "OutOfMemoryError", "not enough memory", "can't allocate memory")


def judge(
    report: Report,
    trial: Trial,
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
    step = trial.steps[-1]
    _judge_speed(report, trial, step)
    _judge_numbers(report, trial)
    if trial.rounding:
        report.warning("precision", trial.rounding, REMEDY)
    _judge_time(report, trial, step, settings, has_vllm=has_vllm)
    _judge_memory(report, trial, settings, of_trial, of_recipe, savings)
    _judge_gap(report, trial, settings)
    _judge_variants(report, variants, not_timed)


def report_failure(
    report: Report, error: BaseException, *, settings: dict[str, Any], savings: Sequence[Saving] = ()
) -> None:
    """Add what a trial ended with: the first cause of the error, and what would help."""
    first = first_cause(error)
    text = describe_error(first, limit=600)
    if any(words in f"{type(first).__name__} {first}" for words in _OUT_OF_MEMORY):
        report.error("trial", f"The memory was not enough: {text}.", _smaller(settings, savings))
        return
    where = _place(first)
    report.error(
        "trial",
        f"The run ended with {text}{where}.",
        "Correct what the message names. AGENT_R1_TRL_DEBUG=1 shows where it was raised.",
    )


def _smaller(settings: dict[str, Any], savings: Sequence[Saving]) -> str:
    """What makes a recipe smaller: the largest saving that `memory` knows, else a smaller micro-batch."""
    if savings:
        return f"Set, or launch with, {savings[0].change}. agent-r1-trl memory lists what else would help."
    rows = settings.get("per_device_train_batch_size", 1) * settings.get("gradient_accumulation_steps", 1)
    if settings.get("per_device_train_batch_size", 1) > 1:
        return f"Set per_device_train_batch_size: 1 and gradient_accumulation_steps: {rows}."
    return "Set gradient_checkpointing: true."


def first_cause(error: BaseException) -> BaseException:
    """The error that others were raised from."""
    seen = {id(error)}
    while (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        if id(cause) in seen:
            break
        seen.add(id(cause))
        error = cause
    return error


def _place(error: BaseException) -> str:
    """File and line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"


# ---------------------------------------------------------------- time


def _judge_speed(report: Report, trial: Trial, step: Step) -> None:
    first = trial.steps[0]
    warm_up = f"; the first step took {first.seconds:.1f} s, with all that is loaded once" if step is not first else ""
    together = f" ({trial.num_processes} processes together)" if trial.num_processes > 1 else ""
    report.ok(
        "speed",
        f"Rollout {_rate(step.sampled_tokens, step.rollout_s)} sampled tokens/s, update "
        f"{_rate(step.loss_tokens, step.update_s)} tokens in the loss/s, on {trial.device}; a step of "
        f"{trial.num_trajectories} trajectories{together} took {step.seconds:.1f} s{warm_up}.",
    )
    if trial.num_failed:
        report.warning(
            "rollout",
            f"{trial.num_failed} trajectories failed for no fault of the policy (environment, tool or sampler).",
            "Run agent-r1-trl doctor without --run: it plays the environment alone and says what it raised.",
        )


def _judge_numbers(report: Report, trial: Trial) -> None:
    logs = [step.logs for step in trial.steps]
    names = ("loss", "grad_norm", "critic/grad_norm")
    bad = [name for name in names if not all(math.isfinite(one.get(name, 0.0)) for one in logs)]
    norms = [one["grad_norm"] for one in logs if "grad_norm" in one]
    if bad or any(one.get("nonfinite/skipped_steps") for one in logs):
        report.error("numbers", f"{' and '.join(bad) or 'A step'} is not finite.", "Set bf16: true and fp16: false.")
    elif not any(step.loss_tokens for step in trial.steps):
        why = "No token was in the loss, so loss and gradients say nothing: what is cut off may be masked."
        report.warning("numbers", why, _LONGER)
    elif not any(norms):
        why = "The gradients were 0 or not logged, so they say nothing: trajectories of one prompt earned the same."
        report.warning("numbers", why, _LONGER)
    else:
        report.ok("numbers", f"Loss {logs[-1].get('loss', 0.0):.3g}, gradient norm {norms[-1]:.3g}: finite.")


_LONGER = (
    "Raise --run_tokens and --run_turns to what the recipe allows. If it stays so, bring the policy nearer to the "
    "task first (SFT), or the task nearer to the policy."
)


def _judge_time(report: Report, trial: Trial, step: Step, settings: dict[str, Any], *, has_vllm: bool) -> None:
    parts = {
        "sampling": step.rollout_s - step.tools_s,
        "tools and environment": step.tools_s,
        "scoring": step.scoring_s,
        "update": step.update_s,
    }
    total = max(sum(parts.values()), 1e-9)
    shares = {name: seconds / total for name, seconds in parts.items()}
    words = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    cure = _cure_of_time(trial, shares, settings, has_vllm=has_vllm)
    if cure:
        report.warning("time", f"A step is {words}.", cure)
    else:
        report.ok("time", f"A step is {words}.")


def _cure_of_time(trial: Trial, shares: dict[str, float], settings: dict[str, Any], *, has_vllm: bool) -> str:
    rows, at_once = settings.get("generation_batch_rows"), settings.get("max_concurrency")
    uses_vllm, own = bool(settings.get("use_vllm")), trial.num_trajectories // trial.num_processes
    if shares["tools and environment"] > LARGE_SHARE and at_once is not None and at_once < own:
        return f"Set max_concurrency: {own}, so that all trajectories wait for their tools at once."
    if shares["sampling"] > LARGE_SHARE and not uses_vllm:
        if rows is not None and rows < own:
            return f"Set generation_batch_rows: {own}, so that all are sampled in one forward pass."
        if trial.device == "cuda":
            first = "" if has_vllm else "Install vLLM (pip install 'agent-r1-trl[vllm]') and set "
            return f"{first or 'Set '}use_vllm: true."
    rollout = shares["sampling"] + shares["tools and environment"]
    if uses_vllm and not settings.get("overlap_rollout") and min(rollout, shares["update"]) > 0.2:
        return "Set overlap_rollout: true: the next rollout is then played during the update."
    return ""


# ---------------------------------------------------------------- memory


def _judge_memory(
    report: Report,
    trial: Trial,
    settings: dict[str, Any],
    of_trial: Estimate | None,
    of_recipe: Estimate | None,
    savings: Sequence[Saving],
) -> None:
    peak = trial.peak_bytes / GIB
    if trial.device != "cuda":
        found = f"The process grew by {peak:.2f} GiB. `memory` estimates GPUs, so this was not compared."
        report.skip("memory", found)
        return
    used = f"; the whole GPU held {trial.used_bytes / GIB:.2f} of {trial.total_bytes / GIB:.0f} GiB"
    if of_trial is None or of_recipe is None:
        report.skip("memory", f"Peak {peak:.2f} GiB{used}. Not compared: `memory` cannot estimate this recipe.")
        return
    expected = _in_this_allocator(of_trial)
    ratio = trial.peak_bytes / expected
    text = f"Peak {peak:.2f} GiB where `memory` expects {expected / GIB:.2f} for what the trial computed{used}. "
    more = max(1.0, ratio)
    whole = of_recipe.peak * more
    share = whole / trial.total_bytes
    text += f"The whole recipe: {whole / GIB:.1f} GiB"
    text += f" (the estimate times {more:.2f})." if more > 1 + TOLERANCE else "."
    if share > 0.9 or of_recipe.problems:
        note = report.error if share > 1 or of_recipe.problems else report.warning
        note("memory", " ".join([text, *of_recipe.problems]), _smaller(settings, savings))
    elif ratio > 1 + TOLERANCE:
        room = trial.total_bytes / GIB / more
        report.warning("memory", text, f"Pass --gpu_memory_gb {room:.0f} to agent-r1-trl memory for this model.")
    else:
        report.ok("memory", text)


def _in_this_allocator(estimate: Estimate) -> float:
    """Of an estimate, what torch's allocator in this process holds: no CUDA context, no engine."""
    others = ("CUDA context, workspaces", "vLLM")
    lines = [line for line in estimate.lines if line.name not in others and line.place == "gpu"]
    totals = {phase: sum(line.bytes for line in lines if line.phase == phase) for phase in _PHASES}
    return totals["always"] + max(totals["update"], totals["rollout"])


_PHASES = ("always", "update", "rollout")


# ---------------------------------------------------------------- sampler, layout


def _judge_gap(report: Report, trial: Trial, settings: dict[str, Any]) -> None:
    synced = [
        step.logs["sampling/sync_logprob_gap"] for step in trial.steps if "sampling/sync_logprob_gap" in step.logs
    ]
    probe = f" The probe after a weight sync found {max(synced):.2g}." if synced else ""
    if filters := filters_of(settings):
        report.warning(
            "sampler",
            f"The log-probs of sampler and trainer were not compared: the sampler draws from a filtered distribution "
            f"({', '.join(f'{name}={settings[name]}' for name in filters)}), and the loss from the whole one.{probe}",
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
    if trial.gap <= limit:
        report.ok("sampler", text)
    elif settings.get("use_vllm") and not settings.get("vllm_importance_sampling_correction", True):
        report.warning("sampler", text, "Set vllm_importance_sampling_correction: true.")
    else:
        report.warning("sampler", text, "Set dtype: float32, and see whether the gap goes away.")


def _judge_variants(report: Report, variants: Sequence[Variant] | None, not_timed: str) -> None:
    if variants is None:
        report.skip("update", f"Layouts and attention kernels were not compared: {not_timed}. {_ALONE}")
        return
    (current,) = (variant for variant in variants if variant.is_current)
    timed = sorted((v for v in variants if v.seconds is not None), key=lambda v: v.seconds or 0.0)
    words = "; ".join(f"{_name(variant)} {variant.seconds:.2f} s" for variant in timed)
    refused = [variant for variant in variants if variant.seconds is None]
    left_out = f" Not possible here: {', '.join(map(_name, refused))}." if refused else ""
    text = f"An update with {_name(current)}; one rollout's passes took: {words}.{left_out}"
    if current.seconds is None:
        report.warning("update", f"The update could not be repeated: {current.reason}.", _ALONE)
    elif timed[0].seconds <= WORTH_IT * current.seconds:  # type: ignore[operator]
        report.warning("update", text, _changes(current, timed[0]))
    else:
        report.ok("update", text + " None is worth a change.")


_ALONE = "Run agent-r1-trl doctor --run in one process, with one GPU, to have them compared."


def _changes(current: Variant, best: Variant) -> str:
    pairs = {name: value for name, value in best.settings.items() if value != current.settings[name]}
    return "Set " + " and ".join(f"{name}: {value}" for name, value in pairs.items()) + "."


def _name(variant: Variant) -> str:
    return " on ".join(str(value) for value in variant.settings.values())


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:,.0f}" if seconds > 0 else "0"

"""What a trial says about a recipe: each judgement by hand, and every cure is a setting that `train` takes.

Those that a CPU can follow are followed by a step of training. Not covered: measuring (test_doctor_run.py).
"""

from __future__ import annotations

import re

import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.cli.train import read_arguments
from agent_r1_trl.features.doctor.memory import Estimate, Line, Saving
from agent_r1_trl.features.doctor.report import Report
from agent_r1_trl.features.doctor.trial import RunTrial, TrialStep, Variant, judge, report_failure
from tests.cli.conftest import write_task

GIB = 2**30
BALANCED = {"seconds": 4.0, "rollout_s": 1.5, "scoring_s": 0.5}


def trial_of(step=None, **values):
    logs = {"loss": 0.5, "grad_norm": 1.0}
    step = TrialStep(**BALANCED | {"logs": logs, "sampled_tokens": 300, "loss_tokens": 400} | (step or {}))
    return RunTrial(
        **{"steps": [TrialStep(seconds=9.0), step], "gap": 1e-5, "num_gap_tokens": 7, "num_trajectories": 8} | values
    )


def variants_of(*others):
    """The current one takes 1 s."""
    now = Variant(settings={"update_layout": "padded", "attn_implementation": "sdpa"}, seconds=1.0, is_current=True)
    return [now, *(Variant(settings=dict(zip(now.settings, names, strict=True)), seconds=s) for s, *names in others)]


def judged(trial, *, variants=None, **options):
    report = Report()
    options = {"settings": {"dtype": "float32", **options.pop("settings", {})}} | options
    judge(report, trial, variants=variants or variants_of(), **options)
    assert len({finding.check for finding in report.findings}) == len(report.findings)
    return {finding.check: finding for finding in report.findings}


def estimate_of(gib, *, gpu=10.0, problems=()):
    lines = (Line(name="weights", bytes=gib * GIB, formula=""), Line(name="vLLM", bytes=GIB, formula=""))
    return Estimate(lines=lines, gpu_memory_gb=gpu, problems=problems)


SLOW_SAMPLER = {"seconds": 10.0, "rollout_s": 9.0, "scoring_s": 0.5}
SLOW_TOOLS = SLOW_SAMPLER | {"logs": {"time/env_s": 9.0, "time/generate_s": 1.0}}
ON_GPU = {"device": "cuda", "total_bytes": 10.0 * GIB, "used_bytes": 9.0 * GIB}
SAVING = [Saving(change="gradient_checkpointing: true", peak=1.0)]
CURES = {
    "few places": (trial_of(SLOW_TOOLS), {"settings": {"max_concurrency": 4}}, "time", {"max_concurrency": 8}),
    "few rows": (
        trial_of(SLOW_SAMPLER), {"settings": {"generation_batch_rows": 2}}, "time", {"generation_batch_rows": 8},
    ),
    "no vLLM": (trial_of(SLOW_SAMPLER, **ON_GPU), {}, "time", {"use_vllm": True}),
    "vLLM is there": (trial_of(SLOW_SAMPLER, **ON_GPU), {"has_vllm": True}, "time", {"use_vllm": True}),
    "no overlap": (trial_of(), {"settings": {"use_vllm": True}}, "time", {"overlap_rollout": True}),
    "too large": (
        trial_of(peak_bytes=9.0 * GIB, **ON_GPU),
        {"of_trial": estimate_of(9), "of_recipe": estimate_of(12), "savings": SAVING},
        "memory",
        {"gradient_checkpointing": True},
    ),
    "no correction": (
        trial_of(gap=0.3),
        {"settings": {"use_vllm": True, "overlap_rollout": True, "vllm_importance_sampling_correction": False}},
        "sampler",
        {"vllm_importance_sampling_correction": True},
    ),
    "rounding": (trial_of(gap=0.3), {}, "sampler", {"dtype": "float32"}),
    "a filter": (
        trial_of(gap=None), {"settings": {"top_p": 0.9, "top_k": 5, "min_p": None, "repetition_penalty": 1.1}},
        "sampler", {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0},
    ),
    "a layout": (
        trial_of(), {"variants": variants_of((0.5, "shared", "sdpa"))}, "update", {"update_layout": "shared"},
    ),
    "a kernel": (
        trial_of(),
        {"variants": variants_of((0.8, "grouped", "sdpa"), (0.5, "packed", "flash_attention_2"))},
        "update",
        {"update_layout": "packed", "attn_implementation": "flash_attention_2"},
    ),
    "not finite": (trial_of({"logs": {"loss": float("nan")}}), {}, "numbers", {"bf16": True, "fp16": False}),
    "two processes": (
        trial_of(SLOW_TOOLS, num_processes=2), {"settings": {"max_concurrency": 3}}, "time", {"max_concurrency": 4},
    ),
}  # fmt: skip


def settings_in(cure):
    return dict(re.findall(r"\b([a-z_0-9]+): ([\w.]*\w)", cure))


@pytest.mark.parametrize(("trial", "options", "check", "cure"), CURES.values(), ids=CURES.keys())
def test_a_cure_names_settings_that_train_takes(trial, options, check, cure, tmp_path, monkeypatch, model_folder):
    finding = judged(trial, **options)[check]
    assert finding.level != "ok"
    found = settings_in(finding.cure)
    assert found == {
        name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in cure.items()
    }
    monkeypatch.chdir(tmp_path)
    path = str(write_task(tmp_path, model_folder))
    flags = [word for name, value in found.items() if name != "bf16" for word in (f"--{name}", value)]
    if "overlap_rollout" in found or "vllm_importance_sampling_correction" in found:
        flags += ["--use_vllm", "true"]
    _, args, model_args = read_arguments(["--config", path, *flags])
    for name, value in cure.items():
        if name != "bf16":  # which no CPU is asked for
            assert getattr(args if hasattr(args, name) else model_args, name) == value


@pytest.mark.slow
def test_a_step_is_made_with_every_cure_that_a_cpu_can_follow(tmp_path, monkeypatch, model_folder):
    chosen = ("few places", "few rows", "too large", "rounding", "a filter", "a layout")
    cures = [judged(trial, **options)[check].cure for trial, options, check, _ in map(CURES.get, chosen)]
    rows = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    cures.append(failure(RuntimeError("out of memory"), rows).cure)
    found = {name: value for cure in cures for name, value in settings_in(cure).items()}
    assert len(found) == 10
    monkeypatch.chdir(tmp_path)
    path = str(write_task(tmp_path, model_folder, top_p=0.9, max_steps=1))
    assert (
        main(["train", "--config", path, *(word for item in found.items() for word in (f"--{item[0]}", item[1]))]) == 0
    )


def test_a_good_run_is_ok_in_every_respect():
    found = judged(trial_of())
    assert {check: finding.level for check, finding in found.items() if finding.level != "ok"} == {"memory": "skipped"}
    assert "Rollout 200 sampled tokens/s, update 200 tokens in the loss/s" in found["speed"].message
    assert "sampling 38%, tools and environment 0%, scoring 12%, update 50%" in found["time"].message


def test_time_at_tools_is_the_part_of_the_rollout_that_trajectories_waited_for_them():
    step = TrialStep(**SLOW_TOOLS)
    assert step.tools_s == pytest.approx(8.1) and step.update_s == pytest.approx(0.5)


def test_memory_is_ok_only_where_it_was_compared():
    compared = {"of_trial": estimate_of(8), "of_recipe": estimate_of(4)}
    assert "expects 8.00" in judged(trial_of(peak_bytes=8.5 * GIB, **ON_GPU), **compared)["memory"].message
    more = judged(trial_of(peak_bytes=10.0 * GIB, **ON_GPU), **compared)["memory"]
    assert more.level == "warning" and "--gpu_memory_gb 8" in more.cure
    assert "the estimate times 1.25" in more.message and "6.2 GiB" in more.message  # (4 + 1) x 1.25
    unknown = judged(trial_of(peak_bytes=1.0, **ON_GPU))["memory"]
    assert unknown.level == "skipped" and "Not compared" in unknown.message
    broken = {"of_trial": estimate_of(8), "of_recipe": estimate_of(4, problems=("too small a share",))}
    assert judged(trial_of(peak_bytes=8.0 * GIB, **ON_GPU), **broken)["memory"].level == "error"


def test_layouts_that_were_not_timed_are_no_ok():
    report = Report()
    judge(report, trial_of(), settings={}, variants=None, not_timed="2 processes train together")
    (finding,) = (finding for finding in report.findings if finding.check == "update")
    assert finding.level == "skipped" and "2 processes" in finding.message


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"loss_tokens": 0}, "No token was in the loss"),
        ({"logs": {"loss": 0.0, "grad_norm": 0.0}}, "say nothing"),
        ({"logs": {"loss": 0.0}}, "say nothing"),
    ],
)
def test_numbers_that_say_nothing_are_no_ok(step, words):
    finding = judged(trial_of(step))["numbers"]
    assert finding.level == "warning" and words in finding.message and "--run_tokens" in finding.cure


def test_rounding_that_undoes_the_training_is_said():
    assert "precision" not in judged(trial_of())
    assert judged(trial_of(rounding="Most updates are rounded away."))["precision"].level == "warning"


def test_the_numbers_of_every_step_are_looked_at():
    trial = trial_of()
    trial.steps[0].logs["grad_norm"] = float("inf")
    assert judged(trial)["numbers"].level == "error"
    trial.steps[0].logs = {"critic/grad_norm": float("nan")}
    assert "critic/grad_norm is not finite" in judged(trial)["numbers"].message


def test_a_gap_that_nothing_was_sampled_for_is_no_ok():
    assert judged(trial_of(gap=None))["sampler"].level == "skipped"


def test_a_layout_that_is_hardly_faster_is_not_recommended():
    refused = Variant(settings={"update_layout": "shared", "attn_implementation": "x"}, reason="no")
    found = judged(trial_of(), variants=[*variants_of((0.95, "packed", "sdpa")), refused])["update"]
    assert found.level == "ok" and "Not possible here: shared on x" in found.message


def test_failed_trajectories_are_counted():
    assert "3 trajectories failed" in judged(trial_of(num_failed=3))["rollout"].message


def failure(error, settings=None, **options):
    report = Report()
    report_failure(report, error, settings=settings or {}, **options)
    return report.findings[0]


def test_a_failure_is_told_by_its_first_cause():
    try:
        try:
            raise OSError("disk full")
        except OSError as error:
            raise RuntimeError("step failed") from error
    except RuntimeError as error:
        finding = failure(error)
    assert finding.level == "error" and "OSError: disk full" in finding.message
    assert "test_doctor_verdict.py, line" in finding.message


def test_a_lack_of_memory_is_cured_by_the_largest_saving():
    error = RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
    assert "gradient_checkpointing: true." in failure(error, savings=SAVING).cure
    rows = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    cure = "Set per_device_train_batch_size: 1 and gradient_accumulation_steps: 8."
    assert failure(error, rows).cure == cure
    assert failure(error).cure == "Set gradient_checkpointing: true."

"""What a trial says about a recipe: each judgement by hand, and every fix is a setting that `train` takes.

Those that a CPU can follow are followed by a step of training. Not covered: measuring (test_doctor_run.py).
"""

from __future__ import annotations

import re

import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.cli.train import read_arguments
from agent_r1_trl.errors import RunError
from agent_r1_trl.features.doctor.memory import Estimate, Line
from agent_r1_trl.features.doctor.report import Report
from agent_r1_trl.features.doctor.trial import RunTrial, TrialStep, judge, report_failure
from tests.cli.conftest import write_task

GIB = 2**30
BALANCED = {"seconds": 4.0, "rollout_s": 1.5, "scoring_s": 0.5}


def trial_of(step=None, **values):
    logs = {"loss": 0.5, "grad_norm": 1.0}
    step = TrialStep(**BALANCED | {"logs": logs, "sampled_tokens": 300} | (step or {}))
    return RunTrial(**{"steps": [TrialStep(seconds=9.0), step], "num_trajectories": 8} | values)


def judged(trial, **options):
    report = Report()
    options = {"settings": {"dtype": "float32", **options.pop("settings", {})}} | options
    judge(report, trial, **options)
    assert len({finding.check for finding in report.findings}) == len(report.findings)
    return {finding.check: finding for finding in report.findings}


def estimate_of(gib, gpu=10.0):
    return Estimate(lines=(Line("weights", gib * GIB),), gpu_memory_gb=gpu)


SLOW_SAMPLER = {"seconds": 10.0, "rollout_s": 9.0, "scoring_s": 0.5}
SLOW_TOOLS = SLOW_SAMPLER | {"logs": {"time/env_s": 9.0, "time/generate_s": 1.0}}
ON_GPU = {"device": "cuda", "total_bytes": 10.0 * GIB, "used_bytes": 9.0 * GIB}
SAVING = {"gradient_checkpointing: true": 1.0}
GAP = {"logs": {"sampling/sampling_logp_difference/mean": 0.3}}
VLLM = {"use_vllm": True, "overlap_rollout": True}
FIXES = {
    "few places": (trial_of(SLOW_TOOLS), {"settings": {"max_concurrency": 4}}, "time", {"max_concurrency": 8}),
    "few rows": (
        trial_of(SLOW_SAMPLER), {"settings": {"generation_batch_rows": 2}}, "time", {"generation_batch_rows": 8},
    ),
    "no vLLM": (trial_of(SLOW_SAMPLER, **ON_GPU), {}, "time", {"use_vllm": True}),
    "vLLM is there": (trial_of(SLOW_SAMPLER, **ON_GPU), {"has_vllm": True}, "time", {"use_vllm": True}),
    "no overlap": (trial_of(), {"settings": {"use_vllm": True}}, "time", {"overlap_rollout": True}),
    "too large": (
        trial_of(**ON_GPU), {"estimate": estimate_of(12), "savings": SAVING}, "memory",
        {"gradient_checkpointing": True},
    ),
    "no correction": (
        trial_of(GAP), {"settings": VLLM | {"vllm_importance_sampling_correction": False}}, "sampler",
        {"vllm_importance_sampling_correction": True},
    ),
    "rounding": (trial_of(GAP), {"settings": VLLM}, "sampler", {"dtype": "float32"}),
    "not finite": (trial_of({"logs": {"loss": float("nan")}}), {}, "numbers", {"bf16": True, "fp16": False}),
}  # fmt: skip


def settings_in(fix):
    return dict(re.findall(r"\b([a-z_0-9]+): ([\w.]*\w)", fix))


@pytest.mark.parametrize(("trial", "options", "check", "fix"), FIXES.values(), ids=FIXES.keys())
def test_a_fix_names_settings_that_train_takes(trial, options, check, fix, tmp_path, monkeypatch, model_folder):
    finding = judged(trial, **options)[check]
    assert finding.level != "ok"
    found = settings_in(finding.fix)
    assert found == {
        name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in fix.items()
    }
    monkeypatch.chdir(tmp_path)
    path = str(write_task(tmp_path, model_folder))
    flags = [word for name, value in found.items() if name != "bf16" for word in (f"--{name}", value)]
    if "overlap_rollout" in found or "vllm_importance_sampling_correction" in found:
        flags += ["--use_vllm", "true"]
    _, args, model_args = read_arguments(["--config", path, *flags])
    for name, value in fix.items():
        if name != "bf16":  # which no CPU is asked for
            assert getattr(args if hasattr(args, name) else model_args, name) == value


@pytest.mark.slow
def test_a_step_is_made_with_every_fix_that_a_cpu_can_follow(tmp_path, monkeypatch, model_folder):
    chosen = ("few places", "few rows", "too large", "rounding")
    fixes = [judged(trial, **options)[check].fix for trial, options, check, _ in map(FIXES.get, chosen)]
    rows = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    fixes.append(failure(RuntimeError("out of memory"), rows).fix)
    found = {name: value for fix in fixes for name, value in settings_in(fix).items()}
    assert len(found) == 6
    monkeypatch.chdir(tmp_path)
    path = str(write_task(tmp_path, model_folder, max_steps=1))
    assert (
        main(["train", "--config", path, *(word for item in found.items() for word in (f"--{item[0]}", item[1]))]) == 0
    )


def test_a_good_run_is_ok_in_every_respect():
    found = judged(trial_of())
    assert {check: finding.level for check, finding in found.items() if finding.level != "ok"} == {
        "sampler": "skipped"
    }
    assert "rollout 200, update 150" in found["speed"].message
    assert "sampling 38%, tools and environment 0%, scoring 12%, update 50%" in found["time"].message


def test_time_at_tools_is_the_part_of_the_rollout_that_trajectories_waited_for_them():
    step = TrialStep(**SLOW_TOOLS)
    assert step.tools_s == pytest.approx(8.1) and step.update_s == pytest.approx(0.5)


def test_memory_is_ok_only_where_there_is_a_gpu_that_it_fits():
    fine = judged(trial_of(**ON_GPU), estimate=estimate_of(8))["memory"]
    assert fine.level == "ok" and "8.0 GiB" in fine.message and "the whole GPU held 9.0 of 10 GiB" in fine.message
    tight = judged(trial_of(**ON_GPU), estimate=estimate_of(9.5), savings=SAVING)["memory"]
    assert tight.level == "warning" and "tight" in tight.message and "gradient_checkpointing: true" in tight.fix
    assert judged(trial_of(), estimate=estimate_of(8))["memory"].level == "skipped"


def test_a_sampler_is_ok_only_where_it_was_compared():
    small = trial_of({"logs": {"sampling/sampling_logp_difference/mean": 1e-5}})
    assert judged(small, settings=VLLM)["sampler"].level == "ok"
    assert judged(trial_of(), settings=VLLM)["sampler"].level == "skipped"
    filtered = judged(small, settings=VLLM | {"top_p": 0.9, "min_p": None})["sampler"]
    assert filtered.level == "skipped" and "top_p" in filtered.message and "min_p" not in filtered.message


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"logs": {"loss": 0.0, "grad_norm": 0.0}}, "say nothing"),
        ({"logs": {"loss": 0.0}}, "say nothing"),
    ],
)
def test_numbers_that_say_nothing_are_no_ok(step, words):
    finding = judged(trial_of(step))["numbers"]
    assert finding.level == "warning" and words in finding.message and "--run_tokens" in finding.fix


def test_rounding_that_undoes_the_training_is_said():
    assert "precision" not in judged(trial_of())
    assert judged(trial_of(rounding="Most updates are rounded away."))["precision"].level == "warning"


def test_the_numbers_of_every_step_are_looked_at():
    trial = trial_of()
    trial.steps[0].logs["grad_norm"] = float("inf")
    assert judged(trial)["numbers"].level == "error"
    trial.steps[0].logs = {"critic/grad_norm": float("nan")}
    assert "critic/grad_norm is not finite" in judged(trial)["numbers"].message


def test_failed_trajectories_are_counted():
    assert "3 trajectories failed" in judged(trial_of(num_failed=3))["rollout"].message


def failure(error, settings=None, **options):
    report = Report()
    report_failure(report, error, settings=settings or {}, **options)
    return report.findings[0]


def raised(*errors):
    """The last of these, each raised from the one before."""
    cause = None
    for error in errors:
        error.__cause__ = cause
        cause = error
    return cause


def test_a_failure_is_told_by_its_first_cause_or_by_what_the_package_says_of_it():
    try:
        raise OSError("disk full")
    except OSError as error:
        finding = failure(raised(error, RuntimeError("step failed")))
    assert finding.level == "error" and "OSError: disk full" in finding.message
    assert "test_doctor_verdict.py, line" in finding.message
    finding = failure(raised(KeyError("gold"), RunError("reward raised KeyError in example 7."), RuntimeError("step")))
    assert "reward raised KeyError in example 7" in finding.message


def test_a_lack_of_memory_is_fixd_by_the_largest_saving():
    error = raised(RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"), RunError("The step failed."))
    assert "gradient_checkpointing: true." in failure(error, savings=SAVING).fix
    rows = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    fix = "Set per_device_train_batch_size: 1 and gradient_accumulation_steps: 8."
    assert failure(error, rows).fix == fix
    assert failure(error).fix == "Set gradient_checkpointing: true."

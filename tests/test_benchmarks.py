"""Every benchmark runs with tiny settings and ends with one line of JSON; nothing here looks at how fast it was."""

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from agent_r1_trl.update import packed_attention
from tests.effort import short
from tests.fake_kernels import in_one_call
from tests.without_vllm import search_path

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"

# file -> arguments of a run that takes seconds
TINY = {
    name: arguments.split()
    for name, arguments in {
        "agent_door.py": "--agents 2",
        "ahead.py": "--ahead 0 1 --steps 2 --prompts 1 --group-size 2 --median 0.01 --warm-up 1",
        "dynamic_sampling.py": "--variants both --max-steps 1 --keys 4 --prompts 2 --group-size 2 --in-reach 1 "
        "--start-steps 2",
        "echo_trap.py": "--recipes inaction --max-steps 1 --cold-steps 1",
        "gpu.py": "--toy",
        "long_agents.py": "--policies window --algos grpo --max-steps 1 --cold-steps 1 --num-examples 2",
        "rollout_concurrency.py": "--trajectories 2 --latency 0.01 --median 0.01 --turns 2 --repeats 1",
        "rollout_throughput.py": "--trajectories 2 --median 0.01 --turns 1 2 --repeats 1",
        "shaping.py": "--rollouts 1 --seeds 0 --shapes 2x4x2 --examples 2",
        "train_step.py": "--model tiny --groups 2 --group-size 2 --micro-batch 2 --prompt 16 --median 12 --longest 40 "
        "--repeats 1 --layouts trl tokens bound",
    }.items()
}
COMPUTED = {"scaling_model.py"}
"""Measures nothing; `test_scaling_model.py` tests it."""
NEED_VLLM = {"rollout_throughput.py"}


def run_benchmark(name, *arguments):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": search_path(is_hidden=name not in NEED_VLLM)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", short(TINY, "rollout_concurrency.py", release=["gpu.py", "train_step.py"]))
def test_a_benchmark_prints_a_table_and_its_figures_as_one_line_of_json(name):
    result = run_benchmark(name, *TINY[name], "--json")
    assert result.returncode == 0, result.stderr
    *table, last = result.stdout.strip().splitlines()
    assert any("┃" in line for line in table)
    figures = json.loads(last)
    rows = figures.get("rows", [figures])
    several = {
        "gpu.py": 8,
        "agent_door.py": 2,
        "ahead.py": 3,
        "rollout_throughput.py": 2,
    }
    assert len(rows) == several.get(name, 1)
    for row in rows:
        assert row and all(math.isfinite(value) for value in row.values())
        assert not row.get("failed")


def test_every_benchmark_is_run_here():
    programs = {path.name for path in BENCHMARKS.glob("*.py") if not path.name.startswith("_")}
    assert programs == set(TINY) | COMPUTED


def test_every_benchmark_has_a_section_on_its_page_and_among_the_results():
    for page in ("README.md", "RESULTS.md"):
        text = (BENCHMARKS / page).read_text(encoding="utf-8")
        missing = [name for name in TINY if f"({name})" not in text]
        assert not missing, f"benchmarks/{page} does not link {missing}"


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["--trajectories", "3"], "even number"),
        (["--turns", "1"], "2 or more"),
        (["--repeats", "0"], "1 or more"),
        (["--latency", "-1"], ">= 0"),
        (["--sigma", "nan"], "finite"),
    ],
)
def test_a_setting_that_cannot_be_measured_is_refused(arguments, fix, capsys):
    benchmark = load_benchmark("rollout_concurrency.py")
    with pytest.raises(SystemExit):
        benchmark.parse_arguments(arguments)
    message = capsys.readouterr().err
    assert arguments[0] in message and fix in message


def test_latencies_are_the_same_for_the_same_seed_and_have_the_median_asked_for():
    draw = load_benchmark("rollout_concurrency.py").draw_latencies
    options = {"count": 2000, "num_calls": 2, "median": 0.2, "sigma": 1.0}
    latencies = draw(**options, seed=3)
    assert latencies == draw(**options, seed=3) != draw(**options, seed=4)
    drawn = [seconds for row in latencies for seconds in row]
    assert statistics.median(drawn) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(map(math.log, drawn)) == pytest.approx(1.0, rel=0.1)


def test_a_call_takes_as_long_in_every_run_and_no_two_calls_take_the_same_time():
    benchmark = load_benchmark("ahead.py")
    calls = [(0, task, member, turn) for task in range(20) for member in range(4) for turn in range(3)]
    drawn = [benchmark.latency(*call, median=0.5, sigma=1.2) for call in calls]
    assert drawn == [benchmark.latency(*call, median=0.5, sigma=1.2) for call in calls]
    assert len(set(drawn)) == len(calls)
    assert statistics.median(drawn) == pytest.approx(0.5, rel=0.2)
    assert statistics.stdev(map(math.log, drawn)) == pytest.approx(1.2, rel=0.1)
    assert benchmark.latency(*calls[0], median=0.5, sigma=0.0) == 0.5


def test_intervals_of_the_corridor_are_those_of_wilson():
    wilson = load_benchmark("long_agents.py").wilson
    assert wilson(0.0, 200) == pytest.approx((0.0, 0.01885), abs=1e-5)
    assert wilson(0.5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)
    assert wilson(0.95, 200) == pytest.approx((0.91042, 0.97262), abs=1e-5)


def test_no_two_evaluations_of_the_corridor_draw_the_same_random_numbers():
    benchmark = load_benchmark("long_agents.py")
    runs = [(p, a, s) for p in benchmark.POLICIES for a in benchmark.ALGOS for s in range(5)]
    seeds = [*range(len(benchmark.POLICIES)), *(benchmark.sampling_seed(*run) for run in runs)]
    assert len(set(seeds)) == len(seeds)


def load_benchmark(name):
    if str(BENCHMARKS) not in sys.path:  # as for a program that Python is called with: where its helpers are
        sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(Path(name).stem, BENCHMARKS / name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_collapse_is_summed_up_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    benchmark = load_benchmark("echo_trap.py")

    def run(*parts, events=()):
        steps = [{"success": value, "state": state} for value, state, num in parts for _ in range(num)]
        return {"steps": steps, "events": list(events)}

    plain = run((0.8, "healthy", 20), (0.0, "healthy", 2), (0.0, "collapsed", 18))
    event = {"action": "rollback", "outcome": "taken", "total_steps": 23}
    guarded = run(
        (0.8, "healthy", 20), (0.0, "healthy", 2), (0.0, "collapsed", 1), (0.9, "healthy", 10), events=[event]
    )
    row = benchmark.summary("inaction", 7, plain, guarded)
    assert row == pytest.approx(
        {
            "recipe": 1, "seed": 7, "start": 0.8, "best": 0.8, "end": 0.0,
            "halved": 25,  # five of the last ten rollouts
            "warned": 23, "collapsing": 23,
            "guard_best": 0.9, "guard_end": 0.9, "guard_steps": 33, "rollbacks": 1, "actions": 1,
        }
    )  # fmt: skip
    benchmark.draw(tmp_path / "plot.png", "inaction", {7: (plain, guarded)})
    assert (tmp_path / "plot.png").stat().st_size > 1000


# -------------------------------------------------------------------- gpu.py: one chance on a machine that is lent

PART = """
import json, sys, time
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(arguments["--out"], "w") as file:
    print(json.dumps({"name": arguments["--only"], "ok": True}), file=file, flush=True)
    sys.stderr.write("the last words")
    ENDING
print("{}")
"""


@pytest.mark.parametrize(
    ("ending", "names", "error"),
    [
        ("pass", ["checks"], ""),
        ("sys.exit(3)", ["checks", "checks, the rest"], "the last words"),
        ("time.sleep(60)", ["checks", "checks, the rest"], "took more than 2 s"),
    ],
)
def test_a_part_on_the_gpu_that_fails_or_hangs_keeps_what_it_found(tmp_path, monkeypatch, ending, names, error):
    gpu = load_benchmark("gpu.py")
    monkeypatch.setattr(gpu, "LEAST_S", 0.0)
    monkeypatch.setattr(gpu, "GRACE_S", 1.0)
    program = tmp_path / "part.py"
    program.write_text(PART.replace("ENDING", ending))
    rows = gpu.run_part("checks", 1.0 if "sleep" in ending else 30.0, str(program))
    assert [row["name"] for row in rows] == names
    assert [row["ok"] for row in rows] == [True, False][: len(rows)]
    assert error in rows[-1].get("error", "")
    monkeypatch.setattr(gpu, "LEAST_S", 99.0)
    assert [row["name"] for row in gpu.run_part("7b", 1.0, str(program))] == ["7b"], "left out, and named"


def test_a_result_is_written_after_every_part_whatever_is_in_it(tmp_path, monkeypatch):
    gpu = load_benchmark("gpu.py")

    def part(args):
        yield {"name": "trl", "tokens_per_s": 2.0, "ok": True, "gradient_error": math.nan}
        yield {"name": "packed", "tokens_per_s": 5.0, "ok": True, "log": "a\nb"}
        raise RuntimeError("the device went away")

    def written(args):
        found = json.loads((tmp_path / "gpu.json").read_text())["parts"]["syncs"]["rows"]
        assert [row["name"] for row in found] == ["trl", "packed", "syncs"]
        assert found[0]["gradient_error"] == "nan" and found[1]["speedup"] == 2.5
        yield {"name": "seen", "ok": True}

    monkeypatch.setitem(gpu.PARTS, "syncs", part)
    monkeypatch.setitem(gpu.PARTS, "generator", written)
    args = gpu.parse_arguments(["--toy", "--parts", "syncs", "generator", "--out", str(tmp_path)])
    result = gpu.run_all(args)
    assert result["parts"]["generator"]["rows"] == [{"name": "seen", "ok": True}]
    page = (tmp_path / "gpu.md").read_text()
    assert "RuntimeError: the device went away" in page and "| packed | 5 |" in page
    assert "a\nb" not in page


@pytest.mark.parametrize("kernel", [None, "efficient"])
def test_kernels_are_held_against_a_naive_loop(monkeypatch, kernel):
    """By segments as on a CPU, and by one call as on a GPU, with a stand-in for PyTorch's kernel."""
    gpu = load_benchmark("gpu.py")
    args = gpu.parse_arguments(["--toy"])
    with in_one_call(monkeypatch, kernel):
        rows = list(gpu.run_kernels(args))
    assert len(rows) == 6 and all(row["ok"] for row in rows)


def test_a_kernel_that_is_wrong_in_its_gradient_alone_is_named(monkeypatch):
    gpu = load_benchmark("gpu.py")
    attend = packed_attention._attend_one_by_one

    def forgetful(query, key, value, *others, **options):
        return attend(query, key.detach(), value, *others, **options) + 0 * key.sum()

    monkeypatch.setattr(packed_attention, "_attend_one_by_one", forgetful)
    rows = list(gpu.run_kernels(gpu.parse_arguments(["--toy"])))
    wrong = [row for row in rows if not row["ok"]]
    assert [row["name"] for row in wrong] == [row["name"] for row in rows if "single tokens" not in row["name"]]
    assert all(row["keys"] == 1 and row["output"] < 1e-6 for row in wrong)


def test_a_page_from_a_cpu_says_that_it_has_no_figures():
    gpu = load_benchmark("gpu.py")
    machine = {"device": "CPU (x86_64)"}
    said = "CPU: no figures. Every part ran at toy size"
    assert said in gpu.markdown({"machine": machine, "parts": {}})
    assert said not in gpu.markdown({"machine": {"device": "NVIDIA H200, 139 GiB"}, "parts": {}})


def test_the_parts_of_the_gpu_run_have_times_that_add_up():
    gpu = load_benchmark("gpu.py")
    assert list(gpu.DONE_BY) == list(gpu.PARTS)
    assert sorted(gpu.DONE_BY.values()) == list(gpu.DONE_BY.values()) and gpu.DONE_BY["7b"] == 1.0
    assert gpu.LIMIT_S + gpu.GRACE_S < 480


def test_a_peak_is_held_against_the_estimate_at_every_size():
    gpu, gib = load_benchmark("gpu.py"), 2**30
    assert gpu.is_as_estimated(0.0112 * gib, 0.0037 * gib), "a toy: 11.5 MiB where 3.8 were expected"
    assert gpu.is_as_estimated(0.0437 * gib, 0.0037 * gib), "and with a workspace of cuBLAS"
    assert not gpu.is_as_estimated(0.1 * gib, 0.0037 * gib)
    for estimate, peak, is_right in ((20, 22.9, True), (20, 17.1, True), (20, 23.2, False), (20, 16.8, False)):
        assert gpu.is_as_estimated(peak * gib, estimate * gib) is is_right

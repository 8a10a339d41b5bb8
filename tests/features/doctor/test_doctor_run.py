"""`agent-r1-trl doctor --run`: two real steps of a recipe, and findings about them.

Covered: GRPO and PPO on a tiny model, what the findings say, what is left behind (nothing), runs that fail, mistakes;
every fix is followed by a run that takes it. Not covered: a GPU's memory beyond the arithmetic.
"""

from __future__ import annotations

import re
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from agent_r1_trl.cli import main
from agent_r1_trl.features.doctor.trial import Meter
from tests.trainers.helpers import make_trainer

CHECKS = ("trial", "speed", "numbers", "time", "memory", "sampler")


@pytest.fixture
def trial(recipe, capsys, tmp_path_factory, monkeypatch):
    """`trial(code, "--flag", ..., setting=...)` runs two steps of the recipe; {check: (verdict, words)}."""

    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def run(code, *flags, **settings):
        path = recipe(**settings)
        capsys.readouterr()
        before = set(Path.cwd().iterdir())
        assert main(["doctor", "--run", "--config", path, *flags]) == code, capsys.readouterr().out
        assert set(Path.cwd().iterdir()) - before <= {Path.cwd() / "__pycache__"}
        assert not [*temporary.glob("agent-r1-doctor-*")]
        printed = capsys.readouterr()
        assert "Traceback" not in printed.out + printed.err
        return read_table(printed.out)

    return run


def read_table(text):
    findings, check = {}, ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("│")]
        if len(cells) != 5:
            continue
        check = cells[2] or check
        verdict, words = findings.get(check, (cells[1], ""))
        findings[check] = (verdict, f"{words} {cells[3]}".strip())
    return findings


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [{}, {"trainer": "ppo", "critic": "model", "update_layout": "packed"}])
def test_two_steps_are_judged_in_every_respect(trial, algorithm):
    found = trial(0, sampling={"filter_groups": None}, **algorithm)
    assert set(found) == set(CHECKS)
    assert re.search(r"rollout [\d,]+, update [\d,]+, on cpu", found["speed"][1])
    shares = re.findall(r"(\d+)%", found["time"][1])
    assert len(shares) == 4 and 98 <= sum(map(int, shares)) <= 102
    assert found["sampler"][0] == found["memory"][0] == "skipped"  # no sampler of its own, and no GPU: no verdict
    assert found["numbers"][0] == "ok"


@pytest.mark.slow
def test_what_was_left_out_is_named(trial):
    found = trial(
        0,
        "--run_tokens",
        "9",
        sampling={"filter_groups": "top_p", "filter_value": 1.0},
        save_strategy="steps",
        save_steps=1,
    )
    assert "up to 2 turns and 9 tokens" in found["trial"][1]
    assert "Not looked at: sampling={'filter_groups': 'top_p'" in found["trial"][1]
    assert "save_strategy=steps" in found["trial"][1]


@pytest.mark.slow
def test_weights_that_rounding_holds_are_a_finding(trial):
    verdict, words = trial(0, "--dtype", "bfloat16", "--learning_rate", "1e-6")["precision"]
    assert verdict == "warning" and "bfloat16" in words and "Set dtype: float32" in words


@pytest.mark.slow
def test_a_trial_too_short_to_learn_from_says_so_and_its_fix_works(trial):
    Path("rewards.py").write_text(
        "def varied(completion_ids, **kwargs):\n"
        "    return [float(len(set(ids)) if len(ids) > 3 else 0) for ids in completion_ids]\n"
    )
    settings = {"reward_funcs": ["rewards.py:varied"], "env_kwargs": {"bonus": 0.0}}
    found = trial(0, "--run_tokens", "3", **settings)["numbers"]
    assert found[0] == "warning" and "say nothing" in found[1] and "--run_tokens" in found[1]
    assert trial(0, "--run_tokens", "48", **settings)["numbers"][0] == "ok"


FAULTS = {
    "a reward function that raises": (
        "def reward(completions, **kwargs):\n    raise KeyError('gold')\n",
        {"reward_funcs": ["broken.py:reward"]},
        ("KeyError: 'gold'", "broken.py, line 2", "It was in example"),
    ),
    "a model that is not there": ("", {"model_name_or_path": "./nowhere"}, ("./nowhere",)),
    "data that is not there": ("", {"dataset_name": "trian.jsonl"}, ("train.jsonl",)),
}


@pytest.mark.parametrize(("code", "settings", "names"), FAULTS.values(), ids=FAULTS.keys())
def test_a_run_that_fails_is_a_finding_with_its_first_cause(trial, code, settings, names):
    Path("broken.py").write_text(code)
    found = trial(1, **settings)
    assert set(found) == {"trial"} and found["trial"][0] == "error"  # nothing is said about what was not measured
    for name in names:
        assert name.replace(" ", "") in found["trial"][1].replace(" ", "")


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--run", "--run_tokens", "0"], "run_tokens=0"),
        (["--run", "--max_turn", "3"], "max_turns"),
        (["--run_tokens", "9"], "--run_tokens"),
        (["--run", "--update_layout", "tight"], "update_layout='tight'"),
    ],
)
def test_a_mistake_is_refused(recipe, refusal, flags, names):
    assert names in refusal("doctor", "--config", recipe(), *flags)


def test_each_rank_reads_the_memory_of_its_own_gpu(tmp_path, monkeypatch):
    """A stand-in for two GPUs: 0 is full, this rank trains on 1; a thread begins with GPU 0, as CUDA's do."""
    current = threading.local()
    current.gpu = 1  # of this thread, as accelerate sets it
    own = lambda: getattr(current, "gpu", 0)  # noqa: E731
    used = {0: 70, 1: 10}
    monkeypatch.setattr(torch.cuda, "current_device", own)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu=None: (80 - used[own() if gpu is None else gpu], 80))
    trainer = make_trainer(tmp_path)
    meter = Meter(trainer)
    meter.trial.device = "cuda"
    meter.on_train_begin(trainer.args, trainer.state, trainer.control, optimizer=trainer.create_optimizer())
    deadline = time.monotonic() + 10
    while not meter.trial.used_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    meter.close()
    assert (meter.trial.used_bytes, meter.trial.total_bytes) == (10, 80)


def test_help_shows_the_flag(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--run", "--help"])
    assert "--run_tokens" in capsys.readouterr().out

"""A checkpoint is whole or is not taken; what cannot be written ends a run; a resumed run is the same run.

Kills during a save: test_kill_resume.py. Two ranks: tests/distributed/test_saving.py.
"""

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback

from agent_r1_trl.testing import make_tokenizer
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from agent_r1_trl.trainers.checkpoints import (
    LOCK_FILE,
    MANIFEST,
    UNFINISHED,
    CheckpointError,
    SaveError,
    choose_checkpoint,
    clear_unfinished,
    output_lock,
    problem_of,
    saving,
)
from tests.trainers.helpers import make_trainer, questions

STEPS = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 4, "max_completion_length": 300,
         "lr_scheduler_type": "constant"}  # fmt: skip
TRAINERS = ["grpo", pytest.param("ppo", marks=pytest.mark.matrix)]


def make(folder, kind="grpo", **options):
    ppo = {"trainer": MultiTurnPPOTrainer, "critic": "head", "num_generations": 1} if kind == "ppo" else {}
    return make_trainer(folder, **(STEPS | ppo | options))


@pytest.fixture(scope="module", params=TRAINERS)
def saved(request, tmp_path_factory):
    """A run's folder with checkpoint-1 and checkpoint-2; each rollout is trained on twice."""
    folder = tmp_path_factory.mktemp(request.param)
    make(folder, request.param, max_steps=2, steps_per_generation=2).train()
    return folder


@pytest.fixture(scope="module")
def grpo_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo")
    make(folder, max_steps=2).train()
    return folder


@pytest.fixture
def run_copy(grpo_run, tmp_path):
    return shutil.copytree(grpo_run, tmp_path / "run")


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def weights(trainer):
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def is_equal(left, right):
    return all(torch.equal(value, right[name]) for name, value in left.items())


# -------------------------------------------------------------------- whole or not taken


def test_a_checkpoint_lists_every_file_and_nothing_is_left_beside_it(saved):
    for step in (1, 2):
        folder = saved / f"checkpoint-{step}"
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        assert sorted([*listed, MANIFEST]) == files_of(folder)
        assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "rollout_state_rank0.pt"} <= set(
            listed
        )
        assert all(entry["bytes"] == (folder / name).stat().st_size for name, entry in listed.items())
    assert not (saved / UNFINISHED).exists()


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove(path):
    path.unlink()


@pytest.mark.parametrize("harm", [cut, remove])
def test_whichever_file_is_harmed_is_named_and_the_checkpoint_passed_over(saved, tmp_path, caplog, harm):
    run = shutil.copytree(saved, tmp_path / "run")
    newest = run / "checkpoint-2"
    assert choose_checkpoint(True, run) == newest
    for name in files_of(newest):
        if name == MANIFEST and harm is not cut:
            continue  # without it the checkpoint counts as one of TRL's
        whole = (newest / name).read_bytes()
        harm(newest / name)
        caplog.clear()
        assert choose_checkpoint(True, run) == run / "checkpoint-1", name
        assert f"Passed over: checkpoint-2: {name} " in caplog.text, name
        with pytest.raises(CheckpointError, match="resume_from_checkpoint=") as caught:
            choose_checkpoint(newest, run)
        assert f"{name} " in str(caught.value)
        assert f"Set resume_from_checkpoint={str(run / 'checkpoint-1')!r}, the newest whole one" in str(caught.value)
        (newest / name).write_bytes(whole)
    assert choose_checkpoint(True, run) == newest


def manifest_of(folder):
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def test_true_takes_the_newest_checkpoint_of_the_newest_run(run_copy, caplog):
    """A shorter run in the folder of a longer one, whose last checkpoint has the higher step."""
    first = manifest_of(run_copy / "checkpoint-2")["run"]["run_id"]
    assert first == manifest_of(run_copy / "checkpoint-1")["run"]["run_id"]
    make(run_copy, max_steps=1).train()
    second = manifest_of(run_copy / "checkpoint-1")["run"]["run_id"]
    assert second not in (first, None)
    caplog.clear()
    assert choose_checkpoint(True, run_copy) == run_copy / "checkpoint-1"
    assert "Passed over: checkpoint-2: it is of an earlier run" in caplog.text
    resumed = make(run_copy, max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.run_id == second == manifest_of(run_copy / "checkpoint-3")["run"]["run_id"]
    assert choose_checkpoint(True, run_copy) == run_copy / "checkpoint-3"


def test_a_run_from_an_earlier_checkpoint_is_a_run_of_its_own(run_copy):
    """Else the steps that it has left behind would be taken for its newest."""
    shutil.copytree(run_copy / "checkpoint-2", run_copy / "checkpoint-9")
    trainer = make(run_copy, max_steps=2)
    trainer.train(resume_from_checkpoint=str(run_copy / "checkpoint-1"))
    assert trainer.run_id != manifest_of(run_copy / "checkpoint-9")["run"]["run_id"]
    assert choose_checkpoint(True, run_copy) == run_copy / "checkpoint-2"


def test_checkpoints_without_a_runs_id_are_those_of_one_run(run_copy):
    for folder in run_copy.glob("checkpoint-*"):
        content = manifest_of(folder)
        del content["run"]["run_id"], content["saved_at"]
        (folder / MANIFEST).write_text(json.dumps(content), encoding="utf-8")
    assert choose_checkpoint(True, run_copy) == run_copy / "checkpoint-2"
    resumed = make(run_copy, max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert choose_checkpoint(True, run_copy) == run_copy / "checkpoint-3"
    assert resumed.run_id is not None


def test_a_checkpoint_without_a_manifest_is_taken_and_said_to_be_one(run_copy, caplog):
    (run_copy / "checkpoint-2" / MANIFEST).unlink()
    (run_copy / "checkpoint-2" / "rollout_state_rank0.pt").unlink()
    trainer = make(run_copy, max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3 and trainer._step == 3
    assert f"checkpoint-2 has no {MANIFEST}: it was written by TRL" in caplog.text
    assert "holds no rollout in flight: the next step begins with a new one" in caplog.text


def test_a_run_without_a_whole_checkpoint_says_which_it_has(run_copy):
    for step in (1, 2):
        (run_copy / f"checkpoint-{step}" / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"resume_from_checkpoint=True: .* no whole checkpoint") as caught:
        make(run_copy, max_steps=3).train(resume_from_checkpoint=True)
    assert "checkpoint-2: optimizer.pt is missing; checkpoint-1: optimizer.pt is missing" in str(caught.value)
    with pytest.raises(
        CheckpointError, match=r"resume_from_checkpoint='none': there is no such directory\. There is no"
    ):
        choose_checkpoint("none", run_copy)


def test_a_resumed_run_takes_the_newest_whole_one_and_ends_like_one_that_never_stopped(run_copy, caplog):
    straight = make(run_copy.parent / "straight", max_steps=3, save_strategy="no")
    straight.train()
    cut(run_copy / "checkpoint-2" / "optimizer.pt")
    resumed = make(run_copy, max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert "checkpoint-1, the newest whole checkpoint. Passed over: checkpoint-2: optimizer.pt has" in caplog.text
    assert is_equal(weights(resumed), weights(straight))
    assert choose_checkpoint(True, run_copy) == run_copy / "checkpoint-3"


def test_a_checkpoint_of_the_model_alone_is_not_resumed(tmp_path):
    make(tmp_path, max_steps=1, save_only_model=True).train()
    with pytest.raises(CheckpointError, match=r"holds no optimizer and no rng state.*save_only_model"):
        make(tmp_path, max_steps=2).train(resume_from_checkpoint=True)


# -------------------------------------------------------------------- another run, a finished run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 8}, "saved with seed=7 and cannot go on with seed=8, .* Start it with seed=7, or"),
        ({"shuffle_dataset": False}, "saved with shuffle_dataset=True and cannot go on with shuffle_dataset=False"),
        ({"train_dataset": questions(9)}, "train_dataset=8 rows and cannot go on with train_dataset=9 rows"),
        (
            {"train_dataset": questions(8).select(range(7, -1, -1))},
            "8 rows and cannot go on with train_dataset=8 rows with other contents or in another order",
        ),
    ],
    ids=["seed", "shuffle", "rows", "order"],
)
def test_a_run_whose_place_in_the_data_would_be_another_is_refused(run_copy, options, message):
    trainer = make(run_copy, max_steps=3, **options)
    with pytest.raises(CheckpointError, match=message) as caught:
        trainer.train(resume_from_checkpoint=True)
    assert "set resume_without: [data] to go on at that place in the new order" in str(caught.value)
    if "seed" in options:
        trainer.args.resume_without = ["data"]
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == 3


def test_a_finished_run_trains_no_further_and_says_how_to_go_on(run_copy, caplog):
    length = {"max_steps": -1, "num_train_epochs": 0.25}
    trainer, before = make(run_copy, **length), files_of(run_copy)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2 and not trainer.last_trajectories
    saved = load_file(run_copy / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(value, trainer.model.state_dict()[name]) for name, value in saved.items())
    assert files_of(run_copy) == before, "nothing was written"
    assert "The run is finished: its checkpoint stands at step 2 of 2" in caplog.text
    assert f"raise max_steps={trainer.args.max_steps}, or num_train_epochs=" in caplog.text
    longer = make(run_copy, **(length | {"num_train_epochs": 0.375}))
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 3


# -------------------------------------------------------------------- a disk that is full


class FullDisk(TrainerCallback):
    """No file of this process can grow beyond 20,000 bytes while the checkpoint of step 2 is written."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.limit(20_000)

    @staticmethod
    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def full_disk():
    yield FullDisk
    FullDisk.limit(resource.RLIM_INFINITY)


def test_a_table_of_completions_that_may_not_be_written_ends_the_run(tmp_path):
    (tmp_path / "completions").write_text("a file, not a folder")
    with pytest.raises(OSError, match="completions"):
        make(tmp_path, max_steps=1, log_completions=True).train()


FULL = (
    r"checkpoint-2 cannot be written: .* \([\d.]+ GB are free\)\. checkpoint-1 is whole\. Free space there, and resume"
)


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_full_disk_ends_the_run_which_goes_on_from_the_checkpoint_before(tmp_path, full_disk, kind):
    trainer = make(tmp_path, kind, max_steps=3, save_total_limit=1, callbacks=[full_disk()])
    with pytest.raises(SaveError, match=FULL) as caught:
        trainer.train()
    assert caught.value.exit_code == 3 and trainer.state.global_step == 2
    full_disk.limit(resource.RLIM_INFINITY)
    assert choose_checkpoint(True, tmp_path).name == "checkpoint-1"
    resumed = make(tmp_path, kind, max_steps=3, save_total_limit=1)
    resumed.train(resume_from_checkpoint=True)
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-3"]
    assert not (tmp_path / UNFINISHED).exists()


@pytest.mark.parametrize(
    "write",
    [
        lambda path: torch.save(torch.zeros(5000), path),
        lambda path: save_file({"a": torch.zeros(5000)}, str(path)),
        lambda path: make_tokenizer("qwen3").save_pretrained(str(path)),
        lambda path: path.write_bytes(b"0" * 5000),
    ],
    ids=["torch", "safetensors", "tokenizers", "python"],
)
def test_a_full_disk_is_known_in_the_words_of_every_library(tmp_path, full_disk, write):
    full_disk.limit(1000)
    with pytest.raises(SaveError, match=r"There is no earlier checkpoint\. Free space"), saving(tmp_path):
        write(tmp_path / "file")
    full_disk.limit(resource.RLIM_INFINITY)  # pytest may write to a file as well


def test_a_mistake_in_the_code_is_no_full_disk(tmp_path, monkeypatch):
    trainer = make(tmp_path, max_steps=1)

    def save(*args, **kwargs):
        raise RuntimeError("these weights cannot be saved")

    monkeypatch.setattr(trainer.model, "save_pretrained", save)
    with pytest.raises(RuntimeError, match="these weights cannot be saved"):
        trainer.train()


# -------------------------------------------------------------------- places


def test_leftovers_of_a_killed_save_are_removed(tmp_path, caplog):
    (tmp_path / UNFINISHED / "checkpoint-4").mkdir(parents=True)
    clear_unfinished(tmp_path)
    assert not any(tmp_path.iterdir())
    assert "checkpoint-4 was interrupted; what it had written is removed" in caplog.text


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "rollout_state_rank7.pt").write_text("of an earlier run", encoding="utf-8")
    make(tmp_path, max_steps=1).train()
    assert problem_of(tmp_path / "checkpoint-1") is None
    assert "rollout_state_rank7.pt" not in files_of(tmp_path / "checkpoint-1")


def test_the_best_checkpoint_is_known_by_its_place(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1,
               "metric_for_best_model": "reward",
               "eval_dataset": questions(2), "per_device_eval_batch_size": 4}  # fmt: skip
    trainer = make(tmp_path, max_steps=2, **options)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best == str(tmp_path / f"checkpoint-{trainer.state.best_global_step}")
    state = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-1")


def test_a_checkpoint_is_pushed_when_it_has_its_place(tmp_path, monkeypatch):
    trainer, pushed = make(tmp_path, max_steps=1), []
    monkeypatch.setattr(
        Trainer, "_push_from_checkpoint", lambda self, folder: pushed.append((folder, problem_of(Path(folder))))
    )
    trainer.args.push_to_hub = True
    trainer.train()
    assert pushed == [(str(tmp_path / "checkpoint-1"), None)]


# -------------------------------------------------------------------- one run at a time


HOLD = """
import os, sys, time
from pathlib import Path
from agent_r1_trl.trainers.checkpoints import output_lock
with output_lock(Path(sys.argv[1])):
    tool = os.fork()  # what a tool of the run starts, which outlives it
    if tool:
        print(tool, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other_run(tmp_path):
    """A process that trains in `tmp_path`, and one that it has forked."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    tool = int(process.stdout.readline())
    yield process, tool
    for pid in (process.pid, tool):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_a_second_run_is_refused_while_the_first_lives_and_never_after(tmp_path, other_run):
    process, tool = other_run
    trainer = make(tmp_path, max_steps=1)
    with pytest.raises(
        CheckpointError, match=f"output_dir={str(tmp_path)!r} is in use by process {process.pid} on"
    ) as caught:
        trainer.train()
    assert f"end it (kill {process.pid};" in str(caught.value) and "set another output_dir" in str(caught.value)
    assert trainer.state.global_step == 0
    process.kill()
    process.wait()
    os.kill(tool, 0)  # it lives, and has the file open
    trainer.train()
    assert trainer.state.global_step == 1
    assert (tmp_path / LOCK_FILE).read_text(encoding="utf-8") == "", "a run that has ended names nobody"


def test_a_file_system_without_locks_is_only_warned_of(tmp_path, monkeypatch, caplog):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    with output_lock(tmp_path / "run"):
        assert (
            f"output_dir={tmp_path / 'run'} cannot be locked ([Errno {errno.ENOLCK}] No locks available)"
            in caplog.text
        )


def test_weights_that_are_tied_to_others_are_missed_by_nobody(tmp_path, caplog):
    """A checkpoint holds them once. Others that are missing are still named."""
    trainer = make_trainer(tmp_path)
    trainer.model.all_tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    result = namedtuple("Result", "missing_keys unexpected_keys")
    trainer._issue_warnings_after_load(result(["lm_head.weight"], []))
    assert "missing keys" not in caplog.text
    trainer._issue_warnings_after_load(result(["lm_head.weight", "model.norm.weight"], []))
    assert "missing keys in the checkpoint model loaded: ['model.norm.weight']" in caplog.text

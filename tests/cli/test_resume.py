"""`resume_from_checkpoint` of a recipe: whole checkpoints are taken, others refused; a full disk has its exit code."""

import json
import shutil
from pathlib import Path

import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.cli.errors import EXIT_INFRASTRUCTURE
from agent_r1_trl.trainers.saving import SavingTrainer


@pytest.fixture
def recipe_of_run(recipe, finished_run):
    """A recipe of three steps whose run stopped while checkpoint-2 was copied; its arguments."""
    path = recipe(save_strategy="steps", save_steps=1, max_steps=3, resume_from_checkpoint=True)
    shutil.copytree(finished_run / "out", "out")
    optimizer = Path("out/checkpoint-2/optimizer.pt")
    optimizer.write_bytes(optimizer.read_bytes()[:100])
    return "train", "--config", path


def test_true_resumes_from_the_newest_whole_checkpoint(recipe_of_run, caplog):
    assert main([*recipe_of_run]) == 0
    assert "out/checkpoint-1, the newest whole checkpoint. Passed over: checkpoint-2: optimizer.pt" in caplog.text
    assert json.loads(Path("out/trainer_state.json").read_text())["global_step"] == 3


def test_a_broken_checkpoint_is_refused_before_the_model_is_loaded(recipe_of_run, refusal):
    message = refusal(
        *recipe_of_run, "--resume_from_checkpoint", "out/checkpoint-2", "--model_name_or_path", "nowhere"
    )
    assert message.startswith("resume_from_checkpoint='out/checkpoint-2': optimizer.pt has 100 bytes instead of ")
    assert "out/checkpoint-1', the newest whole one" in message


def test_the_folder_of_a_run_is_no_checkpoint_and_the_newest_whole_one_in_it_is_named(recipe_of_run, refusal):
    assert "out/checkpoint-1', the newest whole one" in refusal(*recipe_of_run, "--resume_from_checkpoint", "out")


def test_another_seed_is_refused_with_the_fix(recipe_of_run, refusal):
    assert "Start it with seed=3, or set resume_without: [data]" in refusal(*recipe_of_run, "--seed", "4")


def test_a_disk_that_is_full_at_the_end_is_an_error_but_no_mistake(recipe_of_run, monkeypatch, capsys):
    def save_model(self, folder, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SavingTrainer, "train", lambda self, **options: None)
    monkeypatch.setattr(SavingTrainer, "save_model", save_model)
    assert main([*recipe_of_run]) == EXIT_INFRASTRUCTURE
    assert "out cannot be written: OSError: [Errno 28] No space left on device" in capsys.readouterr().err

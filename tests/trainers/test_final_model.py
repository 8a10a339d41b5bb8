"""The model at the end of a run: whatever stops its save, every file of `output_dir` is whole."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from agent_r1_trl.trainers import MultiTurnPPOTrainer
from agent_r1_trl.trainers.checkpoints import FOLDER, put_in_place, save_final_model
from tests.trainers.helpers import make_trainer


class KilledError(BaseException):
    """In the place of SIGKILL."""


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def embedding(folder):
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


@pytest.fixture
def trainer(tmp_path):
    """Its first model is saved in `output_dir`, and has changed since."""
    trainer = make_trainer(tmp_path / "out")
    assert save_final_model(trainer, trainer.args.output_dir) is None
    with torch.no_grad():
        trainer.model.model.embed_tokens.weight += 1
    return trainer


@pytest.mark.parametrize("error", [KilledError, OSError(28, "No space left on device")])
def test_a_save_that_is_stopped_in_the_middle_of_a_file_leaves_the_model_of_before(trainer, tmp_path, error):
    out, write = tmp_path / "out", trainer.model.save_pretrained
    before = embedding(out).clone()

    def write_half(folder, **options):
        write(folder, **options)
        path = next(path for path in (out / FOLDER / "model.safetensors", out / "model.safetensors") if path.exists())
        with path.open("r+b") as file:
            file.truncate(1000)
        raise error

    trainer.model.save_pretrained = write_half
    if error is KilledError:
        with pytest.raises(KilledError):
            save_final_model(trainer, str(out))
    else:
        assert "No space left" in save_final_model(trainer, str(out))
        assert not (out / FOLDER).exists()
    assert torch.equal(embedding(out), before)
    trainer.model.save_pretrained = write  # the next save takes away what this one has left
    assert save_final_model(trainer, str(out)) is None
    assert not torch.equal(embedding(out), before) and not (out / FOLDER).exists()


def test_a_kill_between_two_files_leaves_whole_ones(trainer, tmp_path, monkeypatch):
    out, replace, moved = tmp_path / "out", os.replace, []
    after = trainer.model.model.embed_tokens.weight

    def replace_two(source, target):
        if len(moved) == stop:
            raise KilledError
        moved.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_two)
    for stop in range(20):  # noqa: B007 - `replace_two` reads it
        moved.clear()
        try:
            save_final_model(trainer, str(out))
        except KilledError:
            assert embedding(out).shape == after.shape
        else:
            break
    assert stop > 3 and torch.equal(embedding(out), after)


def test_the_critic_stands_beside_the_model(tmp_path):
    trainer = make_trainer(tmp_path / "out", trainer=MultiTurnPPOTrainer, critic="head", num_generations=1)
    save_final_model(trainer, str(tmp_path / "out"))
    assert {"config.json", "model.safetensors", "tokenizer.json", "critic/critic.safetensors"} <= files(
        tmp_path / "out"
    )


def test_shards_of_an_earlier_model_go_when_they_are_replaced_and_nothing_else_does(tmp_path):
    out, beside = tmp_path / "out", tmp_path / "out" / FOLDER
    beside.mkdir(parents=True)
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "notes.safetensors"):
        save_file({"old": torch.zeros(1)}, out / name)
    (out / "model.safetensors.index.json").write_text("{}")
    save_file({"new": torch.zeros(1)}, beside / "model.safetensors")
    put_in_place(beside, out)
    assert files(out) == {"model.safetensors", "notes.safetensors"}

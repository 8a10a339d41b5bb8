"""A second run into a folder that holds one: refused, moved or resumed, never mixed."""

import json
from pathlib import Path

import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.trainers.checkpoints import find_run, output_lock, set_aside


def steps(folder):
    return json.loads((Path(folder) / "trainer_state.json").read_text())["global_step"]


def test_a_second_run_is_refused_before_the_model_is_loaded_and_overwrite_moves_the_first(recipe, refusal, capsys):
    path = recipe(max_steps=2, eval_dataset_name=None)
    assert main(["train", "--config", path]) == 0
    message = refusal("train", "--config", path, "--model_name_or_path", "nowhere")
    assert message.startswith("output_dir='out' holds a run already (trainer_state.json)")
    assert "Set another output_dir, or overwrite: true" in message and "out.1" in message
    assert "no checkpoint to resume from" in refusal("train", "--config", path, "--resume_from_checkpoint", "true")

    assert main(["train", "--config", path, "--max_steps", "1", "--overwrite", "true"]) == 0
    assert f"The old run of out is now in {Path('out.1').resolve()}" in capsys.readouterr().out.replace("\n", " ")
    assert (steps("out.1"), steps("out")) == (2, 1)
    assert len(list(Path("out/trajectories").glob("step_*[0-9].jsonl"))) == 1, "nothing of the first run"
    assert "overwrite: false" in Path("out/recipe.yaml").read_text(), "running the same again moves nothing"


def test_overwrite_refuses_to_move_what_the_run_needs_and_contradicts_a_resume(recipe, refusal):
    path = recipe()
    Path("out").mkdir()
    Path("out/trainer_state.json").write_text("{}")
    Path("out/model").mkdir()
    arguments = ["train", "--config", path, "--overwrite", "true"]
    assert "overwrite: true would move" in refusal(*arguments, "--model_name_or_path", "out/model")
    assert "Remove one of them" in refusal(*arguments, "--resume_from_checkpoint", "true")
    assert Path("out/trainer_state.json").exists() and not Path("out.1").exists()


def test_a_folder_with_checkpoints_is_refused_with_the_newest_and_the_way_to_go_on(recipe, refusal):
    path = recipe()
    assert "To go on with it" not in refusal_of_run("trajectories/step_000001.jsonl", path, refusal)
    for name in ("checkpoint-8/model.safetensors", "checkpoint-12/model.safetensors"):
        message = refusal_of_run(name, path, refusal)
    assert message.startswith("output_dir='out' holds a run already (checkpoint-12); ")
    assert "To go on with it, pass --resume_from_checkpoint true; for a new run, set another output_dir" in message


def refusal_of_run(name, path, refusal):
    file = Path("out", name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    return refusal("train", "--config", path)


def test_a_resume_without_a_checkpoint_says_so_and_starts(recipe, capsys):
    path = recipe(max_steps=1, eval_dataset_name=None, resume_from_checkpoint=True)
    assert main(["train", "--config", path]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "resume_from_checkpoint: true: output_dir='out' holds none, so the run starts at step 0." in said


@pytest.mark.parametrize("name", ["checkpoint-10/x", "trajectories/step_000001.jsonl", "adapter_model.safetensors"])
def test_each_part_of_a_run_is_found_and_moved_to_the_first_free_name(tmp_path, name):
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).write_text("kept")
    (tmp_path / "run.1").mkdir()
    assert name.startswith(find_run(tmp_path / "run"))
    assert set_aside(tmp_path / "run") == tmp_path / "run.2"
    assert (tmp_path / "run.2" / name).read_text() == "kept" and not (tmp_path / "run").exists()


def test_an_evaluation_of_a_run_goes_into_a_folder_of_its_own(recipe, capsys):
    path = recipe()
    assert main(["train", "--config", path]) == 0
    assert "--output_dir out/evaluation" in capsys.readouterr().out
    before = sorted(Path("out").iterdir())
    assert main(["eval", "--config", "out/recipe.yaml", "--model", "out"]) == 0
    assert sorted(Path("out").iterdir()) == sorted([*before, Path("out/evaluation")])
    assert json.loads(Path("out/evaluation/evaluation.json").read_text())["reward"] is not None
    assert main(["eval", "compare", "out", "out/evaluation"]) == 0


def test_an_evaluation_is_no_run(tmp_path):
    for name in ("trajectories/eval_step_000000.jsonl", "evaluation.json", "_run.lock", "recipe.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert find_run(tmp_path) is None and set_aside(tmp_path) is None
    with output_lock(tmp_path):
        assert find_run(tmp_path) is None

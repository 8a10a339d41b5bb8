"""What `agent-r1-trl eval --report_to` gives to trackers."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.cli.errors import EXIT_INFRASTRUCTURE
from agent_r1_trl.cli.eval_trackers import MAX_SAMPLES, SAMPLE_COLUMNS, SAMPLES, TABLE, figures, samples, trained_steps
from agent_r1_trl.evaluation import EvaluationResult, EvaluationTable, TableRow
from tests.recording.examples import two_turns

FLAGS = ["--max_turns", "1", "--output_dir", "scores"]


def table_of(*methods):
    trajectories = [two_turns(example_id=str(index)) for index in range(MAX_SAMPLES + 2)]
    rows = [{"exact_match": (0.5, 1.0), "f1": (0.0, 0.0)}]
    result = EvaluationResult.from_rows(rows, example_ids=["0"], trajectories=trajectories)
    return EvaluationTable(rows=[TableRow(method=method, dataset="test", result=result) for method in methods])


def test_figures_are_named_by_data_set_and_method_where_there_are_several_and_what_has_no_value_is_left_out():
    assert figures(table_of("model")) == {"eval/exact_match": 0.5, "eval/num_examples": 1.0}
    assert sorted(figures(table_of("base", "model"))) == [
        f"eval/test/{method}/{name}" for method in ("base", "model") for name in ("exact_match", "num_examples")
    ]


def test_samples_are_the_first_trajectories_of_each_row_as_text():
    lines = samples(table_of("base", "model"))
    assert len(lines) == 2 * MAX_SAMPLES and {len(line) for line in lines} == {len(SAMPLE_COLUMNS)}
    first = dict(zip(SAMPLE_COLUMNS, lines[0], strict=True))
    item = two_turns(example_id="0")
    assert (first["method"], first["example"], first["stop reason"]) == ("base", "0", item.stop_reason.value)
    assert first["prompt"].splitlines()[-1].startswith("user: ") and "assistant: " in first["completion"]
    assert float(first["reward"]) == pytest.approx(item.total_reward)


def test_the_step_is_that_of_the_checkpoint(tmp_path):
    assert trained_steps(str(tmp_path)) == trained_steps("ada/model") == trained_steps() == 0
    (tmp_path / "trainer_state.json").write_text('{"global_step": 40}')
    assert trained_steps(str(tmp_path)) == 40
    assert trained_steps(str(tmp_path), "ada/model") == 0
    later = tmp_path / "later"
    later.mkdir()
    (later / "trainer_state.json").write_text('{"global_step": 40}')
    assert trained_steps(str(tmp_path), str(later)) == 40
    (later / "trainer_state.json").write_text('{"global_step": 80}')
    assert trained_steps(str(tmp_path), str(later)) == 0


def test_tensorboard_has_every_figure_the_table_and_trajectories_and_a_replay_sends_them_as_well(recipe):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    path = recipe(report_to="mlflow")  # the recipe's is for the training
    assert main(["eval", "--config", path, *FLAGS]) == 0
    assert not Path("scores/runs").exists()
    assert main(["eval", "--config", path, *FLAGS, "--replay", "scores", "--report_to", "tensorboard"]) == 0
    events = event_accumulator.EventAccumulator("scores/runs/eval")
    events.Reload()
    result = json.loads(Path("scores/evaluation.json").read_text())
    logged = {name: events.Scalars(name)[0].value for name in events.Tags()["scalars"]}
    expected = {name: value for name, value in result.items() if isinstance(value, float) and name != "duration_s"}
    assert {name.removeprefix("eval/") for name in logged} == {*expected, "num_examples"}
    assert {name: logged[f"eval/{name}"] for name in expected} == pytest.approx(expected)
    texts = {name: events.Tensors(name)[0].tensor_proto.string_val[0].decode() for name in events.Tags()["tensors"]}
    (table,) = [text for name, text in texts.items() if name.startswith(TABLE)]
    assert table.startswith("| data set | method | examples |")
    shown = [text for name, text in texts.items() if name.startswith(SAMPLES)]
    assert len(shown) == 2 and any("What is 0 + 0?" in text for text in shown)


def test_trackers_that_cannot_be_reported_to_are_refused_before_the_model_is_loaded(recipe, refusal, monkeypatch):
    path = recipe(output_dir=None, model_name_or_path="./nowhere")
    flags = ["eval", "--config", path, "--report_to"]
    assert "report_to='tensorbord': must be some of" in refusal(*flags, "tensorbord")
    assert "report_to='tensorboard': there is no directory" in refusal(*flags, "tensorboard")
    monkeypatch.setattr("agent_r1_trl.cli.eval_trackers.importlib.util.find_spec", lambda name: None)
    assert "pip install wandb" in refusal(*flags, "wandb")
    assert "model_name_or_path='./nowhere'" in refusal(*flags, "none")


def test_a_tracker_that_fails_is_named_and_the_results_are_there(recipe, refusal, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "file/inside")
    pytest.importorskip("tensorboard")
    path = recipe()
    Path("file").touch()
    message = refusal("eval", "--config", path, *FLAGS, "--report_to", "tensorboard", code=EXIT_INFRASTRUCTURE)
    assert "report_to='tensorboard'" in message and "The results are in scores" in message
    assert json.loads(Path("scores/evaluation.json").read_text())["num_examples"] == 2


OTHERS = [name for name in ("trackio", "wandb") if importlib.util.find_spec(name)]


@pytest.fixture
def tracked(recipe, tmp_path):
    """The folder of an evaluation with a baseline that reported to the trackers that are installed."""
    path = recipe()
    surroundings = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
    # A process of its own: trackers start threads and servers that outlive a run.
    command = [sys.executable, "-m", "agent_r1_trl.cli.eval", "--config", path, *FLAGS, "--report_to", *OTHERS]
    command += ["--datasets", "test.jsonl", "train.jsonl", "--run_name", "mine"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | surroundings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return tmp_path


@pytest.mark.slow
@pytest.mark.skipif("trackio" not in OTHERS, reason="not installed")
def test_trackio_has_the_figures_and_the_tables(tracked):
    with contextlib.closing(sqlite3.connect(tracked / "trackio" / "huggingface.db")) as database:
        rows = [json.loads(text) for (text,) in database.execute("select metrics from metrics")]
    (logged,) = [row for row in rows if TABLE in row]
    assert logged["eval/test/model/turns"] == 1.0 and logged["eval/train/model/num_examples"] == 4
    assert "What is 3 + 3?" in json.dumps(logged[SAMPLES]) and "train" in json.dumps(logged[TABLE])


@pytest.mark.slow
@pytest.mark.skipif("wandb" not in OTHERS, reason="not installed")
def test_wandb_has_the_figures_and_the_tables(tracked):
    (file,) = tracked.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()  # records of a private form; names stand in them as they are
    assert b"eval/test/model/turns" in content and b"mine" in content
    tables = [json.loads(path.read_text()) for path in tracked.glob("wandb/offline-run-*/files/media/table/**/*.json")]
    assert sorted(len(table["data"]) for table in tables) == [2, 6]
    assert any("What is 3 + 3?" in json.dumps(table) and table["columns"] == SAMPLE_COLUMNS for table in tables)

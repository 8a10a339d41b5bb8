"""What trackers are given: every number, the table of `log_completions`, and traces for trackio."""

import contextlib
import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from collections import deque

import pytest

from agent_r1_trl.recording import read_records
from agent_r1_trl.safe_text import set_rules, visible
from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers.metrics import write_as_text
from agent_r1_trl.trainers.recorder import make_trace
from tests.cli.conftest import write_task
from tests.recording.examples import two_turns


def test_conversations_become_text_that_shows_calls_and_what_is_text_stays():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    conversation = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "1 é"},
        {"role": "user", "content": [{"type": "text", "text": "so?"}]},
        {"role": "assistant", "content": "one"},
    ]
    column = deque([conversation, "a prompt", [], None])
    write_as_text(column)
    first, *others = column
    assert first.splitlines() == [
        'assistant: {"name": "add", "arguments": {"a": 1}}',
        "tool: 1 é",
        'user: [{"type": "text", "text": "so?"}]',
        "assistant: one",
    ]
    assert others == ["a prompt", "", None]
    write_as_text(column)
    assert column[0] == first


TRACKERS = [name for name in ("tensorboard", "trackio", "wandb") if importlib.util.find_spec(name)]


@pytest.fixture(scope="module")
def tracked_run(tmp_path_factory):
    """The folder of a run that reported to every tracker that is installed, and what it logged."""
    if not TRACKERS:
        pytest.skip("no tracker is installed")
    folder = tmp_path_factory.mktemp("tracked")
    tokenizer = make_tokenizer("qwen2_5")
    make_policy(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    path = write_task(
        folder, folder / "model", report_to=TRACKERS, log_completions=True, eval_strategy="steps", eval_steps=1
    )
    surroundings = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "TRACKIO_DIR": str(folder / "trackio")}
    # A process of its own: trackers start threads and servers that outlive a run.
    command = [sys.executable, "-m", "agent_r1_trl.cli.train", "--config", str(path)]
    done = subprocess.run(command, cwd=folder, env=os.environ | surroundings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    history = json.loads((folder / "out" / "trainer_state.json").read_text())["log_history"]
    logged = {name for log in history for name, value in log.items() if name not in ("step", "epoch")}
    assert {"reward", "rollout/turns", "eval_reward", "eval_rollout/turns"} <= logged
    names = {f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}" for name in logged}
    return folder, {name for name in names if not name.startswith(("train/train_", "train/total_flos"))}


@pytest.mark.slow
@pytest.mark.skipif("tensorboard" not in TRACKERS, reason="not installed")
def test_tensorboard_has_every_number(tracked_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, names = tracked_run
    (file,) = (folder / "out").rglob("events.out.*")
    events = EventAccumulator(str(file))
    events.Reload()
    assert not names - set(events.Tags()["scalars"])


@pytest.mark.slow
@pytest.mark.skipif("trackio" not in TRACKERS, reason="not installed")
def test_trackio_has_every_number_and_the_trajectories_as_tables(tracked_run):
    folder, names = tracked_run
    with contextlib.closing(sqlite3.connect(folder / "trackio" / "huggingface.db")) as database:
        rows = [json.loads(text) for (text,) in database.execute("select metrics from metrics")]
    assert not names - {name for row in rows for name in row}
    tables = [row["completions"] for row in rows if "completions" in row]
    text = json.dumps(tables)
    assert len(tables) >= 4  # two steps, and an evaluation after each
    assert "What is 0 + 0?" in text and "environment_reward" in text and "advantage" in text


@pytest.mark.slow
@pytest.mark.skipif("trackio" not in TRACKERS, reason="not installed")
def test_trackio_has_the_trajectories_of_each_step_as_traces(tracked_run):
    folder, _ = tracked_run
    with contextlib.closing(sqlite3.connect(folder / "trackio" / "huggingface.db")) as database:
        found = list(database.execute("select key, messages, metadata, spans from traces order by timestamp, id"))
    assert {key for key, *_ in found} == {"trajectories"}
    traces = {}
    for _, *texts in found:
        messages, metadata, spans = map(json.loads, texts)
        traces[metadata["inspector"]] = messages, metadata, spans
    records = [record for record in read_records(folder / "out") if record.split == "train"]
    assert len(found) == len(traces) == len(records) == 8  # two steps of four
    for record in records:
        item = record.trajectory
        messages, metadata, spans = traces[f"#{record.step}/{record.group}/{item.generation}"]
        assert [message["content"] for message in messages] == [
            visible(message["content"]) for message in item.messages
        ]
        assert (metadata["step"], metadata["group"], metadata["example"]) == (
            record.step,
            record.group,
            item.example_id,
        )
        assert (metadata["reward"], metadata["success"]) == (item.total_reward, item.is_solved)
        assert len(spans) == len(item.tool_results)


def test_a_trace_has_a_span_for_each_call_and_no_secret(monkeypatch):
    monkeypatch.setenv("SEARCH_API_KEY", "0123456789abc")
    set_rules()
    item = two_turns(prompt_messages=[{"role": "user", "content": "\x1b[31m 0123456789abc \ud800"}])
    trace = make_trace(item, 4, 2)
    assert trace["messages"][0]["content"] == "␛[31m [secret: SEARCH_API_KEY] ?"
    assert trace["metadata"]["inspector"] == "#4/2/3" and trace["metadata"]["reward"] == item.total_reward
    (span,) = trace["spans"]
    assert (span["name"], span["input"], span["output"]) == ("search", {"query": "Höhe 🙂"}, "too slow")
    assert (span["status"], span["error"], span["duration_ms"]) == ("error", "timeout, not charged", 250.0)


@pytest.mark.slow
@pytest.mark.skipif("wandb" not in TRACKERS, reason="not installed")
def test_wandb_has_every_number_and_the_trajectories_as_tables(tracked_run):
    folder, names = tracked_run
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()  # records of a private form; names stand in them as they are
    assert not [name for name in names if name.encode() not in content]
    tables = [json.loads(path.read_text()) for path in folder.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert tables and all(
        {"prompt", "completion", "environment_reward", "advantage"} <= set(t["columns"]) for t in tables
    )
    assert any("What is 0 + 0?" in json.dumps(table) for table in tables)

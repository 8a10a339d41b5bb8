"""Trajectories to disk and back: losslessness, names, several writes, processes and starts."""

import contextlib
import json
import logging
import math
import resource

import numpy as np
import pytest

from agent_r1_trl.recording import TrajectoryStore, read_records, read_trajectories, trajectory_files
from agent_r1_trl.recording.events import read_events, write_event
from agent_r1_trl.recording.store import sidecar
from tests.recording.examples import empty, two_turns


def test_a_round_trip_loses_nothing(tmp_path):
    trajectories = [two_turns(), two_turns(generation=4, advantages=None), empty()]
    path = TrajectoryStore(tmp_path).write(10, trajectories)
    assert path == tmp_path / "trajectories" / "step_000010.jsonl"
    assert list(read_trajectories(tmp_path)) == trajectories
    assert list(read_trajectories(path)) == trajectories


def test_numbers_that_are_not_finite_survive(tmp_path):
    logprobs = [-math.inf, math.nan, 0.0, 0.0, 0.0, 0.0, -1.0, -2.0]
    TrajectoryStore(tmp_path).write(0, [two_turns(logprobs=logprobs)])
    (back,) = read_trajectories(tmp_path)
    assert back.logprobs[0] == -math.inf and math.isnan(back.logprobs[1]) and back.logprobs[6:] == [-1.0, -2.0]


def test_a_lone_surrogate_in_a_call_can_be_recorded(tmp_path):
    trajectory = two_turns(example_id="q\ud800")
    trajectory.turns[0].message["content"] = json.loads('"\\ud83d broken"')
    TrajectoryStore(tmp_path).write(0, [trajectory])
    assert list(read_trajectories(tmp_path)) == [trajectory]


def test_what_json_cannot_hold_is_converted_and_the_run_goes_on(tmp_path):
    loop = []
    loop.append(loop)
    info = {
        "array": np.arange(3),
        "scalar": np.float32(0.5),
        "set": {2, 1},
        "object": object(),
        ("a", 1): "tuple key",
        "loop": loop,
        "long": 1 << 20_000,
    }
    TrajectoryStore(tmp_path).write(0, [two_turns(info=info)])
    (back,) = read_trajectories(tmp_path)
    assert back.info["array"] == [0, 1, 2] and back.info["scalar"] == 0.5 and back.info["set"] == [1, 2]
    assert back.info["object"].startswith("<object object") and back.info["('a', 1)"] == "tuple key"
    assert back.info["loop"] == ["<circular reference>"] and int(back.info["long"], 16) == 1 << 20_000


def test_a_line_tells_a_foreign_reader_what_it_needs(tmp_path):
    path = TrajectoryStore(tmp_path, rank=2).write(7, [two_turns()], split="eval")
    row = json.loads(path.read_text(encoding="utf-8"))
    assert (row["step"], row["split"], row["rank"], row["stop_reason"]) == (7, "eval", 2, "done")
    assert row["token_rewards"] == [0.0, -0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 1.1]
    assert row["total_reward"] == pytest.approx(1.0)
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert "Höhe 🙂" in path.read_text(encoding="utf-8")


def test_writes_to_one_step_append(tmp_path):
    store = TrajectoryStore(tmp_path)
    for generation in range(3):
        store.write(1, [two_turns(generation=generation)])
    store.write(2, [two_turns(generation=9)])
    records = list(read_records(tmp_path))
    assert [(r.step, r.index, r.trajectory.generation) for r in records] == [
        (1, 0, 0),
        (1, 1, 1),
        (1, 2, 2),
        (2, 0, 9),
    ]


def test_processes_and_splits_never_share_a_file(tmp_path):
    for rank in (0, 1, 12):
        store = TrajectoryStore(tmp_path, rank=rank)
        store.write(3, [two_turns(generation=rank)])
        store.write(3, [two_turns(generation=100 + rank)], split="eval")
    names = [path.name for path in trajectory_files(tmp_path)]
    stems = ["step_000003", "step_000003_rank1", "step_000003_rank12"]
    assert names == [f"{stem}.jsonl" for stem in [*stems, *(f"eval_{stem}" for stem in stems)]]
    train = list(read_records(tmp_path, step=3, split="train"))
    assert [(r.rank, r.index) for r in train] == [(0, 0), (1, 1), (12, 2)]
    assert [t.generation for t in read_trajectories(tmp_path, split="eval")] == [100, 101, 112]


def test_a_step_sampled_again_replaces_the_old_one_which_is_kept_aside(tmp_path):
    first = TrajectoryStore(tmp_path)
    first.write(1, [two_turns(generation=1)])
    first.write(2, [two_turns(generation=2)])
    first.write(2, [two_turns(generation=2)])
    other_rank = TrajectoryStore(tmp_path, rank=1)
    other_rank.write(2, [two_turns(generation=7)])
    for generation in (22, 222):
        TrajectoryStore(tmp_path).write(2, [two_turns(generation=generation)])
    assert [t.generation for t in read_trajectories(tmp_path)] == [1, 222, 7]
    aside = tmp_path / "trajectories" / "superseded"
    kept = sorted(t.generation for path in aside.iterdir() for t in read_trajectories(path))
    assert kept == [2, 2, 22]


def test_a_line_cut_by_a_crash_is_left_out_and_said(tmp_path, caplog):
    path = TrajectoryStore(tmp_path).write(0, [two_turns(), two_turns(generation=5)])
    path.write_bytes(path.read_bytes()[:-40])
    with caplog.at_level(logging.WARNING):
        assert list(read_trajectories(tmp_path)) == [two_turns()]
    assert "line 2 was cut off" in caplog.text


@pytest.mark.parametrize("line", ["{broken", '{"no": "trajectory"}', "[1]", "\xff"])
def test_a_broken_line_in_the_middle_names_file_and_line(tmp_path, line):
    path = TrajectoryStore(tmp_path).write(0, [two_turns()])
    data = path.read_bytes()
    path.write_bytes(data + line.encode("latin-1") + b"\n" + data)
    with pytest.raises(ValueError, match=r"step_000000\.jsonl, line 2"):
        list(read_trajectories(tmp_path))


@pytest.mark.parametrize("changes", [{"step": None}, {"step": "x"}, {"rank": None}, {"bootstrap_value": None}])
def test_a_line_with_something_else_in_the_place_of_a_number_names_the_file(tmp_path, changes):
    path = TrajectoryStore(tmp_path).write(0, [two_turns()])
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}) + "\n")
    with pytest.raises(ValueError, match=r"step_000000\.jsonl: not a recorded trajectory"):
        list(read_trajectories(tmp_path))


@pytest.mark.parametrize("column", [5, "f9:AAAA", None])
def test_columns_that_are_none_name_the_file(tmp_path, column):
    path = TrajectoryStore(tmp_path).write(0, [two_turns()])
    sidecar(path).write_text(json.dumps({"line": 0, "value": column}) + "\n")
    with pytest.raises(ValueError, match=r"step_000000\.jsonl: not a recorded trajectory"):
        list(read_records(tmp_path, columns=True))


def test_mistakes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="split='test'"):
        TrajectoryStore(tmp_path).write(0, [two_turns()], split="test")
    with pytest.raises(ValueError, match="step=-1"):
        TrajectoryStore(tmp_path).write(-1, [two_turns()])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list(read_trajectories(tmp_path / "nowhere"))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"a\.txt"):
        list(read_trajectories(tmp_path / "a.txt"))


@contextlib.contextmanager
def full_disk(num_bytes):
    """No file can grow beyond this size: a write stops in the middle, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_on_a_full_disk_what_is_lost_is_counted_and_said_once_and_recording_goes_on_when_there_is_space(
    tmp_path, caplog
):
    store = TrajectoryStore(tmp_path)
    first = store.write(1, [two_turns()])
    with full_disk(first.stat().st_size + 100):
        assert store.write(1, [two_turns()] * 40) is None
        assert store.write(2, [two_turns()] * 40) is None
    assert store.num_lost == 80
    assert [record.levelname for record in caplog.records] == ["ERROR"], "one cause is reported once"
    assert "40 trajectories of process 0 could not be recorded" in caplog.text
    assert store.write(1, [two_turns(), two_turns()]) is not None
    assert store.write(2, [two_turns()]) is not None
    assert "recorded again; 80 were not" in caplog.text
    assert [record.step for record in read_records(tmp_path)] == [1, 1, 1, 2]
    assert {path.suffix for path in (tmp_path / "trajectories").iterdir()} == {".jsonl"}, "nothing else is left"
    with full_disk(10):
        store.write(3, [two_turns()])
    assert caplog.records[-1].levelname == "ERROR", "it is said again once it had worked in between"


@pytest.mark.parametrize("size", [10, 200_000])
def test_what_is_appended_after_a_line_that_was_cut_off_takes_its_place(size, tmp_path):
    whole = {"step": 1, "action": "clip"}
    write_event(tmp_path, whole)
    with (tmp_path / "trajectories" / "events.jsonl").open("a") as file:
        file.write('{"step": 2, "text": "' + "x" * size)
    write_event(tmp_path, {"step": 3, "action": "stop"})
    assert read_events(tmp_path) == [whole, {"step": 3, "action": "stop"}]

"""Recorded trajectories as a data set that `datasets` reads, and as conversations for supervised fine-tuning."""

import json
import shutil

import pytest
from datasets import load_dataset

from agent_r1_trl import safe_text
from agent_r1_trl.cli import main
from agent_r1_trl.recording import TrajectoryStore, read_records
from agent_r1_trl.recording.dataset import COLUMNS, write_dataset
from agent_r1_trl.trajectory import Segment, StopReason
from tests.recording.examples import empty, two_turns

REWRITTEN = {"segments": [Segment(start=6, row=1, prompt_ids=[8, 9])]}


@pytest.fixture
def run_folder(tmp_path):
    """Five trajectories, two of them evaluated."""
    folder = tmp_path / "run"
    TrajectoryStore(folder).write(1, [two_turns(), two_turns(advantages=None, **REWRITTEN)])
    TrajectoryStore(folder).write(2, [empty()])
    TrajectoryStore(folder).write(2, [two_turns(generation=1), two_turns(outcome_reward=-1, reward_parts={})], "eval")
    return folder


def read(folder, cache):
    return load_dataset(str(folder), cache_dir=str(cache))


def test_load_dataset_reads_the_numbers_of_every_trajectory(run_folder, tmp_path):
    assert write_dataset(run_folder, tmp_path / "data") == {"train": 3, "eval": 2}
    data = read(tmp_path / "data", tmp_path / "cache")
    assert {split: len(rows) for split, rows in data.items()} == {"train": 3, "eval": 2}
    assert data["train"].column_names == list(COLUMNS)
    records = {split: list(read_records(run_folder, split=split)) for split in data}
    same = (
        "generation", "prompt_ids", "completion_ids", "action_mask", "logprobs", "turn_ids", "advantages",
        "outcome_reward", "in_baseline",
    )  # fmt: skip
    for split, rows in data.items():
        for row, record in zip(rows, records[split], strict=True):
            item = record.trajectory
            assert {name: row[name] for name in same} == {name: getattr(item, name) for name in same}
            assert (row["group"], row["in_loss"]) == (record.group, record.in_loss)
            assert (row["id"], row["step"], row["reward"]) == (item.example_id, record.step, item.total_reward)
            assert row["authors"] == [author.value for author in item.authors]
            assert row["token_rewards"] == item.token_rewards()
            assert json.loads(row["info"]) == item.info and row["is_masked"] is False
            assert [(turn["start"], turn["end"], turn["reward"]) for turn in row["turns"]] == [
                (turn.start, turn.end, turn.reward) for turn in item.turns
            ]


def test_an_export_to_the_same_folder_is_no_older_one_from_the_cache(run_folder, tmp_path):
    for steps in ([1], [1, 2]):
        run = tmp_path / f"run{len(steps)}"
        for step in steps:
            TrajectoryStore(run).write(step, [two_turns()])
        write_dataset(run, tmp_path / "data")
        assert read(tmp_path / "data", tmp_path / "cache")["train"].num_rows == len(steps)
        shutil.rmtree(tmp_path / "data")


def test_messages_and_rows_are_those_of_the_trajectory(run_folder, tmp_path):
    write_dataset(run_folder, tmp_path / "data")
    first, second = read(tmp_path / "data", tmp_path / "cache")["train"].select(range(2))
    assert [(message["role"], message["content"]) for message in first["messages"]] == [
        ("user", "Hauptstadt?"), ("assistant", ""), ("tool", "too slow"), ("assistant", "Oslo"),
    ]  # fmt: skip
    assert first["messages"][1]["tool_calls"][0]["function"]["name"] == "search"
    assert first["rows"] == [{"prompt_ids": [5, 6, 7], "starts": [0], "ends": [8]}]
    assert second["rows"] == [
        {"prompt_ids": [5, 6, 7], "starts": [0], "ends": [6]},
        {"prompt_ids": [8, 9], "starts": [6], "ends": [8]},
    ]


def test_a_masked_secret_stays_masked_and_is_marked(tmp_path, monkeypatch):
    monkeypatch.setenv("SEARCH_API_KEY", "0123456789abc")
    safe_text.set_rules()
    prompt = [{"role": "user", "content": "use 0123456789abc"}]
    TrajectoryStore(tmp_path / "run").write(0, [two_turns(prompt_messages=prompt)])
    monkeypatch.delenv("SEARCH_API_KEY")
    write_dataset(tmp_path / "run", tmp_path / "data")
    row = read(tmp_path / "data", tmp_path / "cache")["train"][0]
    assert row["is_masked"] and row["prompt_ids"] == [0, 0, 0]
    assert row["messages"][0]["content"] == "use [secret: SEARCH_API_KEY]"


def test_what_parquet_cannot_hold_is_written_as_text(tmp_path):
    odd = two_turns(example_id="\ud800", info={"a": {1, 2}})
    odd.turns[0].message = {
        "role": "assistant", "content": [{"type": "text", "text": "x"}],
        "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": {"a": [1]}}}, {"name": "g", "arguments": "{"},
        ],
    }  # fmt: skip
    TrajectoryStore(tmp_path / "run").write(0, [odd])
    write_dataset(tmp_path / "run", tmp_path / "data")
    row = read(tmp_path / "data", tmp_path / "cache")["train"][0]
    message = row["messages"][1]
    assert json.loads(message["content"]) == [{"type": "text", "text": "x"}]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"a":[1]}', "{"]
    assert row["id"] == "?"


def test_an_output_that_is_not_empty_and_a_run_without_trajectories_are_refused(run_folder, tmp_path, capsys):
    assert main(["export", str(run_folder), "--output", str(run_folder)]) == 2
    assert "is not empty. Pass a directory" in capsys.readouterr().err
    (tmp_path / "none").mkdir()
    assert main(["export", str(tmp_path / "none"), "--output", str(tmp_path / "new")]) == 2
    assert "no trajectories are recorded there" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nowhere"), "--output", str(tmp_path / "new")]) == 2
    assert main(["export", str(run_folder), "--output", str(tmp_path / "new"), "--min_reward", "1"]) == 2
    assert "--min_reward, --split: a data set holds all" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


# ---------------------------------------------------------------- for supervised fine-tuning


def sft(tmp_path, run, *arguments):
    path = tmp_path / "sft.jsonl"
    assert main(["export", str(run), "--sft", "--output", str(path), *arguments]) == 0
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_whole_conversations_above_the_reward_are_written_with_their_tools(tmp_path):
    rewards = {"a": 1.1, "b": 0.6, "c": 0.59}
    rolled_out = [two_turns(example_id=name, outcome_reward=value, reward_parts={}) for name, value in rewards.items()]
    left_out = [
        two_turns(outcome_reward=9, reward_parts={}, stop_reason=StopReason.MAX_TURNS),
        two_turns(outcome_reward=9, reward_parts={}, is_scored=False),
        two_turns(outcome_reward=9, reward_parts={}, **REWRITTEN),
    ]
    for item in [*rolled_out, *left_out]:
        item.prompt_messages[0]["content"] = item.example_id
    run = tmp_path / "run"
    TrajectoryStore(run).write(1, [*rolled_out, *left_out])
    TrajectoryStore(run).write(1, [two_turns()], "eval")
    (run / "recipe.yaml").write_text("env: agent_r1_trl.testing.toys.AddEnv\n")
    rows = sft(tmp_path, run, "--min_reward", "0.5")
    assert [row["messages"] for row in rows] == [item.messages for item in rolled_out[:2]]
    assert all(row["tools"][0]["function"]["name"] == "add" for row in rows)


def test_assistant_messages_of_the_prompt_have_no_weight(tmp_path):
    item = two_turns()
    item.prompt_messages = [item.prompt_messages[0], {"role": "assistant", "content": "Hm?"}, item.prompt_messages[0]]
    TrajectoryStore(tmp_path / "run").write(1, [item])
    (row,) = sft(tmp_path, tmp_path / "run", "--min_reward", "0")
    weights = [message.get("weight") for message in row["messages"] if message["role"] == "assistant"]
    assert weights == [0, *[None] * len(item.turns)]


def test_trl_reads_the_conversations_of_a_run(tmp_path):
    """Rows with different arguments, none of which may get the keys of another."""
    first, second = two_turns(), two_turns()
    calls = ({"a": 1}, {"query": "x", "k": [2]})
    for item, arguments in zip((first, second), calls, strict=True):
        item.turns[0].message = {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "search", "arguments": arguments}}]}  # fmt: skip
    TrajectoryStore(tmp_path / "run").write(1, [first, second])
    rows = sft(tmp_path, tmp_path / "run", "--min_reward", "1")
    assert rows == [{"messages": first.messages}, {"messages": second.messages}]
    data = load_dataset("json", data_files=str(tmp_path / "sft.jsonl"), cache_dir=str(tmp_path / "cache"))["train"]
    got = [row["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in data]
    assert got == list(calls)


@pytest.mark.parametrize(
    ("output", "arguments", "message"),
    [
        ("a.jsonl", (), "--min_reward: not set"),
        ("a.jsonl", ("--min_reward", "5"), "(stop 'done', scored, in one context) earned that much"),
        ("a.csv", ("--min_reward", "1"), "must be a new .jsonl file"),
    ],
)
def test_mistakes_of_an_export_for_sft_are_refused(run_folder, tmp_path, capsys, output, arguments, message):
    assert main(["export", str(run_folder), "--sft", "--output", str(tmp_path / output), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / output).exists()

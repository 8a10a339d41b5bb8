"""What is recorded of a run beside its trajectories: columns of tokens, groups, steps, metrics, the tokenizer."""

import json
import logging
import math

import numpy as np
import pytest
import torch

from agent_r1_trl.recording import TrajectoryStore, read_metrics, read_records, read_steps
from agent_r1_trl.recording.store import decode, encode, sidecar
from agent_r1_trl.testing import AddEnv, make_policy, make_tokenizer, say
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from tests.features.sampling.test_resampling import make as make_resampled
from tests.features.sampling.test_resampling import taught
from tests.recording.examples import two_turns as two_turns_recorded
from tests.trainers.helpers import make_trainer, questions
from tests.trainers.test_ppo_trainer import random_head
from tests.trainers.test_rows import three_turns

TEMPERATURE = 0.7
ROWS = {"context.policy": "window", "context.turns": 1, "max_turns": 4, "script": three_turns}
PPO = {"trainer": MultiTurnPPOTrainer, "critic": "head", "num_generations": 1}


def recorded(folder, **options):
    """A trainer with a record."""
    defaults = {"record_trajectories": "jsonl", "temperature": TEMPERATURE, "env": AddEnv, "journal": False}
    return make_trainer(folder, **{**defaults, **options})


def read(folder, **options):
    return list(read_records(folder, split="train", columns=True, **options))


@torch.no_grad()
def scored(trajectory):
    """Log-probs and entropies of the sampled tokens before any update, from one forward pass for each row."""
    model, log_probs, entropies = make_policy(make_tokenizer("qwen3")).eval(), {}, {}
    for row in trajectory.rows:
        logits = model(torch.tensor([row.prompt_ids + row.completion_ids])).logits[0].double() / TEMPERATURE
        all_logps = logits.log_softmax(-1)[len(row.prompt_ids) - 1 : -1]
        times = [time for span in row.spans for time in range(*span)]
        for time, token, logps in zip(times, row.completion_ids, all_logps, strict=True):
            log_probs[time], entropies[time] = logps[token].item(), -(logps.exp() * logps).sum().item()
    sampled = [time for time, is_one in enumerate(trajectory.action_mask) if is_one]
    return [np.array([of[time] for time in sampled]) for of in (log_probs, entropies)]


def assert_columns_are_those_of_the_first_policy(record):
    log_probs, entropies = scored(record.trajectory)
    sampler = np.array(record.trajectory.logprobs)[np.array(record.trajectory.action_mask, dtype=bool)]
    assert record.columns["entropy"] == pytest.approx(entropies, rel=2e-3)
    assert record.columns["log_ratio"] == pytest.approx(log_probs - sampler, rel=2e-3, abs=1e-4)


# -------------------------------------------------------------------- columns


UPDATES = {
    "padded": {},
    "grouped": {"update_layout": "grouped"},
    "packed": {"update_layout": "packed"},
    "shared by tokens": {"update_layout": "shared", "max_tokens_per_micro_batch": 300},
    "rows": ROWS,
    "rows packed": {**ROWS, "update_layout": "packed"},
    "two iterations": {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.05},
    "two rollouts a step": {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 2,
        "learning_rate": 0.0,
    },
    "mini-batches": {
        "per_device_train_batch_size": 4, "steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 4,
        "num_iterations": 2, "learning_rate": 0.0, "update_layout": "shared",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", UPDATES)
def test_columns_are_those_of_the_first_pass_over_each_token(tmp_path, kind):
    trainer = recorded(tmp_path, **UPDATES[kind])
    trainer.train()
    records = read(tmp_path)
    assert len(records) % 8 == 0 and len({record.trajectory.example_id for record in records}) > 1
    for record in records:
        assert_columns_are_those_of_the_first_policy(record)
        assert record.in_loss and record.is_kept
    if "context.policy" in UPDATES[kind]:
        assert any(len(record.trajectory.rows) > 1 for record in records)


@pytest.mark.parametrize("options", [{}, {**ROWS, "update_layout": "shared"}], ids=["padded", "rows"])
def test_values_and_returns_are_the_critics(tmp_path, options):
    trainer = recorded(tmp_path, **PPO, gamma=0.9, lam=0.8, learning_rate=0.0, **options)
    random_head(trainer)
    trainer.train()
    step = read_steps(tmp_path)[1]
    assert step["estimator"] == "gae" and (step["gamma"], step["lam"]) == (0.9, 0.8)
    mean, std = step["whitening"]["mean"], step["whitening"]["std"]
    for record in read(tmp_path):
        item, sampled = record.trajectory, np.array(record.trajectory.action_mask, dtype=bool)
        assert_columns_are_those_of_the_first_policy(record)
        values = {}
        for row in item.rows:
            ids = torch.tensor([row.prompt_ids + row.completion_ids])
            with torch.no_grad():
                found = trainer.model.eval()(input_ids=ids, attention_mask=ids * 0 + 1, values_only=True).state_values[
                    0
                ]
            times = [time for span in row.spans for time in range(*span)]
            values |= dict(zip(times, found[len(row.prompt_ids) - 1 : -1].tolist(), strict=True))
        values = [values[time] for time in np.flatnonzero(sampled)]
        assert record.columns["value"] == pytest.approx(values, rel=1e-3, abs=1e-4)
        rewards, returns, advantage, after = np.array(item.token_rewards())[sampled], [], 0.0, record.bootstrap_value
        for reward, value in zip(rewards[::-1], values[::-1], strict=True):
            advantage = reward + 0.9 * after - value + 0.9 * 0.8 * advantage
            returns, after = [advantage + value, *returns], value
        assert record.columns["return"] == pytest.approx(returns, rel=1e-3, abs=1e-4)
        raw = record.columns["return"] - record.columns["value"]
        assert (raw - mean) / std == pytest.approx(np.array(item.advantages)[sampled], abs=5e-3)


def test_the_reference_has_a_column_of_its_own(tmp_path, policy_path):
    trainer = recorded(tmp_path, beta=0.1, model=policy_path, max_steps=2)
    trainer.train()
    for record in read(tmp_path):
        assert record.columns["reference"] == pytest.approx(scored(record.trajectory)[0], rel=2e-3)


def test_equal_completions_get_the_numbers_of_their_own_prompts(tmp_path):
    trainer = recorded(tmp_path, script=lambda rng, turn: say("the same"), update_layout="grouped")
    trainer.train()
    records = read(tmp_path)
    assert len({tuple(record.trajectory.completion_ids) for record in records}) == 1
    entropies = {tuple(record.columns["entropy"]) for record in records}
    assert len(entropies) == len({record.trajectory.example_id for record in records}) == 2
    for record in records:
        assert_columns_are_those_of_the_first_policy(record)


def test_what_is_not_trained_on_has_no_columns_and_says_so(tmp_path):
    env = taught("q0")
    trainer = make_resampled(
        tmp_path, env, groups=4, record_trajectories="jsonl", **{"sampling.resample_rounds": 0},
        **{"sampling.filter_groups": "top_fraction", "sampling.filter_value": 0.5},
    )  # fmt: skip
    trainer.train()
    records = read(tmp_path)
    kept = {record.trajectory.example_id: record.is_kept for record in records}
    assert kept["q0"] and not all(kept.values())
    for record in records:
        assert record.in_loss is record.is_kept is ("entropy" in record.columns)
        assert record.columns == {} or np.isfinite(record.columns["entropy"]).all()


def test_groups_are_numbered_throughout_and_replaced_ones_have_numbers_of_their_own(tmp_path):
    trainer = make_resampled(tmp_path, taught("q0", "q2", "q9"), groups=4, record_trajectories="jsonl")
    trainer.train()
    records = read(tmp_path)
    groups = {}
    for record in records:
        groups.setdefault(record.group, []).append(record.trajectory)
    assert all(len({item.example_id for item in members}) == 1 for members in groups.values())
    assert all(sorted(item.generation for item in members) == [0, 1] for members in groups.values())
    replaced = {number for number, (first, _) in groups.items() if first.is_replaced}
    assert replaced and min(replaced) >= 4 and set(groups) - replaced == {0, 1, 2, 3}
    for record in records:
        assert record.in_loss is not record.trajectory.is_replaced and record.is_kept
        assert bool(record.columns) is record.in_loss


def test_two_rollouts_of_a_step_have_different_groups(tmp_path):
    trainer = recorded(tmp_path, **UPDATES["two rollouts a step"])
    trainer.train()
    assert sorted({record.group for record in read(tmp_path, step=1)}) == [0, 1]
    assert sorted({record.group for record in read(tmp_path, step=2)}) == [0, 1]


@pytest.mark.parametrize("values", [[1.5, -2.0, math.nan], [7e4, 1e-7], []])
def test_a_column_comes_back_as_float16_or_as_wide_as_it_needs(values):
    text = encode(np.array(values))
    assert text[:3] == ("f4:" if 7e4 in values else "f2:")
    assert decode(text).tolist() == pytest.approx(values, rel=1e-3, abs=1e-7, nan_ok=True)


# -------------------------------------------------------------------- what may go wrong


def test_columns_of_a_full_disk_are_lost_and_said_once_and_the_run_goes_on(tmp_path, caplog, monkeypatch):
    trainer = recorded(tmp_path, max_steps=3)
    places = [tmp_path / "trajectories" / f"step_{step:06d}.columns.jsonl" for step in (1, 2)]
    for place in places:
        place.mkdir(parents=True)
        (place / "in the way").touch()
    monkeypatch.setattr(TrajectoryStore, "_supersede", lambda self, path: None)
    with caplog.at_level(logging.ERROR):
        trainer.train()
    assert trainer.state.global_step == 3
    assert sum("Columns of tokens could not be written" in line for line in caplog.messages) == 1
    monkeypatch.undo()
    for place in places:
        (place / "in the way").unlink()
        place.rmdir()
    assert [bool(record.columns) for record in read(tmp_path)] == [False] * 16 + [True] * 8


def test_columns_are_joined_where_a_step_is_written_again(tmp_path):
    for value in (1.0, 2.0):
        store = TrajectoryStore(tmp_path)
        path = store.write(1, [two_turns_recorded(), two_turns_recorded(generation=4)])
        columns = {"entropy": encode(np.full(4, value)), "log_ratio": encode(np.ones(3))}
        sidecar(path).write_text(json.dumps({"line": 1, **columns}) + "\n")
    first, second = read(tmp_path)
    assert first.columns == {} and second.columns.keys() == {"entropy"}, "another length is another trajectory's"
    assert second.columns["entropy"].tolist() == [2.0] * 4 and second.columns["entropy"].dtype == np.float32
    aside = tmp_path / "trajectories" / "superseded"
    assert sorted(path.name for path in aside.iterdir()) == ["step_000001.1.columns.jsonl", "step_000001.1.jsonl"]
    (_, old) = read(aside / "step_000001.1.jsonl")
    assert old.columns["entropy"].tolist() == [1.0] * 4
    assert next(read_records(tmp_path)).columns == {}, "nobody asked"


def test_a_resumed_run_has_the_record_of_one_that_never_stopped(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "script": None, "max_completion_length": 12}
    whole = recorded(tmp_path / "whole", **options)
    whole.train()
    first = recorded(tmp_path / "run", **options)
    first.train()
    for name in ("metrics.jsonl", "trajectories/steps.jsonl"):
        with (tmp_path / "run" / name).open("a") as file:
            file.write('{"step": 4, "cut o')
    resumed = recorded(tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    runs = [tmp_path / name for name in ("run", "whole")]
    assert [entry["step"] for entry in read_metrics(runs[0]) if "loss" in entry] == [1, 2, 3, 4]
    losses = [[(entry["step"], entry["loss"]) for entry in read_metrics(run) if "loss" in entry] for run in runs]
    assert losses[0] == losses[1]
    steps = [read_steps(run) for run in runs]
    assert steps[0] == steps[1] and list(steps[0]) == [1, 2, 3, 4]
    for one, other in zip(*map(read, runs), strict=True):
        assert one.trajectory.completion_ids == other.trajectory.completion_ids and one.group == other.group
        assert one.columns.keys() == other.columns.keys() == {"entropy", "log_ratio"}
        for name in one.columns:
            assert one.columns[name] == pytest.approx(other.columns[name], abs=1e-5), name
    aside = tmp_path / "run" / "trajectories" / "superseded"
    assert {path.name for path in aside.iterdir()} >= {"step_000003.1.jsonl", "step_000003.1.columns.jsonl"}


def test_a_run_that_goes_on_in_the_middle_of_a_rollout_goes_on_without_its_columns(tmp_path):
    options = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}
    options |= {"save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    first = recorded(tmp_path, **options)
    first.train()
    sidecar(tmp_path / "trajectories" / "step_000001.jsonl").unlink()  # as after a kill before it was written
    resumed = recorded(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [bool(record.columns) for record in read(tmp_path)] == [False] * 8 + [True] * 8


# -------------------------------------------------------------------- steps, metrics, tokenizer


def test_what_is_logged_can_be_read_while_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "hunter-2-hunter-2")
    seen = []
    trainer = recorded(tmp_path, max_steps=2)
    log = trainer.log

    def noted(logs, start_time=None):
        log({**logs, "of hunter-2-hunter-2": float("nan")}, start_time)
        seen.append(read_metrics(tmp_path)[-1])

    trainer.log = noted
    trainer.train()
    assert [entry["step"] for entry in seen] == [1, 2, 2] and seen == read_metrics(tmp_path)
    assert seen[0]["time"].endswith("+00:00") and seen[0]["reward"] == trainer.state.log_history[0]["reward"]
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "hunter" not in text and "NaN" not in text


def test_metrics_of_an_older_run_are_those_of_its_state(tmp_path):
    assert read_metrics(tmp_path) == [] and read_steps(tmp_path) == {}
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "loss": 0.5}]}))
    (tmp_path / "trajectories").mkdir()
    assert read_metrics(tmp_path) == read_metrics(tmp_path / "trajectories") == [{"step": 1, "loss": 0.5}]


def test_the_tokenizer_is_there_from_the_start_unless_it_was(tmp_path):
    trainer = recorded(tmp_path / "new")
    trainer.rollouts.generate = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert (tmp_path / "new" / "tokenizer.json").is_file()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "tokenizer.json").write_text("another")
    trainer = recorded(tmp_path / "old", train_dataset=questions())
    trainer.train()
    assert (tmp_path / "old" / "tokenizer.json").read_text() == "another"


def test_without_a_record_nothing_is_written(tmp_path):
    trainer = recorded(tmp_path, record_trajectories="none")
    trainer.train()
    assert not {path.name for path in tmp_path.iterdir()} & {"metrics.jsonl", "trajectories", "tokenizer.json"}

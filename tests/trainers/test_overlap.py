"""Generating the next rollout while the update trains on this one."""

import asyncio
import itertools
import os
import threading
import time

import pytest
import torch
from transformers import TrainerCallback

from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.testing import AddEnv
from agent_r1_trl.trainers.rollouts import Lookahead, training_order
from tests.trainers.helpers import make_trainer, questions

OVERLAP = {"overlap_rollout": True}


# -------------------------------------------------------------------- looking ahead


def test_batches_that_were_passed_on_are_there_until_they_are_done():
    lookahead, source = Lookahead(), iter("abcdef")
    window = lookahead.over(source, 0)
    assert (next(window), next(window), next(window), window.at(1)) == ("a", "b", "c", "b")
    window = lookahead.over(source, 3)
    assert list(lookahead._batches) == [] and (next(window), window.at(5), window.at(6)) == ("d", "f", None)
    assert list(window) == ["e", "f"]


# -------------------------------------------------------------------- training


class Watch(TrainerCallback):
    """Keeps what each update was trained on and how far the next rollout had come when it began."""

    def __init__(self):
        self.trainer = None
        self.trained_on = []
        self.has_next = []

    def on_substep_end(self, args, state, control, **kwargs):
        self.on_step_end(args, state, control)

    def on_step_end(self, args, state, control, **kwargs):
        self.trained_on.append([(t.prompt_messages, t.completion_ids) for t in self.trainer.last_trajectories])
        self.has_next.append(self.trainer.rollouts.upcoming is not None)


def watched(tmp_path, max_steps=5, **options):
    watch = Watch()
    watch.trainer = make_trainer(
        tmp_path, callbacks=[watch], train_dataset=questions(6), max_steps=max_steps, use_vllm=True, **options
    )
    return watch.trainer, watch


BATCHES = ("steps_per_generation", "gradient_accumulation_steps", "num_iterations")


QUICK = [(1, 2, 1), (3, 2, 1)]
OTHERS = sorted({*itertools.product((1, 2, 3), repeat=3)} - {*QUICK})


@pytest.mark.parametrize(
    "numbers", [*QUICK, *(pytest.param(numbers, marks=pytest.mark.matrix) for numbers in OTHERS)], ids=str
)
def test_it_trains_on_what_the_synchronous_run_trains_on(tmp_path, numbers):
    options = {
        "learning_rate": 0.0,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 80,
    }
    options |= dict(zip(BATCHES, numbers, strict=True))
    options["max_steps"] = -(-7 * numbers[0] * numbers[2] // (3 * numbers[1]))  # two to three rollouts, or all epochs
    plain, expected = watched(tmp_path / "plain", **options)
    plain.train()
    trainer, watch = watched(tmp_path / "overlap", overlap_rollout=True, **options)
    trainer.train()
    assert watch.trained_on == expected.trained_on
    assert len({str(rows) for rows in watch.trained_on}) > 1
    assert any(watch.has_next) and not any(expected.has_next)


def test_a_rollout_is_under_way_in_every_update_but_the_last_of_an_epoch_and_of_the_run(tmp_path):
    trainer, watch = watched(tmp_path, **OVERLAP)  # 6 questions, 2 a step: 3 steps an epoch
    trainer.train()
    assert watch.has_next == [True, True, False, True, False]
    logged = [entry for entry in trainer.state.log_history if "sampling/staleness" in entry]
    assert [entry["sampling/staleness"] for entry in logged] == [0, 1, 1, 0, 1]
    assert all(entry["time/wait_s"] >= 0 for entry in logged)


class NoisyEnv(AddEnv):
    """Draws from torch's global random numbers, another number of them every time."""

    def reset(self, example):
        torch.rand(1 + os.urandom(1)[0])
        return super().reset(example)


def test_the_order_of_the_rows_hangs_on_no_draw_of_the_next_rollout(tmp_path):
    runs = []
    for _ in range(2):
        trainer, _ = watched(
            tmp_path, env=NoisyEnv, max_steps=4, steps_per_generation=2, per_device_train_batch_size=4, **OVERLAP
        )
        rows, loss = [], trainer._compute_loss

        def compute_loss(model, inputs, rows=rows, loss=loss):
            rows.append(inputs["completion_ids"].tolist())
            return loss(model, inputs)

        trainer._compute_loss = compute_loss
        trainer.train()
        runs.append(rows)
    assert runs[0] == runs[1]
    assert [len(rows) for rows in runs[0]] == [4] * 4


def test_a_seeded_order_does_not_depend_on_what_was_drawn_before():
    orders = []
    for _ in range(2):
        orders.append(training_order(6, seed=3, step=7, is_seeded=True).tolist())
        torch.rand(1)
    assert orders[0] == orders[1] != list(range(6)) and sorted(orders[0]) == list(range(6))
    assert training_order(6, seed=3, step=8, is_seeded=True).tolist() != orders[0]
    torch.manual_seed(5)
    expected = torch.randperm(6)
    torch.manual_seed(5)
    assert torch.equal(training_order(6, seed=3, step=7, is_seeded=False), expected), "TRL's order"


class HeldEnv(AddEnv):
    """Knows how many of its kind are sampling; none begins while the gate is closed."""

    sampling = 0
    gate = threading.Event()

    async def reset(self, example):
        HeldEnv.sampling += 1
        while not HeldEnv.gate.is_set():
            await asyncio.sleep(0.01)
        return super().reset(example)

    async def close(self):
        HeldEnv.sampling -= 1


def held(tmp_path, monkeypatch, update):
    """A trainer whose next rollout is held from its start to the end of `update(number of trajectories sampling)`."""
    trainer, _ = watched(tmp_path, env=HeldEnv, **OVERLAP)
    begin, loss = trainer.rollouts.finish, trainer._compute_loss
    HeldEnv.gate.set()

    def begin_held(position):
        HeldEnv.gate.clear()
        begin(position)

    def compute_loss(*args):
        wait_until(lambda: HeldEnv.sampling == (8 if trainer.rollouts.upcoming else 0))
        update(HeldEnv.sampling)
        HeldEnv.gate.set()
        return loss(*args)

    monkeypatch.setattr(trainer.rollouts, "finish", begin_held)
    monkeypatch.setattr(trainer, "_compute_loss", compute_loss)
    return trainer


def wait_until(has_happened):
    deadline = time.monotonic() + 60
    while not has_happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_trajectories_are_sampled_while_the_update_runs(tmp_path, monkeypatch):
    sampling = []
    held(tmp_path, monkeypatch, sampling.append).train()
    assert sampling == [8, 8, 0, 8, 0], "an epoch has three steps"


def test_a_run_that_fails_ends_the_rollout_under_way(tmp_path, monkeypatch):
    def fail(sampling):
        raise RuntimeError("out of memory")

    trainer = held(tmp_path, monkeypatch, fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert trainer.rollouts.upcoming is None
    wait_until(lambda: HeldEnv.sampling == 0)


def test_evaluation_between_two_updates_leaves_the_rollout_under_way_to_its_update(tmp_path):
    options = {"eval_dataset": questions(2), "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.0}
    options["per_device_eval_batch_size"] = 8
    _, expected = plain = watched(tmp_path / "plain", learning_rate=0.0)
    plain[0].train()
    trainer, watch = watched(tmp_path / "overlap", overlap_rollout=True, **options)
    trainer.train()
    evaluations = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(evaluations) == 5
    assert watch.trained_on[1:] != watch.trained_on[:-1]
    assert [rows for rows in watch.trained_on if rows in expected.trained_on] == expected.trained_on


class BrokenEnv(ToolEnv):
    """An author's mistake: the outcome is no number. It shows on the second question."""

    def outcome_reward(self, trajectory):
        is_first = "question 0" in str(trajectory.prompt_messages)
        return 1.0 if is_first else "good"


def test_an_authors_mistake_in_the_next_rollout_is_heard(tmp_path):
    trainer, _ = watched(tmp_path, env=BrokenEnv, **OVERLAP)
    with pytest.raises(ValueError, match="outcome_reward"):
        trainer.train()

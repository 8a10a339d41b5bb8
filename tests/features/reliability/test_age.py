"""Batches whose policy has moved too far since they were sampled: nothing begins ahead, and fresh ones end the run."""

import itertools
import logging
import math

import pytest
import torch
from transformers import TrainerCallback

from agent_r1_trl.features.distillation import SelfDistillation
from agent_r1_trl.features.reliability.age import OffPolicyError
from agent_r1_trl.recording import read_records
from agent_r1_trl.update.entries import EFFECTIVE_SHARE
from agent_r1_trl.update.importance import effective_share
from tests.trainers.helpers import make_trainer


class OneRank:
    def reduce(self, values, reduction):
        return values


def test_the_share_is_that_of_the_ratios_before_any_bound():
    difference = torch.tensor([[0.0, 2.0, math.nan], [1.0, 0.0, 9.0]])
    in_loss = torch.tensor([[True, True, True], [True, False, False]])
    ratios = [1.0, math.exp(2.0), math.exp(1.0)]
    expected = sum(ratios) ** 2 / (3 * sum(ratio**2 for ratio in ratios))
    assert effective_share(difference, in_loss, OneRank()) == pytest.approx(expected)
    assert effective_share(torch.zeros(2, 3), in_loss, OneRank()) == 1.0
    assert math.isnan(effective_share(difference, torch.zeros_like(in_loss), OneRank()))
    far = torch.tensor([[900.0, 0.0, 0.0]])
    assert effective_share(far, torch.ones(1, 3, dtype=torch.bool), OneRank()) == pytest.approx(1 / 3)


def ahead(tmp_path, shares, **options):
    """A run whose batches have these shares, and how many rollouts were in flight after each."""
    options = {"rollouts_ahead": 2, "max_steps": len(shares), "failures.min_effective_share": 0.9, **options}
    trainer = make_trainer(tmp_path, **options)
    guard, in_flight, left = trainer.features["age"], [], iter(shares)
    look = guard.rollout_end

    def look_at(batch, output):
        in_flight.append(len(trainer.rollouts.ahead))
        output[EFFECTIVE_SHARE] = torch.tensor(next(left))
        look(batch, output)

    guard.rollout_end = look_at
    trainer.train()
    return trainer, in_flight


def test_nothing_begins_ahead_while_a_batch_is_too_far_off_and_it_is_said_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer, in_flight = ahead(tmp_path, [1.0, 0.5, 0.4, 0.99, 1.0, 0.89, 0.95, 1.0])
    assert in_flight == [2, 2, 1, 0, 2, 2, 1, 0], "the last two are the end of the run"
    said = [record.getMessage() for record in caplog.records if "below failures.min" in record.getMessage()]
    assert len(said) == 1
    for text in ("Step 2", "=0.5 ", "failures.min_effective_share=0.9", "learning_rate=0.001", "rollouts_ahead=2"):
        assert text in said[0], text
    held = [entry["sampling/is_held"] for entry in trainer.state.log_history if "sampling/is_held" in entry]
    assert held == [0, 1, 1, 0, 0, 1, 0, 0]


def test_three_fresh_batches_in_a_row_that_are_off_policy_end_the_run(tmp_path):
    with pytest.raises(OffPolicyError, match=r"sampling/effective_share=0.3 .*sync_logprob_gap"):
        ahead(tmp_path, [0.3] * 8)
    trainer, _ = ahead(tmp_path / "other", [0.3, 0.3, 0.3, 0.3, 0.95, 0.3, 0.3, 0.3])
    assert trainer.state.global_step == 8, "those that were sampled ahead do not count"


class WeightsOfSteps(TrainerCallback):
    """What each optimizer step has left."""

    def __init__(self):
        self.found = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.found.append(torch.cat([value.detach().flatten() for value in model.parameters()]))


@pytest.mark.parametrize("updates", [1, 2])
def test_such_a_batch_is_not_trained_on(tmp_path, caplog, updates):
    weights = WeightsOfSteps()
    options = {"max_steps": 4 * updates, "per_device_train_batch_size": 8 // updates, "updates_per_rollout": updates}
    with caplog.at_level(logging.WARNING):
        trainer, _ = ahead(tmp_path, [1.0, 0.5, 0.91, 1.0], callbacks=[weights], **options)
    moved = [not torch.equal(before, after) for before, after in itertools.pairwise(weights.found)]
    steps_of_second = range(updates, 2 * updates)
    assert [step for step, is_moved in enumerate(moved, 1) if not is_moved] == list(steps_of_second)
    skipped = [entry["filter/skipped_steps"] for entry in trainer.state.log_history if "filter/skipped_steps" in entry]
    assert skipped[-1] == updates
    said = [record.getMessage() for record in caplog.records if "was skipped" in record.getMessage()]
    assert len(said) == 1 and "because failures.min_effective_share left no trajectory" in said[0]


def test_record_metrics_and_report_say_that_such_a_batch_was_not_trained_on(tmp_path):
    trainer, _ = ahead(tmp_path, [1.0, 0.5, 1.0], record_trajectories="jsonl")
    records = [*read_records(tmp_path)]
    assert {(item.step, item.is_kept) for item in records} == {(1, True), (2, False), (3, True)}
    assert {item.in_loss for item in records if item.step == 2} == {False}
    logged = [entry["group/taught_share"] for entry in trainer.state.log_history if "group/taught_share" in entry]
    assert [share > 0 for share in logged] == [True, False, True]
    assert [rollout.teaches for rollout in trainer.features["learning"].rollouts] == [True, False, True]


def test_such_a_batch_is_not_trained_on_by_a_loss_term_either(tmp_path):
    """Whose tokens a filter would leave to it."""
    weights, terms = WeightsOfSteps(), [SelfDistillation(weight=1.0)]
    trainer, _ = ahead(tmp_path, [1.0, 0.5, 1.0], callbacks=[weights, *terms])
    moved = [not torch.equal(before, after) for before, after in itertools.pairwise(weights.found)]
    assert moved == [False, True]
    assert [entry["distillation"] is not None for entry in trainer.state.log_history[:3]] == [True, False, True]


def test_a_run_without_rollouts_ahead_has_no_guard_and_one_whose_minimum_is_0_never_holds(tmp_path):
    assert make_trainer(tmp_path).features.get("age") is None
    _, in_flight = ahead(tmp_path, [0.1] * 5, **{"failures.min_effective_share": 0.0})
    assert in_flight == [2, 2, 2, 1, 0]

"""Batches whose policy has moved too far since they were sampled: nothing begins ahead, and fresh ones end the run."""

import logging
import math

import pytest
import torch

from agent_r1_trl.features.reliability.age import AgeGuard, OffPolicyError
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
    said = [record.getMessage() for record in caplog.records if "min_effective_share" in record.getMessage()]
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


def test_such_a_batch_counts_for_the_root_of_its_share():
    guard, loss = AgeGuard(0.9), torch.tensor(2.0)
    assert guard.check_loss(loss, {EFFECTIVE_SHARE: torch.tensor(0.25)}).item() == 1.0
    assert guard.check_loss(loss, {EFFECTIVE_SHARE: torch.tensor(0.9)}).item() == 2.0
    assert guard.check_loss(loss, {}).item() == 2.0
    assert guard.check_loss(loss, {EFFECTIVE_SHARE: torch.tensor(math.nan)}).item() == 2.0


def test_a_run_without_rollouts_ahead_has_no_guard_and_one_whose_minimum_is_0_never_holds(tmp_path):
    assert make_trainer(tmp_path).features.get("age") is None
    _, in_flight = ahead(tmp_path, [0.1] * 5, **{"failures.min_effective_share": 0.0})
    assert in_flight == [2, 2, 2, 1, 0]

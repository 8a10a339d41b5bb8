"""How many rollouts may run ahead at a learning rate, and batches whose policy has moved too far."""

import itertools
import logging
import math
from unittest import mock

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from agent_r1_trl.features.distillation import SelfDistillation
from agent_r1_trl.features.reliability import age
from agent_r1_trl.features.reliability.age import Drift, OffPolicyError
from agent_r1_trl.generation.base import current_slot
from agent_r1_trl.recording import read_records
from agent_r1_trl.testing import AddEnv, make_tokenizer
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from agent_r1_trl.update.entries import EFFECTIVE_SHARE
from agent_r1_trl.update.importance import effective_share
from tests.trainers.helpers import make_trainer
from tests.trainers.versions import SAMPLED, Chat


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


# -------------------------------------------------------------------- how far an update moves the policy


def test_the_variance_grows_with_the_square_of_the_rates_and_the_samplers_noise_is_none_of_it():
    drift = Drift()
    assert not drift.is_known and drift.expected_share(9.0) == 1.0
    drift.add(1 / 1.001, 0.0)
    assert not drift.is_known, "weights that have not moved say nothing but the sampler's noise"
    drift.add(1 / (1 + 0.001 + 0.02), 4.0)
    assert drift.is_known and drift.expected_share(1.0) == pytest.approx(1 / 1.005)
    assert drift.expected_share(3.0) == pytest.approx(1 / 1.045)
    assert drift.reach(1 / 1.045) == pytest.approx(3.0)
    drift.add(1 / 1.02, 4.0, has_noise=False)
    assert drift.expected_share(1.0) == pytest.approx(1 / 1.005)
    assert drift.expected_share(0.0) == 1.0
    again = Drift()
    again.load_state_dict(drift.state_dict())
    assert again.expected_share(2.0) == drift.expected_share(2.0) and again.noise == drift.noise


def test_later_measurements_count_more_and_large_distances_too():
    drift = Drift()
    drift.add(0.5, 1.0)
    for _ in range(20):
        drift.add(1.0, 1.0)
    assert drift.expected_share(1.0) > 0.999
    drift.add(0.9, 1e-9)
    assert drift.expected_share(1.0) > 0.9, "a tiny step says little"


def test_a_policy_that_does_not_move_may_be_as_old_as_it_likes():
    drift = Drift()
    drift.add(1.0, 1e-6)
    assert drift.is_known and drift.expected_share(1e6) == 1.0 and drift.reach(0.98) == math.inf


# -------------------------------------------------------------------- the guard


def by_rate(coefficient):
    """What a probe finds where the variance is this many times the square of the last learning rate."""
    return lambda guard: 1 / (1 + coefficient * [*guard._rates.values()][-1] ** 2)


def ahead(tmp_path, shares, probed=lambda guard: 1.0, **options):
    """A run whose batches have these shares, and how many rollouts were in flight after each.

    `probed` gives the share that scoring the last batch once more finds.
    """
    options = {"rollouts_ahead": 2, "max_steps": len(shares), "failures.min_effective_share": 0.9, **options}
    trainer = make_trainer(tmp_path, **options)
    guard, in_flight, left = trainer.features["age"], [], iter(shares)
    look = guard.rollout_end

    def look_at(batch, output):
        in_flight.append(len(trainer.rollouts.ahead))
        output[EFFECTIVE_SHARE] = torch.tensor(next(left))
        look(batch, output)

    guard.rollout_end = look_at
    with mock.patch.object(age, "effective_share", lambda *_: probed(guard)):
        trainer.train()
    return trainer, in_flight


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_nothing_begins_ahead_before_an_update_has_shown_how_far_it_moves_the_policy(tmp_path, caplog):
    trainer, in_flight = ahead(tmp_path, [1.0] * 7)
    assert in_flight == [0, 0, 2, 2, 2, 1, 0], "the last two are the end of the run"
    assert logged(trainer, "sampling/rollouts_ahead") == [0, 2, 2, 2, 2, 2, 2]
    assert not [record for record in caplog.records if "run ahead" in record.getMessage()]


class FlatAtFirst(AddEnv):
    """All trajectories of the first two rollouts earn the same."""

    def outcome_reward(self, trajectory):
        return 1.0 if current_slot.get().order < 2 else float(sum(trajectory.completion_ids) % 5)


def test_an_update_without_a_gradient_shows_nothing(tmp_path):
    """Where no group has taught anything yet, no rate looks too large."""
    constant = {"lr_scheduler_type": "constant", "learning_rate": 1e-3}
    trainer, in_flight = ahead(tmp_path, [math.nan] * 6, by_rate(0.05e6), env=FlatAtFirst, **constant)
    norms = logged(trainer, "grad_norm")
    assert norms[:2] == [0.0, 0.0] and norms[2] > 0.0
    assert logged(trainer, "sampling/rollouts_ahead") == [0] * 6 and in_flight == [0] * 6
    assert logged(trainer, "sampling/expected_share")[:3] == [1.0] * 3
    assert logged(trainer, "sampling/expected_share")[3] < 0.9


def test_as_many_run_ahead_as_the_rate_allows_and_it_is_said_once(tmp_path, caplog):
    unknown = [math.nan] * 7  # so that the probe alone says something
    constant = {"lr_scheduler_type": "constant", "learning_rate": 1e-3}
    with caplog.at_level(logging.WARNING):
        trainer, in_flight = ahead(tmp_path, unknown, by_rate(0.01e6), **constant)
    assert in_flight == [0, 0, 1, 1, 1, 1, 0]
    said = [record.getMessage() for record in caplog.records if "run ahead until" in record.getMessage()]
    assert len(said) == 1
    for text in (
        "Step 2",
        "learning_rate=0.001",
        "rollouts_ahead=2",
        "about 0.962",
        "Below 0.98",
        "So 1 run",
        "0.0007",
    ):
        assert text in said[0], text
    assert logged(trainer, "sampling/expected_share")[1:] == pytest.approx([1 / 1.04] * 6)


def test_a_rate_that_falls_lets_them_begin(tmp_path):
    falling = {"lr_scheduler_type": "linear", "learning_rate": 1e-3}
    trainer, _ = ahead(tmp_path, [math.nan] * 10, by_rate(0.05e6), **falling)
    allowed = logged(trainer, "sampling/rollouts_ahead")
    rates = [1e-3 * (1 - step / 10) for step in range(10)]
    expected = [0] + [max(n for n in (0, 1, 2) if 0.05e6 * (n * rate) ** 2 <= 1 / 0.98 - 1) for rate in rates[1:]]
    assert allowed == expected and {*allowed} == {0, 1, 2}


def test_a_schedule_that_warms_up_is_judged_by_its_top(tmp_path):
    rising = {"lr_scheduler_type": "linear", "learning_rate": 1e-3, "warmup_steps": 5}
    trainer, in_flight = ahead(tmp_path, [math.nan] * 6, by_rate(0.05e6), **rising)
    assert in_flight == [0] * 6
    shares = logged(trainer, "sampling/expected_share")
    assert shares[2:5] == pytest.approx([1 / 1.2] * 3)


def test_the_noise_of_a_warm_ups_first_rates_holds_but_is_no_reason_to_warn(tmp_path, caplog):
    """What is measured says nothing of the rate: it is as much at 1/20 of the top as it is later."""
    rising = {"lr_scheduler_type": "linear", "learning_rate": 1e-3, "warmup_steps": 20}
    with caplog.at_level(logging.WARNING):
        trainer, _ = ahead(tmp_path, [math.nan] * 12, lambda guard: 1 / (1 + 1e-4), **rising)
    assert logged(trainer, "sampling/expected_share")[2] < 0.98, "expected of the top of the schedule"
    allowed = logged(trainer, "sampling/rollouts_ahead")
    assert allowed[:3] == [0] * 3 and allowed[-1] > 0
    assert not [record for record in caplog.records if "run ahead until" in record.getMessage()]


@pytest.mark.parametrize("num", [1, 4])
def test_a_constant_rate_that_is_too_large_is_named_at_once_whatever_n(tmp_path, caplog, num):
    constant = {"lr_scheduler_type": "constant", "learning_rate": 1e-3, "rollouts_ahead": num}
    with caplog.at_level(logging.WARNING):
        ahead(tmp_path, [math.nan] * 3, by_rate(0.05e6), **constant)
    said = [record.getMessage() for record in caplog.records if "run ahead until" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("Step 2:")


def test_a_warm_up_to_a_rate_that_is_too_large_is_named_before_its_top(tmp_path, caplog):
    rising = {"lr_scheduler_type": "linear", "learning_rate": 1e-3, "warmup_steps": 9}
    with caplog.at_level(logging.WARNING):
        ahead(tmp_path, [math.nan] * 6, by_rate(0.05e6), **rising)
    said = [record.getMessage() for record in caplog.records if "run ahead until" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("Step 5:"), "the update of step 4 is the first at a third of the top"


def test_a_batch_that_is_too_far_off_is_left_out_and_said_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        _, in_flight = ahead(tmp_path, [1.0, 1.0, 1.0, 0.5, 0.4, 0.99, 1.0, 1.0])
    assert in_flight == [0, 0, 2, 2, 1, 0, 0, 0]
    said = [record.getMessage() for record in caplog.records if "below failures.min" in record.getMessage()]
    assert len(said) == 1
    for text in ("Step 4", "=0.5 ", "failures.min_effective_share=0.9", "learning_rate=0.001", "rollouts_ahead=2"):
        assert text in said[0], text


def test_three_fresh_batches_in_a_row_that_are_off_policy_end_the_run(tmp_path):
    with pytest.raises(OffPolicyError, match=r"sampling/effective_share=0.3 .*sync_logprob_gap"):
        ahead(tmp_path, [0.3] * 8)
    trainer, _ = ahead(tmp_path / "other", [1.0, 1.0, 1.0, 0.3, 0.3, 0.3, 0.3, 1.0])
    assert trainer.state.global_step == 8, "those that were sampled ahead do not count"


def test_a_resumed_run_knows_what_was_measured(tmp_path):
    constant = {"lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 3}
    first, _ = ahead(tmp_path, [math.nan] * 3, by_rate(0.01e6), **constant)
    options = {**constant, "failures.min_effective_share": 0.9, "max_steps": 4}
    resumed = make_trainer(tmp_path, rollouts_ahead=2, **options)
    limits = []
    take = resumed.rollouts.ahead.take

    def noted(rows, position):
        limits.append(resumed.rollouts.ahead.limit)
        return take(rows, position)

    resumed.rollouts.ahead.take = noted
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert limits[0] == 1 == first.rollouts.ahead.limit
    measured = first.features["age"].state_dict()
    assert measured["drift"]["square"] > 0
    assert {0, 1, 2, 3} == measured["rates"].keys() | resumed.features["age"]._rates.keys()
    assert resumed.features["age"]._rates[1] == measured["rates"][1] == 1e-3


def real_run(tmp_path, rate, **options):
    """A run of a policy that samples itself."""
    trainer = make_trainer(
        tmp_path,
        **{**SAMPLED, "env": Chat, "rollouts_ahead": 2, "max_steps": 6, "learning_rate": rate, **options},
        lr_scheduler_type="constant",
    )
    trainer.train()
    return trainer


def test_a_policy_that_samples_itself_runs_ahead_at_a_small_rate_and_not_at_a_large_one(tmp_path):
    small = real_run(tmp_path / "small", 1e-5)
    assert logged(small, "sampling/rollouts_ahead")[1:] == [2] * 5
    assert max(logged(small, "sampling/staleness_max")) > 0
    large = real_run(tmp_path / "large", 0.1)
    assert logged(large, "sampling/rollouts_ahead") == [0] * 6
    assert logged(large, "sampling/staleness_max") == [0] * 6
    assert logged(large, "sampling/expected_share")[1] < 0.9


def test_the_noise_of_dropout_is_no_movement(tmp_path, caplog):
    tokenizer = make_tokenizer("qwen3")
    size = {"vocab_size": len(tokenizer), "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 1024}
    model = GPT2LMHeadModel(
        GPT2Config(**size, resid_pdrop=0.4, embd_pdrop=0.4, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    )
    with caplog.at_level(logging.WARNING):
        trainer = real_run(tmp_path, 1e-7, model=model, disable_dropout=False)
    assert logged(trainer, "sampling/effective_share")[0] < 0.998, "between a sampler without it and the update"
    assert logged(trainer, "sampling/rollouts_ahead")[1:] == [2] * 5
    assert logged(trainer, "sampling/expected_share")[1] > 0.9999
    assert not [record for record in caplog.records if "run ahead until" in record.getMessage()]


def test_a_critics_warm_up_says_nothing_about_the_policy(tmp_path):
    trainer = real_run(tmp_path, 1e-5, trainer=MultiTurnPPOTrainer, critic_warmup_steps=3)
    assert logged(trainer, "sampling/rollouts_ahead") == [0, 0, 0, 0, 2, 2]


def test_at_learning_rate_0_nothing_is_waited_for(tmp_path):
    _, in_flight = ahead(tmp_path, [1.0] * 4, learning_rate=0.0)
    assert in_flight == [2, 2, 1, 0]


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
    blind = {"rollouts_ahead": 2, "vllm_importance_sampling_correction": False}
    assert make_trainer(tmp_path, **blind).features.get("age") is None
    _, in_flight = ahead(tmp_path, [0.1] * 5, **{"failures.min_effective_share": 0.0})
    assert in_flight == [2, 2, 2, 1, 0]

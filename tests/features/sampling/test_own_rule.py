"""A filter rule of the user's own: alone, and beside dynamic sampling and the echo guard's action `filter`."""

import functools

import pytest
import torch

from agent_r1_trl.features.sampling.rules import apply_own
from agent_r1_trl.objects import OwnObject, OwnObjectError
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig
from tests.features.sampling.test_group_filter import trainer_of
from tests.features.sampling.test_resampling import logged, make, taught
from tests.trainers.helpers import questions, scored_batch

CPU = {"output_dir": "unused", "bf16": False, "use_cpu": True}


def above(returns, least):
    """Groups whose members in the baseline earned at least so much on average."""
    return returns.nanmean(dim=1) >= least


def passed(returns):
    return above(returns, 0.5)


def own(rule):
    return OwnObject.of("sampling.filter_groups", rule, "mine")


@pytest.mark.parametrize("answer", [None, [True, False], torch.ones(2), torch.ones(4, dtype=torch.bool)])
def test_an_answer_of_another_form_is_refused(answer):
    with pytest.raises(
        OwnObjectError, match=r"^sampling.filter_groups='mine' returned .*Return a bool tensor of shape \(2,\)"
    ):
        apply_own(own(lambda returns: answer), torch.zeros(2, 2))


def test_it_may_change_what_it_gets():
    returns = torch.zeros(2, 2)
    apply_own(own(lambda groups: groups.fill_(7)[:, 0] > 0), returns)
    assert not returns.any()


def test_object_and_path_keep_the_same_rows_and_the_settings_name_them(tmp_path):
    sizes = {"num_generations": 4, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    names = {passed: f"{__name__}:passed", functools.partial(above, least=0.5): f"{__name__}:above(least=0.5)"}
    for given, name in [*names.items(), *((f"{__name__}{mark}passed",) * 2 for mark in ".:")]:
        trainer = trainer_of(tmp_path, sampling={"filter_groups": given}, num_iterations=1, **sizes)
        batch = scored_batch(trainer)
        # The groups earn 0 of 4, 1 or 2 and so on; `passed` asks for a half.
        returns = batch["trajectory_rewards"].view(-1, 4)
        in_baseline = (batch["tool_mask"] * batch["completion_mask"]).any(dim=1).view(-1, 4)
        means = (returns * in_baseline).sum(dim=1) / in_baseline.sum(dim=1)
        expected = (means >= 0.5).unsqueeze(1) & in_baseline
        assert batch["is_kept"].view(-1, 4).equal(expected) and 0 < expected.sum() < 16
        assert trainer.args.to_dict()["sampling"] == {"filter_groups": name}
        trainer.save_model(tmp_path)
        stored = torch.load(tmp_path / "training_args.bin", weights_only=False).sampling.filter_groups
        assert (type(stored), stored) == (str, name)


def test_what_only_our_rules_read_is_refused_and_groups_of_one_may_be_filtered():
    with pytest.raises(ValueError, match=r"filter_value=.* has no effect with sampling.filter_groups='.*:passed'"):
        MultiTurnGRPOConfig(**CPU, sampling={"filter_groups": passed, "filter_value": 0.5})
    asked = {"filter_groups": passed, "filter_when": 0.5, "filter_loss_scaling": True}
    MultiTurnPPOConfig(**CPU, sampling=asked, num_generations=1)
    with pytest.raises(ValueError, match=r"sampling.filter_groups='.*:passed' with fp16=True"):
        MultiTurnGRPOConfig(**CPU, sampling={"filter_groups": passed}, fp16=True)


def test_beside_dynamic_sampling_it_sees_the_groups_that_are_left_in_the_batch(tmp_path):
    seen = []

    def rule(returns):
        seen.append(returns.clone())
        return (returns > 0).any(dim=1)

    trainer = make(
        tmp_path, taught("q0", "q5", "q6"), num_prompts=8, sampling={"filter_groups": rule, "resample_rounds": 2}
    )
    batch = scored_batch(trainer)
    (returns,) = seen
    assert logged(trainer)["sampling/resampled_groups"] > 0
    earned = torch.tensor([item.total_reward for item in trainer.last_trajectories]).view(4, 2)
    assert returns.equal(earned) and (returns.sum(dim=1) > 0).sum() >= 2, "more than the first rollout had"
    assert batch["is_kept"].view(4, 2).equal((earned > 0).any(dim=1, keepdim=True).expand(4, 2))


def test_the_guards_action_filter_leaves_it_and_adds_dynamic_sampling(tmp_path):
    options = {"sampling": {"filter_groups": passed, "resample_rounds": 0}, "echo": {"actions": ["filter", "stop"]}}
    trainer = make(tmp_path, taught("q0"), num_prompts=8, train_dataset=questions(8), **options)
    text = trainer.features["echo_guard"]._apply("filter")
    assert text == "groups without signal are replaced in up to 2 rounds"
    assert trainer.features["group_filter"].settings.filter_groups == f"{__name__}:passed"
    kept = scored_batch(trainer)["is_kept"].view(4, 2)
    assert kept.any() and logged(trainer)["sampling/resampled_groups"] > 0


def test_a_rollout_of_which_the_rule_keeps_nothing_taught_nothing(tmp_path):
    trainer = make(
        tmp_path, taught("q0"), num_prompts=4, max_steps=1,
        sampling={"filter_groups": lambda returns: torch.zeros(len(returns), dtype=torch.bool), "resample_rounds": 0},
    )  # fmt: skip
    trainer.train()
    assert "taught nothing  1 of 1 rollouts" in trainer.features["learning"].summary()

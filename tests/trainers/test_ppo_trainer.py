"""`MultiTurnPPOTrainer` as a whole: credit over turns, both losses, the KL term, what is logged of the critic."""

import math

import pytest
import torch
from peft import LoraConfig

from agent_r1_trl.advantages import compute_bilevel_gae, compute_gae
from agent_r1_trl.critic.attach import critic_parameters, is_critic_name
from agent_r1_trl.testing import call, say
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from tests.trainers.helpers import loss_and_gradients, make_trainer, questions, scored_batch

KINDS = ("adapter", "head", "model")


def lora():
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def make_ppo(tmp_path, kind="model", *, trainer=MultiTurnPPOTrainer, **options):
    if options.pop("with_lora", False) or kind == "adapter":
        options.setdefault("peft_config", lora())
    return make_trainer(tmp_path, trainer=trainer, critic=kind, num_generations=1, **options)


def random_head(trainer):
    """A critic with something to say: heads start at zero."""
    for name, parameter in critic_parameters(trainer.model).items():
        if "value_head" in name:
            torch.nn.init.normal_(parameter, std=0.5)


def trainer_rewards(trainer):
    """The token rewards of the trajectories that were scored last."""
    return [trajectory.token_rewards() for trajectory in trainer.last_trajectories]


def test_gae_over_turns_sees_turns(tmp_path):
    trainer = make_ppo(tmp_path, advantage_estimator="bilevel_gae", gamma_turn=0.5, gamma=0.9, whiten_advantages=False)
    random_head(trainer)
    batch = scored_batch(trainer)
    mask = batch["tool_mask"] * batch["completion_mask"]
    turn_ids, rewards = torch.full(mask.shape, -1), torch.zeros(mask.shape)
    for row, trajectory in enumerate(trainer.last_trajectories):
        turn_ids[row, : len(trajectory.turn_ids)] = torch.tensor(trajectory.turn_ids)
        rewards[row, : len(trajectory.turn_ids)] = torch.tensor(trajectory.token_rewards())
    advantages, returns = compute_bilevel_gae(
        rewards, batch["old_values"], mask, turn_ids, gamma_turn=0.5, lam_turn=0.95, gamma=0.9, lam=0.95
    )
    torch.testing.assert_close(batch["advantages"], advantages)
    torch.testing.assert_close(batch["returns"], returns)


@pytest.mark.parametrize("kind", KINDS)
def test_the_values_in_the_loss_are_those_of_scoring_until_a_step_is_made(tmp_path, kind):
    trainer = make_ppo(tmp_path, kind)
    random_head(trainer)
    batch = scored_batch(trainer)
    trainer.compute_loss(trainer.model, batch)
    mask = batch["value_mask"]
    error = (batch["returns"] - batch["old_values"])[mask]
    expected = 0.5 * (error**2).mean().item()
    metrics = trainer._take_value_metrics()
    assert metrics == {"critic/value_loss": pytest.approx(expected, rel=1e-4), "critic/value_clip_ratio": 0.0}
    assert trainer._take_value_metrics() == {}, "each micro-batch counts once"


def test_a_micro_batch_that_is_not_finite_is_left_out_of_the_value_loss_that_is_logged(tmp_path):
    trainer = make_ppo(tmp_path, "head")
    random_head(trainer)
    batch = scored_batch(trainer)
    trainer.compute_loss(trainer.model, batch)
    expected = trainer._take_value_metrics()
    broken = batch["returns"].clone()
    broken[1, batch["value_mask"][1].long().argmax()] = math.nan
    for returns in (broken, batch["returns"]):
        trainer.compute_loss(trainer.model, {**batch, "returns": returns})
    assert trainer._take_value_metrics() == pytest.approx(expected)


def test_an_evaluation_that_was_cut_leaves_nothing_in_the_value_loss_of_the_next_one(tmp_path):
    trainer = make_ppo(tmp_path, "head", eval_dataset=questions(8), per_device_eval_batch_size=8)
    expected = trainer.evaluate()["eval_critic/value_loss"]
    trainer._value_sums["eval"] = torch.tensor([1e3, 0.0, 1.0], dtype=torch.float64)
    assert expected > 0 and trainer.evaluate()["eval_critic/value_loss"] == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_both_losses_reach_their_own_parameters(tmp_path, kind):
    trainer = make_ppo(tmp_path, kind)
    random_head(trainer)
    _, gradients = loss_and_gradients(trainer, scored_batch(trainer))
    names = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert names == set(gradients)
    for role in (True, False):
        share = [gradients[name].abs().max() > 0 for name in names if is_critic_name(name) is role]
        assert share, role
        assert sum(map(bool, share)) >= len(share) / 2, role  # LoRA starts with half of its matrices at zero


def test_kl_in_the_reward_lowers_returns_and_leaves_the_loss_alone(tmp_path):
    options = {"beta": 0.5, "gamma": 1.0, "lam": 1.0, "whiten_advantages": False}
    trainer = make_ppo(tmp_path, "head", with_lora=True, kl_placement="reward", **options)
    with torch.no_grad():  # away from the reference, which is the model without its adapter
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    batch = scored_batch(trainer)
    mask = (batch["tool_mask"] * batch["completion_mask"]).bool()
    k1 = (batch["old_per_token_logps"] - batch["ref_per_token_logps"]) * mask
    assert k1.abs().max() > 1e-4
    plain = torch.zeros(mask.shape)
    for row, rewards in enumerate(trainer_rewards(trainer)):
        plain[row, : len(rewards)] = torch.tensor(rewards)
    expected, _ = compute_gae(plain - 0.5 * k1, batch["old_values"], mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(batch["advantages"], expected)
    trainer._metrics["train"].clear()
    loss = trainer.compute_loss(trainer.model, batch)
    trainer.beta, before = 0.0, trainer.beta
    assert before == 0.5  # put back after the loss
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(loss.item(), abs=1e-7)


def test_lora_runs_get_an_adapter_and_full_runs_a_model(tmp_path):
    assert make_ppo(tmp_path, None).critic_kind == "model"
    assert make_ppo(tmp_path, None, peft_config=lora()).critic_kind == "adapter"


@pytest.mark.parametrize(("reply", "earned"), [(say("xyx"), 2.0), (call(a=1, b=2), 0.0)], ids=["text", "call"])
def test_without_an_environment_prompts_are_answered_in_one_turn(tmp_path, reply, earned):
    def count_x(completions, **kwargs):
        return [float(completion[0]["content"].count("x")) for completion in completions]

    trainer = make_ppo(tmp_path, "head", env=None, script=lambda rng, turn: reply, reward_funcs=[count_x])
    trainer.train()
    assert {(len(item.turns), item.total_reward) for item in trainer.last_trajectories} == {(1, earned)}

"""A loss term of the user's own: a sum over tokens that means the same in every layout and for both trainers."""

import itertools

import pytest
import torch

from agent_r1_trl.objects import OwnObjectError
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.update.layout import UPDATE_LAYOUTS
from tests.effort import nightly
from tests.toys import AddEnv
from tests.trainers.helpers import LikelihoodTrainer, loss_and_gradients, make_trainer, scored_batch


def returning(value, base=MultiTurnGRPOTrainer):
    class Trainer(base):
        def extra_loss(self, inputs, log_probs, mask):
            return value(inputs, log_probs, mask) if callable(value) else value

    return Trainer


def test_the_sum_is_divided_by_the_loss_tokens_and_added(tmp_path):
    plain, ours = make_trainer(tmp_path), make_trainer(tmp_path, trainer=LikelihoodTrainer)
    batch = [scored_batch(trainer) for trainer in (plain, ours)][1]
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    without, _ = loss_and_gradients(plain, batch)
    loss, _ = loss_and_gradients(ours, batch)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = ours.model(input_ids=ids, attention_mask=attention).logits[:, :-1]
    log_probs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0][:, -mask.shape[1] :]
    assert (loss - without).item() == pytest.approx(-0.5 * log_probs[mask].mean().item(), abs=1e-6)
    assert ours._metrics["train"]["extra_loss"] == [pytest.approx((loss - without).item(), abs=1e-6)]


@pytest.mark.parametrize("layout", ["shared", *nightly("grouped", "packed")])
def test_every_layout_and_cut_into_micro_batches_learns_the_same_from_it(tmp_path, layout):
    def trained(name, trainer=LikelihoodTrainer, **options):
        trainer = make_trainer(
            tmp_path / name, trainer=trainer, max_steps=2, per_device_train_batch_size=4,
            gradient_accumulation_steps=2, optim="sgd", learning_rate=0.1, max_grad_norm=0.0, **options,
        )  # fmt: skip
        trainer.train()
        return trainer

    ours, padded = trained("ours", update_layout=layout), trained("padded")
    plain = trained("plain", MultiTurnGRPOTrainer)
    for name, value in padded.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], value, rtol=0, atol=2e-6)
    moved = [(plain.model.state_dict()[n] - value).abs().max() for n, value in padded.model.state_dict().items()]
    assert max(moved) > 1e-3, "the term has an effect"
    assert "extra_loss" in ours.state.log_history[0] and "extra_loss" not in plain.state.log_history[0]


def test_log_probs_outside_the_mask_are_zero_in_every_layout(tmp_path):
    for layout in UPDATE_LAYOUTS:
        seen = []

        def look(inputs, log_probs, mask, seen=seen):
            seen.append((log_probs.detach(), mask))

        trainer = make_trainer(tmp_path / layout, trainer=returning(look), update_layout=layout)
        trainer.compute_loss(trainer.model, scored_batch(trainer))
        [(log_probs, mask)] = seen
        assert (log_probs[~mask] == 0).all() and (log_probs[mask] < 0).all() and mask.any() and not mask.all()


def test_ppo_adds_it_to_the_policys_loss(tmp_path):
    trainer = make_trainer(
        tmp_path,
        trainer=returning(lambda inputs, log_probs, mask: -log_probs.sum(), MultiTurnPPOTrainer),
        critic="head",
        num_generations=1,
    )
    trainer.train()
    assert trainer.state.log_history[0]["extra_loss"] > 0


def test_none_is_no_term(tmp_path):
    trainer, plain = make_trainer(tmp_path, trainer=returning(None)), make_trainer(tmp_path)
    batch = [scored_batch(item) for item in (trainer, plain)][1]
    assert torch.equal(loss_and_gradients(trainer, batch)[0], loss_and_gradients(plain, batch)[0])
    assert trainer._metrics["train"]["extra_loss"] == [0.0], "it takes part in what the ranks add up"


@pytest.mark.parametrize("wrong", [1.0, torch.zeros(3)], ids=["number", "vector"])
def test_what_is_no_scalar_tensor_is_refused(tmp_path, wrong):
    trainer = make_trainer(tmp_path, trainer=returning(wrong))
    with pytest.raises(ValueError, match="extra_loss"):
        trainer.compute_loss(trainer.model, scored_batch(trainer))


# -------------------------------------------------------------------- as a function: `loss_term`


def likelihood(inputs, log_probs, mask):
    return -0.5 * log_probs.sum()


def of_rewards(inputs, log_probs, mask):
    return -(inputs["trajectory_rewards"].unsqueeze(1) * log_probs * mask).sum()


@pytest.mark.parametrize("given", [likelihood, f"{__name__}:likelihood"], ids=["object", "path"])
def test_a_function_is_the_same_term_under_its_own_name(tmp_path, given):
    method, function = make_trainer(tmp_path, trainer=LikelihoodTrainer), make_trainer(tmp_path, loss_term=given)
    batch = [scored_batch(item) for item in (method, function)][1]
    assert torch.equal(loss_and_gradients(method, batch)[0], loss_and_gradients(function, batch)[0])
    assert function._metrics["train"]["loss_term"] == method._metrics["train"]["extra_loss"]
    assert function.args.to_dict()["loss_term"] == f"{__name__}:likelihood"


@pytest.mark.parametrize(
    ("layout", "steps"), [("grouped", 2), ("packed", 1), *nightly(("padded", 2), ("shared", 1), ("shared", 2))]
)
def test_a_function_of_the_rewards_sees_those_of_its_rows(tmp_path, layout, steps):
    seen = []

    def look(inputs, log_probs, mask):
        for reward, ids, row in zip(inputs["trajectory_rewards"], inputs["completion_ids"], mask, strict=True):
            seen.append((reward.item(), tuple(ids[row].tolist())))
        return of_rewards(inputs, log_probs, mask)

    trainer = make_trainer(
        tmp_path, loss_term=look, update_layout=layout, max_steps=1, gradient_accumulation_steps=steps,
        per_device_train_batch_size=8 // steps,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["loss_term"] != 0
    earned = {
        (item.total_reward, tuple(itertools.compress(item.completion_ids, item.action_mask)))
        for item in trainer.last_trajectories
    }
    assert len({reward for reward, _ in earned}) > 1 and set(seen) == earned


def test_every_row_of_a_rewritten_context_has_the_reward_of_its_trajectory(tmp_path):
    rewards = iter([3.0, 5.0])

    class Paid(AddEnv):
        def outcome_reward(self, trajectory):
            return next(rewards)

    def again(view):
        return [*view.prompt_messages, {"role": "user", "content": "again"}]

    options = {"context.policy": again, "num_generations": 2, "per_device_train_batch_size": 2}
    trainer = make_trainer(tmp_path, env=Paid, loss_term=of_rewards, max_concurrency=1, **options)
    rows = scored_batch(trainer)["trajectory_rewards"].tolist()
    earned = [item.total_reward for item in trainer.last_trajectories for _ in item.rows]
    assert rows[: len(earned)] == earned and len(earned) > 2 == len(set(earned))


@pytest.mark.parametrize("wrong", [lambda *rest: 1.0, lambda *rest: 1 / 0], ids=["number", "raises"])
def test_a_function_that_fails_is_named(tmp_path, wrong):
    trainer = make_trainer(tmp_path, loss_term=wrong)
    with pytest.raises(OwnObjectError, match=r"loss_term='tests.*<lambda>' (returned 1.0|raised ZeroDivisionError)"):
        trainer.compute_loss(trainer.model, scored_batch(trainer))

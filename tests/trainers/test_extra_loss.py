"""A loss term of the user's own, as a method and as a function; its own tokens, layouts and PPO: `test_hooks.py`."""

import pytest
import torch

from agent_r1_trl.objects import OwnObjectError
from agent_r1_trl.testing import AddEnv
from agent_r1_trl.trainers import MultiTurnGRPOTrainer
from tests.trainers.helpers import LikelihoodTrainer, loss_and_gradients, make_trainer, scored_batch


def returning(value, base=MultiTurnGRPOTrainer):
    class Trainer(base):
        def extra_loss(self, inputs, log_probs, mask):
            return value(inputs, log_probs, mask) if callable(value) else value

    return Trainer


def test_none_is_no_term(tmp_path):
    trainer, plain = make_trainer(tmp_path, trainer=returning(None)), make_trainer(tmp_path)
    batch = [scored_batch(item) for item in (trainer, plain)][1]
    assert torch.equal(loss_and_gradients(trainer, batch)[0], loss_and_gradients(plain, batch)[0])
    assert trainer._metrics["train"]["extra_loss"] == [0.0], "it takes part in what the ranks add up"


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


@pytest.mark.parametrize("wrong", [lambda *rest: 1.0, lambda *rest: torch.zeros(3), lambda *rest: 1 / 0])
def test_a_function_that_fails_is_named(tmp_path, wrong):
    trainer = make_trainer(tmp_path, loss_term=wrong)
    said = r"loss_term='tests.*<lambda>' (returned (1.0|a torch.float32 of shape)|raised ZeroDivisionError)"
    with pytest.raises(OwnObjectError, match=said):
        trainer.compute_loss(trainer.model, scored_batch(trainer))

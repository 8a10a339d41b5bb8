"""PPO in packed rows: values, both losses and their gradients are those of padded rows, for every critic."""

import pytest
import torch
from datasets import Dataset

from agent_r1_trl.critic.attach import is_critic_name
from agent_r1_trl.testing import call, make_policy, make_tokenizer, say
from agent_r1_trl.update.layout import UpdateLayout
from tests.fake_kernels import in_one_call
from tests.trainers.helpers import loss_and_gradients, move_weights, scored_batch
from tests.trainers.test_ppo_trainer import KINDS, make_ppo, random_head


def ragged(count=8):
    """Questions of very different lengths."""
    return Dataset.from_list(
        [{"id": f"q{i}", "prompt": [{"role": "user", "content": "word " * (1 + 5 * i)}]} for i in range(count)]
    )


def some_never_answer(rng, turn):
    return call(a=rng.randrange(9), b=1) if turn == 0 or rng.random() < 0.5 else say("x" * rng.randrange(1, 9))


def batches_and_losses(trainer, **changes):
    """Of each layout: a scored batch, and loss and gradients after the weights have moved."""
    random_head(trainer)
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    found = {}
    for layout in ("padded", "packed", "shared"):
        trainer.args.update_layout = layout
        trainer.layout = UpdateLayout(trainer.args)
        trainer.layout.prepare(trainer.model)
        if trainer.critic_kind == "model":
            trainer.layout.prepare(trainer.model.critic_backbone)
        trainer.model.load_state_dict(weights)
        trainer.rollouts.synced_step = -1
        batch = scored_batch(trainer)
        move_weights(trainer.model)
        for name, change in changes.items():
            batch[name] = change(batch)
        found[layout] = batch, *loss_and_gradients(trainer, batch)
    return found


def assert_as_padded(found):
    padded, loss, gradients = found.pop("padded")
    kept = padded["value_mask"]
    assert padded["old_values"][kept].std() > 0.05
    for is_critic in (True, False):
        assert max(grad.abs().max() for name, grad in gradients.items() if is_critic_name(name) is is_critic) > 1e-4
    for layout, (batch, own_loss, own_gradients) in found.items():
        for name in ("old_values", "returns", "advantages"):
            torch.testing.assert_close(batch[name][kept], padded[name][kept], atol=1e-5, rtol=1e-4, msg=layout + name)
        torch.testing.assert_close(own_loss, loss, atol=1e-5, rtol=1e-5, msg=layout)
        assert own_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(own_gradients[name], gradient, atol=1e-5, rtol=1e-4, msg=f"{layout} {name}")


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [*((kind, None) for kind in KINDS), ("head", "flash"), ("adapter", "efficient"), ("model", "flash")],
)
def test_every_critic_reads_packed_rows(tmp_path, kind, kernel, monkeypatch):
    trainer = make_ppo(
        tmp_path, kind, train_dataset=ragged(), num_iterations=2, bootstrap_truncated=True,
        script=some_never_answer, max_turns=2,
    )  # fmt: skip
    with in_one_call(monkeypatch, kernel):
        found = batches_and_losses(trainer)
    stops = [trajectory.stop_reason.is_truncated for trajectory in trainer.last_trajectories]
    assert any(stops), "some values are bootstrapped"
    assert not all(stops)
    assert_as_padded(found)


@pytest.mark.parametrize("kernel", [None, "efficient"])
def test_gradient_checkpointing_recomputes_the_critics_pass_under_its_adapter(tmp_path, kernel, monkeypatch):
    trainer = make_ppo(tmp_path, "adapter", gradient_checkpointing=True)
    trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    with in_one_call(monkeypatch, kernel):
        assert_as_padded(batches_and_losses(trainer))


def test_a_critic_may_train_on_rows_that_left_the_policys_loss(tmp_path):
    trainer = make_ppo(tmp_path, "head", num_iterations=2)
    found = batches_and_losses(
        trainer, tool_mask=lambda batch: batch["tool_mask"] * batch["tool_mask"].new_tensor([0, 1] * 4)[:, None]
    )
    assert_as_padded(found)


def test_observations_in_the_loss_are_packed_as_well(tmp_path):
    assert_as_padded(batches_and_losses(make_ppo(tmp_path, "model", loss_mask=False, advantage_mask=False)))


def test_a_critic_model_of_the_users_own_reads_packed_rows(tmp_path):
    own = make_policy(make_tokenizer("qwen3"), seed=5, hidden_size=16).model
    assert_as_padded(batches_and_losses(make_ppo(tmp_path, "model", critic_model=own)))


def test_a_packed_evaluation_is_the_padded_one(tmp_path):
    logged = []
    for layout in ("padded", "shared"):
        trainer = make_ppo(tmp_path / layout, "head", eval_dataset=ragged(), update_layout=layout)
        torch.manual_seed(4)
        random_head(trainer)
        logged.append(trainer.evaluate())
    for name in ("eval_loss", "eval_critic/value_mean", "eval_critic/value_loss"):
        assert logged[1][name] == pytest.approx(logged[0][name], abs=1e-5), name

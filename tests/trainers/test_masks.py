"""What the policy did not sample moves nothing: not the loss, not a gradient, not the baseline."""

import itertools
import math

import pytest
import torch
from trl import GRPOTrainer

from agent_r1_trl.advantages import Credit
from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.testing import make_tokenizer
from tests.effort import nightly
from tests.trainers.helpers import loss_and_gradients, make_trainer, scored_batch


def watch_log_probs(trainer):
    """Make the log-probabilities of the loss a leaf whose gradient can be read."""
    seen = {}
    original = trainer._get_per_token_logps_and_entropies

    def watched(*args, **kwargs):
        log_probs, entropies, aux = original(*args, **kwargs)
        seen["log_probs"] = log_probs.detach().requires_grad_(True)
        return seen["log_probs"], entropies, aux

    trainer._get_per_token_logps_and_entropies = watched
    return seen


PER_TOKEN = {
    "advantages", "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"
}  # fmt: skip


POISONS = (math.nan, math.inf, -math.inf, 1e30, -200.0)


@pytest.mark.parametrize(
    ("layout", "loss_type"),
    [
        ("padded", "sapo"),
        ("packed", "dapo"),
        *nightly(*((layout, name) for layout in ("padded", "packed") for name in ("cispo", "vespo"))),
    ],
)
def test_what_stands_at_mask_0_moves_nothing(tmp_path, loss_type, layout, policy_path):
    trainer = make_trainer(
        tmp_path, model=policy_path, beta=0.1, use_vllm=True, update_layout=layout, loss_type=loss_type,
        vllm_importance_sampling_mode="token_truncate", off_policy_mask_threshold=0.5, entropy_coef=0.1,
    )  # fmt: skip
    batch = scored_batch(trainer)
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert (batch["advantages"][~mask] == 0).all()
    assert (batch["advantages"][mask] != 0).any()
    loss, gradients = loss_and_gradients(trainer, batch)
    # Observation ids are inputs, but what else stands there is nobody's business.
    for name, poison in itertools.product(PER_TOKEN, POISONS):
        poisoned = {**batch, name: batch[name].masked_fill(~mask, poison)}
        other_loss, other = loss_and_gradients(trainer, poisoned)
        assert torch.equal(loss, other_loss), (name, poison)
        assert all(torch.equal(gradient, other[weight]) for weight, gradient in gradients.items()), (name, poison)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_model_that_gives_observations_no_probability_trains_as_ever(tmp_path, layout):
    trainer = make_trainer(tmp_path, update_layout=layout, num_iterations=2, entropy_coef=0.1)
    batch = scored_batch(trainer)
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    loss, gradients = loss_and_gradients(trainer, batch)
    forward = trainer.layout.log_probs if layout == "packed" else GRPOTrainer._get_per_token_logps_and_entropies

    def poisoned(*args, **kwargs):
        return tuple(part if part is None else part.masked_fill(~mask, -math.inf) for part in forward(*args, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.layout, "log_probs", poisoned)
        patch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", poisoned)
        other_loss, other = loss_and_gradients(trainer, batch)
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(gradient, other[name]) for name, gradient in gradients.items())


def test_ids_trained_are_the_ids_sampled(tmp_path):
    trainer = make_trainer(tmp_path)
    batch = scored_batch(trainer)
    chat = ChatFormat(make_tokenizer("qwen3"))
    for ids, mask in zip(batch["completion_ids"], batch["completion_mask"] * batch["tool_mask"], strict=True):
        sampled = chat.tokenizer.decode(ids[mask.bool()])
        assert sampled.count("<tool_call>") == 1
        assert sampled.endswith("<|im_end|>")
        assert "tool_response" not in sampled


def by_tokens(inputs):
    """An estimator of a user's own."""
    return Credit(advantages=torch.arange(1.0, len(inputs.returns) + 1).unsqueeze(1) * inputs.mask)


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_pp_baseline", by_tokens])
def test_without_loss_mask_observations_get_the_number_of_their_trajectory(tmp_path, estimator):
    masked = scored_batch(make_trainer(tmp_path, advantage_estimator=estimator))
    trainer = make_trainer(tmp_path, advantage_estimator=estimator, loss_mask=False)
    batch = scored_batch(trainer)
    action = (masked["completion_mask"] * masked["tool_mask"]).bool()
    torch.testing.assert_close(batch["advantages"][action], masked["advantages"][action], msg="statistics stay")
    completion = batch["completion_mask"].bool()
    assert (completion & ~action).any()
    number = masked["advantages"].gather(1, action.long().argmax(1, keepdim=True))  # (B, 1)
    assert (number != 0).any()
    torch.testing.assert_close(batch["advantages"], number * completion)
    seen = watch_log_probs(trainer)
    trainer.compute_loss(trainer.model, batch).backward()
    assert (seen["log_probs"].grad[completion & (number != 0)] != 0).all()
    assert (seen["log_probs"].grad[~completion] == 0).all()


@pytest.mark.parametrize("estimator", ["turn_grpo", "gigpo", "reinforce_pp"])
def test_without_loss_mask_an_observation_gets_the_number_of_the_token_it_follows(tmp_path, estimator):
    options = {"advantage_estimator": estimator, "loss_mask": False}
    options |= {"gamma": 0.9} if estimator == "reinforce_pp" else {}
    batch = scored_batch(make_trainer(tmp_path, **options))
    masked = scored_batch(make_trainer(tmp_path, **options | {"loss_mask": True}))
    action = (masked["completion_mask"] * masked["tool_mask"]).bool()
    for row in range(8):
        last = 0.0
        for token in range(int(batch["completion_mask"][row].sum())):
            last = masked["advantages"][row, token].item() if action[row, token] else last
            assert batch["advantages"][row, token].item() == pytest.approx(last, abs=1e-6)
    if estimator != "reinforce_pp":  # the mask of the estimator makes no difference to what is spread by turns
        unmasked = scored_batch(make_trainer(tmp_path, **options, advantage_mask=False))
        torch.testing.assert_close(batch["advantages"], unmasked["advantages"])


def test_without_loss_mask_importance_ratios_stay_those_of_action_tokens(tmp_path):
    batch = scored_batch(make_trainer(tmp_path, loss_mask=False, use_vllm=True))
    masked = scored_batch(make_trainer(tmp_path, use_vllm=True))
    action = (masked["completion_mask"] * masked["tool_mask"]).bool()
    assert (batch["importance_sampling_ratio"][~action] == 1).all()
    assert (batch["importance_sampling_ratio"][action] != 1).all()
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum() > action.sum()


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_masks_that_one_rank_changes_change_no_collective_call(tmp_path, layout):
    """The other ranks make those of an unchanged micro-batch, and would wait in any other for ever."""
    trainer = make_trainer(tmp_path, update_layout=layout)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    calls = []
    for name in ("gather", "reduce", "pad_across_processes", "gather_for_metrics"):
        method = getattr(trainer.accelerator, name)
        setattr(trainer.accelerator, name, lambda *a, n=name, f=method, **k: calls.append(n) or f(*a, **k))
    trainer.compute_loss(trainer.model, inputs)
    expected = calls.copy()
    assert expected
    for mask in (inputs["tool_mask"] * 0, inputs["tool_mask"].clone()):
        calls.clear()
        trainer.compute_loss(trainer.model, {**inputs, "tool_mask": mask})
        assert calls == expected

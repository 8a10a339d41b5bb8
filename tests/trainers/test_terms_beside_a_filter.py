"""Loss terms in runs that train on some rows only: neither the policy's step nor the term depends on the other.

An optimizer step takes four rollouts of two groups. In two of them all trajectories earn the same; in one nobody calls
the tool, so that there is no observation for the term.
"""

import pytest
import torch

from agent_r1_trl import RolloutCallback
from agent_r1_trl.features.distillation import SelfDistillation
from agent_r1_trl.testing import AddEnv, call, say
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from tests.effort import nightly
from tests.trainers.helpers import make_trainer, same, state_of
from tests.trainers.test_hooks import WorldModel

FLAT, SILENT = (0, 3), 2
BEST = {"sampling.filter_groups": "top_fraction", "sampling.filter_value": 0.5}
"""The better one of two groups is kept; none if both are flat."""
STEP = {
    "gradient_accumulation_steps": 4, "steps_per_generation": 1, "learning_rate": 1e-3, "weight_decay": 0.1,
    "max_grad_norm": 0.0,
}  # fmt: skip


class Gradients(RolloutCallback):
    """Remembers the gradients of each optimizer step, its rollouts, and what they kept."""

    def __init__(self):
        self.gradients, self.rollouts = [], []

    def rollout_end(self, batch, output):
        self.rollouts.append((batch.trajectories, batch.is_kept))

    def before_step(self, step):
        named = self.trainer.model.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})


class ZeroWorld(WorldModel):
    """The same tokens, of weight 0."""

    def extra_loss(self, inputs, log_probs, mask):
        return 0.0 * super().extra_loss(inputs, log_probs, mask)


def run(tmp_path, *terms, flat=FLAT, **options):
    """A training with these terms; what `Gradients` remembers, and the trainer."""
    box, seen = [], Gradients()

    class Env(AddEnv):
        def outcome_reward(self, trajectory):
            return 0.0 if box[0]._step % 4 in flat else float(len(trajectory.final_text) % 3)

        def process_reward(self, call, result):
            return 0.0

    def script(rng, turn):
        is_silent = box[0]._step % 4 == SILENT
        if turn == 0 and not is_silent:
            return call(a=rng.randrange(9), b=10 ** rng.randrange(9))
        return say("x" * rng.randrange(1, 9))

    trainer = make_trainer(tmp_path, script=script, env=Env, callbacks=[*terms, seen], **BEST, **STEP | options)
    box.append(trainer)
    trainer.train()
    return seen, trainer


def log_probs_of(model, item):
    """(T,) of a trajectory alone, with gradient."""
    ids = torch.tensor([[*item.prompt_ids, *item.completion_ids]])
    logits = model(input_ids=ids).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[len(item.prompt_ids) - 1 :, 0]


def by_hand(model, rollouts, *, size=4):
    """The policy's loss and the term's, each a mean over the rollouts that have any of it, a row at a time."""
    policy, term = [], []
    for trajectories, kept in rollouts:
        rewards = torch.tensor([item.total_reward for item in trajectories]).view(-1, size)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        losses, terms, num_actions, num_observed = 0.0, 0.0, 0, 0
        for item, advantage, is_kept in zip(trajectories, advantages, kept, strict=True):
            log_probs, is_action = log_probs_of(model, item), torch.tensor(item.action_mask).bool()
            terms, num_observed = terms - 0.5 * log_probs[~is_action].sum(), num_observed + int((~is_action).sum())
            if is_kept:
                losses, num_actions = losses - advantage * log_probs[is_action].sum(), num_actions + sum(is_action)
        policy += [losses / num_actions] if num_actions else []
        term += [terms / num_observed] if num_observed else []
    return sum(policy) / len(policy), sum(term) / len(term), (len(policy), len(term))


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_near(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-6, rtol=1e-4, msg=name)
    assert max(value.abs().max() for value in expected.values()) > 1e-3


BY_TOKENS = {"update_layout": "shared", "max_tokens_per_micro_batch": 400}


@pytest.mark.parametrize("options", [{}, BY_TOKENS, *nightly({"update_layout": "grouped"})], ids=str)
def test_policy_and_term_are_means_over_the_rollouts_that_have_any_of_them(tmp_path, options):
    seen, trainer = run(tmp_path, WorldModel(), learning_rate=0.0, **options)
    policy, term, counts = by_hand(trainer.model, seen.rollouts)
    assert counts == (2, 3)
    assert_near(seen.gradients[0], gradients_of(trainer.model, policy + term))


@pytest.mark.parametrize("trainer", [MultiTurnGRPOTrainer, MultiTurnPPOTrainer])
def test_a_term_is_added_to_what_the_step_is_without_it(tmp_path, trainer):
    options = {"trainer": trainer, "num_generations": 4, "learning_rate": 0.0}
    options |= {"critic": "head"} if trainer is MultiTurnPPOTrainer else {}
    plain, _ = run(tmp_path / "plain", **options)
    seen, made = run(tmp_path / "term", WorldModel(), **options)
    _, term, _ = by_hand(made.model, seen.rollouts)
    expected = gradients_of(made.model, term)
    found = {name: seen.gradients[0][name] - plain.gradients[0][name] for name in plain.gradients[0]}
    assert_near(found, expected)
    critics = found.keys() - expected.keys()
    assert bool(critics) is (trainer is MultiTurnPPOTrainer)
    assert all(found[name].abs().max() < 1e-6 for name in critics)


def test_the_share_that_a_filter_keeps_scales_the_policy_alone(tmp_path):
    scaling = {"sampling.filter_loss_scaling": True, "learning_rate": 0.0}
    seen, trainer = run(tmp_path, WorldModel(), **scaling)
    policy, term, _ = by_hand(trainer.model, seen.rollouts)
    assert_near(seen.gradients[0], gradients_of(trainer.model, 0.5 * policy + term))
    one, trainer = run(tmp_path / "one", WorldModel(), gradient_accumulation_steps=1, max_steps=2, **scaling)
    policy, term, _ = by_hand(trainer.model, one.rollouts[1:])
    assert_near(one.gradients[1], gradients_of(trainer.model, 0.5 * policy + term))


# -------------------------------------------------------------------- which steps are made


FIRST_FLAT = {"max_steps": 3, "gradient_accumulation_steps": 1, "optim": "adamw_torch"}
"""Each rollout is an optimizer step; the first is flat."""


def test_distillation_of_weight_0_changes_no_bit_of_a_filtered_run(tmp_path):
    hint = SelfDistillation(lambda item, row: "say it", weight=0.0)
    for options in (FIRST_FLAT, {"max_steps": 2}):
        _, plain = run(tmp_path / f"a{len(options)}", **options)
        _, other = run(tmp_path / f"b{len(options)}", hint, **options)
        assert same(state_of(plain), state_of(other))
        assert plain.kept_rows.num_skipped == other.kept_rows.num_skipped == (1 if options is FIRST_FLAT else 0)
    assert any(entry.get("distillation/gap") for entry in other.state.log_history), "it is watched all the same"


@pytest.mark.parametrize("options", [FIRST_FLAT, {"max_steps": 2}], ids=str)
def test_a_term_of_weight_0_moves_nothing_although_its_rows_come_back(tmp_path, options):
    _, plain = run(tmp_path / "plain", **options)
    _, other = run(tmp_path / "zero", ZeroWorld(), **options)
    assert plain.kept_rows.num_skipped == other.kept_rows.num_skipped
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(other.model.state_dict()[name], value, atol=1e-5, rtol=1e-4, msg=name)
    steps = [next(iter(item.optimizer.state.values()))["step"] for item in (plain, other)]
    assert steps[0] == steps[1]


def test_a_term_moves_the_policy_in_a_step_of_which_no_row_is_kept(tmp_path):
    seen, trainer = run(tmp_path, WorldModel(), max_steps=1, gradient_accumulation_steps=1, learning_rate=0.0)
    assert trainer.kept_rows.num_skipped == 0 and not any(seen.rollouts[0][1])
    num = sum(item.action_mask.count(0) for item in seen.rollouts[0][0])
    term = sum(
        -0.5 * log_probs_of(trainer.model, item)[~torch.tensor(item.action_mask).bool()].sum() / num
        for item in seen.rollouts[0][0]
    )
    assert_near(seen.gradients[0], gradients_of(trainer.model, term))


def test_a_term_over_the_tokens_of_the_policy_goes_with_the_policy(tmp_path):
    """Without `extra_tokens` it is filtered, skipped and scaled as the policy's loss is."""

    class Likelihood(RolloutCallback):
        name = "likelihood"

        def extra_loss(self, inputs, log_probs, mask):
            return -0.5 * log_probs.sum()

    _, trainer = run(tmp_path / "a", Likelihood(), **FIRST_FLAT)
    assert trainer.kept_rows.num_skipped == 1
    plain, _ = run(tmp_path / "b", learning_rate=0.0)
    seen, trainer = run(tmp_path / "c", Likelihood(), learning_rate=0.0)
    expected = 0.0
    for trajectories, kept in [seen.rollouts[1], seen.rollouts[2]]:
        rows = [item for item, is_kept in zip(trajectories, kept, strict=True) if is_kept]
        num = sum(item.num_action_tokens for item in rows)
        for item in rows:
            expected -= 0.25 * log_probs_of(trainer.model, item)[torch.tensor(item.action_mask).bool()].sum() / num
    found = {name: seen.gradients[0][name] - plain.gradients[0][name] for name in plain.gradients[0]}
    assert_near(found, gradients_of(trainer.model, expected))

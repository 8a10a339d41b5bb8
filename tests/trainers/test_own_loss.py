"""A `_compute_loss` that was written for TRL's trainer computes in ours what it computes there, or is refused."""

import pytest
import torch
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from tests.effort import nightly
from tests.trainers.helpers import (
    add,
    loss_and_gradients,
    make_trainer,
    move_weights,
    questions,
    scored_batch,
)
from tests.trainers.trl_twin import plain_config


def ids_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 5) for ids in completion_ids]


def by_turn(trajectory, **kwargs):
    return [[float(sum(item.completion_ids) % (2 + k)) for k, _ in enumerate(item.turns)] for item in trajectory]


class TokenLoss:
    """What a user may have written for TRL: one advantage for each row, spread over the tokens."""

    def _compute_loss(self, model, inputs):
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        whole = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        log_probs, *_ = self._get_per_token_logps_and_entropies(model, ids, whole, mask.shape[1])
        return self.weigh(log_probs, inputs["advantages"], mask)

    def weigh(self, log_probs, advantages, mask):
        ratio = (log_probs - log_probs.detach()).exp()
        return -(ratio * advantages.unsqueeze(1) * mask).sum() / mask.sum()


class RowLoss(TokenLoss):
    """The same over whole sequences."""

    def weigh(self, log_probs, advantages, mask):
        return -(((log_probs * mask).sum(dim=1) / mask.sum(dim=1)).exp() * advantages).mean()


def plain_trainer(kind, **options):
    """TRL's trainer, of which only the loss is asked for."""
    tokenizer = make_tokenizer("qwen3")
    config = plain_config(options.pop("tmp_path"), per_device_train_batch_size=8, beta=0.0, **options)
    trainer = kind(
        model=make_policy(tokenizer), reward_funcs=ids_reward, args=config, train_dataset=questions(),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def as_trls(batch):
    """Our batch as TRL's trainer makes it: one advantage for each row, read off any token of the loss."""
    mask = batch["completion_mask"] * batch["tool_mask"]
    rows = [row[kept.bool()].tolist() for row, kept in zip(batch["advantages"], mask, strict=True)]
    assert all(len(set(row)) == 1 for row in rows)
    return {**batch, "advantages": torch.tensor([row[0] for row in rows])}


def same(ours, theirs):
    (loss, gradients), (expected, wanted) = ours, theirs
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-8)
    assert any(gradient.abs().max() > 1e-5 for gradient in wanted.values())
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("loss", [TokenLoss, RowLoss])
@pytest.mark.parametrize(
    ("is_in_front", "layout"), [(True, "padded"), (False, "shared"), *nightly((True, "grouped"), (False, "packed"))]
)
def test_a_loss_written_for_trl_computes_what_it_computes_in_trls_trainer(tmp_path, loss, is_in_front, layout):
    mix_in = type("Mine", (loss, GRPOTrainer), {})
    bases = (mix_in, MultiTurnGRPOTrainer) if is_in_front else (MultiTurnGRPOTrainer, mix_in)
    ours = make_trainer(tmp_path, trainer=type("Ours", bases, {}), reward_funcs=[ids_reward], update_layout=layout)
    batch = scored_batch(ours)
    theirs = plain_trainer(mix_in, tmp_path=tmp_path)
    same(loss_and_gradients(ours, batch), loss_and_gradients(theirs, as_trls(batch)))


@pytest.mark.parametrize(
    ("is_in_front", "layout"), [(True, "shared"), (False, "padded"), *nightly((True, "padded"), (False, "shared"))]
)
def test_gmpo_mixed_in_is_trls_gmpo_and_trains(tmp_path, is_in_front, layout):
    bases = (GMPOTrainer, MultiTurnGRPOTrainer) if is_in_front else (MultiTurnGRPOTrainer, GMPOTrainer)
    given = {"reward_funcs": [ids_reward], "num_iterations": 2, "epsilon": 0.4, "update_layout": layout}
    ours = make_trainer(tmp_path, trainer=type("GMPO", bases, {}), **given)
    batch = scored_batch(ours)
    theirs = plain_trainer(GMPOTrainer, tmp_path=tmp_path, num_iterations=2, epsilon=0.4)
    for trainer in (ours, theirs):
        move_weights(trainer.model)
    same(loss_and_gradients(ours, batch), loss_and_gradients(theirs, as_trls(batch)))
    name = "clip_ratio/region_mean"
    assert ours._metrics["train"][name][-1] == pytest.approx(theirs._metrics["train"][name][-1])
    trained = make_trainer(tmp_path, trainer=type("GMPO", bases, {}), **given)
    before = {name: weight.clone() for name, weight in trained.model.named_parameters()}
    trained.train()
    assert any(not torch.equal(weight, before[name]) for name, weight in trained.model.named_parameters())


def plus_term(base):
    class Plus(base):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) + 0.25

    return Plus


REFUSED = {
    "advantage_estimator='turn_grpo' gives": {"advantage_estimator": "turn_grpo", "turn_reward_funcs": [by_turn]},
    "max_tokens_per_micro_batch=300": {"update_layout": "shared", "max_tokens_per_micro_batch": 300},
    "loss_unit='turn'": {"loss_unit": "turn"},
    "with a critic": {"trainer": MultiTurnPPOTrainer, "critic": "head"},
    "sampling.filter_groups": {"sampling.filter_groups": "top_fraction", "sampling.filter_value": 0.5},
    "kl_placement='reward'": {"advantage_estimator": "reinforce_pp", "beta": 0.1, "kl_placement": "reward"},
}
"""Where rows have no advantages of their own, by the reason."""
ANY = [{}, {"update_layout": "packed"}, *REFUSED.values()]


@pytest.mark.parametrize("options", ANY, ids=lambda options: "-".join(options))
def test_a_term_beside_ours_leaves_ours_as_it_is(tmp_path, options, policy_path):
    """Whatever the advantages are: only our own loss reads them."""
    options = {
        "model": policy_path,
        "reward_funcs": [ids_reward],
        "trainer": MultiTurnGRPOTrainer,
        **options,
    }
    losses = []
    for kind in (options["trainer"], plus_term(options["trainer"])):
        trainer = make_trainer(tmp_path, **options | {"trainer": kind})
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        torch.manual_seed(2)
        inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        losses.append(trainer.compute_loss(trainer.model, inputs).item())
    assert losses[1] == pytest.approx(losses[0] + 0.25 * len(inputs.get("micro_batches", [inputs])), abs=1e-6)


@pytest.mark.parametrize(("reason", "reads"), [*((reason, "[]") for reason in REFUSED), ("with a critic", "get")])
def test_advantages_that_rows_do_not_have_are_refused_where_they_are_read(tmp_path, reason, reads, policy_path):
    options = {"model": policy_path, "reward_funcs": [ids_reward], "trainer": MultiTurnGRPOTrainer}
    options |= REFUSED[reason]

    class Reads(options.pop("trainer")):
        def _compute_loss(self, model, inputs):
            inputs["advantages"] if reads == "[]" else inputs.get("advantages")

    with pytest.raises(ValueError, match=rf"{reason}.*inputs\['token_advantages'\]"):
        make_trainer(tmp_path, trainer=Reads, **options).train()


def test_token_advantages_are_those_that_ours_would_be_given(tmp_path):
    seen = []

    class Reads(MultiTurnGRPOTrainer):
        def _compute_loss(self, model, inputs):
            seen.append(inputs["token_advantages"])
            self.current_gradient_accumulation_steps = 1
            doubled = {**inputs, "advantages": 2 * inputs["token_advantages"]}
            return super()._compute_loss(model, doubled)

    options = {"advantage_estimator": "turn_grpo", "turn_reward_funcs": [by_turn]}
    plain, own = (make_trainer(tmp_path, trainer=kind, **options) for kind in (MultiTurnGRPOTrainer, Reads))
    batch = scored_batch(plain)
    expected = plain.compute_loss(plain.model, {**batch, "advantages": 2 * batch["advantages"]})
    torch.testing.assert_close(own.compute_loss(own.model, batch), expected)
    torch.testing.assert_close(seen[0], batch["advantages"])


def test_advantages_of_rows_that_a_loss_changes_are_those_that_ours_trains_on(tmp_path):
    class Doubles(MultiTurnGRPOTrainer):
        def _compute_loss(self, model, inputs):
            self.current_gradient_accumulation_steps = 1
            return super()._compute_loss(model, {**inputs, "advantages": 2 * inputs["advantages"]})

    plain, own = (
        make_trainer(tmp_path, trainer=kind, reward_funcs=[ids_reward]) for kind in (MultiTurnGRPOTrainer, Doubles)
    )
    batch = scored_batch(plain)
    expected = plain.compute_loss(plain.model, {**batch, "advantages": 2 * batch["advantages"]})
    torch.testing.assert_close(own.compute_loss(own.model, batch), expected)


def test_a_loss_that_is_set_on_a_trainer_is_called_as_trl_calls_it(tmp_path):
    shapes, trainer = [], make_trainer(tmp_path, reward_funcs=[ids_reward])
    trainer._compute_loss = lambda model, inputs: shapes.append(inputs["advantages"].shape) or torch.zeros(())
    trainer.compute_loss(trainer.model, scored_batch(trainer))
    assert shapes == [(8,)]


def test_rows_without_a_token_in_the_loss_have_advantage_0(tmp_path):
    seen = []

    class Reads(MultiTurnGRPOTrainer):
        def _compute_loss(self, model, inputs):
            seen.append(inputs["advantages"])
            return torch.zeros(())

    trainer = make_trainer(tmp_path, trainer=Reads, reward_funcs=[ids_reward])
    batch = scored_batch(trainer)
    batch["tool_mask"][3] = 0
    trainer.compute_loss(trainer.model, batch)
    expected = as_trls({name: x[[0, 1, 2, 4, 5, 6, 7]] for name, x in batch.items() if x.dim() > 1})["advantages"]
    torch.testing.assert_close(seen[0], torch.cat([expected[:3], torch.zeros(1), expected[3:]]))


def test_gmpos_own_configuration_is_taken(tmp_path):
    kind = type("GMPO", (GMPOTrainer, MultiTurnGRPOTrainer), {})
    config = GMPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to=[], num_generations=4)
    tokenizer = make_tokenizer("qwen3")
    trainer = kind(
        make_policy(tokenizer),
        [ids_reward],
        config,
        train_dataset=questions(),
        processing_class=tokenizer,
        tools=[add],
    )
    assert (trainer.epsilon_low, trainer.epsilon_high) == (0.4, 0.4)

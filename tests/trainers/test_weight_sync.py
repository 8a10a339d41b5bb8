"""A sampler with weights of its own has those of the policy whenever the policy's change."""

import pytest
import torch

from agent_r1_trl.generation import ScriptedGenerator
from agent_r1_trl.testing import AddEnv, make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnGRPOTrainer
from agent_r1_trl.trainers.callbacks import RolloutCallback
from tests.trainers.helpers import Remember, make_args, questions, scripted, two_turns


class Copying(ScriptedGenerator):
    """Says what a script says, and keeps the weights that it was last brought."""

    weights = None

    def sync(self, model):
        self.weights = [parameter.detach().clone() for parameter in model.parameters()]
        return True

    def has_those_of(self, model):
        return all(map(torch.equal, self.weights, model.parameters()))


class Worse(MultiTurnGRPOTrainer):
    """Its first checkpoint is its best, and the last evaluation has synced the last weights."""

    def evaluate(self, *args, **kwargs):
        return super().evaluate(*args, **kwargs) | {"eval_loss": float(self.state.global_step)}


@pytest.fixture
def make(tmp_path):
    def make(trainer=MultiTurnGRPOTrainer, callbacks=None, **options):
        tokenizer = make_tokenizer("qwen3")
        generator = scripted(tokenizer, two_turns)
        generator.__class__ = Copying
        return generator, trainer(
            model=make_policy(tokenizer), args=make_args(tmp_path, **options), env=AddEnv, generator=generator,
            train_dataset=questions(), eval_dataset=questions(), processing_class=tokenizer,
            callbacks=callbacks,
        )  # fmt: skip

    return make


def test_every_turn_of_a_run_is_sampled_from_the_weights_after_the_last_step(make):
    generator, trainer = make(max_steps=3, learning_rate=0.1)
    seen = []

    class Noting(Copying):
        async def generate(self, request):
            seen.append((trainer.state.global_step, self.has_those_of(trainer.model)))
            return await super().generate(request)

    generator.__class__ = Noting
    trainer.train()
    assert {step for step, _ in seen} == {0, 1, 2} and all(has_them for _, has_them in seen)


def test_the_best_model_is_brought_to_the_sampler(make):
    generator, trainer = make(
        Worse, max_steps=2, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss",
    )  # fmt: skip
    trainer.add_callback(memory := Remember())
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert not all(map(torch.equal, memory.seen[2].values(), trainer.model.parameters()))
    MultiTurnGRPOTrainer.evaluate(trainer)
    assert generator.has_those_of(trainer.model)


def test_a_second_run_begins_with_the_weights_that_the_first_one_left(make):
    """Both count their steps from 0, and the first run synced at its step 0."""
    generator, trainer = make(max_steps=1)
    trainer.train()
    left = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert all(map(torch.equal, generator.weights, left))


class VoidsOne(RolloutCallback):
    """Throws the first rollout away."""

    num = 0

    def after_rollout(self, batch):
        self.num += 1
        return self.num == 1


def test_what_the_sync_took_is_logged_though_the_rollout_behind_it_was_thrown_away(make):
    _, trainer = make(callbacks=[VoidsOne()])
    trainer.train()
    assert trainer.state.log_history[0]["time/sync_s"] > 0


HALVES = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}


@pytest.mark.parametrize("options", [{}, HALVES], ids=str)
def test_a_second_run_begins_with_a_rollout_of_its_own(make, options):
    """The first one ends with a pass over its rollout that is still to come, or in the middle of an optimizer step."""
    generator, trainer = make(max_steps=1, num_iterations=2, **options)
    trainer.train()
    trainer._step += len(options) > 0
    num_requests = len(generator.requests)
    trainer.train()
    assert len(generator.requests) == 2 * num_requests
    assert trainer._step == trainer.args.gradient_accumulation_steps

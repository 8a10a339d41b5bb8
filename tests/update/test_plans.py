"""What is read of a micro-batch when its rollout is laid out is used for these rows and masks, and for no others."""

import pytest
import torch

from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.update.batches import take_rows
from tests.effort import short
from tests.trainers.helpers import loss_and_gradients, make_trainer, move_weights

SMALL = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 2}


def laid_out(trainer):
    """The first micro-batch of a rollout, scored with other weights than the loss is computed with."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer._step = 0
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    move_weights(trainer.model)
    return inputs


def other_mask(inputs):
    return {**inputs, "tool_mask": inputs["tool_mask"] * (inputs["tool_mask"].cumsum(dim=1) % 3 > 0)}


def written_to(name):
    def change(inputs):
        inputs[name][-1, :4] = 0 if name.endswith("mask") else 7
        return inputs

    return change


CHANGES = {
    "reordered": lambda inputs: take_rows(inputs, torch.tensor([2, 0, 3, 1])),
    "filtered": lambda inputs: take_rows(inputs, torch.tensor([1, 2])),
    "masked": other_mask,
    "masked in place": written_to("tool_mask"),
    "shorter in place": written_to("completion_mask"),
    "other tokens in place": written_to("completion_ids"),
    "other prompts in place": written_to("prompt_ids"),
    "without a mask": lambda inputs: {name: value for name, value in inputs.items() if name != "tool_mask"},
}


@pytest.mark.parametrize("layout", short(["packed", "shared"], "shared"))
def test_rows_that_changed_since_they_were_laid_out_are_read_anew(tmp_path, layout):
    for name, change in CHANGES.items():
        trainer = make_trainer(tmp_path, update_layout=layout, **SMALL)
        inputs = laid_out(trainer)
        before = loss_and_gradients(trainer, inputs)
        assert trainer.layout.plan_of(inputs) is not None
        inputs = change(inputs)
        found = loss_and_gradients(trainer, inputs)
        assert trainer.layout.plan_of(inputs) is None, name
        trainer.layout._plans = {}
        torch.testing.assert_close(found, loss_and_gradients(trainer, inputs), atol=0, rtol=0, msg=name)
        if name not in ("reordered", "without a mask"):  # the advantages of masked tokens are 0
            assert not torch.equal(found[0], before[0]), name


@pytest.mark.parametrize("trainer", [MultiTurnGRPOTrainer, MultiTurnPPOTrainer])
@pytest.mark.parametrize("options", [{}, {"max_tokens_per_micro_batch": 300}], ids=str)
def test_a_rollout_is_packed_once_and_every_pass_over_it_is_that_of_fresh_rows(tmp_path, trainer, options):
    trainer = make_trainer(tmp_path, trainer=trainer, update_layout="shared", **SMALL, **options)
    inputs, packed, pack = laid_out(trainer), [], trainer.layout.pack
    trainer.layout.pack = lambda *args: packed.append(1) or pack(*args)
    micro_batches = inputs.get("micro_batches", [inputs])
    for one in micro_batches * 2:
        planned = loss_and_gradients(trainer, one)
        assert not packed
        assert not trainer.layout.plan_of(one).batch.layout._masks, "they are as large as the attention"
        plans, trainer.layout._plans = trainer.layout._plans, {}
        torch.testing.assert_close(planned, loss_and_gradients(trainer, one), atol=0, rtol=0)
        trainer.layout._plans = plans
        assert packed
        packed.clear()


class ScoresTwice(MultiTurnGRPOTrainer):
    """A loss term that scores other rows inside the loss: those of the micro-batch from the last to the first."""

    def extra_loss(self, inputs, log_probs, mask):
        parts = ("prompt", "completion")
        ids, attention = (torch.cat([inputs[f"{part}_{name}"] for part in parts], 1) for name in ("ids", "mask"))
        self._loss_pass.scored = self._loss_pass.scored.flip(0)
        self._loss_pass.mask = self._loss_pass.mask.flip(0)
        others, *_ = self._get_per_token_logps_and_entropies(self.model, ids.flip(0), attention.flip(0), mask.shape[1])
        torch.testing.assert_close(others.flip(0), log_probs, atol=1e-5, rtol=0)
        self.num_checked = len(others)
        return None


def test_a_second_forward_pass_inside_the_loss_computes_its_own_rows(tmp_path):
    trainer = make_trainer(tmp_path, trainer=ScoresTwice, update_layout="packed", **SMALL)
    loss_and_gradients(trainer, laid_out(trainer))
    assert trainer.num_checked == 4


@pytest.mark.parametrize("layout", ["padded", "grouped"])
def test_a_layout_without_packing_knows_which_micro_batches_have_loss(tmp_path, layout):
    trainer = make_trainer(tmp_path, model=make_policy(make_tokenizer("qwen3")), update_layout=layout, **SMALL)
    inputs = laid_out(trainer)
    plan = trainer.layout.plan_of(inputs)
    assert plan.has_loss and plan.batch is None
    assert trainer.layout.plan_of(other_mask(inputs)) is None

"""Numbers that are not finite reach neither weights nor optimizer, are counted and named, and at last end the run."""

import copy
import itertools
import json
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from agent_r1_trl.features.reliability.nonfinite import BATCH, NonFiniteError, NumberWatch, nonfinite_weights
from agent_r1_trl.generation import ScriptedGenerator
from agent_r1_trl.generation.scripted import ScriptedTurn
from agent_r1_trl.rollout import NothingRolledOutError
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.trainers import ppo as ppo_module
from agent_r1_trl.trainers.callbacks import OptimizerStep, RolloutCallback
from agent_r1_trl.trainers.checkpoints import last_checkpoint
from agent_r1_trl.update.entries import TRAJECTORY_ROW
from tests.trainers.helpers import make_trainer, same, two_turns, watched

NAN, INF = float("nan"), float("inf")


def broken_at(steps, name, value=NAN, base=MultiTurnGRPOTrainer):
    """A trainer whose batches hold `value` under `name` in one token of the second row, in some optimizer steps."""

    class Broken(base):
        def _prepare_inputs(self, generation_batch):
            inputs = super()._prepare_inputs(generation_batch)
            if self.state.global_step not in steps or self._step % self.args.gradient_accumulation_steps:
                return inputs
            where = (inputs["completion_mask"] * inputs["tool_mask"])[1].argmax()
            broken = inputs[name].clone()
            broken[1, where] = value
            return {**inputs, name: broken}

    return Broken


LORA = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
ADAM = {"weight_decay": 0.1, "adam_beta1": 0.9, "warmup_steps": 2, "max_steps": 4, "optim": "adamw_torch"}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("advantages", NAN, "the advantages of example 'q"),
        ("ref_per_token_logps", -INF, "the reference's log-probs of example 'q"),
    ],
)
def test_a_step_on_what_is_not_finite_changes_no_bit_of_weights_optimizer_and_schedule(
    tmp_path, caplog, name, value, said
):
    trainer = make_trainer(
        tmp_path, trainer=broken_at([1], name, value), beta=0.1, num_iterations=2, gradient_accumulation_steps=2,
        per_device_train_batch_size=4, peft_config=LORA, **ADAM,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="agent_r1_trl"):
        states = watched(trainer)
    changed = [not same(*pair) for pair in itertools.pairwise(states)]
    assert changed == [True, False, True, True]
    assert f"Optimizer step 2 was skipped: its numbers are not finite. First: {said}" in caplog.text
    assert caplog.text.count("was skipped") == 1
    logged = [entry.get("nonfinite/skipped_steps") for entry in trainer.state.log_history if "grad_norm" in entry]
    assert logged[0] is None and 1.0 in logged
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)


def test_a_step_that_is_not_finite_leaves_the_adaptive_entropy_bonus_alone(tmp_path):
    class Broken(MultiTurnGRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return tuple(item * NAN if self.state.global_step == 1 and item is not None else item for item in found)

    bonus = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.01}
    trainer = make_trainer(tmp_path, trainer=Broken, max_steps=3, **bonus)
    trainer.train()
    logged = [entry["entropy_coef"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx([0.09, 0.09, 0.08]) and trainer._last_world_entropy > 0


@pytest.mark.parametrize("broken", (0, 1))
def test_of_two_rollouts_in_a_step_the_one_that_is_broken_is_named(tmp_path, caplog, broken):
    rolled_out = []

    class Broken(MultiTurnGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            rolled_out.append(self.last_trajectories)
            if len(rolled_out) == broken + 1:
                output["advantages"][5] = NAN
            return output

    make_trainer(tmp_path, trainer=Broken, gradient_accumulation_steps=2, steps_per_generation=1).train()
    found, other = rolled_out[broken][5], rolled_out[1 - broken][5]
    assert (found.example_id, found.generation) != (other.example_id, other.generation)
    assert f"of example {found.example_id!r}, generation {found.generation}. 1 in a row" in caplog.text


@pytest.mark.parametrize("layout", [{}, {"update_layout": "shared", "max_tokens_per_micro_batch": 400}], ids=str)
def test_of_a_trajectory_with_several_rows_the_trajectory_is_named(tmp_path, caplog, layout):
    class Broken(MultiTurnGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            last = len(self.last_trajectories) - 1
            row = max(row for row, index in enumerate(self.last_batch.training_rows.index) if index == last)
            assert row > last, "the number of a row is that of no trajectory"
            output["advantages"][row] = NAN
            return output

    trainer = make_trainer(
        tmp_path, trainer=Broken, context={"policy": "window", "turns": 1}, gradient_accumulation_steps=2,
        per_device_train_batch_size=4, script=lambda rng, turn: two_turns(rng, max(0, turn - 1)), **layout,
    )  # fmt: skip
    trainer.train()
    found = trainer.last_trajectories[-1]
    assert f"the advantages of example {found.example_id!r}, generation {found.generation}. 1" in caplog.text


@pytest.mark.parametrize("name", BATCH)
def test_every_entry_that_enters_the_loss_is_looked_at_where_its_mask_holds_and_nowhere_else(tmp_path, name):
    """Also after the run went back: a rollout of a checkpoint has not the names of the one before."""
    policy, critic = torch.tensor([[1, 0, 0]]), torch.tensor([[0, 1, 0]])
    first, second = (policy, critic) if name not in ("old_values", "returns") else (critic, policy)
    watch = NumberWatch(1, str(tmp_path))
    watch.attach(SimpleNamespace(run_id=""))
    watch.rollout_end(SimpleNamespace(trajectories=[SimpleNamespace(example_id="q0", generation=0)]), {})
    watch.go_back(0, 0)
    inputs = {"completion_mask": policy, "value_mask": critic, TRAJECTORY_ROW: torch.tensor([0])}
    harmless = watch.check_loss(torch.tensor(0.0), inputs | {name: torch.zeros(1, 3).masked_fill(second.bool(), NAN)})
    broken = watch.check_loss(torch.tensor(0.0), inputs | {name: torch.zeros(1, 3).masked_fill(first.bool(), NAN)})
    assert harmless == 0.0 and broken.isnan()
    with pytest.raises(NonFiniteError, match=f"{BATCH[name]} of row 0 of a rollout that was resumed"):
        watch.before_step(OptimizerStep(number=0, norms=(), is_finite=False, is_scaled=False))


class InfiniteTerm(MultiTurnGRPOTrainer):
    """A term of a user's own that is infinite from the third step on."""

    def extra_loss(self, inputs, log_probs, mask):
        return log_probs.sum() * (INF if self.state.global_step >= 2 else 1.0)


def test_steps_in_a_row_end_the_run_and_the_last_healthy_checkpoint_is_named(tmp_path, caplog):
    trainer = make_trainer(tmp_path, trainer=InfiniteTerm, max_steps=9, save_strategy="steps", save_steps=1)
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    assert str(caught.value).startswith(
        "3 optimizer steps in a row had numbers that are not finite, as many as failures.max_"
    )
    assert (
        "First in the last one: the loss term InfiniteTerm.extra_loss. The last healthy checkpoint is "
        f"{tmp_path / 'checkpoint-2'}. Correct the function: its sum must be finite."
    ) in str(caught.value)
    assert trainer.state.global_step == 4 and not nonfinite_weights(trainer.model)
    assert caplog.text.count("was skipped") == 3


def broken_term(inputs, log_probs, mask):
    return log_probs.sum() * NAN


class TermOfACallback(RolloutCallback):
    name = "mine"

    def extra_tokens(self, inputs):
        return inputs["completion_mask"].bool()

    def extra_loss(self, inputs, log_probs, mask):
        return log_probs.sum() / 0.0


class FiniteTerm(RolloutCallback):
    def extra_loss(self, inputs, log_probs, mask):
        return log_probs.sum()


@pytest.mark.parametrize("layout", ["padded", "shared"])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss_term": broken_term}, f"loss_term='{__name__}:broken_term'"),
        ({"callbacks": [FiniteTerm(), TermOfACallback()]}, "TermOfACallback.extra_loss"),
    ],
    ids=["function", "callback"],
)
def test_a_loss_term_that_is_not_finite_is_named(tmp_path, caplog, options, named, layout):
    make_trainer(tmp_path, update_layout=layout, **options).train()
    assert f"Optimizer step 1 was skipped: its numbers are not finite. First: the loss term {named}. 1" in caplog.text


def test_the_number_of_steps_is_the_users_and_a_healthy_step_begins_anew(tmp_path):
    trainer = make_trainer(tmp_path / "two", trainer=InfiniteTerm, max_steps=9, failures={"max_nonfinite_steps": 2})
    with pytest.raises(NonFiniteError, match=r"failures.max_nonfinite_steps=2 allows.*There is no healthy checkpoint"):
        trainer.train()
    assert trainer.state.global_step == 3
    trainer = make_trainer(
        tmp_path / "apart",
        trainer=broken_at([0, 1, 3, 4], "advantages"),
        max_steps=6,
        failures={"max_nonfinite_steps": 3},
    )
    trainer.train()
    assert trainer.features["numbers"].num_skipped == 4


@pytest.mark.parametrize(("critic", "what"), [("adapter", "loss"), ("model", "values")])
def test_a_critic_that_is_not_finite_skips_the_step_of_both_and_is_named(tmp_path, caplog, monkeypatch, critic, what):
    good, trainer = ppo_module.value_loss, None

    def bad_loss(values, *args, **kwargs):
        total, clipped = good(values, *args, **kwargs)
        return (total * NAN if what == "loss" and trainer.state.global_step == 1 else total), clipped

    class Broken(MultiTurnPPOTrainer):
        def _watch_values(self, name, values, mask):
            if what == "values" and self.state.global_step == 1 and name == "values":
                values = values * NAN
            super()._watch_values(name, values, mask)

    monkeypatch.setattr(ppo_module, "value_loss", bad_loss)
    peft = {"peft_config": LORA}
    trainer = make_trainer(
        tmp_path, trainer=Broken, critic=critic, num_generations=1, **(ADAM | {"max_steps": 3}),
        **({} if critic == "model" else peft),
    )  # fmt: skip
    states = watched(trainer)
    assert [not same(*pair) for pair in itertools.pairwise(states)] == [True, False, True]
    said = "the loss" if what == "loss" else "the critic's values of example"
    assert f"Optimizer step 2 was skipped: its numbers are not finite. First: {said}" in caplog.text


def test_gradients_that_are_not_finite_under_a_finite_loss_are_skipped(tmp_path, caplog):
    trainer = make_trainer(tmp_path, max_steps=2, max_grad_norm=0.0)
    trainer.model.lm_head.weight.register_hook(lambda gradient: gradient * INF)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    assert same(before, trainer.model.state_dict())
    assert "First: the gradients alone (the loss was finite)" in caplog.text


# -------------------------------------------------------------------- weights


def test_weights_that_are_not_finite_are_not_written_and_the_last_checkpoint_stays(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    kept = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text(encoding="utf-8"))
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = INF
    with pytest.raises(
        NonFiniteError, match=r"1 tensors of the model .*first lm_head\.weight.*checkpoint-1\. Lower learning_rate"
    ):
        trainer.save_model(str(tmp_path / "final"))
    assert not (tmp_path / "final").exists() and kept["global_step"] == 1


def test_the_last_checkpoint_is_found_by_number_and_not_by_name(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-30", "checkpoint-x", "checkpoint-20.tmp"):
        (tmp_path / name).mkdir()
    assert last_checkpoint(tmp_path, 20) == tmp_path / "checkpoint-10"
    assert last_checkpoint(tmp_path, 8) is None
    manifest = {"version": 1, "run": {"run_id": "earlier"}, "files": {}}
    (tmp_path / "checkpoint-10" / "checkpoint_manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert last_checkpoint(tmp_path, 20, "earlier") == tmp_path / "checkpoint-10"
    assert last_checkpoint(tmp_path, 20, "this one") == tmp_path / "checkpoint-9"  # it says nothing of a run


# -------------------------------------------------------------------- samplers


@pytest.mark.parametrize("value", [NAN, -INF, None])
def test_a_sampler_without_a_log_prob_fails_that_trajectory_alone(tmp_path, value):
    trainer = make_trainer(tmp_path, script=two_turns, max_steps=1)
    generator = trainer.rollouts._generator
    script = generator._script

    def answer(request):
        turn = script(request)
        if request.index != 3:
            return turn
        return ScriptedTurn(token_ids=turn.token_ids, logprobs=[-1.0, value, *turn.logprobs[2:]])

    generator._script = answer
    trainer.train()
    failed = [item for item in trainer.last_trajectories if item.stop_reason == "generation_error"]
    assert len(failed) == 1 and failed[0].error.endswith(f"is {value!r}")
    assert isinstance(generator, ScriptedGenerator) and not nonfinite_weights(trainer.model)


def test_a_policy_of_nan_ends_the_run_with_that_cause(tmp_path):
    trainer = make_trainer(tmp_path, script=None, max_steps=3)
    with torch.no_grad():
        trainer.model.lm_head.weight.fill_(NAN)
    with pytest.raises(
        NothingRolledOutError, match="logits contain NaN or infinity: in training, lower learning_rate"
    ):
        trainer.train()


def test_a_model_without_trained_weights_is_saved(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.model.requires_grad_(False)
    trainer.save_model(str(tmp_path / "frozen"))
    assert (tmp_path / "frozen" / "config.json").is_file()

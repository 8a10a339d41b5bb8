"""What the trainers lean on in TRL's methods, beside names and arguments (`test_trl_release.py`).

A failure here says which change of TRL broke what.
"""

import inspect

import pytest
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.callbacks import SyncRefModelCallback

from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.trainers.construction import as_trl_sees
from agent_r1_trl.trainers.trl_release import BODIES, hash_of_code
from tests.trainers.helpers import make_args, make_trainer, questions, scored_batch


def source(name):
    return inspect.getsource(getattr(GRPOTrainer, name))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("create_optimizer", ["self", "model"]),
        ("_clip_grad_norm", ["self", "model"]),
        ("_get_grad_norm", ["self", "model", "grad_norm"]),
        ("_get_learning_rate", ["self"]),
        ("_load_best_model", ["self"]),
        ("save_model", ["self", "output_dir", "_internal_call"]),
        ("_load_from_checkpoint", ["self", "resume_from_checkpoint", "model"]),
        ("_issue_warnings_after_load", ["self", "load_result"]),
        ("_push_from_checkpoint", ["self", "checkpoint_folder"]),
        ("_get_output_dir", ["self", "trial"]),
        (
            "_init_training_state",
            ["self", "max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint", "trial"],
        ),
    ],
)
def test_what_is_overridden_of_transformers_keeps_its_signature(name, parameters):
    assert list(inspect.signature(getattr(GRPOTrainer, name)).parameters) == parameters


def test_an_evaluation_is_a_loop_whose_metrics_are_logged_after_it():
    evaluation = source("evaluate")
    assert list(inspect.signature(GRPOTrainer.evaluation_loop).parameters)[:2] == ["self", "dataloader"]
    assert evaluation.index("self.evaluation_loop(") < evaluation.index("self.log(output.metrics)")


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_ours_builds_on_was_read(name):
    found = hash_of_code(getattr(GRPOTrainer, name))
    assert found == BODIES[name], f"GRPOTrainer.{name} has changed: read what is new, then change its hash"


def test_few_classes_stand_above_trls():
    """A step is read in one class, saving in another, evaluation in a third; a fourth has the hooks alone."""
    for kind in (MultiTurnGRPOTrainer, MultiTurnPPOTrainer):
        own = [item.__name__ for item in kind.__mro__ if item.__module__.startswith("agent_r1_trl.")]
        assert len(own) <= 5, own


def test_old_log_probs_are_the_first_of_three_results():
    parameters = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    assert parameters[:6] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"]


def test_the_loss_calls_the_model_once(tmp_path):
    calls = []
    trainer = make_trainer(tmp_path)
    batch = scored_batch(trainer)
    trainer._compute_loss(lambda **kwargs: calls.append(1) or trainer.model(**kwargs), batch)
    assert calls == [1]


def test_the_loss_takes_advantages_per_token_and_multiplies_both_masks():
    loss = source("_compute_loss")
    assert 'completion_mask * inputs["tool_mask"]' in loss
    assert "advantages.dim() == 1" in loss
    assert "self.current_gradient_accumulation_steps" in loss


def test_the_batch_has_the_tensors_that_are_replaced(tmp_path):
    tokenizer = make_tokenizer("qwen3")
    plain = GRPOTrainer(
        model=make_policy(tokenizer), reward_funcs=lambda completions, **kwargs: [1.0] * len(completions),
        args=GRPOConfig(**{k: v for k, v in make_args(tmp_path).to_dict().items() if k in ("output_dir", "use_cpu",
        "per_device_train_batch_size", "num_generations", "max_steps")}, bf16=False, report_to=[],
        max_completion_length=4),
        train_dataset=questions(), processing_class=tokenizer,
    )  # fmt: skip
    expected = set(scored_batch(plain))
    assert {"advantages", "completion_mask", "num_items_in_batch", "prompt_ids", "completion_ids"} <= expected
    ours = set(scored_batch(make_trainer(tmp_path)))
    added = {
        "tool_mask",
        "in_baseline",
        "row_scale",
        "micro_batch_scale",
        "trajectory_row",
        "training_row",
        "trajectory_rewards",
    }
    added |= {"is_first_row", "tokens_in_other_rows"}
    assert ours == expected | added


def test_the_trainer_keeps_vllm_out_of_trls_hands(tmp_path):
    args = make_args(tmp_path)
    args.use_vllm, args.reward_weights = True, [2.0]
    with as_trl_sees(args, num_columns=1):
        assert (args.use_vllm, args.reward_weights) == (False, [2.0, 1.0])
    assert (args.use_vllm, args.reward_weights) == (True, [2.0])


def test_peft_keeps_the_active_adapter_where_the_critic_switches_it():
    assert isinstance(BaseTunerLayer._active_adapter, str)
    assert BaseTunerLayer._disable_adapters is False
    wrapped = inspect.getsource(AuxiliaryTrainingWrapper)
    assert "self._active_adapter = [adapter_name]" in wrapped
    assert "self._disable_adapters = False" in wrapped


def test_gradients_are_clipped_and_measured_right_before_the_optimizer_step():
    loop = inspect.getsource(Trainer._run_epoch)
    measured = loop.index("grad_norm = self._get_grad_norm(model, grad_norm=grad_norm)")
    assert loop.index("grad_norm = self._clip_grad_norm(model)") < measured < loop.index("self.optimizer.step()")


def test_a_step_that_the_optimizer_skipped_leaves_the_schedule_alone():
    assert "if not self.accelerator.optimizer_step_was_skipped:" in inspect.getsource(Trainer._run_epoch)
    assert "return self._is_overflow" in inspect.getsource(AcceleratedOptimizer.step_was_skipped.fget)
    assert "step_was_skipped" in inspect.getsource(Accelerator.optimizer_step_was_skipped.fget)
    assert "compute_loss(model, inputs, num_items_in_batch=" in inspect.getsource(Trainer.training_step)


def test_the_reference_is_synced_from_what_parameters_yields():
    assert "model.parameters()" in inspect.getsource(SyncRefModelCallback._sync_target_model)
    assert "self.sync_target_model(model, self.ref_model" in inspect.getsource(SyncRefModelCallback.on_step_end)


def test_a_checkpoint_is_written_where_the_output_directory_is_said_to_be():
    body = inspect.getsource(Trainer._save_checkpoint)
    assert "run_dir = self._get_output_dir(trial=trial)" in body
    assert "rotate_checkpoints(\n                output_dir=run_dir," in body


def test_the_loss_reads_beta_in_two_ways_which_a_weight_per_row_can_answer():
    """`WeightedBeta` stands in its place where trajectories have several rows."""
    lines = {line.strip() for line in source("_compute_loss").splitlines() if "self.beta" in line}
    assert lines == {"if self.beta != 0.0:", "per_token_loss = per_token_loss + self.beta * per_token_kl"}

"""A deep copy of the policy, from which a generator may sample beside the update, computes with its own weights."""

import copy

import pytest
import torch
from peft import LoraConfig

from agent_r1_trl.trainers import MultiTurnPPOTrainer
from tests.trainers.helpers import make_trainer

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}
PPO = {"trainer": MultiTurnPPOTrainer, "num_generations": 1}
RUNS = {
    "plain": {},
    "adapter": LORA,
    "float32 head": {"cast_lm_head_to_fp32": True},
    "bf16": {"bf16": True},
    "critic head": {**PPO, "critic": "head"},
    "critic model": {**PPO, "critic": "model"},
    "critic adapter": {**PPO, **LORA, "critic": "adapter"},
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_a_copy_says_the_same_until_its_own_weights_change_and_the_policys_update_is_none_of_its(tmp_path, options):
    trainer = make_trainer(tmp_path, **options)
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        assert torch.equal(twin(input_ids=IDS).logits, before)
        for parameter in model.parameters():
            parameter.add_(0.1)
        assert torch.equal(twin(input_ids=IDS).logits, before)
        assert not torch.equal(model(input_ids=IDS).logits, before)
        for parameter in twin.parameters():
            parameter.add_(0.2)
        assert not torch.equal(twin(input_ids=IDS).logits, before)


@pytest.mark.parametrize("options", [{}, RUNS["critic head"]], ids=["policy", "with a critic"])
def test_the_fused_head_of_a_copy_and_its_values_are_its_own(tmp_path, options):
    trainer = make_trainer(tmp_path, **options)
    twin = copy.deepcopy(trainer.model)
    asked = {"input_ids": IDS, "labels": IDS, "fused_lm_head": True}
    if options:
        asked["compute_values"] = True

    def read(model):
        output = model(**asked)
        return [output.log_probs, *([output.state_values] if options else [])]

    with torch.no_grad():
        before = read(trainer.model)
        for parameter in trainer.model.parameters():
            parameter.add_(0.1)
        assert all(map(torch.equal, read(twin), before))
        assert not any(map(torch.equal, read(trainer.model), before))


def test_a_copy_in_training_mode_keeps_its_cache_while_the_policy_checkpoints_its_gradients(tmp_path):
    trainer = make_trainer(tmp_path, gradient_checkpointing=True)
    trainer.model.gradient_checkpointing_disable()  # as around a rollout, where a generator makes its copy
    twin = copy.deepcopy(trainer.model)
    trainer.model.gradient_checkpointing_enable()
    trainer.model.train()
    with torch.no_grad():
        assert twin(input_ids=IDS, use_cache=True).past_key_values.get_seq_length() == IDS.shape[1]

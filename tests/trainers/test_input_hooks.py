"""Switching gradient checkpointing off and on leaves no hooks behind, and the gradients where they were."""

import pytest
from peft import LoraConfig

from tests.trainers.helpers import make_trainer

LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}


@pytest.mark.parametrize("options", [{}, {"rollouts_ahead": 1}, LORA], ids=["plain", "ahead", "adapter"])
def test_a_run_with_gradient_checkpointing_has_one_hook_on_its_embeddings(tmp_path, options):
    trainer = make_trainer(tmp_path, gradient_checkpointing=True, max_steps=4, **options)
    trainer.train()
    assert len(trainer.model.get_input_embeddings()._forward_hooks) == 1
    assert all(entry["grad_norm"] > 0 for entry in trainer.state.log_history if "grad_norm" in entry)

"""One PPO step for each critic, with and without gradient checkpointing, in any number of processes."""

import itertools
import os

import torch
from peft import LoraConfig
from transformers import TrainerCallback

from agent_r1_trl.critic.attach import base_causal_lm
from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from tests.distributed.fsdp2 import whole
from tests.trainers.helpers import make_trainer

POLICY_FOLDER = "policy"
"""Below the output folder: the tiny policy. Loading it from there makes ZeRO-3 share it out from the start."""
NUM_ROWS = 8
"""Of all processes together."""
KINDS = ("adapter", "head", "model")
CHECKPOINTING = ("off", "reentrant", "non-reentrant")
BY_TOKENS = {"update_layout": "shared", "max_tokens_per_micro_batch": 250}
CASES = tuple(itertools.product(KINDS, CHECKPOINTING))


def cases_of(launch):
    """The cases of a kind of launch; `use_reentrant` is refused with FSDP2."""
    return [case for case in CASES if launch != "fsdp2" or case[1] != "reentrant"]


class CatchGradients(TrainerCallback):
    """Keeps the gradients of the first step, as they are after the backward pass and before the optimizer's step."""

    def __init__(self):
        self.trainer = None
        self.gradients = {}

    def on_train_begin(self, args, state, control, **kwargs):
        if not self.trainer.is_deepspeed_enabled:
            return
        engine = self.trainer.model_wrapped
        engine_step = engine.step

        def step(*arguments, **options):  # accelerate's backward calls it at once
            self.catch()
            return engine_step(*arguments, **options)

        engine.step = step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if not self.trainer.is_deepspeed_enabled:
            self.catch()

    def catch(self):
        self.gradients = {}
        for name, parameter in self.trainer.model.named_parameters():
            if not parameter.requires_grad:
                continue
            if self.trainer.is_deepspeed_enabled:
                gradient = _full_gradient(parameter)
            else:
                gradient = whole(parameter.grad)
            self.gradients[name] = gradient.detach().clone()


def _full_gradient(parameter):
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(parameter)


def one_step(kind, checkpointing, output_dir, **options):
    """The gradient of everything trainable by its name, and how many blocks of the policy's backbone were run.

    Options are those of the configuration. The adapter critic has a LoRA policy and a reference pass as well.
    """
    catcher = CatchGradients()
    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if kind == "adapter" else None
    trainer = make_trainer(
        output_dir,
        model=str(output_dir / POLICY_FOLDER),
        trainer=MultiTurnPPOTrainer,
        critic=kind,
        num_generations=1,
        per_device_train_batch_size=NUM_ROWS // num_processes(),
        peft_config=lora,
        beta=0.04 if kind == "adapter" else 0.0,
        gradient_checkpointing=checkpointing != "off",
        gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"},
        max_grad_norm=0.0,
        callbacks=[catcher],
        **options,
    )
    catcher.trainer = trainer
    fill(trainer.model)
    block_runs = []
    block = base_causal_lm(trainer.model).model.layers[0].mlp
    block.register_forward_pre_hook(lambda *_: block_runs.append(1))  # recomputation may stop within the block
    trainer.train()
    return {"gradients": catcher.gradients, "block_runs": len(block_runs)}


def save_policy(folder):
    """Put the tiny policy into an output folder, and return that."""
    make_policy(make_tokenizer("qwen3")).save_pretrained(folder / POLICY_FOLDER)
    return folder


def num_processes():
    """How many processes share the rows."""
    return int(os.environ.get("WORLD_SIZE", 1))


def fill(model):
    """Adapters and value heads start (half) at zero, where most gradients vanish."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ("lora_" in name or "value_head" in name):
            with torch.no_grad():
                parameter.normal_(std=0.2, generator=generator)

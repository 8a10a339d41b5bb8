"""Runs that sample from split weights and read them: `python -m tests.distributed.sharded_sampling OUTPUT_DIR`.

Rank 0 writes the results to `OUTPUT_DIR/sampled.pt`.
"""

import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from peft import LoraConfig
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from agent_r1_trl.environments import StepResult
from agent_r1_trl.generation.weights import is_sharded, policy_weights
from agent_r1_trl.trainers.callbacks import RolloutCallback
from tests.distributed.critics import NUM_ROWS, POLICY_FOLDER, num_processes
from tests.trainers.helpers import make_trainer

FILE = "sampled.pt"
LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj", "embed_tokens"], task_type="CAUSAL_LM")
CASES = {"full": None, "lora": LORA}


class CountingEnv:
    """Question n takes n + 1 turns: the ranks, with a question each, need different numbers of forward passes."""

    def reset(self, example):
        self.left = int(example["id"].removeprefix("q")) + 1
        return example["prompt"]

    def step(self, message):
        self.left -= 1
        return StepResult([{"role": "user", "content": "go on"}], 0.0, self.left == 0, {})


class LogProbs(RolloutCallback):
    """Keeps the policy's log-probs of every forward pass of the loss."""

    def __init__(self):
        self.seen = []

    def on_values(self, name, values, mask):
        if name == "log_probs":
            self.seen.append(values.detach()[mask.bool()])


class Memory(TrainerCallback):
    """Counts the bytes of this rank in an update: what lies there, and what is gathered at a time, at most."""

    def __init__(self):
        self.bytes = {"gathered": 0}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self.modules:
            module.register_forward_pre_hook(self.look)

    def look(self, module, inputs):
        if not torch.is_grad_enabled():
            return  # in a rollout everything is gathered
        for tensor in inputs:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self.count)  # in the backward pass, behind this module
        self.count()

    def count(self, gradient=None):
        groups = [module._get_fsdp_state()._fsdp_param_group for module in self.modules]
        whole = {group for group in groups if group and (group.is_unsharded or group._all_gather_result is not None)}
        parameters = [item for group in whole for item in group.fsdp_params]
        size = sum(item.orig_dtype.itemsize * item._orig_size.numel() for item in parameters)
        self.bytes["gathered"] = max(self.bytes["gathered"], size)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.bytes["weights"] = local_bytes(model.parameters())
        self.bytes["policy: gradients"] = local_bytes(parameter.grad for parameter in parameters)

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        states = (value for item in optimizer.state.values() for value in item.values())
        self.bytes["policy: Adam"] = local_bytes(value for value in states if value.dim())


def local_bytes(tensors):
    """Of the parts that this rank has."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def sampled(case, folder, **options):
    """The steps, sampled tokens and last weights of a run that samples with transformers."""
    watch, memory = LogProbs(), Memory()
    trainer = make_trainer(
        folder / case,
        model=str(folder / POLICY_FOLDER),
        script=None,
        num_generations=4,
        per_device_train_batch_size=NUM_ROWS // num_processes(),
        env=CountingEnv,
        max_tokens_per_turn=5,
        max_completion_length=200,
        max_turns=8,
        max_steps=2,
        learning_rate=1e-3,
        beta=0.04,
        reward_funcs=[lambda completion_ids, **_: [float(ids[0] % 7) for ids in completion_ids]],
        peft_config=CASES[case],
        callbacks=[watch, memory],
        **options,
    )
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    was_sharded = is_sharded(model)
    weights = {name: weight.detach().clone() for name, weight in policy_weights(model)}
    return {
        "steps": [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry],
        "ids": gather_object([item.completion_ids for item in trainer.last_trajectories]),
        "turns": gather_object([max(len(item.turns) for item in trainer.last_trajectories)]),
        "weights": weights,
        "parts": [name for name, weight in weights.items() if isinstance(weight, DTensor)],
        "was_sharded": was_sharded,
        "is_sharded": is_sharded(model),
        "log_probs": torch.cat(watch.seen),
        "bytes": memory.bytes,
    }


def main(folder):
    results = {case: sampled(case, folder) for case in CASES}
    results["bf16"] = sampled("full", folder, bf16=True)
    if PartialState().is_main_process:
        torch.save(results, folder / FILE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Filtered runs in any number of processes; one of their steps has nothing to train on.

Two micro-batches make a step; the second of its three groups is on both ranks, and two of the three are kept.
"""

import itertools

import torch
from accelerate.utils import gather_object

from agent_r1_trl.testing import AddEnv
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from tests.distributed.agreement import ragged
from tests.distributed.critics import POLICY_FOLDER, num_processes
from tests.distributed.nonfinite import state_of
from tests.trainers.helpers import make_trainer

FLAT_STEP = 1
CASES = {
    "grpo": {"trainer": MultiTurnGRPOTrainer, "loss_type": "grpo"},
    "ppo": {"trainer": MultiTurnPPOTrainer, "critic": "head"},
}


def filtered(case, output_dir):
    """Per rank and step: loss and gradient norm, whether anything changed, and how many rows each micro-batch has."""

    class Env(AddEnv):
        def outcome_reward(self, trajectory):
            return 0.0 if trainer.state.global_step == FLAT_STEP else float(len(trajectory.completion_ids) % 3)

        def process_reward(self, call, result):
            return 0.0

    def seen(generation_batch):
        inputs = prepare_inputs(generation_batch)
        states.append(state_of(trainer))
        rows.append((len(inputs["in_baseline"]), int(inputs["in_baseline"].sum())))
        return inputs

    states, rows = [], []
    trainer = make_trainer(
        output_dir,
        model=str(output_dir / POLICY_FOLDER),
        script=ragged,
        env=Env,
        num_generations=8,
        per_device_train_batch_size=12 // num_processes(),
        gradient_accumulation_steps=2,
        max_turns=4,
        max_steps=3,
        weight_decay=0.1,
        optim="adamw_torch",
        sampling={"filter_groups": "top_fraction", "filter_value": 0.7},
        **CASES[case],
    )
    prepare_inputs, trainer._prepare_inputs = trainer._prepare_inputs, seen
    trainer.train()
    logged = [(entry["loss"], entry.get("grad_norm")) for entry in trainer.state.log_history if "loss" in entry]
    states = [*states[::2], state_of(trainer)]
    changed = [len(a) != len(b) or not all(map(torch.equal, a, b)) for a, b in itertools.pairwise(states)]
    return gather_object([{"logged": logged, "changed": changed, "rows": rows}])

"""Runs whose trajectories have several rows, in any number of processes."""

import functools

from accelerate.utils import gather_object

from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from tests.distributed.agreement import ragged
from tests.distributed.critics import POLICY_FOLDER, num_processes
from tests.trainers.helpers import make_trainer
from tests.trainers.test_rows import MANY, at_random, splitting

CASES = {
    "grpo": {"trainer": MultiTurnGRPOTrainer, "loss_type": "grpo"},
    "dr_grpo": {"trainer": MultiTurnGRPOTrainer, "loss_type": "dr_grpo", "filter_groups": "top_fraction"},
    "ppo": {"trainer": MultiTurnPPOTrainer, "critic": "head"},
}


def rows(case, output_dir, *, is_split):
    """Per rank: loss and gradient norm of each step, rows of each micro-batch, and the most rows of a trajectory."""

    def seen(generation_batch):
        inputs = prepare_inputs(generation_batch)
        sizes.append(len(inputs["completion_ids"]))
        return inputs

    sizes = []
    trainer = make_trainer(
        output_dir,
        model=str(output_dir / POLICY_FOLDER),
        script=ragged,
        num_generations=4,
        per_device_train_batch_size=12 // num_processes(),
        gradient_accumulation_steps=2,
        max_turns=4,
        max_steps=2,
        **MANY,
        **CASES[case],
    )
    trainer = splitting(trainer, at_random) if is_split else trainer
    prepare_inputs, trainer._prepare_inputs = trainer._prepare_inputs, seen
    trainer.train()
    logged = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    most = max(len(item.rows) for item in trainer.last_trajectories)
    return gather_object([{"logged": logged, "sizes": sizes, "most": most}])


whole, split = functools.partial(rows, is_split=False), functools.partial(rows, is_split=True)

"""Estimators and a loss term as a user writes them, in any number of processes: `python -m ... OUTPUT_DIR`.

Rank 0 writes `OUTPUT_DIR/own.json`.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object

from agent_r1_trl.advantages import compute_gae
from agent_r1_trl.advantages.estimators import Credit
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.update.layout import UPDATE_LAYOUTS
from tests.distributed.agreement import ragged
from tests.distributed.critics import POLICY_FOLDER, fill, num_processes
from tests.trainers.helpers import LikelihoodTrainer, make_trainer, questions

RESULTS_FILE = "own.json"


def my_grpo(inputs):
    """GRPO, written down from its formula, group by group; what stands outside the mask is left to the package."""
    returns = inputs.returns.double()
    advantages = torch.zeros_like(returns)
    for group in inputs.group_ids.unique():
        rows = (inputs.group_ids == group) & inputs.in_baseline
        centred = returns[rows] - returns[rows].mean()
        std = (centred.square().sum() / max(1, len(centred) - 1)).sqrt()
        advantages[rows] = centred / (std + 1e-4) if std > 1e-6 * returns[rows].abs().max() else 0.0
    advantages[~inputs.in_baseline] = float("nan")
    return Credit(advantages=advantages.float())


def my_gae(inputs):
    """GAE by the package's function, as an estimator of the PPO trainer."""
    advantages, returns = compute_gae(
        inputs.token_rewards, inputs.values, inputs.mask, gamma=inputs.settings.gamma, lam=inputs.settings.lam
    )
    return Credit(advantages=advantages.masked_fill(~inputs.mask, 9.0), returns=returns)


def one_step(output_dir, estimator, *, has_critic=False, trainer=MultiTurnGRPOTrainer, **options):
    """Per row of all ranks (which, why it ended, its advantages), and the loss and gradient norm of one step.

    One of the three groups is on both ranks.
    """
    trainer = make_trainer(
        output_dir,
        model=str(output_dir / POLICY_FOLDER),
        script=ragged,
        trainer=MultiTurnPPOTrainer if has_critic else trainer,
        train_dataset=questions(12),
        num_generations=1 if has_critic else 4,
        per_device_train_batch_size=12 // num_processes(),
        max_completion_length=400,
        max_turns=4,
        record_trajectories="jsonl",
        advantage_estimator=estimator,
        **({"critic": "head", "gamma": 0.9} if has_critic else {}),
        **options,
    )
    fill(trainer.model)
    trainer.train()
    rows = gather_object(
        [(f"{t.example_id}/{t.generation}", t.stop_reason.value, t.advantages) for t in trainer.last_trajectories]
    )
    (step,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"rows": rows, "loss": step["loss"], "grad_norm": step["grad_norm"]}


def compute(output_dir):
    """Ours in the first layout, then the user's, and a loss term, in every one; ours and the user's with a critic."""
    return {
        "grpo": one_step(output_dir, "grpo"),
        **{layout: one_step(output_dir, my_grpo, update_layout=layout) for layout in UPDATE_LAYOUTS},
        **{
            f"{layout}, own loss term": one_step(output_dir, "grpo", trainer=LikelihoodTrainer, update_layout=layout)
            for layout in UPDATE_LAYOUTS
        },
        "gae": one_step(output_dir, "gae", has_critic=True),
        "my_gae": one_step(output_dir, f"{__spec__.name}.my_gae", has_critic=True),
    }


if __name__ == "__main__":
    results = compute(Path(sys.argv[1]))
    if os.environ.get("RANK", "0") == "0":
        (Path(sys.argv[1]) / RESULTS_FILE).write_text(json.dumps(results), encoding="utf-8")

"""PPO runs that are saved and resumed: `python -m tests.distributed.resume OUTPUT_DIR`, in any number of processes.

Rank 0 writes the losses of both runs of each critic to `OUTPUT_DIR/losses.json`; their checkpoints lie beside it.
"""

import json
import sys
from pathlib import Path

from accelerate import PartialState
from peft import LoraConfig

from agent_r1_trl.trainers import MultiTurnPPOTrainer
from tests.distributed.critics import KINDS, NUM_ROWS, POLICY_FOLDER, num_processes
from tests.trainers.helpers import make_trainer

LOSSES_FILE = "losses.json"
SAVED_STEP, NUM_STEPS = 3, 5
"""The checkpoint stands between two rollouts: each is trained on for two steps."""
LOGGED = ("loss", "grad_norm", "critic/value_loss")


def train(kind, folder, policy, checkpoint=None):
    """[[loss, ...] of each step] of a run with that critic, from its start or from a checkpoint."""
    has_lora = kind == "adapter"
    trainer = make_trainer(
        folder,
        model=str(policy),
        trainer=MultiTurnPPOTrainer,
        critic=kind,
        num_generations=1,
        per_device_train_batch_size=NUM_ROWS // 2 // num_processes(),
        steps_per_generation=2,
        max_steps=NUM_STEPS,
        save_strategy="steps",
        save_steps=SAVED_STEP,
        learning_rate=1e-2,
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if has_lora else None,
        beta=0.0 if kind == "model" else 0.04,
        **({"sync_ref_model": True, "ref_model_sync_steps": 1} if kind == "head" else {}),  # TRL: not with adapters
    )
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [[entry[name] for name in LOGGED] for entry in history]


def main(folder):
    losses = {}
    for kind in KINDS:
        policy, straight = folder / POLICY_FOLDER, folder / kind / "straight"
        losses[kind] = {
            "straight": train(kind, straight, policy),
            "resumed": train(kind, folder / kind / "resumed", policy, straight / f"checkpoint-{SAVED_STEP}"),
        }
    if PartialState().is_main_process:
        (folder / LOSSES_FILE).write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

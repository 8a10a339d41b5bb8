"""A small PPO run that leaves a line per step behind, for a process of its own."""

import json

from peft import LoraConfig
from transformers import TrainerCallback

from tests.trainers.helpers import PlainEnv
from tests.trainers.test_ppo_trainer import make_ppo


class WriteSteps(TrainerCallback):
    """Appends to `path` what was logged, what was asked and said, and the sum of squares of each trained tensor."""

    def __init__(self, path):
        self.path = path
        self.trainer = None

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if "loss" not in logs:
            return
        # A step on the second half of a rollout has none of its own.
        trajectories = self.trainer.last_trajectories if "time/rollout_s" in logs else []
        entry = {
            "step": state.global_step,
            "prompts": str([trajectory.prompt_ids for trajectory in trajectories]),
            "completions": str([trajectory.completion_ids for trajectory in trajectories]),
            "weights": [p.detach().double().pow(2).sum().item() for p in model.parameters() if p.requires_grad],
            **logs,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def run(folder, kind, max_steps, checkpoint=None):
    """Train `max_steps` steps with a critic of `kind`; each step appends a line to `folder/steps.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = WriteSteps(folder / "steps.jsonl")
    trainer = make_ppo(
        folder,
        kind,
        script=None,  # sampled by the policy, with the transformers generator
        env=PlainEnv,
        peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM"),
        max_steps=max_steps,
        lr_scheduler_type="constant",  # a run of another length keeps its rates
        save_strategy="steps",
        save_steps=3,
        steps_per_generation=2,  # the checkpoint of step 3 stands between two rollouts
        per_device_train_batch_size=2,
        max_completion_length=12,
        learning_rate=1e-2,
        beta=0.04,
        callbacks=[writer],
    )
    writer.trainer = trainer
    trainer.train(resume_from_checkpoint=checkpoint)

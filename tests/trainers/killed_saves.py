"""A save that is killed (SIGKILL) at one of its moments after the other, for a process of its own."""

import json
import os
import shutil
import sys

from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.trainers.checkpoints import choose_checkpoint
from tests.trainers.helpers import make_trainer

MOMENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "shutil.move")
"""What Python reports before it is done; libraries that write without Python do so between two of these."""


def kill_at(folder, moment):
    """End this process when it is about to touch `folder` for the `moment`th time."""
    count = 0

    def watch(event, arguments):
        nonlocal count
        if event in MOMENTS and str(folder) in str(arguments[0]):
            count += 1
            if count == moment:
                os.kill(os.getpid(), 9)

    sys.addaudithook(watch)


def run(folder, kind):
    """Train one step; then kill the save of the second one at its 1st, 4th, 7th, ... moment until it gets through.

    `folder/killed.json` says what a resumed run would have taken after each.
    """
    ppo = {"trainer": MultiTurnPPOTrainer, "critic": "head", "num_generations": 1} if kind == "ppo" else {}
    run_dir = folder / "run"
    trainer = make_trainer(
        run_dir, max_steps=1, save_strategy="steps", save_steps=1, save_total_limit=1, per_device_train_batch_size=4,
        max_completion_length=300, **({"trainer": MultiTurnGRPOTrainer} | ppo),
    )  # fmt: skip
    trainer.train()
    shutil.copytree(run_dir, folder / "after_one_step")
    trainer.state.global_step, taken = 2, []
    while True:
        process = os.fork()
        if process == 0:
            kill_at(run_dir, moment=3 * len(taken) + 1)
            trainer._save_checkpoint(trainer.model, None)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        taken.append((os.waitstatus_to_exitcode(status), choose_checkpoint(True, run_dir).name))
        if status == 0:
            break
        if (run_dir / "checkpoint-2").exists():  # begin as before; what a torn save left stays for the next one
            shutil.rmtree(run_dir)
            shutil.copytree(folder / "after_one_step", run_dir)
    (folder / "killed.json").write_text(json.dumps(taken), encoding="utf-8")

"""Checkpoints of two ranks, for `failures.py`: one that is torn, and a second run."""

import os
import subprocess
import sys

from accelerate import PartialState
from transformers import TrainerCallback

from tests.trainers.test_whole_checkpoints import HOLD

NUM_STEPS = 2


class FirstStep(TrainerCallback):
    """The step at which a run begins."""

    number = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.number = state.global_step


def torn(folder, make):
    """Where resumed runs begin and end, if the newest checkpoint has lost a part of one rank's file.

    Args:
        folder: of the run.
        make: makes a trainer of that folder, with options.
    """
    main, found = PartialState(), {}
    make(folder, max_steps=NUM_STEPS, save_strategy="steps", save_steps=1).train()
    main.wait_for_everyone()
    if main.is_main_process:
        (folder / f"checkpoint-{NUM_STEPS}" / f"rng_state_{main.num_processes - 1}.pth").write_bytes(b"torn")
    main.wait_for_everyone()
    for name, max_steps in {"longer": NUM_STEPS + 1, "finished": 1}.items():
        begin = FirstStep()
        trainer = make(folder, max_steps=max_steps, callbacks=[begin])
        trainer.train(resume_from_checkpoint=True)
        found[name] = [begin.number, trainer.state.global_step]
    return found


def locked(folder, make):
    """The error of a run beside another one."""
    main, other = PartialState(), None
    if main.is_main_process:
        folder.mkdir()
        other = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
        tool = int(other.stdout.readline())
    main.wait_for_everyone()
    try:
        make(folder).train()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if other is not None:
            other.kill()
            other.communicate()
            os.kill(tool, 9)
    return None

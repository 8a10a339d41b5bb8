"""Checkpoints of two ranks, for `failures.py`: one that cannot be written, one that is torn, and a second run."""

import os
import resource
import subprocess
import sys

from accelerate import PartialState
from transformers import TrainerCallback

from agent_r1_trl.trainers.checkpoints import problem_of
from tests.trainers.test_whole_checkpoints import HOLD

FULL_STEP, NUM_STEPS = 2, 3


class FullDisk(TrainerCallback):
    """The last rank can write no file of more than `SIZE` bytes at `FULL_STEP`."""

    SIZE = 1000

    def on_step_end(self, args, state, control, **kwargs):
        is_last = PartialState().is_last_process
        self.limit(self.SIZE if is_last and state.global_step == FULL_STEP else resource.RLIM_INFINITY)

    def on_save(self, *args, **kwargs):
        self.limit(resource.RLIM_INFINITY)

    @staticmethod
    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class FirstStep(TrainerCallback):
    """The step at which a run begins."""

    number = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.number = state.global_step


def full_and_torn(folder, make):
    """Names of the whole checkpoints of a run whose disk was full once; where resumed runs begin and end.

    Args:
        folder: of the run.
        make: makes a trainer of that folder, with options.
    """
    main, found = PartialState(), {}
    make(folder, max_steps=NUM_STEPS, save_strategy="steps", save_steps=1, callbacks=[FullDisk()]).train()
    found["whole"] = sorted(path.name for path in folder.glob("*check*") if problem_of(path) is None)
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

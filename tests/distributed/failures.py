"""Failures, evaluation and a checkpoint of two ranks: `python -m tests.distributed.failures OUTPUT_DIR`.

Rank 0 writes what every rank found to `OUTPUT_DIR/found.json`.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import ClassVar

from accelerate import PartialState
from accelerate.utils import gather_object

from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.rollout import runner
from agent_r1_trl.testing import say
from agent_r1_trl.trainers.saving import ROLLOUT_STATE
from tests.distributed import saving
from tests.trainers.helpers import make_trainer, questions, scored_batch

FOUND_FILE = "found.json"
NUM_STEPS, NUM_EVAL_ROWS = 4, 5


class NumberEnv(ToolEnv):
    """Every row earns its number; bad ones cannot start."""

    bad: tuple = ()

    def reset(self, example):
        self.number = float(example["id"].removeprefix("q"))
        if example["id"] in self.bad:
            raise OSError("the server is down")
        return super().reset(example)

    def outcome_reward(self, trajectory):
        return self.number


class OneBadRow(NumberEnv):
    """Of four rows."""

    bad = ("q2",)


class Outage(NumberEnv):
    """Nothing can start."""

    bad = tuple(f"q{index}" for index in range(8))


class LastAlone(NumberEnv):
    """Of each group of four, shared by two processes, one member on the last process can start."""

    starts = itertools.count()

    def reset(self, example):
        if not is_last_process() or next(self.starts) % 2:
            raise OSError("the server is down")
        return super().reset(example)


class OnceOnTheLast(NumberEnv):
    """On the last process the first try of every row fails."""

    tried: ClassVar[set] = set()

    def seed(self, *, reset_seed, dynamics_seed):
        self.own_seed = dynamics_seed

    def reset(self, example):
        if is_last_process() and self.own_seed not in self.tried:
            self.tried.add(self.own_seed)
            raise OSError("the server is down")
        return super().reset(example)


class BadStep(NumberEnv):
    """On the last process it breaks the protocol."""

    def step(self, message):
        return None if is_last_process() else super().step(message)


def is_last_process():
    state = PartialState()
    return state.process_index == state.num_processes - 1


def scores(value=None, error=None):
    """A reward function that goes wrong on the last process alone."""

    def scorer(completions, **columns):
        if is_last_process() and error is not None:
            raise error
        return [value if is_last_process() else 1.0] * len(completions)

    return scorer


def trainer_of(folder, env=NumberEnv, *, max_steps=NUM_STEPS, **options):
    """One prompt on each rank and step."""
    return make_trainer(
        folder, env=env, script=lambda rng, turn: say("x" * rng.randrange(1, 9)), train_dataset=questions(4),
        eval_dataset=questions(NUM_EVAL_ROWS), num_generations=4, max_steps=max_steps, num_generations_eval=1,
        per_device_eval_batch_size=2, **{"per_device_train_batch_size": 4, **options},
    )  # fmt: skip


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def bad_row(folder):
    """A run in which all trajectories of one rank fail in some steps."""
    trainer = trainer_of(folder, OneBadRow, save_strategy="steps", save_steps=1)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [[entry["loss"], entry["grad_norm"], entry["rollout/lost_share"]] for entry in logged]


def evaluation(folder):
    """The seeds of this rank's trajectories, and the metrics; the last batch is filled up with rows from the start."""
    trainer, seeds = trainer_of(folder, NumberEnv), []
    take = trainer.evaluation.__class__.take

    def watched(self, trajectories, *, rank, **others):
        own = take(self, trajectories, rank=rank, **others)
        seeds.extend((item.example_id, item.seed) for item in own)
        return own

    trainer.evaluation.__class__.take = watched
    metrics = trainer.evaluate()
    trainer.evaluation.__class__.take = take
    names = (
        "eval_reward",
        "eval_reward/outcome",
        "eval_rewards/environment_reward/mean",
        "eval_completions/mean_length",
    )
    return {"seeds": seeds, "metrics": [metrics[name] for name in names]}


def torn(folder):
    """The error of a run whose checkpoint has lost the file of one rank."""
    state = PartialState()
    checkpoint = folder / "checkpoint-1"
    if state.is_main_process and state.num_processes > 1:
        (checkpoint / ROLLOUT_STATE.format(rank=1)).unlink()
    state.wait_for_everyone()
    return error_of(trainer_of(folder, NumberEnv).train, resume_from_checkpoint=str(checkpoint))


def lone_member(folder):
    """This rank's rows in the baseline, in a batch whose group lost three of four members, and its metrics."""
    trainer = trainer_of(folder, LastAlone, per_device_train_batch_size=2)
    output = scored_batch(trainer)
    return [output["in_baseline"].tolist(), trainer._metrics["train"]["group/too_small_share"]]


def replaced(folder):
    """The rewards, the shares of replaced trajectories and the failures of a run in which first tries fail."""
    runner.RETRY_WAIT_S = 0.01
    trainer = trainer_of(folder, OnceOnTheLast, retry_failed=1, failures={"max_share": 0.0, "window": 1})
    trainer.train()
    names = ("rollout/replaced_share", "rollout/lost_share")
    return [[entry[name] for name in names] for entry in trainer.state.log_history if "loss" in entry]


def wrong_values(folder):
    """How runs end in which something returns what it must not on the last rank alone."""
    runs = {
        "infinite": {"reward_funcs": [scores(float("inf"))]},
        "raising": {"reward_funcs": [scores(error=KeyError("the judge is down"))]},
        "turns": {"turn_reward_funcs": [lambda trajectory, **_: 5 if is_last_process() else [None] * len(trajectory)]},
    }
    errors = {name: error_of(trainer_of(folder / name, NumberEnv, **options).train) for name, options in runs.items()}
    return errors | {"step": error_of(trainer_of(folder / "step", BadStep).train)}


def compute(folder):
    """What one rank finds."""
    return {
        "wrong_values": wrong_values(folder / "wrong"),
        "lone_member": lone_member(folder / "lone"),
        "replaced": replaced(folder / "replaced"),
        "bad_row": bad_row(folder / "run"),
        "outage": error_of(trainer_of(folder / "outage", Outage).train),
        "evaluation": evaluation(folder / "evaluation"),
        "torn": torn(folder / "run"),
        "saving": saving.torn(folder / "saving", trainer_of),
        "locked": saving.locked(folder / "locked", trainer_of),
    }


if __name__ == "__main__":
    found = gather_object([compute(Path(sys.argv[1]))])
    if PartialState().is_main_process:
        (Path(sys.argv[1]) / FOUND_FILE).write_text(json.dumps(found), encoding="utf-8")

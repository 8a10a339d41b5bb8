"""One rank of a run ahead to which something happens: `run_rank(folder, rank, port, what)` in its own process.

`what`: `synchronous`: nothing, and no rollout is ahead; `held`: a call of rank 1 holds its event loop in a rollout
that is ahead; `signal`: rank 1 gets SIGTERM while both ranks wait for a rollout and two others are in flight;
`resume`: goes on where that has ended. Rank r writes its batches to `WHAT_r.json`; environments leave `open-*` files
and remove them.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import time
import uuid

NUM_RANKS, NUM_STEPS, ROWS = 2, 4, 4
HANG_S = 300


def run_rank(folder, rank, port, what):
    """Train; the exit code is that of the command line."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    log = os.open(folder / f"{what}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    logging.basicConfig(level=logging.WARNING)
    from agent_r1_trl.cli.errors import run_command

    sys.exit(run_command(lambda _: train(folder, rank, what), []))


def train(folder, rank, what):
    from transformers import TrainerCallback

    from agent_r1_trl.generation.base import current_slot
    from tests.trainers.helpers import make_trainer
    from tests.trainers.versions import SAMPLED

    class Env:
        """Three turns."""

        has_held = is_told = False

        def reset(self, example):
            self.num_turns = 0
            self.file = folder / f"open-{rank}-{uuid.uuid4()}"
            self.file.touch()
            return example["prompt"]

        async def step(self, message):
            order = current_slot.get().order
            if what == "held" and rank == 1 and order == 2 and not Env.has_held:
                Env.has_held = True
                time.sleep(HANG_S)
            if what == "held" and rank == 1 and order > 0:
                while not Env.has_held:  # no trajectory of it has ended when the loop is lost
                    await asyncio.sleep(0.01)
            if what == "signal" and order > 0:
                await self.tell_rank_1(order)
            self.num_turns += 1
            return [{"role": "user", "content": "and?"}], 0.0, self.num_turns == 3, {}

        async def tell_rank_1(self, order):
            """Hang, in flight; once the update waits for the second rollout, and all are there, rank 1 is told."""
            if rank == 1 and order == 1:
                while not trainer.state.global_step or len(list(folder.glob("open-*"))) < 3 * NUM_RANKS * ROWS:
                    await asyncio.sleep(0.02)
                if not Env.is_told:
                    Env.is_told = True
                    os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(HANG_S)

        def outcome_reward(self, trajectory):
            return float(sum(trajectory.completion_ids) % 5)

        def close(self):
            self.file.unlink()

    batches = {}

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            batch = [[item.seed, item.stop_reason.value, item.completion_ids] for item in trainer.last_trajectories]
            batches[state.global_step] = batch

    options = {"env": Env, "max_steps": NUM_STEPS, "per_device_train_batch_size": ROWS, "learning_rate": 0.0}
    options |= {"stall_timeout": 0.8, "ddp_timeout": 77, "rollouts_ahead": 0 if what == "synchronous" else 2}
    output_dir = folder / what.replace("resume", "signal")
    trainer = make_trainer(output_dir, callbacks=[Keep()], **{**SAMPLED, **options})
    try:
        trainer.train(resume_from_checkpoint=what == "resume")
    finally:
        (folder / f"{what}_{rank}.json").write_text(json.dumps(batches), encoding="utf-8")
    return 0

"""One rank of a run that ends early: `run_rank(folder, rank, ending)` in its own process, which needs no launcher.

Environments leave `open-*` files and turn them into `closed-*` files; every rank's messages are in `log-*.txt`.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
import uuid

NUM_RANKS = 2
HANG_S = 300
SENT = {"kill": signal.SIGKILL, "signal": signal.SIGTERM, "full": signal.SIGTERM}


def run_rank(folder, rank, ending, num_ranks=NUM_RANKS, port=0):
    """Train until `ending`; the exit code is that of the command line.

    Endings: `signal`: rank 1 sends SIGTERM to itself while both ranks sample; `environment`: an environment of rank 1
    breaks the protocol while those of rank 0 hang; `reward`: a reward function raises on rank 1 alone; `disk`: rank 1
    cannot write its part of a checkpoint; `full`: both as for `signal` and for `disk`; `kill`: rank 1 kills itself
    while rank 0 samples; `hang`: nothing happens.
    """
    if num_ranks > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    else:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # as launched by accelerate
    log = os.open(folder / f"log-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    logging.basicConfig(level=logging.WARNING)
    from agent_r1_trl.cli.errors import run_command

    sys.exit(run_command(lambda _: train(folder, rank, ending), []))


def train(folder, rank, ending):
    from agent_r1_trl.testing import AddEnv
    from tests.trainers.helpers import make_trainer

    begun = threading.Event()

    class Env(AddEnv):
        """Hangs from the second step on, except where the ending says otherwise."""

        def reset(self, example):
            self.file = folder / f"open-{rank}-{uuid.uuid4()}"
            self.file.touch()
            return super().reset(example)

        async def step(self, message):
            if trainer.state.global_step and ending not in ("reward", "disk"):
                if rank == 1:
                    while len(list(folder.glob("open-0-*"))) < 4:
                        await asyncio.sleep(0.02)
                if rank == 1 and ending == "environment":
                    return "nonsense"
                if rank == 1 and ending in SENT and not begun.is_set():
                    begun.set()
                    os.kill(os.getpid(), SENT[ending])
                await asyncio.sleep(HANG_S)
            return await super().step(message)

        def close(self):
            self.file.rename(self.file.with_name(self.file.name.replace("open", "closed")))

    def reward(completions, trainer_state, **kwargs):
        if ending == "reward" and rank == 1 and trainer_state.global_step == 1:
            raise LookupError("a mistake of the reward function")
        return [0.0] * len(completions)

    trainer = make_trainer(
        folder / "run", env=Env, reward_funcs=reward, max_steps=3, per_device_train_batch_size=4, ddp_timeout=77,
        save_strategy="steps" if ending == "disk" else "no", save_steps=1,
    )  # fmt: skip
    if ending in ("disk", "full") and rank == 1:
        trainer._save_rng_state = write_nothing
    try:
        trainer.train()
    finally:
        (folder / f"finally-{rank}").write_text(gloo_timeout())
    return 0


def write_nothing(folder):
    raise OSError(28, "No space left on device")


def gloo_timeout():
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return ""
    return str(dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def run_under_a_launcher(folder, rank, ending):
    """A process that has started one rank and waits for it."""
    pid = os.fork()
    if pid == 0:
        run_rank(folder, rank, ending, num_ranks=1)
    (folder / "pid").write_text(str(pid))
    os.waitpid(pid, 0)


def two_signals(folder):
    """Send three signals to this process, of which the first two count as one."""
    from agent_r1_trl.features.reliability.signal_handlers import SignalListener

    with SignalListener(lambda signum: (folder / "first").write_text(str(signum))):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2.2)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(HANG_S)

"""What one run of the soak is: a seed decides trainer, sampler, number of ranks, and the faults that it meets."""

from __future__ import annotations

import random
from dataclasses import dataclass

MAX_STEPS = 3
MODEL_LENGTH = 1024
"""Tokens that a vLLM sampler takes: the prompts of the task with its tools have about 400."""

IN_THE_TASK = (
    "tool raises",
    "tool hangs",
    "tool is slow",
    "tool blocks the event loop",
    "backend is down at times",
    "environment crashes in reset",
    "environment hangs in reset",
    "environment crashes in step",
    "environment crashes in close",
    "scoring crashes",
    "scoring hangs",
    "malformed calls",
    "huge observations",
    "escape sequences",
)
"""Faults of tools, environments and the policy, drawn anew at each place."""
IN_THE_NUMBERS = ("reward is not finite", "gradient is not finite")
ON_DISK = ("disk is full",)
SIGNALS = ("SIGINT", "SIGTERM", "SIGKILL")
"""Sent to every rank at a random moment; the run is then resumed."""
ON_SERVERS = ("server is killed", "server freezes")

SAMPLERS = ("scripted", "transformers", "server", "engine")
_CYCLE = ("transformers", "scripted", "transformers", "scripted", "server") * 4
"""Samplers of twenty seeds, but for the last one of each twenty, which is an engine in the trainer's process."""


@dataclass(frozen=True)
class Plan:
    """One run."""

    seed: int
    sampler: str
    trainer: str
    num_ranks: int
    rollouts_ahead: int
    faults: tuple[str, ...]

    @property
    def signal(self) -> str | None:
        """The signal that interrupts the run."""
        return next((fault for fault in self.faults if fault in SIGNALS), None)

    @property
    def must_fail(self) -> bool:
        """Whether the run has to end with an error, however often it is resumed."""
        return "reward is not finite" in self.faults

    @property
    def repeats_exactly(self) -> bool:
        """Whether the run, resumed after a kill, must end with the weights that it has without the kill.

        Sampling must be repeatable, and nothing in the task may depend on how fast the machine is.
        """
        timed = {"tool is slow", "tool blocks the event loop", "backend is down at times"}
        return self.sampler == "scripted" and not self.must_fail and not timed & set(self.faults)

    def __str__(self) -> str:
        parts = [
            self.trainer,
            self.sampler,
            "2 ranks" if self.num_ranks > 1 else "1 rank",
            *[f"{self.rollouts_ahead} ahead"] * (self.rollouts_ahead > 0),
        ]
        return f"seed {self.seed}: {', '.join(parts)}: {', '.join(self.faults) or 'no fault'}"


def draw_plan(seed: int) -> Plan:
    """The run of a seed."""
    rng = random.Random(f"soak {seed}")
    sampler = "engine" if seed % 20 == 19 else _CYCLE[seed % 20]
    faults = rng.sample(IN_THE_TASK, rng.randrange(4))
    others = [None, *SIGNALS, *IN_THE_NUMBERS]
    # Weights reach servers through files: without room for them there is nothing to sample from, and the run ends.
    others += [*ON_SERVERS, *ON_SERVERS] if sampler == "server" else ON_DISK
    other = rng.choice(others)
    return Plan(
        seed=seed,
        sampler=sampler,
        trainer=rng.choice(["grpo", "ppo"]),
        num_ranks=1 if sampler == "engine" else rng.choice([1, 1, 2]),
        rollouts_ahead=2 if rng.random() < 0.5 else 0,
        faults=(*faults, *([other] if other else [])),
    )

"""What the settings of uploads cannot mean; read with those of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agent_r1_trl.settings import Clash, Need

NEEDS = (Need("push.trajectories", {"record_trajectories": ("jsonl",)}),)
CLASHES = (
    Clash(
        "push.critic",
        lambda c: c.push.critic and not c.has_critic,
        "this trainer has no critic. Remove push.critic, or train with MultiTurnPPOTrainer.",
    ),
)


def resolve(config: Any) -> None:
    """Nothing follows from them."""


def find_problems(config: Any) -> Iterator[str]:
    """None besides those of the tables."""
    yield from ()

"""Problems of the settings of uploads, read with those of the trainer."""

from __future__ import annotations

from agent_r1_trl.settings import Clash, Need

NEEDS = (Need("push.trajectories", {"record_trajectories": ("jsonl",)}),)
CLASHES = (
    Clash(
        "push.critic",
        lambda c: c.push.critic and not c.has_critic,
        "this trainer has no critic. Remove push.critic, or train with MultiTurnPPOTrainer.",
    ),
)

"""Make the CPU variant's starting point: a tiny model that knows how to pull an arm, and mostly pulls the sure one.

It imitates a careful player, who takes what is certain: four pulls in five go to the arm that pays a little every
time, whatever the order of the arms. It takes half a minute on one core.

    python recipes/bandit/make_cold_start.py
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_model import game_cold_start

from agent_r1_trl.features.games.bandit import RISKY, SURE, BanditEnv

SHARES = {SURE: 0.78, RISKY: 0.2, "neither": 0.02}
"""How often the demonstrator pulls each arm, or names none."""


def say(env: BanditEnv, rng: random.Random) -> str:
    """A turn of the demonstrator."""
    arms = {**dict(zip(env.kinds, env.names, strict=True)), "neither": "Both"}
    return f"<answer>{arms[rng.choices(list(SHARES), list(SHARES.values()))[0]]}</answer>"


if __name__ == "__main__":
    game_cold_start(__file__, __doc__, say, steps=150)

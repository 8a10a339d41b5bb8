"""Make the CPU variant's starting point: a tiny model that sees the light, but not often enough for thirty rooms.

It imitates a player who opens the lit door in most rooms and any of the three in the others. It takes a minute on one
core.

    python recipes/corridor/make_cold_start.py
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_model import game_cold_start, write_moves

CARE = 0.84
"""How often the demonstrator looks for the lit door; it opens any of the three otherwise."""


def say(env, rng: random.Random) -> str:
    """A turn of the demonstrator."""
    return write_moves(env, [env.lit_door if rng.random() < CARE else rng.choice(env.actions)])


if __name__ == "__main__":
    game_cold_start(__file__, __doc__, say, steps=120, context=512)

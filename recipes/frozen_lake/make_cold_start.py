"""Make the CPU variant's starting point: a tiny model that knows the way over the ice, but mostly walks straight on.

It imitates a player who in each turn looks for the holes (30%), goes right to the edge and then down whatever lies
there (60%), or stumbles about (10%). It takes two minutes on one core.

    python recipes/frozen_lake/make_cold_start.py
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_model import game_cold_start, write_moves

from agent_r1_trl.features.games import FrozenLakeEnv

SHARES = {"careful": 0.3, "hasty": 0.6, "clumsy": 0.1}


def say(env: FrozenLakeEnv, rng: random.Random) -> str:
    """A turn of the demonstrator."""
    player = rng.choices(list(SHARES), list(SHARES.values()))[0]
    if player == "careful":
        moves = env.solution() or []
    elif player == "hasty":
        moves = ["Right"] * (env.size - 1 - env.place[1]) + ["Down"] * (env.size - 1)
    else:
        moves = rng.choices(env.actions, k=env.max_actions_per_turn)
    return write_moves(env, moves)


if __name__ == "__main__":
    game_cold_start(__file__, __doc__, say, steps=350)

"""Make the CPU variant's starting point: a tiny model that knows how to push a box, but often runs straight at it.

It imitates a player who in each turn thinks ahead (70%), or walks in the direction in which the box has to go, as if
it stood behind it (30%). It takes about four minutes on one core.

    python recipes/sokoban/make_cold_start.py
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_model import game_cold_start, write_moves

from agent_r1_trl.features.games import SokobanEnv
from agent_r1_trl.features.games.sokoban import read_level

SHARES = {"careful": 0.7, "hasty": 0.3}


def say(env: SokobanEnv, rng: random.Random) -> str:
    """A turn of the demonstrator."""
    player = rng.choices(list(SHARES), list(SHARES.values()))[0]
    moves = (env.solution() or []) if player == "careful" else []
    if player == "hasty":
        _, _, (target,), _ = read_level(env.level, "Sokoban")
        (box,) = env.state.boxes
        down, right = target[0] - box[0], target[1] - box[1]
        moves = ["Down" if down > 0 else "Up"] * abs(down) + ["Right" if right > 0 else "Left"] * abs(right)
    if not moves:  # the box can no longer be moved to the target
        moves = rng.choices(env.actions, k=env.max_actions_per_turn)
    return write_moves(env, moves)


if __name__ == "__main__":
    game_cold_start(__file__, __doc__, say, steps=600)

"""Make the CPU variant's starting point: a tiny model that knows how to push a box, but mostly runs straight at it.

It imitates a player who in each turn thinks ahead (45%), walks in the direction in which the box has to go, as if it
stood behind it (45%), or stumbles about (10%). It takes two to three minutes on one core.

    python recipes/sokoban/make_cold_start.py
"""

from __future__ import annotations

import functools
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from tiny_model import cold_start, make_parser, play, read_env  # noqa: E402

from agent_r1_trl.environments.games import SokobanEnv  # noqa: E402
from agent_r1_trl.environments.games.sokoban import read_level  # noqa: E402

SHARES = {"careful": 0.45, "hasty": 0.45, "clumsy": 0.1}


def say(env: SokobanEnv, rng: random.Random) -> str:
    """A turn of the demonstrator."""
    player = rng.choices(list(SHARES), list(SHARES.values()))[0]
    moves = (env.solution() or []) if player == "careful" else []
    if player == "hasty":
        _, _, (target,), _ = read_level(env.level, "Sokoban")
        (box,) = env.state.boxes
        down, right = target[0] - box[0], target[1] - box[1]
        moves = ["Down" if down > 0 else "Up"] * abs(down) + ["Right" if right > 0 else "Left"] * abs(right)
    if not moves:  # clumsy, or the box can no longer be moved to the target
        moves = rng.choices(env.actions, k=env.max_actions_per_turn)
    return f"<answer>{f' {env.separator} '.join(moves[: env.max_actions_per_turn])}</answer>"


def main() -> None:
    """Make and save tokenizer and model."""
    args = make_parser(__doc__, out=Path("outputs/sokoban/start"), steps=400).parse_args()
    make_env = read_env(HERE / "grpo" / "config_cpu.yaml")
    cold_start(args, functools.partial(play, make_env, say), vocab_size=400)


if __name__ == "__main__":
    main()

"""Make the CPU variant's starting point: a tiny model that knows the way over the ice, but mostly walks straight on.

It imitates a player who in each turn looks for the holes (30%), goes right to the edge and then down whatever lies
there (60%), or stumbles about (10%). It takes two minutes on one core.

    python recipes/frozen_lake/make_cold_start.py
"""

from __future__ import annotations

import functools
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from tiny_model import cold_start, make_parser, play, read_env  # noqa: E402

from agent_r1_trl.environments.games import FrozenLakeEnv  # noqa: E402

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
    return f"<answer>{f' {env.separator} '.join(moves[: env.max_actions_per_turn])}</answer>"


def main() -> None:
    """Make and save tokenizer and model."""
    args = make_parser(__doc__, out=Path("outputs/frozen_lake/start"), steps=350).parse_args()
    make_env = read_env(HERE / "grpo" / "config_cpu.yaml")
    cold_start(args, functools.partial(play, make_env, say), vocab_size=400)


if __name__ == "__main__":
    main()

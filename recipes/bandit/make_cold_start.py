"""Make the CPU variant's starting point: a tiny model that knows how to pull an arm, and mostly pulls the sure one.

It imitates a careful player, who takes what is certain: four pulls in five go to the arm that pays a little every
time, whatever the order of the arms. It takes half a minute on one core.

    python recipes/bandit/make_cold_start.py
"""

from __future__ import annotations

import functools
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from tiny_model import cold_start, make_parser, play, read_env  # noqa: E402

from agent_r1_trl.environments.games.bandit import RISKY, SURE, BanditEnv  # noqa: E402

SHARES = {SURE: 0.78, RISKY: 0.2, "neither": 0.02}
"""How often the demonstrator pulls each arm, or names none."""


def say(env: BanditEnv, rng: random.Random) -> str:
    """A turn of the demonstrator."""
    arms = {**dict(zip(env.kinds, env.names, strict=True)), "neither": "Both"}
    return f"<answer>{arms[rng.choices(list(SHARES), list(SHARES.values()))[0]]}</answer>"


def main() -> None:
    """Make and save tokenizer and model."""
    args = make_parser(__doc__, out=Path("outputs/bandit/start"), steps=150).parse_args()
    make_env = read_env(HERE / "grpo" / "config_cpu.yaml")
    cold_start(args, functools.partial(play, make_env, say), vocab_size=400)


if __name__ == "__main__":
    main()

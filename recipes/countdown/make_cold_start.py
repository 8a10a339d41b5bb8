"""Make the CPU variant's starting point: a tiny model that writes sums of the given numbers, mostly without reckoning.

It imitates a player who in one turn of three writes a sum that comes to the target, and otherwise adds and subtracts
the numbers at random. It takes two minutes on one core.

    python recipes/countdown/make_cold_start.py
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from tiny_model import cold_start, make_parser, play, read_env  # noqa: E402

from agent_r1_trl.environments.games import CountdownEnv  # noqa: E402

CAREFUL_SHARE = 0.35


def sums(numbers: list[int]) -> dict[str, int]:
    """Sums and differences of all numbers, and their values; the largest number stands first or last."""
    found: dict[str, int] = {}
    down = sorted(numbers, reverse=True)
    for order in (down, [*down[1:], down[0]]):
        for signs in itertools.product((1, -1), repeat=len(order) - 1):
            rest = list(zip(signs, order[1:], strict=True))
            text = str(order[0]) + "".join(f" {'+' if sign > 0 else '-'} {number}" for sign, number in rest)
            found[text] = order[0] + sum(sign * number for sign, number in rest)
    return found


def say(env: CountdownEnv, rng: random.Random) -> str:
    """A turn of the demonstrator."""
    level = json.loads(env.level)
    found = sums(level["numbers"])
    right = [text for text, value in found.items() if value == level["target"]]
    is_careful = bool(right) and rng.random() < CAREFUL_SHARE
    return f"<answer>{right[0] if is_careful else rng.choice(list(found))}</answer>"


def main() -> None:
    """Make and save tokenizer and model."""
    args = make_parser(__doc__, out=Path("outputs/countdown/start"), steps=400).parse_args()
    make_env = read_env(HERE / "grpo" / "config_cpu.yaml")
    cold_start(args, functools.partial(play, make_env, say), vocab_size=400)


if __name__ == "__main__":
    main()

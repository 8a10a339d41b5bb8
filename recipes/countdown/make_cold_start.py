"""Make the CPU variant's starting point: a tiny model that writes sums of the given numbers, mostly without reckoning.

It imitates a player who in one turn of three writes a sum that comes to the target, and otherwise adds and subtracts
the numbers at random. It takes two minutes on one core.

    python recipes/countdown/make_cold_start.py
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_model import game_cold_start

from agent_r1_trl.features.games import CountdownEnv

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


if __name__ == "__main__":
    game_cold_start(__file__, __doc__, say, steps=400)

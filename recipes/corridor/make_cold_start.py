"""Make the CPU variant's starting point: a tiny model that sees the light, but not often enough for thirty rooms.

It imitates a player who opens the lit door in most rooms and any of the three in the others. The demonstrations are
pieces of a walk through the whole corridor, as if a dark door ended nothing, in contexts as each policy makes them.
Asked for a summary, the player says which room it is in. It takes two and a half minutes on one core.

    python recipes/corridor/make_cold_start.py
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_model import Messages, cold_start, make_parser, play, read_env

from agent_r1_trl.features.games import GameEnv
from agent_r1_trl.rollout.summaries import HEADING

CARE = 0.83
"""How often the demonstrator looks for the lit door; it opens any of the three otherwise."""
REQUEST = "Where are you?"
"""The recipe's `context.summary_prompt`."""
ROOMS = 11
"""Rooms of a context that was cut: what the recipe's 256 tokens hold."""
SHARES = {"keep": 0.2, "window": 0.3, "summarise": 0.5}
"""Of the demonstrations, by the policy that makes their contexts."""


def say(env: GameEnv, rng: random.Random) -> str:
    """A turn of a player who always looks for the lit door."""
    return env.lit_door


def spoiled(walk: Messages, rng: random.Random) -> Messages:
    """The walk of a player who does not always look, and goes on all the same."""

    def turn(message: dict[str, str]) -> dict[str, str]:
        return message if rng.random() < CARE else {**message, "content": rng.choice(doors)}

    doors = sorted({message["content"] for message in walk if message["role"] == "assistant"})
    return [turn(message) if message["role"] == "assistant" else message for message in walk]


def in_context(walk: Messages, kind: str, rng: random.Random) -> Messages:
    """What a context of this kind holds of a walk.

    Args:
        walk: system, first room, and then a turn and the next room in alternation; the last turn has no answer.
        kind: one of `SHARES`.
        rng: chooses where the context begins, and where a summary is asked for.
    """
    if kind == "keep":
        return walk
    # The first turn follows the first room, which stays in every context, and must fit it: it is imitated, too.
    begin = rng.choice([i for i in range(2, len(walk) - 1, 2) if walk[i] == walk[2]])
    begin = rng.choice([2, begin])
    prompt, piece = walk[:2], walk[begin : begin + 2 * ROOMS + 1]
    if kind == "summarise" and begin > 2:
        prompt = [walk[0], {**walk[1], "content": f"{walk[1]['content']}\n\n{HEADING}{room_name(piece[1])}"}]
    if kind == "summarise" and rng.random() < 0.5:
        piece = piece[: 2 * rng.randint(1, len(piece) // 2)]
        piece += [{"role": "user", "content": REQUEST}, {"role": "assistant", "content": room_name(piece[-1])}]
    return [*prompt, *piece]


def room_name(message: dict[str, str]) -> str:
    """The summary of a player who has just read this."""
    return message["content"].partition(":")[0]


def demonstration(rng: random.Random) -> Messages:
    """A piece of a walk."""
    kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
    return in_context(spoiled(play(make_env, say, rng), rng), kind, rng)


if __name__ == "__main__":
    folder = Path(__file__).resolve().parent
    make_env = read_env(folder / "grpo" / "config_cpu.yaml")
    parser = make_parser(__doc__, out=Path("outputs/corridor/start"), steps=300)
    parser.set_defaults(batch_size=16, context_weight=0.0)
    args = parser.parse_args()
    cold_start(args, demonstration, vocab_size=400, context=512)

"""Make the CPU variant's starting point: a tiny model that sees the light, but not often enough for thirty rooms.

It imitates a player who opens the lit door in most rooms and any of the three in the others. Asked for a summary, the
player says which room it is in. It takes two minutes on one core.

    python recipes/corridor/make_cold_start.py
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_model import Messages, cold_start, make_parser, play, read_env, write_moves

from agent_r1_trl.environments.games import GameEnv
from agent_r1_trl.rollout.summaries import HEADING

CARE = 0.87
"""How often the demonstrator looks for the lit door; it opens any of the three otherwise."""
REQUEST = "Where are you?"
"""The recipe's `summary_prompt`."""
SHARES = {"whole": 0.6, "asked": 0.2, "summarised": 0.2}
"""Of the demonstrations: games without a summary, and the contexts before and after one (docs/long-agents.md)."""


def say(env: GameEnv, rng: random.Random) -> str:
    """A turn of the demonstrator."""
    return write_moves(env, [env.lit_door if rng.random() < CARE else rng.choice(env.actions)])


def with_summary(game: Messages, kind: str, rng: random.Random) -> Messages:
    """The context in which a summary of the game is written, or the one that goes on from it.

    Args:
        game: system, first room, and then a turn and the next room in alternation.
        kind: "whole", "asked" or "summarised".
        rng: chooses the turn after which there is a summary.
    """
    num_answered = len(game) // 2 - 1  # the last turn has no answer
    if kind == "whole" or num_answered < 1:
        return game
    turn = 2 * rng.randint(1, num_answered)
    summary = game[turn + 1]["content"].partition(":")[0]
    if kind == "asked":
        request = [{"role": "user", "content": REQUEST}, {"role": "assistant", "content": summary}]
        return [*game[: turn + 2], *request]
    first = {**game[1], "content": f"{game[1]['content']}\n\n{HEADING}{summary}"}
    return [game[0], first, *game[turn:]]


def demonstration(rng: random.Random) -> Messages:
    """A game of the demonstrator, or what of it a context with a summary holds."""
    kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
    return with_summary(play(make_env, say, rng), kind, rng)


if __name__ == "__main__":
    folder = Path(__file__).resolve().parent
    make_env = read_env(folder / "grpo" / "config_cpu.yaml")
    parser = make_parser(__doc__, out=Path("outputs/corridor/start"), steps=450)
    parser.set_defaults(batch_size=16)
    args = parser.parse_args()
    cold_start(args, demonstration, vocab_size=400, context=512)

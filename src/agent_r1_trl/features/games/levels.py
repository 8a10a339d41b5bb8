"""Data sets of levels: `make_rows("sokoban", 500, seed=0)`."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from agent_r1_trl.features.games.base import GameEnv
from agent_r1_trl.features.games.countdown import CountdownEnv
from agent_r1_trl.features.games.frozen_lake import FrozenLakeEnv
from agent_r1_trl.features.games.sokoban import SokobanEnv

GAMES: dict[str, type[GameEnv]] = {
    "countdown": CountdownEnv,
    "frozen_lake": FrozenLakeEnv,
    "sokoban": SokobanEnv,
}
_DRAWS_PER_LEVEL = 50


def make_rows(
    game: str | type[GameEnv],
    num: int,
    seed: int = 0,
    *,
    exclude: Iterable[Mapping[str, Any]] = (),
    **options: object,
) -> list[dict[str, Any]]:
    """Rows with different levels of a game: `id`, `seed` and `level`.

    Args:
        game: "countdown", "frozen_lake", "sokoban", or a class.
        num: how many.
        seed: other seeds give other levels.
        exclude: rows whose levels, or those of their seeds, are excluded, so that test and training do not share any.
        **options: settings of the environment, such as size=5. Give the environment the same.

    Raises:
        ImportError: a package of the extra `games` is not installed.
        ValueError: there is no such game, or it has not enough different levels with these settings.
    """
    found_class = GAMES.get(game) if isinstance(game, str) else game
    if found_class is None or not issubclass(found_class, GameEnv):
        names = ", ".join(map(repr, GAMES))
        raise ValueError(
            f"game={game!r}: must be one of {names}, or a GameEnv. Rows of others need only a column seed."
        )
    env, name = found_class(**options), game if isinstance(game, str) else game.__name__
    taken = set(map(env.read_row, exclude))
    draws = random.Random(seed)
    found: list[dict[str, Any]] = []
    for _ in range(_DRAWS_PER_LEVEL * num):
        if len(found) == num:
            break
        level_seed = draws.getrandbits(31)
        level = env.new_level(level_seed)
        if level not in taken:
            taken.add(level)
            found.append({"id": f"{name}-{level_seed}", "seed": level_seed, "level": level})
    if len(found) < num:
        raise ValueError(
            f"num={num}: with {options or 'these settings'}, {len(found)} different levels of {name} were found. "
            "Lower num, or choose settings with more levels (a larger size, say)."
        )
    return found

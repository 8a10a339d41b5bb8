"""Data sets of levels."""

import pytest

from agent_r1_trl import ToolEnv
from agent_r1_trl.features.games import make_rows


@pytest.mark.parametrize("game", ["frozen_lake", "sokoban", "countdown"])
def test_levels_are_all_different_and_the_same_for_the_same_seed(game):
    made = make_rows(game, 12, seed=3)
    assert made == make_rows(game, 12, seed=3) and made[:5] == make_rows(game, 5, seed=3)
    assert len({row["level"] for row in made}) == len({row["id"] for row in made}) == 12
    assert made[0] != make_rows(game, 1, seed=4)[0]


def test_a_test_set_shares_no_level_with_the_training_set():
    train = make_rows("sokoban", 60, room=(5, 5), wall_share=0.0)
    test = make_rows("sokoban", 40, exclude=train, room=(5, 5), wall_share=0.0)
    assert not {row["level"] for row in train} & {row["level"] for row in test}
    seeds = [{"seed": row["seed"]} for row in train]
    assert make_rows("sokoban", 40, exclude=seeds, room=(5, 5), wall_share=0.0) == test


def test_a_game_that_is_unknown_or_has_too_few_levels_is_refused():
    with pytest.raises(ValueError, match="game='chess'"):
        make_rows("chess", 1)
    with pytest.raises(ValueError, match=r"game=.*ToolEnv.*GameEnv"):
        make_rows(ToolEnv, 1)
    with pytest.raises(ValueError, match="num=90"):
        make_rows("sokoban", 90, room=(4, 5), wall_share=0.0, min_moves=1)

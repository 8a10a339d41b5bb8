"""FrozenLakeEnv: the map, the slips, the end; against gymnasium's own environment."""

import gymnasium
import numpy
import pytest

from agent_r1_trl.features.games import FrozenLakeEnv
from agent_r1_trl.features.games.frozen_lake import shortest_path
from tests.environments.helpers import finished
from tests.features.games.helpers import CLASSIC, begun, step, written

WAY = ["Down", "Down", "Right", "Right", "Down", "Right"]


def lake(level=CLASSIC, **settings):
    return begun(FrozenLakeEnv, {"level": level}, **{"is_slippery": False, **settings})


def test_the_lake_is_drawn_with_the_player_on_it():
    assert lake().describe() == "P___\n_O_O\n___O\nO__G"
    text = lake(symbols={"ice": ".", "hole": "hole "}).describe()
    assert text == "P...\n.hole .hole \n...hole \nhole ..G"


def test_the_known_way_over_the_known_map_wins():
    env = lake(max_actions_per_turn=6)
    result = step(env, written(*WAY))
    assert result.done and result.reward == 0.0 and env.place == (3, 3)
    assert env.describe().endswith("O__V")
    trajectory = finished()
    assert env.outcome_reward(trajectory) == (1.0, {"success": 1.0})
    assert trajectory.info["num_effective_actions"] == 6.0 and trajectory.info["fell"] == 0.0


def test_a_hole_ends_the_game_without_reward():
    env = lake()
    assert step(env, written("Right", "Down", "Down")).done
    assert env.place == (1, 1) and "_X_O" in env.describe()
    trajectory = finished()
    assert env.outcome_reward(trajectory) == (0.0, {"success": 0.0}) and trajectory.info["fell"] == 1.0


def test_the_shortest_way_goes_round_the_holes():
    assert len(shortest_path(CLASSIC.split("\n"), (0, 0))) == 6
    assert shortest_path(["SH", "HG"], (0, 0)) is None
    env = lake()
    step(env, written("Down"))
    assert len(env.solution()) == 5


@pytest.mark.parametrize(("size", "max_actions"), [(4, 6), (8, 14)])
def test_every_generated_lake_is_crossed_by_its_solution_within_the_actions(size, max_actions):
    env = FrozenLakeEnv(
        size=size, ice_share=0.6, max_actions=max_actions, max_actions_per_turn=max_actions, is_slippery=False
    )
    for seed in range(40):
        env.reset({"seed": seed})
        assert env.level.count("\n") == size - 1
        env.play(env.solution())
        assert env.is_won


def test_it_moves_and_slips_as_gymnasium_does():
    """The same map and seed in gymnasium's own environment, through its front door."""
    env = lake(is_slippery=True, success_rate=0.6, max_actions=1000, max_actions_per_turn=1000)
    twin = gymnasium.make("FrozenLake-v1", desc=CLASSIC.split("\n"), is_slippery=True, success_rate=0.6)
    actions = ["Left", "Down", "Right", "Up"]
    for seed in range(10):
        env.seed(reset_seed=1, dynamics_seed=seed)
        env.reset({"level": CLASSIC})
        env.random.seed(seed)
        twin.reset(seed=env.random.getrandbits(32))
        while not env.is_over:
            action = env.random.choice(actions)
            state, reward, over, *_ = twin.step(actions.index(action))
            env.play([action])
            assert env.place == divmod(int(state), 4) and env.is_over == over and env.is_won == bool(reward)


def test_the_model_is_told_of_the_slipping_only_where_it_slips():
    assert "slippery" in lake(is_slippery=True).rules() and "slippery" not in lake().rules()


def test_a_level_may_be_indented_and_its_seed_numpy_s():
    assert lake("  SF \r\n  FG\r\n").describe() == "P_\n_G"
    assert FrozenLakeEnv().reset({"seed": numpy.int64(3)}) == FrozenLakeEnv().reset({"seed": 3})


def test_the_level_may_be_gymnasium_s_list_of_lines():
    env = FrozenLakeEnv(is_slippery=False)
    prompt = env.reset({"level": gymnasium.envs.toy_text.frozen_lake.MAPS["8x8"]})
    assert prompt[1]["content"].startswith("P_______\n________\n___O____")


def test_the_fix_for_a_large_lake_works_and_a_lake_of_holes_is_refused():
    assert FrozenLakeEnv(size=8, max_actions=20).reset({"seed": 1})
    with pytest.raises(ValueError, match="ice_share"):
        FrozenLakeEnv(size=8, max_actions=14, ice_share=0.01).new_level(1)

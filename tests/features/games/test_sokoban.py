"""SokobanEnv: pushing, rewards by name, levels, solutions."""

import functools

import pytest
from reasoning_gym.games.contrib.sokoban.src.game import Game

from agent_r1_trl.features.games import SokobanEnv
from agent_r1_trl.features.games.sokoban import moves_to_solve, read_level, solve, write_level
from tests.environments.helpers import finished
from tests.features.games.helpers import ROOM, begun, step, text_of, written

TWO = "#######\n#.$@$.#\n#-----#\n#######"


def room(level=ROOM, **settings):
    return begun(SokobanEnv, {"level": level}, **settings)


def test_the_room_is_drawn():
    assert room().describe() == "######\n#_P__#\n#_X__#\n#____#\n#_O__#\n######"
    assert room("####\n#*+#\n#$-#\n####").describe() == "####\n#VS#\n#X_#\n####"
    assert room(symbols={"floor": " ", "box": "[]"}).describe() == "######\n# P  #\n# []  #\n#    #\n# O  #\n######"


def test_each_action_costs_a_box_on_its_target_earns_and_solving_pays_most():
    env = room()
    result = step(env, written("Down", "Down", "Left"))
    assert result.done and env.is_won
    assert result.info["reward_parts"] == {"step": pytest.approx(-0.2), "box_on_target": 1.0}
    trajectory = finished()
    assert env.outcome_reward(trajectory) == (10.0, {"success": 10.0})
    assert trajectory.info["num_actions"] == 2.0 and trajectory.info["boxes_on_target"] == 1.0


def test_a_box_that_leaves_its_target_costs_what_it_earned():
    env = room(TWO, step_reward=0.0, box_reward=2.0)
    assert step(env, written("Left")).info["reward_parts"] == {"step": 0.0, "box_on_target": 2.0}
    env = room("######\n#@*-.#\n#-$--#\n######", step_reward=0.0)
    assert step(env, written("Right")).info["reward_parts"] == {"step": 0.0, "box_off_target": -1.0}


@pytest.mark.parametrize(
    ("level", "action"),
    [
        ("####\n#@.#\n#$-#\n####", "Up"),
        ("####\n#@.#\n#$-#\n####", "Down"),
        ("######\n#@$$.#\n#-.--#\n######", "Right"),
    ],
)
def test_walls_and_two_boxes_in_a_row_do_not_move(level, action):
    env = room(level)
    before = env.state
    result = step(env, written(action))
    assert env.state == before and result.reward == -0.1
    assert (env.num_actions, env.num_effective_actions) == (1, 0)
    assert "Actions left: 9" in text_of(result)


def test_a_box_is_not_pulled():
    env = room()
    step(env, written("Right", "Down", "Right"))
    assert env.state.boxes == {(2, 2)}


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_boxes": 2, "max_actions": 20, "min_moves": 8}, {"room": (7, 5), "wall_share": 0.25, "min_moves": 1}],
)
def test_every_generated_level_is_solved_by_its_solution_in_the_moves_allowed(settings):
    env = SokobanEnv(max_actions_per_turn=99, **settings)
    for seed in range(200 if not settings else 30):
        env.reset({"seed": seed})
        if seed % 10 == 0:  # the search costs milliseconds
            solution = env.solution()
            assert env.min_moves <= len(solution) <= env.max_actions
            env.play(solution)
            assert env.is_won and env.num_effective_actions == len(solution)
        assert env.level.count("$") + env.level.count("*") == env.num_boxes


def test_playing_backwards_finds_the_moves_that_playing_forwards_takes():
    free, targets, state = read_level(TWO, "test")[1:]
    moves = moves_to_solve(free, targets, 12)
    assert moves[state] == len(solve(free, targets, state)) == 3
    for number, (start, expected) in enumerate(moves.items()):
        if number % 7 == 0:
            assert len(solve(free, targets, start)) == expected
    stuck = read_level("####\n#$-#\n#@.#\n####", "test")
    assert stuck[3] not in moves_to_solve(stuck[1], stuck[2], 50) and solve(*stuck[1:]) is None


def test_solutions_solve_in_the_simulator_of_reasoning_gym():
    """Its letters: + wall, X goal, @ box, * player, $ box on goal, % player on goal."""
    letters = str.maketrans("#.$@*+-", "+X@*$%-")
    env = SokobanEnv(num_boxes=2, max_actions=20)
    for seed in range(8):
        env.reset({"seed": seed})
        rows = [list(row) for row in env.level.translate(letters).split("\n")]
        game = Game(height=len(rows), width=len(rows[0]))
        game.load_puzzle_matrix(rows)
        for action in env.solution():
            game.player.update(key=action[0])
        assert game.is_level_complete()


def test_a_level_file_of_others_is_read():
    text = "; 12\n#####\n# @ #\n# $ #\n# . #\n#####\n"
    size, free, targets, state = read_level(text, "test")
    assert size == (5, 5) and targets == {(3, 2)} and state.boxes == {(2, 2)} and len(free) == 9
    assert write_level(size, free, targets, state) == "#####\n#-@-#\n#-$-#\n#-.-#\n#####"
    ragged = "  ####\n###  #\n#@$ .#\n######"
    assert begun(SokobanEnv, {"level": ragged}).solution() == ["Right", "Right"]


def test_a_room_without_such_levels_is_refused_with_a_fix():
    make = functools.partial(SokobanEnv, room=(4, 4), min_moves=9)
    with pytest.raises(ValueError, match="Enlarge the room"):
        make().new_level(1)
    assert make(room=(6, 6)).new_level(1)

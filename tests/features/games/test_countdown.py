"""CountdownEnv: exact values, the rules, and text that is never run."""

import json
from fractions import Fraction

import numpy
import pytest

from agent_r1_trl.features.games import CountdownEnv, countdown
from agent_r1_trl.features.games.countdown import MAX_CHARS, ExpressionError, compute
from tests.environments.helpers import finished
from tests.features.games.helpers import begun, step, text_of, written

LEVEL = json.dumps({"numbers": [3, 7, 25, 25], "target": 46})


def puzzle(**settings):
    return begun(CountdownEnv, {"level": LEVEL}, **settings)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3 * 7 + 25", 46),
        ("(25 - 3) / 7", Fraction(22, 7)),
        ("(25 - 25) * 7 + 3", 3),
        ("-3 + 7", 4),
        ("+7", 7),
        ("3 \u00d7 7 \u2212 25 = 46", -4),
        ("[25 + 7] \u00f7 3", Fraction(32, 3)),
        ("3", 3),
    ],
)
def test_values_are_exact(text, value):
    assert compute(text, [3, 7, 25, 25]) == value


def test_nothing_is_rounded():
    assert compute("1 / 3 * 3", [1, 3, 3]) == 1
    near = 10**16 + 1
    assert compute(f"{near} - {10**16}", [near, 10**16]) == 1


HOSTILE = [
    "__import__('os').system('touch x')", "9**9**9", "3**7", "3//7", "3 % 7", "3 << 7", "7!", "3 if 7 else 25",
    "lambda: 3", "[3, 7]", "(3, 7)", "{3}", "3.0 + 7", "3e7", "0x3", "3_0", "'3'", "f'{3}'", "x", "3 7", "", " ", "()",
    "(" * 150 + "3" + ")" * 150, "(" * 99 + "3", "-" * 199 + "3", "3" * 5000, "\u0663 + 7", "\uff13", "3\n+\n7;7",
    "3 +", "* 3", "abs(3)", "3(7)", "3 and 7", "not 3", "~3", "007", "3 @ 7", "3 := 7", "\ud800", "1j",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_expression_is_refused_and_never_run(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    numbers = [3, 7, 25, 25]
    if text.startswith("-" * 199):
        assert compute(text, numbers) == -3
        return
    with pytest.raises(ExpressionError):
        compute(text, numbers)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["3 + 3", "7 * 8", "25 + 25 + 25", "0 + 3", "10 + 3"])
def test_a_number_that_is_not_given_or_used_too_often_is_refused(text):
    with pytest.raises(ExpressionError, match="not given, or one too often"):
        compute(text, [3, 7, 25, 25])


def test_a_division_by_zero_and_a_number_left_over_are_named():
    with pytest.raises(ExpressionError, match="divides by zero"):
        compute("3 / (25 - 25)", [3, 25, 25])
    with pytest.raises(ExpressionError, match="not use all"):
        compute("3 + 7", [3, 7, 25], must_use_all=True)
    assert compute("25 - 3 * 7", [3, 7, 25], must_use_all=True) == 4


def test_the_longest_expression_is_quick_to_compute():
    numbers = [int("9" * 18)] * 10
    assert compute("*".join(map(str, numbers)), numbers) == numbers[0] ** 10
    assert len("*".join(map(str, numbers))) < MAX_CHARS


def test_the_right_value_wins_and_a_wrong_one_earns_the_format_reward_once():
    env = puzzle(max_actions=3)
    result = step(env, written("25 + 25"))
    assert result.info["reward_parts"] == {"format": 0.1} and not result.done
    assert text_of(result) == "'25 + 25' is 50.\nNumbers: 3, 7, 25, 25\nTarget: 46\nExpressions left: 2"
    assert step(env, written("25 + 7")).reward == 0.0
    assert step(env, written("3 * 7 + 25")).done
    assert env.outcome_reward(finished()) == (1.0, {"success": 1.0})


def test_by_default_there_is_one_attempt_and_what_does_not_count_is_none():
    env = puzzle()
    result = step(env, written("46"))
    assert result.reward == -0.1 and not result.done and "'46' does not count" in text_of(result)
    assert step(env, written("25 + 25")).done and env.outcome_reward(finished()) == (0.0, {"success": 0.0})


def test_every_generated_puzzle_is_solved_by_its_solution():
    env = CountdownEnv(target=(10, 99), max_number=50, must_use_all=True)
    for seed in range(30):
        env.reset({"seed": seed})
        puzzle = json.loads(env.level)
        assert 3 <= len(puzzle["numbers"]) <= 4 and 10 <= puzzle["target"] <= 99 and max(puzzle["numbers"]) <= 50
        env.play(env.solution())
        assert env.is_won


def test_columns_of_other_data_sets_are_read():
    assert begun(CountdownEnv, {"nums": [44, 19, 35], "target": 98}).describe() == "Numbers: 44, 19, 35\nTarget: 98"
    assert begun(CountdownEnv, {"numbers": [1, 2], "target": 3, "nums": None}).solution() is None
    assert begun(CountdownEnv, {"nums": numpy.array([1, 2]), "target": numpy.int64(3)}).describe() == (
        "Numbers: 1, 2\nTarget: 3"
    )


def test_puzzles_that_do_not_exist_are_refused_with_a_fix(monkeypatch):
    monkeypatch.setattr(countdown, "_MAX_DRAWS", 1)
    with pytest.raises(ValueError, match="Widen target or max_number"):
        CountdownEnv(max_number=2, target=(900, 999)).new_level(1)

"""Weighted sums of rewards, with their parts."""

import math

import pytest
import torch

from agent_r1_trl.rewards import compose, exact_match, f1_score


def test_the_parts_add_up_to_the_reward():
    reward = compose({"em": (exact_match, 2.0), "f1": f1_score})
    total, parts = reward("the city of Paris", "Paris")
    assert parts == {"em": 0.0, "f1": 0.5} and total == 0.5
    assert reward("Paris", "Paris") == (3.0, {"em": 2.0, "f1": 1.0})


def test_keyword_arguments_reach_the_functions():
    assert compose({"a": lambda x, y=0: x + y})(1, y=2)[0] == 3.0


def test_booleans_count_as_one_and_zero():
    assert compose({"a": (lambda: True, 0.5)})() == (0.5, {"a": 0.5})


@pytest.mark.parametrize(
    "value",
    [None, "x", "1.5", b"1", math.nan, math.inf, -math.inf, [1], pytest.param(10**400, id="huge"), 1j, torch.ones(2)],
)
def test_a_reward_that_is_not_a_finite_number_is_named(value):
    with pytest.raises(ValueError, match="'broken'"):
        compose({"broken": lambda: value})()


def test_a_tensor_of_one_number_is_a_number():
    assert compose({"a": (lambda: torch.tensor(0.5), 2)})() == (1.0, {"a": 1.0})


def test_a_weighted_reward_that_is_too_large_is_named():
    with pytest.raises(ValueError, match=r"reward 'a' returned 10\.0, times its weight 1e\+308: must be a finite"):
        compose({"a": (lambda: 10.0, 1e308)})()


def test_an_exception_in_a_reward_function_is_not_swallowed():
    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        compose({"a": fail})()


async def asynchronous():
    return 1.0


def test_bad_parts_are_refused():
    for parts in ({}, None, [exact_match]):
        with pytest.raises(ValueError, match=r"compose\("):
            compose(parts)
    for part in (
        5,
        asynchronous,
        (asynchronous, 1.0),
        (exact_match, math.nan),
        (exact_match, "2"),
    ):
        with pytest.raises(ValueError, match=r"compose: .*'a'"):
            compose({"a": part})

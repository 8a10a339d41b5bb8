"""Which groups are trained on, in numbers by hand (`agent_r1_trl.features.sampling.rules`)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1_trl.features.sampling.rules import group_scores, has_signal, select_groups, signal_to_noise
from agent_r1_trl.features.sampling.settings import RULES
from tests.effort import examples

RETURNS = torch.tensor(
    [[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0], [0.2, 0.4, 0.6, 0.8]], dtype=torch.float64
)
NAN = math.nan


def kept(returns, **options):
    """The groups that are kept."""
    return select_groups(torch.as_tensor(returns), **options).nonzero().flatten().tolist()


def test_the_scores_are_those_computed_by_hand():
    assert group_scores(RETURNS).tolist() == pytest.approx([0, 0.577350, 0.5, 0, 0.258199], abs=1e-6)
    assert has_signal(RETURNS).tolist() == [False, True, True, False, True]


@pytest.mark.parametrize(
    "options, groups",
    [
        ({"value": 0.25}, [1]),
        ({"value": 0.1}, [1]),  # at least one
        ({"value": 0.5}, [1, 2]),
        ({"value": 0.6}, [1, 2, 4]),  # 0.6 * 5 is 3, whatever float arithmetic makes of it
        ({"value": 1}, [0, 1, 2, 3, 4]),
        ({"rule": "top_p", "value": 0.81}, [1, 2, 4]),  # 1.0774 < .81 * 1.3355
        ({"rule": "top_p", "value": 0.8}, [1, 2]),  # 1.0774 >= 1.0684
        ({"rule": "top_p", "value": 1.0}, [1, 2, 4]),  # a group without spread is never added
        ({"rule": "min_p", "value": 0.5}, [1, 2]),
        ({"rule": "min_p", "value": 1e-9}, [1, 2, 4]),
    ],
)
def test_each_rule_keeps_the_groups_that_one_finds_by_hand(options, groups):
    assert kept(RETURNS, **options) == groups
    assert kept(RETURNS.float(), **options) == groups


def test_equal_scores_go_to_the_lower_index():
    returns = [[0.0, 1.0], [5.0, 6.0], [7.0, 7.0], [0.1, 1.1]]
    assert kept(returns, value=0.25) == [0]
    assert kept(returns, value=0.5) == [0, 1]
    assert kept(returns, value=0.75) == [0, 1, 3]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "returns", [[[1.0, 1.0], [0.0, 0.0]], [[0.3, 0.1 + 0.2], [0.0, 0.1 + 0.2 - 0.3]], [[NAN, 1.0]] * 2]
)
def test_of_a_batch_without_spread_nothing_is_kept(rule, returns):
    assert kept(torch.tensor(returns, dtype=torch.float64), rule=rule, value=0.5) == []
    assert signal_to_noise(torch.tensor([[1.0, 1.0], [2.0, 2.0]])) == 0.0


def test_members_outside_the_baseline_are_not_counted():
    """[nan 0 1 1] counts as [0 1 1], with a std of .577350; one member left has no signal."""
    returns = torch.tensor([[NAN, 0, 1, 1], [NAN, NAN, NAN, 9], [0, 0, 0, 1]])
    scores = group_scores(returns)
    assert scores[[0, 2]].tolist() == pytest.approx([0.577350, 0.5], abs=1e-6)
    assert scores[1].isnan()
    assert has_signal(returns).tolist() == [True, False, True]
    assert kept(returns, value=0.4) == [0]


def test_groups_without_a_member_in_the_baseline_are_not_among_the_groups():
    returns = torch.tensor([[NAN, NAN], [0, 1], [0, 2.0]])
    assert kept(returns, value=1.0) == [1, 2]
    assert kept(returns, value=0.7) == [2]  # floor(.7 * 2), where .7 * 3 would keep both


def test_the_gates_number_is_computed_by_hand():
    """RV = 0 .333333 .25 0 .066667: mean .13, std .152936."""
    assert signal_to_noise(RETURNS) == pytest.approx(1.176417, abs=1e-6)
    assert math.isnan(signal_to_noise(torch.tensor([[0.0, 1.0]])))
    alone = torch.tensor([[0.0, 1.0], [5.0, 5.0], [3.0, NAN]])  # the last has no group to vary in
    assert signal_to_noise(alone) == pytest.approx(math.sqrt(2))


grid = st.integers(-20, 20).map(lambda number: number / 10)
batches = st.lists(st.lists(grid, min_size=4, max_size=4), min_size=1, max_size=6)
rules = st.fixed_dictionaries(
    {
        "rule": st.sampled_from(RULES),
        "value": st.integers(1, 20).map(lambda number: number / 20),
    }
)


@settings(max_examples=examples(150), deadline=None)
@given(batches, rules, st.sampled_from([-7.3, 0.1, 1000.0, 1e6]), st.sampled_from([1e-6, 3.7, 1e6]))
def test_a_constant_and_a_scale_change_no_choice(batch, options, constant, scale):
    returns = torch.tensor(batch, dtype=torch.float64)
    expected = kept(returns, **options)
    assert kept(returns + constant, **options) == expected
    assert kept(returns * scale, **options) == expected


@settings(max_examples=examples(100), deadline=None)
@given(batches, rules, st.randoms(use_true_random=False))
def test_the_order_of_the_members_changes_no_choice(batch, options, random):
    returns = torch.tensor(batch, dtype=torch.float64)
    order = random.sample(range(4), 4)
    assert kept(returns[:, order], **options) == kept(returns, **options)

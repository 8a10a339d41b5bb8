"""What stands at mask 0 changes no bit of any result, nor does padding; shapes that do not fit are refused."""

import functools

import pytest
import torch

from agent_r1_trl.advantages import (
    compute_bilevel_gae,
    compute_gae,
    compute_gigpo_advantages,
    compute_group_advantages,
    compute_reinforce_pp_baseline_advantages,
    compute_returns_to_go,
    compute_rloo_advantages,
    compute_step_gae,
    compute_turn_group_advantages,
    masked_mean,
    masked_whiten,
)

# Row by row: two turns with an observation between; one token; no token; a turn behind an observation, ends in one.
TURNS = torch.tensor(
    [
        [0, 0, -1, -1, 1, 1, 1, -1],
        [0, -1, -1, -1, -1, -1, -1, -1],
        [-1, -1, -1, -1, -1, -1, -1, -1],
        [-1, 0, 0, -1, 1, -1, -1, -1],
    ]
)
MASK = TURNS >= 0
GROUPS = torch.tensor([5, 5, 5, 5])
ROW_RETURNS = torch.tensor([1.0, 0.0, 0.0, 0.5])
BOOTSTRAP = torch.tensor([0.0, 0.3, 0.7, -0.2])


def tokens(seed):
    return torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed))


def reinforce_pp_baseline(kl_rewards, mask):
    raw = compute_reinforce_pp_baseline_advantages(ROW_RETURNS, GROUPS, mask, kl_rewards=kl_rewards, gamma=0.9)
    return masked_whiten(raw, mask).float()


gae = functools.partial(compute_gae, gamma=0.9, lam=0.8, bootstrap_values=BOOTSTRAP)
bilevel_gae = functools.partial(
    compute_bilevel_gae, gamma_turn=0.95, lam_turn=0.9, gamma=0.99, lam=0.8, bootstrap_values=BOOTSTRAP
)
step_gae = functools.partial(compute_step_gae, gamma_turn=0.95, lam_turn=0.9, bootstrap_values=BOOTSTRAP)

# Each takes token tensors (B, T) and then the mask.
ON_TOKENS = {
    "masked_mean": (masked_mean, 1),
    "masked_whiten": (masked_whiten, 1),
    "gae": (gae, 2),
    "returns_to_go": (functools.partial(compute_returns_to_go, gamma=0.9), 1),
    "reinforce_pp_baseline": (reinforce_pp_baseline, 1),
    "bilevel_gae": (lambda rewards, values, mask: bilevel_gae(rewards, values, mask, pad_turns(mask)), 2),
    "step_gae": (lambda rewards, values, mask: step_gae(rewards, values, mask, pad_turns(mask)), 2),
}
on_tokens = pytest.mark.parametrize("name", ON_TOKENS)


def pad_turns(mask):
    return torch.nn.functional.pad(TURNS, (0, mask.shape[1] - TURNS.shape[1]), value=-1)


def bits(result):
    """The bit patterns of one tensor or a pair, so that -0.0 is not 0.0 and a NaN would equal itself."""
    found = result if isinstance(result, tuple) else (result,)
    assert all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in found)
    return [tensor.view(torch.int32).tolist() for tensor in found]


@on_tokens
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 1e38, -7.0])
def test_nothing_at_mask_0_changes_a_bit(name, poison):
    function, count = ON_TOKENS[name]
    clean = [tokens(seed) for seed in range(count)]
    expected = bits(function(*clean, MASK))
    for index in range(count):
        poisoned = [x.masked_fill(~MASK, poison) if i == index else x for i, x in enumerate(clean)]
        assert bits(function(*poisoned, MASK)) == expected
    changed = [x.masked_fill(MASK, 0.25) for x in clean]
    assert bits(function(*changed, MASK)) != expected  # while action tokens do matter


@on_tokens
@pytest.mark.parametrize("extra", [1, 5, 200])
def test_padding_on_the_right_changes_nothing(name, extra):
    function, count = ON_TOKENS[name]
    inputs = [tokens(seed) for seed in range(count)]
    result = function(*inputs, MASK)
    wide = [torch.nn.functional.pad(x, (0, extra), value=float("nan")) for x in inputs]
    padded = function(*wide, torch.nn.functional.pad(MASK, (0, extra)))
    pairs = zip(*((x if isinstance(x, tuple) else (x,)) for x in (result, padded)), strict=True)
    for narrow, wider in pairs:
        wider = wider[..., : MASK.shape[1]] if wider.dim() else wider
        torch.testing.assert_close(wider, narrow, rtol=1e-6, atol=1e-7)


def test_turn_ids_at_mask_0_are_not_read():
    rewards, values = tokens(0), tokens(1)
    for over_turns in (bilevel_gae, step_gae):
        expected = bits(over_turns(rewards, values, MASK, TURNS))
        assert bits(over_turns(rewards, values, MASK, TURNS.masked_fill(~MASK, 17))) == expected


def test_the_bootstrap_value_of_a_row_without_action_tokens_is_not_read():
    bootstrap = torch.tensor([0.0, 0.0, float("nan"), 0.0])
    for advantages in compute_gae(tokens(0), tokens(1), MASK, gamma=0.9, lam=0.8, bootstrap_values=bootstrap):
        assert advantages.isfinite().all()


@on_tokens
def test_a_batch_without_action_tokens_gives_zeros(name):
    function, count = ON_TOKENS[name]
    result = function(*[torch.full(MASK.shape, float("nan"))] * count, torch.zeros_like(MASK))
    for tensor in result if isinstance(result, tuple) else (result,):
        assert (tensor == 0).all()


def test_whitening_takes_its_statistics_from_what_is_counted():
    x, mask = torch.tensor([[1.0, 99.0, 3.0], [7.0, 5.0, 99.0]]), torch.tensor([[1, 0, 1], [1, 1, 0]])
    found = masked_whiten(x, mask, torch.tensor([[1, 1, 1], [0, 0, 1]]))  # mean 2, variance 2
    expected = torch.tensor([[-(0.5**0.5), 0, 0.5**0.5], [5 * 0.5**0.5, 3 * 0.5**0.5, 0]])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert not masked_whiten(x, mask, torch.tensor([[1, 1, 0], [0, 0, 1]])).any(), "one entry has no spread"


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_masked_entries_whiten_to_zero(count):
    mask = torch.tensor([[1, 0, 0]]) * count
    assert masked_whiten(torch.tensor([[4.0, float("nan"), 2.0]]), mask).tolist() == [[0, 0, 0]]


def test_whitening_equal_numbers_gives_zero_and_not_nan():
    assert masked_whiten(torch.full((2, 3), 0.1), torch.ones(2, 3)).abs().max() < 1e-6


def test_the_masked_mean_carries_gradients_to_masked_entries_only():
    x = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    masked_mean(x, torch.tensor([1, 0, 1])).backward()
    assert x.grad.tolist() == [0.5, 0, 0.5]


def test_estimators_build_no_graph():
    values = tokens(1).requires_grad_()
    for result in (*gae(tokens(0), values, MASK), *bilevel_gae(tokens(0), values, MASK, TURNS)):
        assert not result.requires_grad


B, T = MASK.shape
ZEROS = torch.zeros(B, T)
ROWS = torch.zeros(B)
PER_TURN = torch.zeros(B, 2)
MISFITS = {
    "mean": lambda: masked_mean(ZEROS, MASK[:, :1]),
    "whiten": lambda: masked_whiten(ZEROS, MASK[0]),
    "gae values": lambda: gae(ZEROS, ZEROS[:, 1:], MASK),
    "gae bootstrap": lambda: compute_gae(ZEROS, ZEROS, MASK, gamma=1, lam=1, bootstrap_values=ROWS.unsqueeze(1)),
    "bilevel turns": lambda: bilevel_gae(ZEROS, ZEROS, MASK, TURNS[:, :-1]),
    "step turns": lambda: step_gae(ZEROS, ZEROS, MASK, TURNS[:, :-1]),
    "returns": lambda: compute_returns_to_go(ZEROS, MASK[:1], gamma=1),
    "baseline rows": lambda: compute_reinforce_pp_baseline_advantages(ROWS[1:], GROUPS[1:], MASK),
    "baseline kl": lambda: compute_reinforce_pp_baseline_advantages(ROWS, GROUPS, MASK, kl_rewards=ZEROS[:, 1:]),
    "group": lambda: compute_group_advantages(ROWS, GROUPS[1:]),
    "rloo": lambda: compute_rloo_advantages(ROWS, GROUPS[1:]),
    "turn group outcome": lambda: compute_turn_group_advantages(PER_TURN, ROWS[:1], TURNS, GROUPS, gamma_turn=1),
    "turn group turns": lambda: compute_turn_group_advantages(PER_TURN[1:], ROWS, TURNS, GROUPS, gamma_turn=1),
    "gigpo anchors": lambda: compute_gigpo_advantages(PER_TURN, TURNS, TURNS, GROUPS, gamma_turn=1, step_weight=1),
    "gigpo groups": lambda: compute_gigpo_advantages(
        PER_TURN, PER_TURN.long(), TURNS, GROUPS[:1], gamma_turn=1, step_weight=1
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_shapes_that_do_not_fit_are_refused_by_name(misfit):
    with pytest.raises(ValueError, match=r"\w+ (has shape )?\(\d"):
        MISFITS[misfit]()


def test_a_turn_without_a_column_of_rewards_is_refused():
    with pytest.raises(ValueError, match=r"turn_ids.*turn_rewards"):
        compute_turn_group_advantages(PER_TURN[:, :1], ROWS, TURNS, GROUPS, gamma_turn=1)

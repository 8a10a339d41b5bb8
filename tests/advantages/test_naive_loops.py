"""Every estimator against plain Python loops over tokens, turns and trajectories, on 1,000 random ragged masks.

Covered: rows without action tokens, turns of one token, trajectories that end in observations, padding of any length,
rewards on any action token, bool, int and float masks; NaN stands wherever the mask is 0.
The loops below are written from the definitions (double sums, no recursion) and share no code with the package.
"""

import math
import random
from collections.abc import Iterator

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
from tests.effort import examples, random_rounds

pytestmark = pytest.mark.fuzz
ROWS, BATCHES = 8, 125
NAN = float("nan")


class Batch:
    """ROWS trajectories in two or three prompt groups, in shuffled order."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        layouts = [self.draw_layout(rng) for _ in range(ROWS)]
        self.length = max(1, *(len(layout) for layout in layouts)) + rng.randint(0, 3)
        self.turn_id_rows = [layout + [-1] * (self.length - len(layout)) for layout in layouts]
        self.num_turns = [max([-1, *layout]) + 1 for layout in layouts]
        self.positions = [[t for t, turn in enumerate(row) if turn >= 0] for row in self.turn_id_rows]
        self.turn_ids = torch.tensor(self.turn_id_rows)  # (B, T)
        kind = rng.choice([torch.bool, torch.int64, torch.float32])
        self.mask = (self.turn_ids >= 0).to(kind)  # (B, T)
        self.rewards, self.values = self.draw_tokens(), self.draw_tokens()
        self.bootstrap = torch.tensor([rng.choice([0.0, rng.gauss(0, 1)]) for _ in range(ROWS)])
        self.group_ids = torch.tensor([rng.choice([7, 7, -3, 40]) for _ in range(ROWS)])
        self.turn_columns = max(1, *self.num_turns) + rng.randint(0, 2)
        self.gammas = [rng.choice([1.0, 0.99, 0.9, 0.5]) for _ in range(4)]

    @staticmethod
    def draw_layout(rng: random.Random) -> list[int]:
        """Turn ids of one trajectory: turns of 1 to 6 tokens with observations between, before and after them."""
        layout: list[int] = [-1] * rng.choice([0, 0, 1])
        for turn in range(rng.choice([0, 1, 1, 2, 3, 5])):
            layout += [turn] * rng.choice([1, 1, 2, 3, 6]) + [-1] * rng.randint(1, 4)
        return layout[: len(layout) - rng.choice([0, 1])] if rng.random() < 0.5 else layout

    def draw_tokens(self) -> torch.Tensor:
        """(B, T) noise on action tokens, NaN elsewhere."""
        return torch.tensor(
            [[self.rng.gauss(0, 1) if turn >= 0 else NAN for turn in row] for row in self.turn_id_rows]
        )

    def draw_returns(self) -> torch.Tensor:
        """(B,) returns with ties; one in ten is outside the baseline."""
        draw = [self.rng.choice([0.0, 1.0, self.rng.gauss(0, 1)]) for _ in range(ROWS)]
        return torch.tensor([NAN if self.rng.random() < 0.1 else value for value in draw])

    def draw_turn_rewards(self) -> torch.Tensor:
        """(B, K) process rewards, 0 behind a row's last turn."""
        return torch.tensor(
            [
                [self.rng.choice([0.0, 0.5, self.rng.gauss(0, 1)]) * (k < turns) for k in range(self.turn_columns)]
                for turns in self.num_turns
            ]
        )

    def members(self, row: int, in_baseline: list[bool]) -> list[int]:
        """Rows of the same group that stayed in the baseline."""
        ids = self.group_ids.tolist()
        return [other for other in range(ROWS) if ids[other] == ids[row] and in_baseline[other]]

    def spread(self, per_row: list[float]) -> torch.Tensor:
        """(B, T): a row's number on each of its action tokens."""
        out = torch.zeros(ROWS, self.length, dtype=torch.float64)
        for row, positions in enumerate(self.positions):
            for t in positions:
                out[row, t] = per_row[row]
        return out


def batches() -> Iterator[Batch]:
    for rng in random_rounds(BATCHES):
        yield Batch(rng)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- the loops


def naive_mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def naive_std(numbers: list[float]) -> float:
    """Bessel-corrected."""
    mean = naive_mean(numbers)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))


def naive_gae(rewards: list[float], values: list[float], after: float, gamma: float, lam: float) -> list[float]:
    """Advantages of a sequence whose every element is a step: sum_l (gamma * lam)^l * delta_{i + l}."""
    values = [*values, after]
    deltas = [reward + gamma * values[i + 1] - values[i] for i, reward in enumerate(rewards)]
    return [math.fsum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(deltas))) for i in range(len(deltas))]


def naive_whiten(x: torch.Tensor, positions: list[list[int]]) -> torch.Tensor:
    places = [(row, t) for row, found in enumerate(positions) for t in found]
    numbers = [float(x[place]) for place in places]
    out = torch.zeros_like(x, dtype=torch.float64)
    if len(numbers) < 2:
        return out
    for place, number in zip(places, numbers, strict=True):
        out[place] = (number - naive_mean(numbers)) / math.sqrt(naive_std(numbers) ** 2 + 1e-8)
    return out


def naive_returns(batch: Batch, rewards: torch.Tensor, gamma: float) -> torch.Tensor:
    out = torch.zeros_like(rewards, dtype=torch.float64)
    for row, positions in enumerate(batch.positions):
        for i, t in enumerate(positions):
            later = positions[i:]
            out[row, t] = math.fsum(gamma**step * float(rewards[row, p]) for step, p in enumerate(later))
    return out


def naive_relative(value: float, peers: list[float]) -> float:
    """(value - mean) / (std + 1e-4) of the peers, 0 where they have no spread."""
    if len(peers) < 2 or naive_std(peers) <= 1e-6 * max(map(abs, peers)):
        return 0.0
    return (value - naive_mean(peers)) / (naive_std(peers) + 1e-4)


def naive_discounted(rewards: list[float], gamma: float) -> list[float]:
    return [math.fsum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


# ---------------------------------------------------------------- the comparisons


def test_the_random_masks_hold_the_odd_cases():
    drawn = list(batches())
    rows = [(batch, row) for batch in drawn for row in range(ROWS)]
    assert len(rows) == ROWS * examples(BATCHES)
    least = examples(50)
    assert sum(not batch.positions[row] for batch, row in rows) > least
    assert sum(batch.turn_id_rows[row].count(0) == 1 for batch, row in rows) > least
    assert sum(bool(batch.positions[row]) and batch.turn_id_rows[row][0] == -1 for batch, row in rows) > least
    assert sum(max(batch.num_turns) >= 3 for batch in drawn) > least
    assert (
        sum(bool(batch.positions[row]) and batch.positions[row][-1] < batch.length - 1 for batch, row in rows) > least
    )


def test_masked_mean_and_whitening():
    for batch in batches():
        expected = naive_whiten(batch.rewards, batch.positions)
        assert_same(masked_whiten(batch.rewards, batch.mask), expected)
        numbers = [float(batch.rewards[row, t]) for row in range(ROWS) for t in batch.positions[row]]
        assert masked_mean(batch.rewards, batch.mask).item() == pytest.approx(naive_mean(numbers or [0.0]), abs=1e-6)


@pytest.mark.parametrize("has_bootstrap", [False, True])
def test_gae(has_bootstrap):
    for batch in batches():
        gamma, lam, *_ = batch.gammas
        bootstrap = batch.bootstrap if has_bootstrap else None
        expected = torch.zeros(ROWS, batch.length, dtype=torch.float64)
        targets = torch.zeros_like(expected)
        for row, positions in enumerate(batch.positions):
            after = float(batch.bootstrap[row]) if has_bootstrap else 0.0
            rewards, values = (x[row, positions].tolist() for x in (batch.rewards, batch.values))
            found = naive_gae(rewards, values, after, gamma, lam)
            for t, advantage, value in zip(positions, found, values, strict=True):
                expected[row, t], targets[row, t] = advantage, advantage + value
        advantages, returns = compute_gae(
            batch.rewards, batch.values, batch.mask, gamma=gamma, lam=lam, bootstrap_values=bootstrap
        )
        assert_same(advantages, expected)
        assert_same(returns, targets)


@pytest.mark.parametrize("has_bootstrap", [False, True])
def test_bilevel_gae(has_bootstrap):
    for batch in batches():
        gamma_turn, lam_turn, gamma, lam = batch.gammas
        expected = torch.zeros(ROWS, batch.length, dtype=torch.float64)
        targets = torch.zeros_like(expected)
        for row, turn_ids in enumerate(batch.turn_id_rows):
            after = float(batch.bootstrap[row]) if has_bootstrap else 0.0
            tokens = [[t for t, turn in enumerate(turn_ids) if turn == k] for k in range(batch.num_turns[row])]
            turn_rewards = [math.fsum(batch.rewards[row, found].tolist()) for found in tokens]
            end_values = [float(batch.values[row, found[-1]]) for found in tokens]
            of_turns = naive_gae(turn_rewards, end_values, after, gamma_turn, lam_turn)
            for found, advantage, end_value in zip(tokens, of_turns, end_values, strict=True):
                values = batch.values[row, found].tolist()
                only_at_the_end = [0.0] * (len(found) - 1) + [advantage + end_value]
                of_tokens = naive_gae(only_at_the_end, values, 0.0, gamma, lam)
                for t, token_advantage, value in zip(found, of_tokens, values, strict=True):
                    expected[row, t], targets[row, t] = token_advantage, token_advantage + value
        advantages, returns = compute_bilevel_gae(
            batch.rewards,
            batch.values,
            batch.mask,
            batch.turn_ids,
            gamma_turn=gamma_turn,
            lam_turn=lam_turn,
            gamma=gamma,
            lam=lam,
            bootstrap_values=batch.bootstrap if has_bootstrap else None,
        )
        assert_same(advantages, expected)
        assert_same(returns, targets)


@pytest.mark.parametrize("has_bootstrap", [False, True])
def test_step_gae(has_bootstrap):
    for batch in batches():
        gamma_turn, lam_turn, *_ = batch.gammas
        expected = torch.zeros(ROWS, batch.length, dtype=torch.float64)
        targets = torch.zeros_like(expected)
        for row, turn_ids in enumerate(batch.turn_id_rows):
            after = float(batch.bootstrap[row]) if has_bootstrap else 0.0
            tokens = [[t for t, turn in enumerate(turn_ids) if turn == k] for k in range(batch.num_turns[row])]
            rewards = [math.fsum(batch.rewards[row, found].tolist()) for found in tokens]
            values = [float(batch.values[row, found[0]]) for found in tokens]
            of_turns = naive_gae(rewards, values, after, gamma_turn, lam_turn)
            for found, advantage, value in zip(tokens, of_turns, values, strict=True):
                expected[row, found], targets[row, found] = advantage, advantage + value
        advantages, returns = compute_step_gae(
            batch.rewards,
            batch.values,
            batch.mask,
            batch.turn_ids,
            gamma_turn=gamma_turn,
            lam_turn=lam_turn,
            bootstrap_values=batch.bootstrap if has_bootstrap else None,
        )
        assert_same(advantages, expected)
        assert_same(returns, targets)


def test_returns_to_go():
    for batch in batches():
        gamma = batch.gammas[0]
        expected = naive_returns(batch, batch.rewards, gamma)
        assert_same(compute_returns_to_go(batch.rewards, batch.mask, gamma=gamma), expected)


@pytest.mark.parametrize("has_kl", [False, True])
def test_reinforce_pp_with_a_group_baseline(has_kl):
    for batch in batches():
        gamma, returns = batch.gammas[0], batch.draw_returns().tolist()
        in_baseline = [not math.isnan(value) for value in returns]
        centred = []
        for row in range(ROWS):
            peers = [returns[other] for other in batch.members(row, in_baseline)]
            has_spread = in_baseline[row] and naive_relative(returns[row], peers) != 0
            centred.append(returns[row] - naive_mean(peers) if has_spread else 0.0)
        expected = batch.spread(centred)
        if has_kl:
            expected += naive_returns(batch, batch.rewards, gamma)
        in_mask = torch.zeros(ROWS, batch.length)
        for row, found in enumerate(batch.positions):
            in_mask[row, found if in_baseline[row] else []] = 1
        found = compute_reinforce_pp_baseline_advantages(
            torch.tensor(returns),
            batch.group_ids,
            batch.mask,
            kl_rewards=batch.rewards if has_kl else None,
            gamma=gamma,
        )
        assert_same(found.float(), expected * in_mask)


def test_group_advantages_and_rloo():
    for batch in batches():
        returns = batch.draw_returns().tolist()
        in_baseline = [not math.isnan(value) for value in returns]
        whole = [value for value in returns if value == value]
        expected: dict[str, list[float]] = {"group": [], "batch": [], "none": [], "rloo": []}
        for row, value in enumerate(returns):
            peers = [returns[other] for other in batch.members(row, in_baseline)]
            others = [returns[other] for other in batch.members(row, in_baseline) if other != row]
            relative = naive_relative(value, peers) if in_baseline[row] else 0.0
            has_spread = in_baseline[row] and len(set(peers)) > 1
            expected["group"].append(relative)
            expected["none"].append(value - naive_mean(peers) if has_spread else 0.0)
            expected["batch"].append(expected["none"][-1] / (naive_std(whole) + 1e-4) if has_spread else 0.0)
            expected["rloo"].append(value - naive_mean(others) if has_spread else 0.0)
        for scale in ("group", "batch", "none"):
            found = compute_group_advantages(torch.tensor(returns), batch.group_ids, scale=scale)
            assert_same(found, torch.tensor(expected[scale], dtype=torch.float64))
        found = compute_rloo_advantages(torch.tensor(returns), batch.group_ids)
        assert_same(found, torch.tensor(expected["rloo"], dtype=torch.float64))


def test_turn_group_advantages():
    for batch in batches():
        gamma, turn_rewards, outcome = batch.gammas[0], batch.draw_turn_rewards(), batch.draw_returns()
        in_baseline = [value == value for value in outcome.tolist()]
        process = [naive_discounted(row, gamma) for row in turn_rewards.tolist()]
        expected = torch.zeros(ROWS, batch.length, dtype=torch.float64)
        for row, turn_ids in enumerate(batch.turn_id_rows):
            if not in_baseline[row]:
                continue
            members = batch.members(row, in_baseline)
            by_outcome = naive_relative(float(outcome[row]), [float(outcome[other]) for other in members])
            whole = [process[other][0] for other in members]
            for t, turn in enumerate(turn_ids):
                if turn >= 0:
                    expected[row, t] = by_outcome + naive_relative(process[row][turn], whole)
        found = compute_turn_group_advantages(turn_rewards, outcome, batch.turn_ids, batch.group_ids, gamma_turn=gamma)
        assert_same(found, expected)


def test_gigpo_advantages():
    for batch in batches():
        gamma, turn_rewards = batch.gammas[0], batch.draw_turn_rewards()
        anchors = [
            [batch.rng.choice([-1, 0, 0, 1]) if k < turns else -1 for k in range(batch.turn_columns)]
            for turns in batch.num_turns
        ]
        outside = batch.rng.choice([None, *range(ROWS)])
        if outside is not None:
            turn_rewards[outside, 0] = NAN
        in_baseline = [row != outside for row in range(ROWS)]
        returns = [naive_discounted(row, gamma) for row in turn_rewards.tolist()]
        expected = torch.zeros(ROWS, batch.length, dtype=torch.float64)
        for row, turn_ids in enumerate(batch.turn_id_rows):
            if not in_baseline[row]:
                continue
            members = batch.members(row, in_baseline)
            episode = naive_relative(
                math.fsum(turn_rewards[row].tolist()), [math.fsum(turn_rewards[other].tolist()) for other in members]
            )
            for t, turn in enumerate(turn_ids):
                if turn < 0:
                    continue
                peers = [
                    returns[other][k]
                    for other in members
                    for k, anchor in enumerate(anchors[other])
                    if anchor == anchors[row][turn] and anchor >= 0
                ]
                step = naive_relative(returns[row][turn], peers) if anchors[row][turn] >= 0 else 0.0
                expected[row, t] = episode + 0.7 * step
        found = compute_gigpo_advantages(
            turn_rewards, torch.tensor(anchors), batch.turn_ids, batch.group_ids, gamma_turn=gamma, step_weight=0.7
        )
        assert_same(found, expected)

"""A trajectory of several seats is to every estimator as if each seat had played a trajectory alone."""

import random

import pytest
import torch

from agent_r1_trl.advantages.estimators import ESTIMATORS, Credit, CreditInputs, CreditSettings
from agent_r1_trl.advantages.seats import SeatRows

PER_TOKEN = ("process_token_rewards", "outcome_token_rewards", "values")


def drawn(rng, num_turns):
    """Turns of one trajectory: (seat, tokens, reward, anchor); every token has an observation behind it."""
    return [(rng.choice([5, 9]), rng.randrange(1, 4), rng.random(), rng.randrange(3)) for _ in range(num_turns)]


def inputs_of(games, outcomes, groups, values, *, seats=None):
    """Inputs of trajectories that are lists of drawn turns; `values`: one for each of their tokens."""
    length, width = max(sum(n + 1 for _, n, _, _ in game) for game in games), max(map(len, games))
    table = {name: torch.zeros(len(games), length, dtype=torch.float64) for name in PER_TOKEN}
    table |= {"turn_ids": torch.full((len(games), length), -1)}
    turns = {name: torch.zeros(len(games), width, dtype=torch.float64) for name in ("turn_rewards", "seat_outcomes")}
    turns |= {name: torch.full((len(games), width), -1) for name in ("anchor_ids", "turn_seats")}
    for row, game in enumerate(games):
        position, given = 0, iter(values[row])
        for number, (seat, count, reward, anchor) in enumerate(game):
            for last in range(position, position + count):
                table["turn_ids"][row, last] = number
                table["values"][row, last] = next(given)
            table["process_token_rewards"][row, last] = turns["turn_rewards"][row, number] = reward
            turns["anchor_ids"][row, number], turns["turn_seats"][row, number] = anchor, seat
            turns["seat_outcomes"][row, number] = outcomes[row][seat]
            position += count + 1
        if seats is None:
            table["outcome_token_rewards"][row, last] = outcomes[row][game[0][0]]
    pairs = zip(outcomes, games, strict=True)
    whole = [sum(found.values()) / len(found) if seats else found[game[0][0]] for found, game in pairs]
    if not seats:
        del turns["turn_seats"], turns["seat_outcomes"]
    return CreditInputs(
        mask=table["turn_ids"] >= 0, group_ids=torch.tensor(groups), outcome_rewards=torch.tensor(whole).double(),
        settings=CreditSettings(gamma=0.9, gamma_turn=0.8, lam=0.7, lam_turn=0.6), **table, **turns,
    )  # fmt: skip


@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_seat_is_a_row_of_its_own(name):
    for seed in range(20):
        rng = random.Random(seed)
        games = [drawn(rng, rng.randrange(1, 6)) for _ in range(6)]
        outcomes = [{5: rng.random(), 9: rng.random()} for _ in games]
        values = [[rng.random() for _ in range(20)] for _ in games]
        rows = SeatRows(inputs_of(games, outcomes, [0, 0, 0, 1, 1, 1], values, seats=True))
        joined = rows.joined(ESTIMATORS[name].estimate(rows.inputs))

        alone, where = [], []
        for row, game in enumerate(games):
            for seat in sorted({turn[0] for turn in game}):
                own, tokens, position = [], [], 0
                for turn in game:
                    if turn[0] == seat:
                        own.append(turn)
                        tokens += range(position, position + turn[1])
                    position += turn[1] + 1
                in_order = [place for place, _ in enumerate_tokens(game) if place in tokens]
                said = [number for number, (place, _) in enumerate(enumerate_tokens(game)) if place in tokens]
                alone.append((own, outcomes[row], (row // 3) * 10 + seat, [values[row][number] for number in said]))
                where.append((row, in_order))
        expected = ESTIMATORS[name].estimate(inputs_of(*(list(column) for column in zip(*alone, strict=True))))
        for index, (row, tokens) in enumerate(where):
            own = expected.advantages[index][[place for place, _ in enumerate_tokens(alone[index][0])]]
            assert joined.advantages[row, tokens].tolist() == pytest.approx(own.tolist(), abs=1e-6), (name, seed)


def enumerate_tokens(game):
    """(place, turn) of the sampled tokens of a trajectory."""
    position = 0
    for turn in game:
        for place in range(position, position + turn[1]):
            yield place, turn
        position += turn[1] + 1


def test_trajectories_without_seats_stay_what_they_are():
    inputs = inputs_of([[(0, 2, 0.5, 1)]], [{0: 1.0}], [0], [[0.1, 0.2]], seats=True)
    rows, credit = SeatRows(inputs), Credit(advantages=torch.ones(1, 3))
    assert rows.inputs is inputs and rows.joined(credit) is credit

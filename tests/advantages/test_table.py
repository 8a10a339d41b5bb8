"""The table of estimators: what its rows promise, how one is found, and what is refused in a user's own."""

import copy
import functools
import pickle
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from agent_r1_trl.advantages import compute_group_advantages
from agent_r1_trl.advantages.estimators import (
    ESTIMATORS,
    Credit,
    CreditInputs,
    CreditSettings,
    Estimator,
    find_estimator,
)
from agent_r1_trl.objects import OwnObject
from agent_r1_trl.trainers import MultiTurnPPOConfig

NAN = float("nan")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "advantages.md"


def example(**changes):
    """Two groups of two; the last row is outside the baseline, the last column is padding.

    tokens = A0 E A1 pad      (A: sampled in that turn, E: observation)
    """
    turn_rewards = torch.tensor([[0.5, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.5]])
    outcome_rewards = torch.tensor([1.0, 0.0, 0.5, NAN])
    process, outcome = torch.zeros(4, 4), torch.zeros(4, 4)
    process[:, [0, 2]] = turn_rewards
    outcome[:, 2] = outcome_rewards.nan_to_num(7.0)
    inputs = {
        "mask": torch.tensor([[1, 0, 1, 0]] * 3 + [[0, 0, 0, 0]]).bool(),
        "turn_ids": torch.tensor([[0, -1, 1, -1]] * 4),
        "group_ids": torch.tensor([0, 0, 1, 1]),
        "process_token_rewards": process,
        "outcome_token_rewards": outcome,
        "turn_rewards": turn_rewards,
        "outcome_rewards": outcome_rewards,
        "anchor_ids": torch.tensor([[3, 5]] * 4),
        "values": torch.tensor([[0.1, NAN, 0.2, NAN]] * 4),
    }
    return CreditInputs(**inputs | changes)


# -------------------------------------------------------------------- the rows


def test_every_row_gives_credit_inside_the_mask_alone():
    for row in ESTIMATORS.values():
        for inputs in (example(), example().only("process"), example().only("outcome")):
            credit = row.estimate(inputs)
            assert credit.advantages.shape == (4, 4)
            assert (credit.advantages[~inputs.mask] == 0).all(), row.name
            assert (credit.returns is not None) == row.needs_critic, row.name
        assert credit.advantages[0, 0] > 0, row.name


def test_every_row_reads_the_settings_that_it_lists_and_no_others():
    changed = {
        "gamma": 0.5,
        "gamma_turn": 0.3,
        "lam": 0.2,
        "lam_turn": 0.1,
        "step_weight": 7.0,
        "scale_rewards": "none",
    }
    assert set(changed) == {item.name for item in fields(CreditSettings)} - {"whiten_advantages"}
    # Two tokens in each turn, and two turns, so that every discount shows.
    long = {
        "mask": torch.ones(2, 4).bool(),
        "turn_ids": torch.tensor([[0, 0, 1, 1]] * 2),
        "group_ids": torch.tensor([0, 0]),
        "process_token_rewards": torch.tensor([[0, 0.5, 0, 1], [0, 0, 0, 0.25]]),
        "outcome_token_rewards": torch.tensor([[0, 0, 0, 1.0], [0, 0, 0, 0]]),
        "turn_rewards": torch.tensor([[0.5, 1.0], [0.0, 0.25]]),
        "outcome_rewards": torch.tensor([1.0, 0.0]),
        "anchor_ids": torch.tensor([[3, 3], [3, 3]]),
        "kl_rewards": torch.tensor([[-0.1, -0.2, -0.3, -0.4], [-0.2, 0.1, 0, 0]]),
        "values": torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.2, 0.3]]),
    }
    for row in ESTIMATORS.values():
        before = row.estimate(CreditInputs(**long)).advantages
        for name, value in changed.items():
            after = row.estimate(CreditInputs(**long, settings=CreditSettings(**{name: value}))).advantages
            assert torch.equal(before, after) != (name in row.options), (row.name, name)
        without_kl = row.estimate(CreditInputs(**long | {"kl_rewards": None})).advantages
        assert torch.equal(before, without_kl) != row.reads_token_rewards, row.name
        alone = row.estimate(CreditInputs(**long | {"group_ids": torch.tensor([0, 1])})).advantages
        assert torch.equal(before, alone) != row.needs_group, row.name


def test_every_row_is_documented_and_its_settings_are_training_arguments():
    table = PAGE.read_text(encoding="utf-8").split("\n\n")[2].splitlines()
    needs = {(True, False): "groups", (False, True): "a critic", (False, False): "nothing"}
    expected = ["| `advantage_estimator` | trainer | baseline | credit | reads | needs |", "|---|---|---|---|---|---|"]
    for row in ESTIMATORS.values():
        trainer, default = ("PPO", "gae") if row.needs_critic else ("GRPO", "grpo")
        name = f"`{row.name}`" + (" (default)" if row.name == default else "")
        options = ", ".join(f"`{option}`" for option in row.options)
        cells = [name, trainer, row.baseline, row.credit, options, needs[row.needs_group, row.needs_critic]]
        expected.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
        assert row.papers and {*row.options, *row.ignores} <= set(MultiTurnPPOConfig.__dataclass_fields__), row.name
    assert table == expected


# -------------------------------------------------------------------- finding one


def own(inputs):
    return Credit(advantages=compute_group_advantages(inputs.returns, inputs.group_ids))


def scaled(inputs, factor):
    return Credit(advantages=factor * own(inputs).advantages)


OWN_ROW = Estimator(name="own_row", compute=own, needs_group=True)


def test_an_estimator_is_found_by_name_by_path_or_as_an_object():
    for given, name, compute in (
        ("grpo", "grpo", ESTIMATORS["grpo"].compute),
        ("tests.advantages.naive_estimator.one", "tests.advantages.naive_estimator.one", None),
        ("tests.advantages.naive_estimator:one", "tests.advantages.naive_estimator:one", None),
        ("tests.advantages.naive_estimator.ROW", "naive", None),
        (own, f"{__name__}:own", own),
        (OWN_ROW, "own_row", own),
        (functools.partial(scaled, factor=2), f"{__name__}:scaled(factor=2)", None),
    ):
        row = find_estimator(given, has_critic=False)
        assert row.name == name
        assert compute is None or row.compute is compute
        assert row.estimate(example()).advantages.shape == (4, 4)
    assert find_estimator(own, has_critic=True).needs_critic


def test_a_path_leads_into_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "my_estimators_here.py").write_text("def mine(inputs): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    assert find_estimator("my_estimators_here.mine", has_critic=False).compute.__name__ == "mine"


def test_what_is_no_estimator_is_refused():
    for given in (
        "a2c", "no_such_module.fn", "tests.advantages.naive_estimator.missing", "math.pi", 3,
        f"{__name__}:scaled(...)",
        compute_group_advantages, lambda: None, Estimator(name="grpo", compute=own),
        Estimator(name="both", compute=own, needs_critic=True, weighs_parts=True),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="advantage_estimator"):
            find_estimator(given, has_critic=False)


def test_the_name_of_an_object_is_a_string_that_keeps_its_row_until_it_is_stored():
    name = OwnObject.of("advantage_estimator", Estimator(name="own", compute=lambda inputs: None), "mine")
    assert find_estimator(copy.deepcopy(name), has_critic=False) is name.target
    stored = pickle.loads(pickle.dumps(name))
    assert (type(stored), stored) == (str, "mine")


# -------------------------------------------------------------------- what a user's function returns


def test_one_number_per_trajectory_reaches_its_tokens_and_nothing_else():
    row = Estimator(name="own", compute=lambda inputs: Credit(advantages=torch.tensor([1.0, 2.0, 3.0, NAN])))
    assert row.estimate(example()).advantages.tolist() == [[1, 0, 1, 0], [2, 0, 2, 0], [3, 0, 3, 0], [0, 0, 0, 0]]


def test_what_an_estimator_must_not_return_is_refused_with_its_name_and_the_fix():
    whole, nan = torch.zeros(4, 4), torch.full((4, 4), NAN)
    for returned, needs_critic, parts in (
        (None, False, "returned a NoneType. Return Credit("),
        (whole, False, "returned a Tensor. Return Credit("),
        (Credit(advantages=[0.0] * 4), False, "advantages that are a list"),
        (Credit(advantages=torch.zeros(4, 3)), False, "advantages of shape (4, 3). Return shape (4, 4)"),
        (Credit(advantages=torch.zeros(4, 1)), False, "or (4,) for one number per trajectory"),
        (Credit(advantages=nan), False, "advantages of which 6 at mask 1 are not finite. Look for"),
        (Credit(advantages=whole), True, "no returns"),
        (Credit(advantages=whole, returns=torch.zeros(4)), True, "returns of shape (4,). Return shape (4, 4)"),
        (Credit(advantages=whole, returns=nan), True, "returns of which 6"),
    ):

        def mine(inputs, returned=returned):
            return returned

        with pytest.raises(ValueError) as error:
            Estimator(name="own", compute=mine, needs_critic=needs_critic).estimate(example())
        message = str(error.value)
        assert message.startswith("advantage_estimator='own': ") and "mine returned" in message
        assert parts in message

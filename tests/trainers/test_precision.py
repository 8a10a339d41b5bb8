"""Trained weights in 16 bits: what rounding does to a small step, and who is warned of it."""

import logging

import pytest
import torch
from peft import LoraConfig

from agent_r1_trl.cli.recipe import read_recipe, shipped_recipes
from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers.metrics import LEAST_RATE, problem_of_recipe
from tests.trainers.helpers import make_trainer
from tests.trainers.test_ppo_trainer import make_ppo


@pytest.mark.parametrize(("rate", "least", "most"), [(1e-6, 0.0, 0.05), (LEAST_RATE, 0.5, 1.0)])
def test_below_the_limit_most_weights_in_bfloat16_stay_where_they_were(rate, least, most):
    torch.manual_seed(0)
    weight = torch.nn.Parameter((torch.randn(100_000) * 0.02).bfloat16())
    before, optimizer = weight.detach().clone(), torch.optim.AdamW([weight], lr=rate, weight_decay=0.0)
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert least <= (weight != before).float().mean() <= most


def warned(caplog, trainer):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "agent_r1_trl"):
        trainer.train()
    return [record.getMessage() for record in caplog.records if "bfloat16" in record.getMessage()]


def in_bfloat16():
    return make_policy(make_tokenizer("qwen3")).bfloat16()


@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        ({}, False),
        ({"model": True}, True),
        ({"model": True, "warmup_steps": 1}, True),  # whose first rate is 0
        ({"model": True, "learning_rate": 1e-4}, False),
        ({"model": True, "peft_config": LoraConfig(r=4, target_modules=["q_proj"])}, False),  # adapters are float32
    ],
)
def test_a_run_says_so_if_rounding_undoes_it(tmp_path, caplog, options, is_warned):
    options = {"learning_rate": 1e-6} | options | ({"model": in_bfloat16()} if options.get("model") else {})
    found = warned(caplog, make_trainer(tmp_path, **options))
    assert len(found) == is_warned
    assert not is_warned or ("bfloat16" in found[0] and "1e-06" in found[0] and "dtype: float32" in found[0])


def test_the_critics_own_rate_counts(tmp_path, caplog):
    options = {"model": in_bfloat16(), "learning_rate": 1e-3}
    assert warned(caplog, make_ppo(tmp_path, "model", **options)) == []
    (found,) = warned(caplog, make_ppo(tmp_path, "model", **options | {"critic_learning_rate": 1e-5}))
    assert "1e-05" in found


@pytest.mark.parametrize("name", shipped_recipes())
def test_no_recipe_trains_weights_that_rounding_holds(name):
    recipe = read_recipe(name)
    assert problem_of_recipe(recipe) == ""
    assert recipe["dtype"] == "float32" or recipe.get("use_peft"), "auto is what the checkpoint has, mostly bfloat16"


@pytest.mark.parametrize(
    ("recipe", "is_problem"),
    [
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "float16", "learning_rate": "5e-5"}, True),
        ({"dtype": "bfloat16", "learning_rate": 1e-4}, False),
        ({"dtype": "bfloat16", "use_peft": True}, False),
        ({"dtype": "float32", "use_peft": True, "load_in_4bit": True}, True),  # TRL casts such adapters
        ({"dtype": "float32"}, False),
        ({}, False),
    ],
)
def test_a_recipe_is_judged_by_what_it_says(recipe, is_problem):
    assert bool(problem_of_recipe(recipe)) is is_problem

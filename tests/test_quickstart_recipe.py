"""What keeps the GRPO quickstart from forgetting: no credit for wrong answers, and many questions in every step."""

import asyncio
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from trl.trainer.utils import RepeatSampler

from agent_r1_trl import SearchQAEnv
from agent_r1_trl.advantages import compute_group_advantages
from tests.environments.helpers import finished, message

ROOT = Path(__file__).resolve().parents[1]
RECIPE = yaml.safe_load((ROOT / "recipes/quickstart/grpo/config_cpu.yaml").read_text(encoding="utf-8"))
ROWS = [json.loads(line) for line in (ROOT / RECIPE["dataset_name"]).read_text(encoding="utf-8").splitlines()]
FAILURES = {
    "stops after the first search": (["lowest point Kanchan Kalan"], "<answer> Nepal</answer>"),
    "asks for another fact": (["lowest point Kanchan Kalan", "area Nepal"], "<answer> 147,181 sq km</answer>"),
    "loses its way": (["lowest point Kavren Kal", "internet code Evren"], "<answer> Evren</answer>"),
    "gives no answer": (["lowest point Kanchan Kalan"], "Nepal"),
}
"""What is wrong -> searches and final text. Asked for is the internet code of the country with that lowest point."""


def roll_out(searches, text, **settings):
    """What a trajectory earns in the recipe's environment."""
    env = SearchQAEnv(**RECIPE["env_kwargs"] | settings)
    evidence = ["nepal/lowest-point", "nepal/internet-code"]
    env.reset({"question": "What is the internet code of the country ...?", "answers": [".np"], "evidence": evidence})
    steps = [asyncio.run(env.step(message(("search", {"query": query})))) for query in searches]
    return sum(step.reward for step in steps) + env.outcome_reward(finished(text))[0]


def relation_of(row):
    return re.match(r"(?:What is|Name) the (.+?) of the ", row["question"])[1]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)  # the recipe's paths start here


@pytest.mark.parametrize("failure", FAILURES)
def test_every_way_to_fail_earns_the_same(failure):
    assert roll_out(*FAILURES[failure]) == -1


def test_a_group_whose_answers_are_all_wrong_teaches_none_of_them():
    def advantages(**settings):
        returns = torch.tensor([roll_out(*failure, **settings) for failure in FAILURES.values()])
        return compute_group_advantages(returns, torch.zeros(len(returns), dtype=torch.long))

    assert advantages().eq(0).all()
    # Partial credit would be the group's only difference, and asking for another fact the best thing to do.
    by_failure = dict(zip(FAILURES, advantages(tool_call_reward=0.5, format_reward=0.1), strict=True))
    assert by_failure["asks for another fact"] > 0.4 > 0 > by_failure["loses its way"]


def test_a_right_answer_earns_more_than_any_failure():
    searches = ["lowest point Kanchan Kalan", "internet code Nepal"]
    assert roll_out(searches, "<answer> .np</answer>") == 1


@pytest.mark.parametrize("seed", range(5))
def test_no_common_relation_is_missing_from_many_steps_in_a_row(seed):
    assert longest_absence(RECIPE["per_device_train_batch_size"] // RECIPE["num_generations"], seed) <= 3
    assert longest_absence(8, seed) > 3  # what steps of 8 questions would do


def longest_absence(questions, seed):
    """Steps in a row, of the first thirty, without a relation that at least one question in twenty asks for."""
    order = RepeatSampler(ROWS, mini_repeat_count=1, batch_size=questions, shuffle=True, seed=seed)
    relations = [relation_of(ROWS[index]) for index in order][: questions * 30]
    steps = [set(relations[start : start + questions]) for start in range(0, len(relations), questions)]
    names = [relation_of(row) for row in ROWS]
    common = [name for name in set(names) if names.count(name) >= len(ROWS) / 20]
    assert len(common) == 7  # all but the largest city
    return max(longest_run([name not in step for step in steps]) for name in common)


def longest_run(flags):
    longest = current = 0
    for flag in flags:
        current = current + 1 if flag else 0
        longest = max(longest, current)
    return longest

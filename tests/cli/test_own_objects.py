"""What a recipe names by its path: every kind of object of one's own, alone, together and with mistakes."""

import json
import re
import sys
from pathlib import Path

import pytest

from agent_r1_trl.cli import main

OWN = """
import collections

import torch

from agent_r1_trl import MultiTurnGRPOTrainer, RolloutCallback, ToolEnv
from agent_r1_trl.advantages import Credit
from agent_r1_trl.features.sandbox import PythonTool, SandboxResult
from agent_r1_trl.generation import Generation

SEEN = collections.Counter()


def estimator(inputs):
    SEEN["advantage_estimator"] += 1
    return Credit(advantages=torch.ones_like(inputs.returns))


def term(inputs, log_probs, mask):
    SEEN["loss_term"] += 1
    return (inputs["trajectory_rewards"].unsqueeze(1) * log_probs).sum()


class Policy:
    def __call__(self, view):
        SEEN["context.policy"] += 1
        return view.messages


class Sampler:
    async def generate(self, request):
        SEEN["generator"] += 1
        ids = request.prompt_ids[:3]
        return Generation(token_ids=ids, logprobs=[-1.0] * len(ids), stop="length")


def rule(returns):
    SEEN["sampling.filter_groups"] += 1
    assert returns.shape == (2, 2), returns.shape
    return torch.arange(2) == 0


class Box:
    def run(self, code, language="python"):
        SEEN["sandbox"] += 1
        return SandboxResult(output=code)

    def close(self):
        pass


class BoxEnv(ToolEnv):
    def __init__(self, sandbox):
        super().__init__()
        self.box = PythonTool(sandbox)

    def step(self, message):
        return [{"role": "user", "content": "on"}], 0.0, False, {}

    def outcome_reward(self, trajectory):
        SEEN["env"] += 1
        return float(self.box("7") == "7")


class Noted(RolloutCallback):
    def rollout_end(self, batch, output):
        SEEN["callbacks"] += 1


class Trainer(MultiTurnGRPOTrainer):
    def log(self, logs, *arguments, **kwargs):
        SEEN["trainer"] += 1
        super().log(logs, *arguments, **kwargs)


number = 3


def two(a, b):
    return None


class NeedsMore:
    def __init__(self, more):
        pass


class Wrong:
    async def generate(self, request, more):
        return None


def fails(*arguments):
    raise KeyError("nothing")


def nothing(*arguments):
    return 5
"""
PATHS = {
    "trainer": "own.py:Trainer", "env": "own.py:BoxEnv", "env_kwargs": {"sandbox": "own.py:Box"},
    "callbacks": ["own.py:Noted"], "generator": "own.py:Sampler", "context.policy": "own.py:Policy",
    "advantage_estimator": "own.py:estimator", "loss_term": "own.py:term", "sampling.filter_groups": "own.py:rule",
}  # fmt: skip


@pytest.fixture
def own_recipe(recipe):
    def write(**settings):
        Path("own.py").write_text(OWN)
        return recipe(eval_dataset_name=None, max_steps=1, **settings)

    return write


def test_everything_of_ones_own_takes_part_in_one_run_from_one_recipe(own_recipe):
    assert main(["train", "--config", own_recipe(**PATHS)]) == 0
    seen = sys.modules["own"].SEEN
    assert set(seen) == {*PATHS, "sandbox"} - {"env_kwargs"}, "one file is one module, whatever names it"
    first = json.loads(Path("out/trainer_state.json").read_text())["log_history"][0]
    assert first["filter/kept_share"] == 0.5 and "loss_term" in first
    resolved = Path("out/recipe.yaml").read_text()
    for name in PATHS.keys() - {"callbacks", "env_kwargs"}:
        assert f"{name.rpartition('.')[2]}: {PATHS[name]}" in resolved


WRONG = {
    "trainer": ("number", "Name a subclass of MultiTurnGRPOTrainer"),
    "callbacks": ("NeedsMore", "cannot be made without arguments: TypeError"),
    "generator": ("Wrong", r"its generate takes \(request, more\): .* async generate\(request"),
    "context.policy": ("two", r"takes \(a, b\): missing .*'b'.* ContextView"),
    "advantage_estimator": ("two", r"takes \(a, b\): missing .*'b'.* CreditInputs"),
    "loss_term": ("two", r"takes \(a, b\): too many .* \(inputs, log_probs, mask\)"),
    "sampling.filter_groups": ("two", r"takes \(a, b\): missing .*'b'.* shape \(G, n\)"),
    "env": ("number", "every trajectory needs its own environment"),
}


@pytest.mark.parametrize("flag", WRONG)
def test_what_a_path_cannot_lead_to_is_refused_before_a_model_is_loaded(own_recipe, refusal, flag):
    def said(value):
        listed = [value] if flag == "callbacks" else value
        return refusal("train", "--config", own_recipe(model_name_or_path="no-such-model", **{flag: listed}))

    for value, text in {
        "nowhere.thing": "no module 'nowhere'",
        "own.py:numbr": r"has no 'numbr'\. Did you mean 'number'\?",
        "own.py:xyz": r"has no 'xyz'\. It has '\w+', '\w+', '\w+', '\w+', '\w+', \.\.\.\.",
        "own.py": r"names a file, and nothing in it\. Write own\.py:my_name",
        "own.py:NeedsMore": "NeedsMore",
        f"own.py:{WRONG[flag][0]}": WRONG[flag][1],
    }.items():
        message = said(value)
        assert f"{flag}={value!r}" in message, message
        assert re.search(text, message), message


@pytest.mark.parametrize(
    ("flag", "name", "said"),
    [
        ("advantage_estimator", "fails", r"raised KeyError: 'nothing' \(.*own.py, line"),
        ("loss_term", "nothing", "returned "),
        ("sampling.filter_groups", "nothing", "returned "),
    ],
)
def test_what_it_does_wrong_in_the_run_is_one_line_that_names_it(own_recipe, refusal, flag, name, said):
    message = refusal("train", "--config", own_recipe(**{flag: f"own.py:{name}"}))
    assert f"{flag}='own.py:{name}'" in message
    assert re.search(said, message), message


def test_a_method_that_cannot_be_called_is_named_without_a_line_of_the_packages(recipe, refusal):
    path = recipe(eval_dataset_name=None, env="task.py:Short")
    with Path("task.py").open("a", encoding="utf-8") as task:
        task.write("\n\nclass Short(AddEnv):\n    def outcome_reward(self):\n        return 1.0\n")
    message = refusal("train", "--config", path)
    assert "takes 1 positional argument but 2 were given. Correct the method." in message, message

"""`agent-r1-trl doctor`: verdicts with fixes; exit code 1 for errors and 2 where the checks cannot start.

Covered: what reaches the doctor from recipe and flags, exit codes, mistakes. Not covered: the checks themselves
(tests/doctor).
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from agent_r1_trl.cli import main
from agent_r1_trl.generation.local.decoding import ModelRunner

BROKEN = '''
from agent_r1_trl import ToolEnv


def untyped(a):
    """Add one to a number."""
    return a


def undocumented(a: int) -> int:
    return a


def typed(a: int) -> int:
    """Return a number unchanged.

    Args:
        a: The number.
    """
    return a


number = 3


class NoReset:
    def step(self, message):
        return None


class NoDatabase(ToolEnv):
    tools = (typed,)

    def __init__(self):
        raise RuntimeError("no database")


class ForgetsRows(ToolEnv):
    tools = (typed,)

    def reset(self, example):
        return example["missing"]
'''


@pytest.fixture
def examine(recipe, capsys):
    """`examine(code, "--flag", ..., setting=...)` runs the doctor on the recipe; its words, without the table."""

    def run(code, *flags, **settings):
        path = recipe(**settings)
        Path("broken.py").write_text(BROKEN)
        capsys.readouterr()
        assert main(["doctor", "--config", path, *flags]) == code
        return " ".join(capsys.readouterr().out.replace("│", " ").split())

    return run


def test_a_good_recipe_is_healthy(examine):
    words = examine(0)
    assert " error " not in words and " warning " not in words
    for check in ("tokenizer", "chat template", "masks", "prompts", "environment: step", "memory"):
        assert check in words, check


def test_the_recipe_of_the_quickstart_is_healthy(monkeypatch):
    monkeypatch.chdir(Path(__file__).resolve().parents[3])
    assert main(["doctor", "--config", "recipes/quickstart/grpo/config_cpu.yaml"]) == 0


def test_a_flag_wins_and_a_warning_is_no_failure(examine):
    words = examine(0, "--max_completion_length", "100000")
    assert "warning" in words and "max_completion_length=100000" in words and "Set max_completion_length to" in words


def test_a_recipe_whose_steps_are_rounded_away_is_warned_of(examine):
    words = examine(0, dtype="bfloat16", learning_rate=1e-6)
    assert "precision" in words and "rounded away" in words and "Set dtype: float32" in words
    assert "precision" not in examine(0, dtype="bfloat16", learning_rate=1e-3)


def test_the_template_and_the_grammar_of_the_recipe_are_examined(examine):
    assert "chat_template='qwen9'" in examine(1, chat_template="qwen9")
    assert "response_template='morse'" in examine(1, response_template="morse")
    assert " error " not in examine(0, chat_template="qwen2_5_training", response_template="hermes")
    # Mistral's markers in place of Qwen's: what the template writes cannot be read.
    assert "are not read back" in examine(1, "--response_template", "mistral")


def test_a_recipe_too_large_for_the_gpu_is_warned_of(examine, monkeypatch):
    gpu = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu)
    words = examine(0, bf16=False)
    assert "the recipe needs 1." in words and "of 80" in words and "warning" not in words
    hint = "It would fit with gradient_checkpointing: false as well."
    assert hint in examine(0, bf16=False, gradient_checkpointing=True)
    assert hint not in examine(0, bf16=False, gradient_checkpointing=False)
    gpu.total_memory = 2**30
    words = examine(0, bf16=False)
    assert "does not fit" in words and "Set, or launch with," in words


def test_memory_that_cannot_be_estimated_is_no_ok(examine):
    assert "Not estimated: optim='sgd'" in examine(0, optim="sgd")


def test_an_environment_that_fails_on_the_rows_is_an_error(examine):
    assert "reset raised KeyError: 'missing'" in examine(1, env="broken.py:ForgetsRows")


def test_weights_are_loaded_and_their_scores_compared_where_that_is_asked_for(examine, monkeypatch):
    assert "Sampled and scored" not in examine(0)
    assert "Sampled and scored log-probs agree (update_layout='packed')" in examine(
        0, "--load_weights", "true", update_layout="packed"
    )
    forward = ModelRunner._forward
    monkeypatch.setattr(ModelRunner, "_forward", lambda *args, **options: 2 * forward(*args, **options))
    assert "The transformers generator reports log-probs that differ" in examine(1, "--load_weights", "true")


MISTAKES = {
    "no model": ({"model_name_or_path": None}, "--model: not set"),
    "a model that is not there": ({"model_name_or_path": "./nowhere"}, "model='./nowhere'"),
    "an unknown setting": ({"max_turn": 3}, "recipe.yaml: 'max_turn'.* mean 'max_turns'"),
    "a word for a number": ({"max_turns": "many"}, "recipe.yaml: max_turns='many'"),
    "a word for a rate": ({"learning_rate": "fast"}, "recipe.yaml: learning_rate='fast'"),
    "no room at all": ({"max_completion_length": 0}, "max_completion_length=0"),
    "two sources of tools": ({"tools": ["broken.py:typed"]}, r"env=.*tools=\['broken.py:typed'\]"),
    "a class without reset": ({"env": "broken.py:NoReset"}, "env='broken.py:NoReset'.*reset"),
    "a tool that is none": ({"env": None, "tools": ["broken.py:number"]}, "broken.py:number.*cannot be called"),
    "a reward that is not there": ({"reward_funcs": ["broken.py:gone"]}, "reward_funcs.*broken.py:gone"),
    "an environment that raises": (
        {"env": "broken.py:NoDatabase"},
        "env='broken.py:NoDatabase'.*RuntimeError: no database.*broken.py, line 35",
    ),
    "arguments it does not take": ({"env_kwargs": {"bonsu": 2}}, "env_kwargs={'bonsu': 2}.* mean 'bonus'"),
    "a built-in that is none": ({"env": "search_qq"}, "env='search_qq'.* mean 'search_qa'"),
    "data that is not there": ({"dataset_name": "trian.jsonl"}, "dataset_name='trian.jsonl'.* mean 'train.jsonl'"),
}


@pytest.mark.parametrize(("settings", "names"), MISTAKES.values(), ids=MISTAKES.keys())
def test_what_cannot_be_examined_is_refused(recipe, refusal, settings, names):
    path = recipe(**settings)
    Path("broken.py").write_text(BROKEN)
    assert re.search(names, message := refusal("doctor", "--config", path)), message

"""The name that is suggested for an unknown one is the one that a person would name."""

import dataclasses
import random
from pathlib import Path

import pytest
from transformers.training_args import OptimizerNames

from agent_r1_trl import closeness
from agent_r1_trl.cli.arguments import TrainArguments
from agent_r1_trl.closeness import closest, num_mistakes
from agent_r1_trl.features import keys_of
from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.trainers import MultiTurnPPOConfig
from agent_r1_trl.trainers.config import ModelConfig

OPTIMIZERS = [str(item.value) for item in OptimizerNames]
SETTINGS = [
    item.name for kind in (TrainArguments, MultiTurnPPOConfig, ModelConfig) for item in dataclasses.fields(kind)
]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("adamm", "adamw_torch"), ("adam", "adamw_torch"), ("AdamW", "adamw_torch"), ("adamw8bit", "adamw_8bit"),
        ("adam_8bit", "adamw_8bit"), ("sdg", "sgd"), ("lionn", "lion_8bit"), ("rmspropp", "rmsprop"),
        ("adamw-torch", "adamw_torch"), ("xyz", None), ("", None),
    ],
)  # fmt: skip
def test_of_an_optimizer(given, meant):
    assert closest(given, OPTIMIZERS) == meant


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lr", "learning_rate"), ("learnig_rate", "learning_rate"), ("learningrate", "learning_rate"),
        ("critic_lr", "critic_learning_rate"), ("epochs", "num_train_epochs"), ("max_turn", "max_turns"),
        ("num_turns", "max_turns"), ("max_tokens", "max_tokens_per_turn"), ("gamma_turns", "gamma_turn"),
        ("grad_accum", "gradient_accumulation_steps"), ("batch_size", "per_device_train_batch_size"),
        ("echo_patience", "echo.patience"), ("filter_groups", "sampling.filter_groups"), ("temp", "temperature"),
        ("vllm_server_urls", "servers.urls"), ("generations", "num_generations"), ("model", "model_name_or_path"),
    ],
)  # fmt: skip
def test_of_a_setting(given, meant):
    assert did_you_mean(given, [*SETTINGS, *keys_of(MultiTurnPPOConfig)]) == f" Did you mean {meant!r}?"


def test_a_name_with_one_wrong_letter_is_found_again():
    draw = random.Random(0)
    for name in SETTINGS:
        place = draw.randrange(len(name))
        wrong = name[:place] + "x" + name[place + 1 :]
        found = closest(wrong, SETTINGS)
        assert len(name) < 4 or (found is not None and num_mistakes(wrong, found) <= 1), (wrong, found)


def test_of_names_that_are_equally_close_the_first_is_taken_and_a_long_name_costs_little():
    assert closest("cat", ["bat", "car"]) == "bat" and closest("cat", ["car", "bat"]) == "car"
    assert closest("x" * 100_000, SETTINGS) is None


def test_of_what_must_be_sure_only_a_whole_name_counts():
    assert closest("after_score", ["after_scores", "keep"], is_sure=True) == "after_scores"
    assert closest("safe", ["save"], is_sure=True) is None
    assert closest("save_mine", ["save", "save_all"], is_sure=True) is None


def test_no_other_place_looks_for_close_names():
    source = Path(closeness.__file__).parent
    assert [path.name for path in source.rglob("*.py") if "difflib" in path.read_text("utf-8")] == ["closeness.py"]

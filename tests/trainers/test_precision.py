"""Weights of 16 bits that swallow small updates are warned of, and no recipe has them; the engine's numbers."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.utils import DistributedType
from peft import LoraConfig

from agent_r1_trl.generation.vllm.build import engine_dtype
from agent_r1_trl.trainers.construction import warn_of_swallowed_updates
from tests.tokenizers import make_tokenizer
from tests.trainers.helpers import make_policy, make_trainer

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*/*/config*.yaml"))


@pytest.mark.parametrize(
    ("dtype", "options", "is_warned"),
    [
        (torch.bfloat16, {"learning_rate": 1e-6}, True),
        (torch.bfloat16, {"learning_rate": 1e-3}, False),
        (torch.float32, {"learning_rate": 1e-6}, False),
        (torch.bfloat16, {"learning_rate": 1e-6, "peft_config": LoraConfig(r=2, target_modules="all-linear")}, False),
    ],
)
def test_a_trainer_warns_of_weights_that_hold_no_small_update(tmp_path, caplog, dtype, options, is_warned):
    make_policy(make_tokenizer("qwen3")).to(dtype).save_pretrained(tmp_path / "policy")
    init = {"model_init_kwargs": {"dtype": str(dtype).removeprefix("torch.")}}
    with caplog.at_level(logging.WARNING):
        make_trainer(tmp_path, model=str(tmp_path / "policy"), **init, **options)
    assert ("most of each update" in caplog.text) == is_warned


def test_deepspeed_keeps_weights_of_32_bits(caplog):
    model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    args = SimpleNamespace(learning_rate=1e-6)
    for kind in (DistributedType.DEEPSPEED, DistributedType.MULTI_GPU):
        warn_of_swallowed_updates(model, args, SimpleNamespace(distributed_type=kind))
    assert caplog.text.count("The trained weights are bfloat16 and learning_rate is 1e-06") == 1


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parts[-3]}-{path.parts[-2]}-{path.stem}")
def test_no_recipe_trains_weights_of_16_bits_at_a_small_rate_without_deepspeed(path):
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    is_small = recipe.get("learning_rate", 1e-6) < 1e-4
    if recipe.get("dtype", "float32") == "float32" or recipe.get("use_peft") or not is_small:
        return
    readme = (path.parents[1] / "README.md").read_text(encoding="utf-8")
    assert "accelerate_configs/zero" in readme, "its command takes one of DeepSpeed's configurations"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"vllm_dtype": "auto", "bf16": True, "fp16": False}, {"dtype": "bfloat16"}),
        ({"vllm_dtype": "auto", "bf16": False, "fp16": True}, {"dtype": "float16"}),
        ({"vllm_dtype": "auto", "bf16": False, "fp16": False}, {}),
        ({"vllm_dtype": "float32", "bf16": True, "fp16": False}, {"dtype": "float32"}),
    ],
)
def test_the_engine_computes_with_the_numbers_of_the_trainer(args, expected):
    assert engine_dtype(SimpleNamespace(**args)) == expected

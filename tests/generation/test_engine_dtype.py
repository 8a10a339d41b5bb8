"""The engine in the trainer's process computes with the numbers of the trainer."""

from types import SimpleNamespace

import pytest

from agent_r1_trl.generation.vllm.build import engine_dtype


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"vllm_dtype": "auto", "bf16": True, "fp16": False}, {"dtype": "bfloat16"}),
        ({"vllm_dtype": "auto", "bf16": False, "fp16": True}, {"dtype": "float16"}),
        ({"vllm_dtype": "auto", "bf16": False, "fp16": False}, {}),
        ({"vllm_dtype": "float32", "bf16": True, "fp16": False}, {"dtype": "float32"}),
    ],
)
def test_the_engine_computes_in_16_bits_where_the_trainer_does(args, expected):
    assert engine_dtype(SimpleNamespace(**args)) == expected

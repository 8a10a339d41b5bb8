"""Adapters that a real vLLM engine gets merged; each has an engine to itself."""

import pytest
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig

from agent_r1_trl.generation import VLLMGenerator
from tests.generation.helpers import tiny_model
from tests.generation.test_vllm import PROBE, SIZES, STOP_ID, change, gap, random_policy

pytestmark = [pytest.mark.vllm, pytest.mark.release]


@pytest.mark.parametrize("width", [32, 48])
def test_lora_on_fused_experts_arrives_merged(width):
    """Experts are packed for the kernel of a CPU; 48 is no width that it takes unpadded."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width, "head_dim": 32}
    config = LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    model = get_peft_model(tiny_model(Qwen3MoeConfig, **SIZES, **sizes), config).eval()
    generator = VLLMGenerator(model, stop_token_ids=[STOP_ID], max_model_len=256)
    for seed in (1, 2):
        change(model, seed)
        assert gap(generator, model) > 0.01
        generator.sync(model)
        assert gap(generator, model) < 1e-4
    generator.close()


def test_single_tokens_of_tied_embeddings_arrive_in_both_ends():
    config = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=PROBE[:10])
    model = get_peft_model(random_policy(tie_word_embeddings=True), config).eval()
    generator = VLLMGenerator(model, stop_token_ids=[STOP_ID], max_model_len=256)
    for seed in (1, 2):
        change(model, seed)
        assert gap(generator, model) > 0.01
        generator.sync(model)
        assert gap(generator, model) < 1e-4
    generator.close()

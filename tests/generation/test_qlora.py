"""QLoRA: a base in 4 bits reaches another engine as the numbers that the trainer computes with.

bitsandbytes is not among the test requirements; with it, these tests run on a CPU. Not covered: its kernels on GPUs.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from agent_r1_trl.generation import VLLMGenerator
from agent_r1_trl.generation.weights import policy_weights
from tests.generation.helpers import tiny_model

IDS = [20 + 7 * index % 60 for index in range(100)]


def logprobs(model):
    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor([IDS])).logits[0, :-1].float(), dim=-1)
    return scores.gather(1, torch.tensor(IDS[1:])[:, None]).squeeze(1)


def plain_model():
    # vLLM's attention on a CPU wants heads of at least 32, and bitsandbytes blocks of 64 numbers.
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return tiny_model(LlamaConfig, **sizes).eval()


@pytest.fixture
def policy(tmp_path):
    """A base in 4 bits with an adapter on half of its linear layers, in float32 otherwise."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    plain_model().save_pretrained(tmp_path)
    in_4_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=in_4_bits, dtype=torch.float32, device_map="cpu"
    )
    for module in base.modules():  # else newer processors repack the weights, and lose precision
        module.support_avx512bf16_for_cpu = False
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(base, config).eval()


def test_what_is_sent_are_the_numbers_that_the_trainer_computes_with(policy):
    weights = dict(policy_weights(policy))
    other = plain_model()
    before = logprobs(other)
    assert weights.keys() == other.state_dict().keys()
    assert {value.dtype for value in weights.values()} == {torch.float32}
    other.load_state_dict(weights)
    expected = logprobs(policy)
    assert (logprobs(other) - expected).abs().max() < 1e-4
    assert (before - expected).abs().mean() > 0.05, "four bits and the adapter make a difference"


def test_only_layers_with_an_adapter_are_sent_again(policy):
    names = {name for name, _ in policy_weights(policy, only_trainable=True)}
    assert names == {
        f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in ("self_attn.q_proj", "mlp.down_proj")
    }


@pytest.mark.vllm
@pytest.mark.release
def test_an_engine_in_the_process_samples_from_the_policy(policy):
    generator = VLLMGenerator(policy, stop_token_ids=[13], max_model_len=256, max_num_seqs=4)
    try:
        for _ in range(2):
            (scores,) = generator.scores(IDS).values()
            assert (torch.tensor(scores) - logprobs(policy)).abs().max() < 1e-3
            with torch.no_grad():
                for parameter in policy.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.05)
            generator.sync(policy)
    finally:
        generator.close()

"""Kinds of adapters and models: a plain model with the weights that are sent computes what the policy does."""

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, GptOssConfig, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from agent_r1_trl.generation.weights import check_adapters, policy_weights
from tests.families.configurations import build
from tests.generation.helpers import PROMPTS, VOCAB, tiny_model


def lora(**options):
    return peft.LoraConfig(r=4, task_type="CAUSAL_LM", **({"target_modules": ["q_proj"]} | options))


def llama(**options):
    return tiny_model(LlamaConfig, **options)


def gpt2(**options):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, **options)
    return AutoModelForCausalLM.from_config(config)


def mixtral(**options):
    return tiny_model(MixtralConfig, num_local_experts=3, num_experts_per_tok=2, **options)


def qwen3_moe(**options):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return tiny_model(Qwen3MoeConfig, **sizes, **options)


def gpt_oss(**options):
    return tiny_model(GptOssConfig, num_local_experts=4, num_experts_per_tok=2, head_dim=8, **options)


TIED = {"tie_word_embeddings": True}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CONV1D = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
SENT = {
    "experts of Mixtral": (mixtral, lora(target_parameters=EXPERTS)),
    "one weight of its experts": (mixtral, lora(target_parameters=["experts.down_proj"], target_modules=[])),
    "experts and router": (mixtral, lora(target_parameters=["gate.weight", "experts.down_proj"])),
    "rank-stabilised experts": (mixtral, lora(target_parameters=EXPERTS, use_rslora=True)),
    "experts trained whole": (mixtral, lora(modules_to_save=["experts"])),
    "experts of Qwen3": (qwen3_moe, lora(target_parameters=EXPERTS)),
    "all-linear of a mixture": (qwen3_moe, lora(target_modules="all-linear")),
    "experts of gpt-oss, transposed": (gpt_oss, lora(target_parameters=EXPERTS)),
    "a parameter of a linear layer": (llama, lora(target_modules=["v_proj"], target_parameters=["q_proj.weight"])),
    "Conv1D of GPT-2": (gpt2, lora(**CONV1D)),
    "DoRA on Conv1D": (gpt2, lora(**CONV1D, use_dora=True)),
    "IA3 on Conv1D": (
        gpt2,
        peft.IA3Config(
            target_modules=["c_attn", "c_fc"], feedforward_modules=["c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"
        ),
    ),
    "embeddings": (llama, lora(target_modules=["embed_tokens", "lm_head"])),
    "biases": (lambda: llama(attention_bias=True), lora(bias="lora_only")),
    "biases of LoRA": (lambda: llama(attention_bias=True), lora(lora_bias=True)),
    "tokens": (llama, lora(trainable_token_indices=[5, 6])),
    "tokens of tied embeddings": (lambda: llama(**TIED), lora(trainable_token_indices=[12, 13])),
    "tokens of GPT-2": (gpt2, lora(**CONV1D, trainable_token_indices={"wte": [12, 13]})),
    "tied embeddings as one": (
        lambda: llama(**TIED),
        lora(modules_to_save=["embed_tokens", "lm_head"], ensure_weight_tying=True),
    ),
    "patterns": (llama, lora(rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 32})),
    "a pass of PiSSA": (llama, lora(init_lora_weights="pissa")),
}


def trained(make, config):
    """A policy far enough from its base, with the log-probs of a prompt."""
    policy = peft.get_peft_model(make(), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return policy, log_probs(policy)


@torch.no_grad()
def log_probs(model):
    return model.eval()(torch.tensor([PROMPTS[2]])).logits.log_softmax(-1)


@pytest.mark.parametrize("kind", SENT)
def test_a_plain_model_with_these_weights_is_the_policy(kind, tmp_path):
    make, config = SENT[kind]
    policy, expected = trained(make, config)
    check_adapters(policy, is_merged=True)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    sent = list(policy_weights(policy))
    assert len({name for name, _ in sent}) == len(sent)
    plain = make()
    assert (log_probs(plain) - expected).abs().max() > 0.01, "the adapter does something"
    plain.save_pretrained(tmp_path)
    with torch.no_grad():
        save_file(
            {name: value.clone().contiguous() for name, value in sent},
            tmp_path / "model.safetensors",
            {"format": "pt"},
        )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(log_probs(loaded), expected, rtol=0, atol=2e-5)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    if make().config.tie_word_embeddings:
        assert not [name for name, _ in sent if name.startswith("lm_head")], "the weight of both ends comes once"


def test_of_adapted_experts_only_their_layers_are_sent_again():
    policy, _ = trained(mixtral, lora(target_parameters=["experts.down_proj"], target_modules=[]))
    names = {name for name, _ in policy_weights(policy, only_trainable=True)}
    assert names and all("block_sparse_moe.experts." in name for name in names)


REFUSED = {
    "LoRA on both ends": (TIED, lora(target_modules=["embed_tokens", "lm_head"]), "tie_word_embeddings"),
    "both ends trained whole": (TIED, lora(modules_to_save=["embed_tokens", "lm_head"]), "ensure_weight_tying=True"),
    "other tokens in each end": (
        TIED,
        lora(trainable_token_indices={"embed_tokens": [5], "lm_head": [6]}),
        "trainable_token_indices",
    ),
    "a bias without a place": ({}, lora(lora_bias=True), "lora_bias=True.*q_proj.*lora_bias=False"),
    "layers that are copies": ({}, lora(layer_replication=[[0, 2], [1, 2]]), "layer_replication"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_vllm_cannot_be_given_is_refused_for_it_alone(kind):
    options, config, message = REFUSED[kind]
    policy, _ = trained(lambda: llama(**options), config)
    check_adapters(policy)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        check_adapters(policy, is_merged=True)


def test_an_adapter_of_layers_that_share_their_weights_is_refused_for_vllm():
    """Zamba's attention blocks are one weight in several layers, and an adapter has a part for each of them."""

    def zamba():
        return build("zamba2", vocabulary=VOCAB, pad_token_id=0, eos_token_id=1)

    policy, _ = trained(zamba, lora(target_modules=["q_proj"]))
    check_adapters(policy)
    with pytest.raises(ValueError, match=r"q_proj.*share one weight.*use_vllm=False"):
        check_adapters(policy, is_merged=True)
    beside, _ = trained(zamba, lora(target_modules=["in_proj"]))
    check_adapters(beside, is_merged=True)


def test_two_weights_under_a_configuration_that_promises_one_are_refused_for_vllm():
    model = llama(**TIED)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    with pytest.raises(ValueError, match=r"two weights.*model\.config\.tie_word_embeddings = False"):
        check_adapters(model, is_merged=True)
    model.config.tie_word_embeddings = False
    check_adapters(model, is_merged=True)


def test_tokens_of_an_end_that_is_trained_whole_are_refused_by_name():
    """With tied embeddings peft trains the tokens in the output layer as well, and then fails in every pass."""
    config = lora(trainable_token_indices={"embed_tokens": [5]}, modules_to_save=["lm_head"])
    policy = peft.get_peft_model(llama(**TIED), config)
    with pytest.raises(ValueError, match=r"trainable_token_indices and modules_to_save both hold .*lm_head"):
        check_adapters(policy)

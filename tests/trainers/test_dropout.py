"""Dropout of every kind is off in the update unless it is asked for: training passes over a row are equal."""

import peft
import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers.dropout import disable_noise, noise_rates
from tests.trainers.helpers import make_trainer

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "vocab_size": 99, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
NOISY = {
    "module": ("gpt_neox", {"hidden_dropout": 0.3, "attention_dropout": 0.3}),
    "number in the attention function": ("llama", {"attention_dropout": 0.3}),
    "numbers in attention and feed-forward layer": ("seed_oss", {"attention_dropout": 0.3, "residual_dropout": 0.3}),
    "read from the configuration in the forward pass": ("persimmon", {"attention_dropout": 0.3}),
    "router jitter": ("mixtral", EXPERTS | {"router_jitter_noise": 0.4}),
    "router that samples experts in training": (
        "phimoe", EXPERTS | {"router_jitter_noise": 0.2, "input_jitter_noise": 0.3},
    ),
    "whole layers": ("opt", {"dropout": 0.3, "layerdrop": 0.5, "ffn_dim": 48, "word_embed_proj_dim": 32}),
}  # fmt: skip


def make_noisy(kind):
    family, options = NOISY[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.15)
    return model


ADAPTERS = {
    "numbers in a dictionary": lambda: peft.LoHaConfig(r=4, rank_dropout=0.5, module_dropout=0.5, **LAYERS),
    "numbers in a dictionary, of another kind": lambda: peft.LoKrConfig(r=4, rank_dropout=0.5, **LAYERS),
    "blocks of a butterfly": lambda: peft.BOFTConfig(boft_block_size=4, boft_dropout=0.5, **LAYERS),
}
LAYERS = {"target_modules": ["q_proj", "up_proj"]}


@torch.no_grad()
def logits_of(model, seed):
    torch.manual_seed(seed)
    return model(input_ids=torch.arange(5, 45)[None], use_cache=False).logits


@pytest.mark.parametrize("kind", NOISY)
def test_training_passes_are_random_until_noise_is_disabled_and_then_those_of_the_sampler(kind):
    model = make_noisy(kind)
    expected = logits_of(model.eval(), 0)
    assert not torch.equal(logits_of(model.train(), 1), logits_of(model, 2)), "the case is one"
    assert noise_rates(model)
    before = disable_noise(model)
    assert before and not noise_rates(model)
    torch.testing.assert_close(logits_of(model.train(), 1), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(logits_of(model.eval(), 2), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_dropout_that_an_adapter_has_of_its_own_is_disabled_as_well(kind):
    """A new adapter adds nothing, so that its dropout does not show before the first update."""
    sizes = AutoConfig.for_model("llama", **SIZES)
    model = peft.get_peft_model(AutoModelForCausalLM.from_config(sizes), ADAPTERS[kind]())
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    expected = logits_of(model.eval(), 0)
    assert not torch.equal(logits_of(model.train(), 1), logits_of(model, 2)), "the case is one"
    assert 0.5 in noise_rates(model).values()
    assert 0.5 in disable_noise(model).values() and not noise_rates(model)
    torch.testing.assert_close(logits_of(model.train(), 1), expected, atol=1e-6, rtol=0)


class StochasticDepth(nn.Module):
    """Leaves out a whole branch, as libraries of layers do."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, hidden):
        return hidden * (torch.rand(()) >= self.p) if self.training else hidden


def test_branches_that_a_layer_of_another_library_leaves_out_are_disabled():
    model = make_noisy("whole layers")
    disable_noise(model)
    layer = model.model.decoder.layers[0]
    layer.activation_fn = nn.Sequential(layer.activation_fn, StochasticDepth(0.5))
    expected = logits_of(model.eval(), 0)
    assert noise_rates(model) == {"1": 0.5}
    disable_noise(model)
    assert not noise_rates(model)
    for seed in range(8):
        torch.testing.assert_close(logits_of(model.train(), seed), expected, atol=1e-6, rtol=0)


def test_gradient_checkpointing_still_works_without_dropout():
    model = make_noisy("numbers in attention and feed-forward layer")
    disable_noise(model)
    model.gradient_checkpointing_enable()
    model.train()
    assert any(module.training for module in model.model.layers)


@pytest.mark.parametrize("disable", [True, False])
def test_a_run_has_no_dropout_unless_it_asks_for_it(tmp_path, disable, caplog):
    options = {} if disable else {"disable_dropout": False}
    config = LoraConfig(r=4, lora_dropout=0.25, target_modules="all-linear")
    trainer = make_trainer(tmp_path, peft_config=config, model=make_policy(make_tokenizer("qwen3")), **options)
    rates = noise_rates(trainer.model)
    assert set(rates.values()) == (set() if disable else {0.25})
    expected = "lora_dropout=0.25 is off" if disable else "on in the update and off in the rollout"
    assert expected in caplog.text

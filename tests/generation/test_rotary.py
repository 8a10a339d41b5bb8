"""Rotary embeddings that follow the longest row: one choice for a run, in the sampler, the trainer and vLLM."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Phi3Config

from agent_r1_trl import MultiTurnPPOConfig, MultiTurnPPOTrainer
from agent_r1_trl.evaluation.agent import open_agent
from agent_r1_trl.generation.rotary import (
    check_engine_length,
    fix_rotary_embeddings,
    longrope_switch,
    vllm_default_length,
)
from agent_r1_trl.rollout import RolloutLimits
from agent_r1_trl.testing import AddEnv, make_tokenizer
from tests.families.configurations import build
from tests.generation.helpers import PROMPTS, forward_logprobs, run, tiny_model

SWITCH = 64
FAMILIES = ["phi3_longrope", "phimoe_longrope", "minicpm3_longrope", "llama_dynamic"]


def model_of(family):
    return build(family, vocabulary=97, pad_token_id=0, eos_token_id=1)


def logits(model, rows):
    """Of each row alone, and of each beside the others, from passes padded on the right."""
    longest = max(map(len, rows))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]
        together = model(input_ids=padded, attention_mask=mask, use_cache=False).logits
    return alone, [row_logits[: len(row)] for row_logits, row in zip(together, rows, strict=True)]


ROWS = [list(range(3, 33)), [7 + i % 80 for i in range(SWITCH + 30)]]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_row_computes_depends_on_no_row_beside_it(family):
    model = model_of(family)
    alone, together = logits(model, ROWS)
    assert (alone[0] - together[0]).abs().max() > 0.01, "transformers' own rows must depend on each other here"
    choice = fix_rotary_embeddings(model, SWITCH if family == "llama_dynamic" else 512)
    assert choice == ("unscaled" if family == "llama_dynamic" else "long")
    for one, other in zip(*logits(model, ROWS), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("family", ["phi3_longrope", "minicpm3_longrope"])
def test_long_factors_are_those_of_long_rows_and_short_ones_those_of_short_rows(family):
    [short_before, long_before], _ = logits(model_of(family), ROWS)
    for length, row, before in [(SWITCH, 0, short_before), (SWITCH + 1, 1, long_before), (None, 1, long_before)]:
        model = model_of(family)
        fix_rotary_embeddings(model, length)
        assert torch.allclose(logits(model, ROWS)[0][row], before, atol=1e-6)


def test_the_choice_can_be_made_again_or_kept():
    model = model_of("phi3_longrope")
    assert fix_rotary_embeddings(model, SWITCH) == "short"
    assert fix_rotary_embeddings(model, 512, keeps_choice=True) == "short"
    assert fix_rotary_embeddings(model, 512) == "long"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_the_model_as_it_was(family, tmp_path):
    model = model_of(family)
    before = model.config.to_json_string()
    fix_rotary_embeddings(model, SWITCH)
    assert model.config.to_json_string() == before
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.rope_parameters == model_of(family).config.rope_parameters


def test_other_models_are_left_alone():
    model = model_of("llama_yarn")
    buffers = dict(model.named_buffers())
    assert fix_rotary_embeddings(model, 512) is None
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())


def test_rows_longer_than_dynamic_frequencies_hold_for_are_refused():
    for length in (65, None):
        with pytest.raises(ValueError, match=r"rope_type='dynamic'.*above 64 tokens.*to at most 64"):
            fix_rotary_embeddings(model_of("llama_dynamic"), length)


@pytest.mark.parametrize(("family", "longest"), [("inkling", 32), ("llama4", 15)])
def test_rows_whose_queries_would_be_scaled_by_their_column_are_refused(family, longest):
    fix_rotary_embeddings(model_of(family), longest)
    for length in (longest + 1, None):
        with pytest.raises(
            ValueError, match=rf"ForCausalLM scales queries.*depends on the longest.*at most {longest}"
        ):
            fix_rotary_embeddings(model_of(family), length)
    if family == "llama4":
        assert fix_rotary_embeddings(model_of("llama4_untuned"), None) is None


def test_reference_and_critic_make_the_choice_of_the_policy(tmp_path):
    tokenizer = make_tokenizer("qwen3")
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = build("phi3_longrope", vocabulary=len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=eos)
    start = tmp_path / "start"
    model.save_pretrained(start)
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": [], "max_steps": 1}
    trainer = MultiTurnPPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(start),
        args=MultiTurnPPOConfig(**settings, beta=0.1, critic="model", max_completion_length=100),
        env=AddEnv,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "2 + 3?"}]}] * 8),
        processing_class=tokenizer,
    )
    assert trainer.ref_model is not None
    rotaries = []
    for part in (trainer.model, trainer.ref_model):
        rotaries += [module for module in part.modules() if type(module).__name__ == "Phi3RotaryEmbedding"]
    assert len(rotaries) == 3, "policy, critic, reference"
    for rotary in rotaries:
        assert rotary.fixed_rotary_choice == "long" and torch.equal(rotary.inv_freq, rotaries[0].inv_freq)


@pytest.mark.parametrize(("limits", "choice"), [(None, "long"), (RolloutLimits(max_model_length=60), "short")])
def test_a_model_that_is_evaluated_makes_the_choice_of_its_limits(limits, choice):
    tokenizer = make_tokenizer("qwen3")
    model = build("phi3_longrope", vocabulary=len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=1)
    with open_agent(model, tokenizer=tokenizer, limits=limits):
        assert fix_rotary_embeddings(model, None, keeps_choice=True) == choice


def test_an_engine_with_the_other_factors_is_refused():
    config = model_of("phi3_longrope").config
    assert longrope_switch(config) == vllm_default_length(config) == SWITCH
    assert longrope_switch(model_of("llama_yarn").config) is vllm_default_length(model_of("llama_yarn").config) is None
    check_engine_length(config, run_length=512, engine_length=65)
    check_engine_length(config, run_length=64, engine_length=20)
    check_engine_length(config, run_length=64, engine_length=None)
    with pytest.raises(ValueError, match=r"max_model_len=64.*the short factors.*Set vllm_max_model_length=64"):
        check_engine_length(config, run_length=512, engine_length=64)
    with pytest.raises(ValueError, match=r"max_model_len=512.*the long factors.*Set vllm_max_model_length=512"):
        check_engine_length(config, run_length=64, engine_length=512)


@pytest.mark.vllm
@pytest.mark.release
@pytest.mark.parametrize(("max_model_len", "choice"), [(SWITCH, "short"), (256, "long"), (None, "short")])
def test_vllm_makes_the_same_choice_for_the_same_length(max_model_len, choice):
    from agent_r1_trl.generation import VLLMGenerator

    factors = {"short_factor": [1.0] * 16, "long_factor": [1.0 + i for i in range(16)]}
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SWITCH, **factors}
    model = tiny_model(
        Phi3Config,
        hidden_size=128,
        original_max_position_embeddings=SWITCH,
        rope_parameters=scaling,
        pad_token_id=0,
        tie_word_embeddings=False,
    ).eval()
    generator = VLLMGenerator(model, stop_token_ids=[5], max_model_len=max_model_len, max_num_seqs=4)
    try:
        length = vllm_default_length(model.config) if max_model_len is None else max_model_len
        assert generator.max_model_length == length
        assert fix_rotary_embeddings(model, length) == choice
        for prompt, generation in zip(PROMPTS, run(generator, PROMPTS), strict=True):
            assert generation.logprobs == pytest.approx(forward_logprobs(model, prompt, generation, 0.8), abs=1e-4)
    finally:
        generator.close()

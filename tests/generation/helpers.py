"""Tiny models and short-cuts shared by the tests of the back ends."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from agent_r1_trl.generation import Generation, GenerationRequest, SamplingParams, TransformersGenerator
from agent_r1_trl.generation.base import check_generation

VOCAB = 97
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8)
PROMPTS = [
    [5, 6, 7],
    [8],
    list(range(10, 33)),
    [40, 41, 42, 43, 44, 45, 46],
    [1, 2],
    [60] * 11,
    [9, 8, 7, 6],
    [77, 78],
]


def tiny_model(config_class=Qwen2Config, **options):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    config = config_class(**(sizes | options))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than the default, so that distributions are not flat
            if parameter.dim() == 2:
                parameter.normal_(0, 0.15)
    return model


def make_generator(model, stop_token_ids=(), **options):
    return TransformersGenerator(model, pad_token_id=0, stop_token_ids=stop_token_ids, **options)


def run(generator, prompts, *, max_tokens=12, params=SAMPLED, seeds=None) -> list[Generation]:
    limits = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
    seeds = seeds if seeds is not None else range(len(prompts))

    async def gather():
        return await asyncio.gather(
            *(
                generator.generate(GenerationRequest(prompt_ids=prompt, max_tokens=limit, seed=seed, params=params))
                for prompt, limit, seed in zip(prompts, limits, seeds, strict=True)
            )
        )

    return asyncio.run(gather())


def forward_logprobs(model, prompt, generation, temperature) -> list[float]:
    """Log-softmax of one unpadded forward pass without a cache, at the sampled ids."""
    ids = torch.tensor([prompt + generation.token_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None]).squeeze(1).tolist()


def check_greedy(engine, policy, stop_id):
    """An engine samples the ids that transformers does, and says their log-probabilities."""
    ours = run(engine, PROMPTS, params=GREEDY, max_tokens=20)
    theirs = run(make_generator(policy, [stop_id]), PROMPTS, params=GREEDY, max_tokens=20)
    for prompt, left, right in zip(PROMPTS, ours, theirs, strict=True):
        assert (left.token_ids, left.stop) == (right.token_ids, right.stop)
        assert left.logprobs == pytest.approx(forward_logprobs(policy, prompt, left, 1.0), abs=1e-4)


def check_masks(engine, policy, params):
    """Log-probabilities of an engine are those of the policy's logits, normalised over the ids that it kept."""
    counts = []
    for prompt, generation in zip(PROMPTS, run(engine, PROMPTS, params=params, max_tokens=20), strict=True):
        check_generation(generation, 20)
        ids = torch.tensor([[*prompt, *generation.token_ids]])
        with torch.no_grad():
            logits = policy(ids).logits[0, len(prompt) - 1 : -1] / params.temperature
        kept = torch.from_numpy(generation.kept_ids.padded(max(generation.kept_ids.counts))).long()
        chosen = logits.gather(1, kept.clamp(min=0)).masked_fill(kept < 0, -torch.inf).logsumexp(dim=1)
        found = logits.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0] - chosen
        assert generation.logprobs == pytest.approx(found.tolist(), abs=1e-4)
        counts += generation.kept_ids.counts
    assert max(counts) <= params.top_k and (params.top_p == 1.0 or min(counts) < params.top_k)

"""A tiny model with random weights, for tests that need gradients."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM


def make_policy(tokenizer: PreTrainedTokenizerBase, seed: int = 0, hidden_size: int = 32) -> Qwen2ForCausalLM:
    """A Qwen2 of two layers and 1,024 positions, on the CPU in float32; a training step takes a tenth of a second.

    Args:
        tokenizer: gives the size of the vocabulary and the special tokens.
        seed: of the weights, which is also left as torch's own seed.
        hidden_size: an even number; 32 makes about 60,000 weights with a tokenizer of `make_tokenizer`.
    """
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.1)
    return model

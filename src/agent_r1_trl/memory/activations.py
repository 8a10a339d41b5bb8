"""What the forward keeps for the backward: bytes per token, counted from what each operation of a decoder saves.

Tested against autograd's own list of saved tensors. Frameworks that fuse (Liger, torch.compile) save less.
"""

from __future__ import annotations

from agent_r1_trl.memory.setup import MemorySetup
from agent_r1_trl.memory.shape import ModelShape

HEAD_TILE_TOKENS = 4096
HEAD_TILE_VOCABULARY = 32768
"""TRL projects the hidden states in tiles of this size, so that the logits are never there at once."""


def layer_bytes(shape: ModelShape, setup: MemorySetup) -> float:
    """Saved by one decoder layer for one micro-batch.

    Two norms keep their input in float32, the normalised and the scaled vector; attention keeps q, the repeated k and
    v, its output twice (before and after the heads are joined); the gated MLP four vectors of its inner width.
    """
    inner, outer = setup.compute_bytes, setup.weight_bytes
    norms = 2 * shape.hidden_size * (4 + outer + inner)
    attention = 5 * shape.num_heads * shape.head_dim * inner + 4 * shape.num_heads
    mlp = 4 * shape.intermediate_size * inner
    adapters = shape.num_adapter_inputs / shape.num_layers * (inner + 1)
    mask = setup.sequence_tokens * inner if setup.saves_attention_mask else 0
    return tokens(setup) * (norms + attention + mlp + adapters + mask)


def activation_bytes(shape: ModelShape, setup: MemorySetup) -> float:
    """Saved by the whole stack; with checkpointing one vector per layer, and one layer at a time in full."""
    one_layer = layer_bytes(shape, setup)
    if setup.gradient_checkpointing:
        return tokens(setup) * shape.hidden_size * setup.weight_bytes * shape.num_layers + one_layer
    return one_layer * shape.num_layers


def head_bytes(shape: ModelShape, setup: MemorySetup) -> float:
    """Of the log-probabilities: one tile of logits with two float32 copies, float32 gradients of what enters."""
    completion = setup.micro_batch * setup.completion_tokens
    tile = min(completion, HEAD_TILE_TOKENS) * min(shape.vocab_size, HEAD_TILE_VOCABULARY)
    weight = 0 if shape.num_adapter_parameters else shape.vocab_size * shape.hidden_size
    return tile * (setup.compute_bytes + 8) + 4 * (completion * shape.hidden_size + weight)


def tokens(setup: MemorySetup) -> int:
    """Of one micro-batch, padding included."""
    return setup.micro_batch * setup.sequence_tokens

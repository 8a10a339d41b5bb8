"""Activations that the forward pass saves for the backward pass, by formula.

Tests compare the formulas with autograd's own list of saved tensors on a CPU. They are not replaced by that list,
because it cannot be had for a GPU without one: fake tensors on a CUDA device need a CUDA build, meta tensors refuse
autocast, and a CPU's kernels save other tensors (a dropout mask of 4 bytes instead of 1). Frameworks that fuse
operations (Liger, torch.compile) save less.
"""

from __future__ import annotations

from agent_r1_trl.memory.setup import MemorySetup
from agent_r1_trl.memory.shape import ModelShape

HEAD_TILE_TOKENS = 4096
HEAD_TILE_VOCABULARY = 32768
"""TRL projects the hidden states in tiles of this size, so that the logits never exist all at once."""


def layer_bytes(shape: ModelShape, setup: MemorySetup) -> float:
    """Bytes that one decoder layer saves for one micro-batch."""
    return setup.pass_tokens * token_bytes(shape, setup)


def token_bytes(shape: ModelShape, setup: MemorySetup) -> float:
    """Bytes that one decoder layer saves for each token.

    Each of the two norms saves its input in float32, the normalised vector and the scaled one. Attention saves q, the
    repeated k and v, and its output twice (before and after the heads are joined). The gated MLP saves four vectors of
    its inner width. Frozen layers save no input; each adapter saves its own input and the mask of its dropout.
    """
    inner, outer = setup.compute_bytes, setup.weight_bytes
    heads, joined = shape.num_heads + shape.num_kv_heads, shape.num_heads * shape.head_dim
    has_mask = setup.saves_attention_mask and not setup.is_packed  # packed rows share one among all layers
    mask = setup.sequence_tokens * inner if has_mask else 0
    if shape.num_adapter_parameters:
        norms = 2 * shape.hidden_size * 4
        attention, mlp = 4 * joined * inner, 3 * shape.intermediate_size * inner
        adapters = shape.num_adapter_inputs / shape.num_layers * ((inner if setup.uses_autocast else 4) + 1)
    else:
        norms = 2 * shape.hidden_size * (4 + outer + inner)
        attention, mlp = 5 * joined * inner, 4 * shape.intermediate_size * inner
        adapters = 0
    if shape.has_head_norms:
        norms += heads * shape.head_dim * (4 if shape.num_adapter_parameters else 4 + inner)
    return norms + attention + 4 * shape.num_heads + mlp + adapters + mask


def activation_bytes(shape: ModelShape, setup: MemorySetup, num_tokens: int | None = None) -> float:
    """Bytes that all layers save; with checkpointing, one vector per layer and one layer at a time in full.

    Args:
        shape: of the model.
        setup: of the run.
        num_tokens: in the pass; None: the policy's.
    """
    one_layer = token_bytes(shape, setup)
    of_token = one_layer * shape.num_layers
    if setup.gradient_checkpointing:
        of_token = shape.hidden_size * setup.weight_bytes * shape.num_layers + one_layer
    return (setup.pass_tokens if num_tokens is None else num_tokens) * of_token


def head_bytes(shape: ModelShape, setup: MemorySetup) -> float:
    """Bytes of the log-probabilities: a tile of logits, two float32 copies, and float32 gradients of the inputs."""
    completion = setup.micro_batch * setup.rows_per_trajectory * setup.completion_tokens
    if setup.is_packed:  # in a pass by tokens, few may belong to prompts
        completion = (
            min(completion, setup.pass_tokens) if setup.max_tokens_per_micro_batch is None else setup.pass_tokens
        )
    tile = min(completion, HEAD_TILE_TOKENS) * min(shape.vocab_size, HEAD_TILE_VOCABULARY)
    weight = 0 if shape.num_adapter_parameters else shape.vocab_size * shape.hidden_size
    return tile * (setup.compute_bytes + 8) + 4 * (completion * shape.hidden_size + weight)

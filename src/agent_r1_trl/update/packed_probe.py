"""Try a model on two short rows in one packed row, before a run begins.

A model may say that it takes an attention interface and still keep the layout from it (StableLM and Nemotron pass on
only arguments that they know), or mask by itself. It then fails in the first update, or lets rows see each other.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from agent_r1_trl.generation.local.decoding import evaluation_mode
from agent_r1_trl.generation.weights import is_sharded
from agent_r1_trl.update.packed_attention import SEGMENTS
from agent_r1_trl.update.packing import pack

_NUM_PROMPT, _NUM_COMPLETION = 3, 5
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_TOLERANCE_OF_16_BITS = 0.25
"""Relative to the size of the hidden states; rows that see each other differ by about as much as they are large."""


def check_packed_rows(base: PreTrainedModel, *, attention: str, share_prefixes: bool, name: str) -> None:
    """Compare hidden states and gradients of packed rows with those of the same rows side by side.

    Not tried are weights that this process holds a part of (ZeRO-3, meta), weights that are still on the CPU though
    there is a GPU, and kernels that need 16 bits; the comparison of sampler and trainer at the first rollout covers
    these.

    Args:
        base: a causal LM, or a backbone, prepared by `use_packed_attention`.
        attention: what that returned.
        share_prefixes: pack as the layout `shared` does.
        name: of the model in messages.

    Raises:
        ValueError: the model fails on the packed row, or computes something else.
    """
    if attention != SEGMENTS or is_out_of_reach(base):
        return
    vocabulary = base.get_input_embeddings().weight.shape[0]
    device = base.get_input_embeddings().weight.device
    length = _NUM_PROMPT + _NUM_COMPLETION
    first = torch.arange(1, length + 1)
    second = torch.cat([first[:_NUM_PROMPT], torch.arange(length + 1, length + 1 + _NUM_COMPLETION)])
    ids = torch.stack([first, second]).remainder(vocabulary).to(device)  # (2, 8), a prompt and two completions
    is_token = torch.ones_like(ids)
    scored = is_token[:, _NUM_PROMPT:].bool()
    batch = pack(ids, is_token, scored, share_prefixes=share_prefixes, attention=attention)
    backbone = base.base_model
    with torch.enable_grad(), evaluation_mode(backbone):
        expected = _states_and_gradients(base, ids, slice(_NUM_PROMPT - 1, -1), attention_mask=is_token)
        try:
            copies = batch.layout.sources[batch.layout.copies]
            found = _states_and_gradients(base, batch.input_ids, copies, **batch.inputs)
        except Exception as error:
            if str(error).startswith("update_layout"):  # of our attention, which names what the model asks for
                raise
            raise ValueError(
                _message(base, name, f"fails on packed rows ({type(error).__name__}: {error})")
            ) from error
    is_whole = base.dtype in _TOLERANCE and not torch.is_autocast_enabled(device.type)
    tolerance = _TOLERANCE[base.dtype] if is_whole else _TOLERANCE_OF_16_BITS
    for what, ours, other in zip(("hidden states", "gradients"), found, expected, strict=True):
        distance = float((ours - other).norm() / other.norm().clamp(min=1e-30))
        if not distance <= tolerance:
            raise ValueError(
                _message(base, name, f"computes other {what} in packed rows (they differ by {distance:.1%})")
            )


def _states_and_gradients(
    base: PreTrainedModel, ids: torch.Tensor, read: slice | torch.Tensor, **inputs: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states that predict scored tokens, (10, H), and a gradient at the input, summed by token id, (V, H).

    Args:
        base: the model.
        ids: (B, L) its input.
        read: which of the L states predict scored tokens.
        inputs: further arguments of its backbone.
    """
    embeddings = base.get_input_embeddings()
    embedded = []

    def keep(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    handle = embeddings.register_forward_hook(keep)
    try:
        states = base.base_model(**{"input_ids": ids, "use_cache": False} | inputs).last_hidden_state
    finally:
        handle.remove()
    states = states[:, read].flatten(0, 1)
    # Any weights do, as long as they are the same for the same state: alike ones would cancel out behind a norm.
    weights = torch.arange(states.numel(), device=states.device).view(states.shape).cos()
    gradients = torch.autograd.grad((states * weights).sum(), embedded)
    total = torch.zeros(embeddings.weight.shape[0], states.shape[1], device=ids.device)
    for gradient in gradients:
        total.index_add_(0, ids.flatten(), gradient.flatten(0, 1).float())
    return states.detach().float(), total


def is_out_of_reach(base: nn.Module) -> bool:
    """Whether a model cannot be tried here: this process has only parts of it, or it is not yet on its GPU."""
    if is_sharded(base) or any(parameter.is_meta for parameter in base.parameters()):
        return True
    is_on_cpu = all(parameter.device.type == "cpu" for parameter in base.parameters())
    return is_on_cpu and torch.cuda.is_available()


def _message(base: PreTrainedModel, name: str, what: str) -> str:
    return (
        f"update_layout: {name} ({type(base).__name__}) {what}, so its attention does not follow the layout of the "
        "rows. Set update_layout='grouped' or 'padded'."
    )

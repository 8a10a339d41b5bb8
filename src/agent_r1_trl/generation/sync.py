"""Bring the policy's weights to the sampler, and check by a few log-probabilities that they are there.

A sampler that silently keeps older weights, or has them in another precision, makes training off-policy: nothing
fails, the run only learns worse. So every sync is checked.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from agent_r1_trl.errors import RunError
from agent_r1_trl.generation.base import Generator
from agent_r1_trl.generation.fsdp2 import plain_class
from agent_r1_trl.generation.local.decoding import evaluation_mode
from agent_r1_trl.generation.weights import is_sharded_by_zero

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Plain text, whose tokens are likely: rounding shows most in the log-probabilities of unlikely ones.
_PROBE_TEXT = (
    "Question: which river flows through Paris, and how long is it? I will search first. The Seine is a river of 777 "
    "kilometres in northern France; it rises near Dijon and reaches the sea at Le Havre. Answer: the Seine, 777 km."
)
_PROBE_TOKENS = 64


class SyncError(RunError):
    """The sampler's log-probabilities are not the trainer's."""


def sync_weights(
    generator: Generator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_gap: float | None = None,
    is_autocast: bool = False,
) -> dict[str, float]:
    """Bring the weights of the policy (unwrapped) to the sampler and compare log-probabilities there.

    A collective call where parameters are sharded.

    Returns:
        Metrics: seconds of the sync, those of the sampler, and the mean absolute difference where it can score. Empty
        for a sampler without weights of its own.

    Raises:
        SyncError: see `probe_sync`.
    """
    start = time.perf_counter()
    if generator.sync(model) is False:  # None, from a user's own `sync`, counts as done
        return {}
    gap = None
    if generator.can_score:
        ids = tokenizer(_PROBE_TEXT, add_special_tokens=False)["input_ids"][:_PROBE_TOKENS]
        gap = probe_sync(generator, model, ids, max_gap=max_gap, is_autocast=is_autocast)
    metrics = {"time/sync_s": time.perf_counter() - start} | generator.metrics()
    return metrics if gap is None else metrics | {"sampling/sync_logprob_gap": gap}


@torch.no_grad()
def policy_scores(model: nn.Module, token_ids: list[int]) -> list[float]:
    """The question for `generator.scores`: log-probabilities at temperature 1, (N,) ids to (N - 1,) numbers.

    The model runs without dropout, as a sampler does. A collective call where parameters are sharded.
    """
    return own_log_probs(model, token_ids, range(1, len(token_ids))).tolist()


@torch.no_grad()
def own_log_probs(
    model: nn.Module, token_ids: Sequence[int], places: Sequence[int], *, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probabilities of some tokens of a row by the model's own forward pass, in eval mode and without a cache.

    Nothing of the trainer or the sampler is in it: no padding, no positions, no packing, no fused head. A collective
    call where parameters are sharded.

    Args:
        model: the policy, unwrapped.
        token_ids: (N,) the row.
        places: (n,) indices of the tokens, at least 1, ascending.
        temperature: what logits are divided by.

    Returns:
        (n,) float32.
    """
    device = next(model.parameters()).device
    ids = torch.tensor([[*token_ids]], device=device)  # (1, N)
    targets = ids[0, [*places]]
    readers = torch.tensor([*places], device=device) - 1  # a token is read one place before it
    head = _head_as_in_the_loss(model) if is_sharded_by_zero(model) else nullcontext()
    base = getattr(model, "get_base_model", lambda: model)()
    options = {}
    # The logits of a long row can be larger than the model. Code from elsewhere may take a number only.
    kind: Any = plain_class(base)
    if kind.__module__.startswith("transformers.") and "logits_to_keep" in inspect.signature(kind.forward).parameters:
        options["logits_to_keep"] = readers
    with evaluation_mode(model), head:
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **options).logits[0]
    if len(logits) != len(readers):
        logits = logits[readers]
    log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return log_probs.gather(1, targets[:, None]).squeeze(1)


class _Head(nn.Module):
    """Calls an output layer as a function, which DeepSpeed's hooks do not see."""

    def __init__(self, head: nn.Linear):
        super().__init__()
        self._of = (head,)  # in a tuple: no submodule

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        (head,) = self._of
        return nn.functional.linear(hidden.to(head.weight.dtype), head.weight, head.bias)


@contextmanager
def _head_as_in_the_loss(model: PreTrainedModel) -> Iterator[None]:
    """Use the output layer of a model under DeepSpeed ZeRO-3 as TRL's loss does: its parameters, never the module.

    DeepSpeed learns from one forward pass in which order the next ones need parameters, and fails where they differ.
    """
    import deepspeed

    base = getattr(model, "get_base_model", lambda: model)()
    head = base.get_output_embeddings()
    for parameter in head.parameters():
        deepspeed.zero.register_external_parameter(base, parameter)
    base.set_output_embeddings(_Head(head))
    try:
        yield
    finally:
        base.set_output_embeddings(head)


def default_max_gap(model: nn.Module, *, is_autocast: bool = False) -> float:
    """1e-3 for float32, where only the order of sums differs; 0.05 for what rounds to 8 or 11 bits.

    `is_autocast`: float32 weights are rounded in every forward pass (mixed precision).
    """
    is_exact = not is_autocast and all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return 1e-3 if is_exact else 0.05


def probe_sync(
    generator: Generator,
    model: nn.Module,
    token_ids: list[int],
    *,
    max_gap: float | None = None,
    is_autocast: bool = False,
) -> float | None:
    """Compare the log-probabilities that sampler and trainer give (N,) likely ids, N >= 2, right after a sync.

    `max_gap` is that of the mean absolute difference; None for `default_max_gap`.

    Returns:
        The largest mean absolute difference of all engines behind the generator; None if it cannot score.

    Raises:
        SyncError: the gap is above `max_gap`. On quantised base weights, which a sampler holds in another form, this
            is a warning.
    """
    max_gap = default_max_gap(model, is_autocast=is_autocast) if max_gap is None else max_gap
    expected = policy_scores(model, token_ids)  # first: an engine that wakes up to score takes its memory
    answers = generator.scores(token_ids)
    if answers is None:
        return None
    gaps = {
        name: sum(abs(left - right) for left, right in zip(scores, expected, strict=True)) / len(expected)
        for name, scores in answers.items()
    }
    name, gap = max(gaps.items(), key=lambda item: item[1] if item[1] == item[1] else float("inf"))
    if gap <= max_gap:
        return gap
    message = (
        f"After the weight sync, the log-probabilities of {name} and of the trainer differ by {gap:.3g} on average "
        f"over {len(expected)} tokens; servers.max_logprob_gap allows {max_gap:g}. Likely causes: a stale adapter or "
        "stale weights (the engine runs another adapter, or kernels that repacked the old weights: on a CPU start "
        "the server with the worker extension, see docs/serving.md); another dtype (start the engine with the "
        "trainer's); another model or template (the server was started from another checkpoint, so vocabulary or "
        "chat template differ). If the difference is only rounding, raise servers.max_logprob_gap."
    )
    if any(not parameter.is_floating_point() for parameter in model.parameters()):
        warnings.warn(message, stacklevel=2)
        return gap
    raise SyncError(message)

"""The output head where tokens were drawn from a part of the vocabulary: only that part is computed.

With top-k, top-p or min-p the sampler's distribution is

    log pi_K(a) = z_a - logsumexp over b in K of z_b

where K are the ids that were kept for this very token (`KeptIds`), for the old, the new and the reference policy
alike. K must be the sampler's own: the trainer's logits are rounded differently, and what they would keep gives some
sampled tokens probability 0.

TRL's fused head calls one function with hidden states, the gathered weight and the options of the model's family
(temperature, soft cap, scale). Inside `kept_head` that function is ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

_CHUNK_NUMBERS = 2**24
"""Numbers of gathered rows of the head at once."""


@contextlib.contextmanager
def kept_head(kept_ids: torch.Tensor, is_scored: torch.Tensor) -> Iterator[None]:
    """The next forward passes of a model with TRL's fused head are normalised over these ids.

    Args:
        kept_ids: (..., K) int32 of each position that predicts a token, filled up with -1; nothing but -1 where a
            token could be any.
        is_scored: (...) bool, which positions predict a token at all.
    """
    import trl.trainer.utils as trl_utils
    from trl.trainer.utils import _ChunkedLogProbFunction as original

    trl_utils._ChunkedLogProbFunction = _KeptHead(kept_ids.flatten(end_dim=-2), is_scored.flatten(), original)
    try:
        yield
    finally:
        trl_utils._ChunkedLogProbFunction = original


def with_kept_ids(
    compute: Callable[..., tuple],
    kept_ids: torch.Tensor,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    *args: Any,
    batch_size: int | None = None,
    **kwargs: Any,
) -> tuple:
    """TRL's `_get_per_token_logps_and_entropies` of a padded batch whose completions have (B, T, K) kept ids."""
    parts = []
    missing = input_ids.shape[1] - 1 - logits_to_keep
    for rows in torch.arange(len(input_ids)).split(batch_size or len(input_ids)):
        is_scored = attention_mask[rows, 1:].bool()
        is_scored[:, :missing] = False
        with kept_head(functional.pad(kept_ids[rows], (0, 0, missing, 0), value=-1), is_scored):
            parts.append(compute(input_ids[rows], attention_mask[rows], logits_to_keep, *args, **kwargs))
    return tuple(x[0] if x[0] is None or x[0].dim() == 0 else torch.cat(x) for x in zip(*parts, strict=True))


class _KeptHead:
    """In place of TRL's function: positions with kept ids by ours, the others by TRL's."""

    def __init__(self, kept_ids: torch.Tensor, is_scored: torch.Tensor, original: Any) -> None:
        self._kept_ids, self._is_scored, self._original = kept_ids, is_scored, original

    def apply(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        """(n,) log-probs and entropies of n positions; 0 where nothing is predicted."""
        kept_ids, is_scored = self._kept_ids.to(hidden.device), self._is_scored.to(hidden.device)
        if len(hidden) != len(is_scored):  # TRL computes the scored ones alone on a GPU
            kept_ids, is_scored = kept_ids[is_scored], is_scored[is_scored]
        has_kept = (kept_ids >= 0).any(dim=1)
        of_kept, rest = ((is_scored & mask).nonzero().squeeze(1) for mask in (has_kept, ~has_kept))
        transform = (temperature, softcap, scale)
        parts = [
            (
                of_kept,
                KeptLogProbs.apply(hidden[of_kept], weight, bias, targets[of_kept], kept_ids[of_kept], *transform),
            )
        ]
        if len(rest) or hasattr(weight, "ds_id"):  # sharded by ZeRO-3: all ranks gather it in the backward pass
            given = (temperature, chunk_size, softcap, scale, outputs)
            parts.append((rest, self._original.apply(hidden[rest], weight, bias, targets[rest], *given)[:2]))
        found = []
        for index, name in enumerate(("log_probs", "entropy")):
            values = torch.zeros(len(hidden), device=hidden.device)
            for places, pair in parts:
                if name in outputs or name == "log_probs":
                    values = values.index_copy(0, places, pair[index])
            found.append(values if name in outputs or name == "log_probs" else None)
        return (*found, None, None, None)


class KeptLogProbs(torch.autograd.Function):
    """(n,) log-probs of targets, and entropies, of the distribution over some rows of the head."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        kept_ids: torch.Tensor,
        temperature: float,
        softcap: float | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states (n, H), a head (V, H) and its bias, targets (n,), kept ids (n, K) filled up with -1."""
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ids = kept_ids.long()
        rows = ids.clamp(min=0)
        logits = torch.empty(ids.shape, device=hidden.device)
        for part in _chunks(ids, hidden.shape[1]):
            states = hidden[part].to(dtype)
            logits[part] = torch.bmm(weight[rows[part]].to(dtype), states.unsqueeze(2)).squeeze(2).float()
        if bias is not None:
            logits += bias[rows].float()
        logits *= scale
        slope = None  # of the soft cap
        if softcap is not None:
            bounded = torch.tanh(logits / softcap)
            logits, slope = softcap * bounded, 1 - bounded**2
        log_probs = torch.log_softmax((logits / temperature).masked_fill(ids < 0, -torch.inf), dim=1)
        probs = log_probs.exp()
        log_probs = log_probs.masked_fill(ids < 0, 0.0)
        entropy = -(probs * log_probs).sum(dim=1)
        is_target = ids == targets.unsqueeze(1)
        ctx.save_for_backward(hidden, weight, bias, ids, probs, log_probs, entropy, is_target, slope)
        ctx.dtype, ctx.factor = dtype, scale / temperature
        return (log_probs * is_target).sum(dim=1), entropy

    @staticmethod
    def backward(ctx: Any, of_log_probs: torch.Tensor, of_entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Gradients of the hidden states, of the head and of its bias."""
        from trl.trainer.utils import maybe_gather_lm_head_ctx

        hidden, weight, bias, ids, probs, log_probs, entropy, is_target, slope = ctx.saved_tensors
        gradient = of_log_probs.unsqueeze(1) * (is_target.float() - probs)  # (n, K), of the logits
        gradient -= of_entropy.unsqueeze(1) * probs * (log_probs + entropy.unsqueeze(1))
        gradient *= ctx.factor if slope is None else ctx.factor * slope
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = ids.clamp(min=0)  # filled up places have gradient 0
        with maybe_gather_lm_head_ctx(weight, bias):
            of_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
            of_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
            for part in _chunks(ids, hidden.shape[1]):
                if of_hidden is not None:
                    chosen = weight[rows[part]].to(ctx.dtype)
                    of_hidden[part] = torch.bmm(gradient[part].unsqueeze(1).to(ctx.dtype), chosen).squeeze(1).float()
                if of_weight is not None:
                    outer = gradient[part].unsqueeze(2) * hidden[part].float().unsqueeze(1)  # (m, K, H)
                    of_weight.index_add_(0, rows[part].flatten(), outer.flatten(end_dim=1))
            of_bias = None
            if needs_bias:
                of_bias = torch.zeros_like(bias, dtype=torch.float32).index_add_(0, rows.flatten(), gradient.flatten())
        found = zip((of_hidden, of_weight, of_bias), (hidden, weight, bias), strict=True)
        return (*(None if one is None else one.to(like.dtype) for one, like in found), *[None] * 5)


def _chunks(ids: torch.Tensor, size: int) -> Iterator[slice]:
    """Stretches of (n, K) ids whose rows of the head, of `size` numbers each, are gathered at once."""
    step = max(1, _CHUNK_NUMBERS // max(1, ids.shape[1] * size))
    return (slice(start, start + step) for start in range(0, len(ids), step))

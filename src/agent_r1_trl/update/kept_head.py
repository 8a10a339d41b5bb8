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
from typing import TYPE_CHECKING, Any

import torch

from agent_r1_trl.update.sampling_masks import SamplingMasks

if TYPE_CHECKING:
    pass

_CHUNK_NUMBERS = 2**24
"""Numbers of gathered rows of the head at once."""


@contextlib.contextmanager
def kept_head(kept_ids: SamplingMasks | torch.Tensor, is_scored: torch.Tensor) -> Iterator[None]:
    """The next forward passes of a model with TRL's fused head are normalised over these ids.

    Args:
        kept_ids: (...) of each position that predicts a token, none where a token could be any; or a tensor (..., K),
            filled up with -1.
        is_scored: (...) bool, which positions predict a token at all.
    """
    import trl.trainer.utils as trl_utils
    from trl.trainer.utils import _ChunkedLogProbFunction as original

    masks = SamplingMasks.of(kept_ids).flatten()
    trl_utils._ChunkedLogProbFunction = _KeptHead(masks, is_scored.flatten(), original)
    try:
        yield
    finally:
        trl_utils._ChunkedLogProbFunction = original


def with_kept_ids(
    compute: Callable[..., tuple],
    kept_ids: SamplingMasks | torch.Tensor,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    *args: object,
    batch_size: int | None = None,
    **kwargs: object,
) -> tuple:
    """TRL's `_get_per_token_logps_and_entropies` of a padded batch whose completions have (B, T) kept ids."""
    masks = SamplingMasks.of(kept_ids)
    missing = input_ids.shape[1] - 1 - logits_to_keep
    parts = []
    for rows in torch.arange(len(input_ids)).split(batch_size or len(input_ids)):
        is_scored = attention_mask[rows, 1:].bool()
        is_scored[:, :missing] = False
        with kept_head(masks[rows].pad(left=missing), is_scored):
            parts.append(compute(input_ids[rows], attention_mask[rows], logits_to_keep, *args, **kwargs))
    joined = []
    for of_parts in zip(*parts, strict=True):
        first = of_parts[0]
        has_rows = first is not None and first.dim() > 0
        joined.append(torch.cat(of_parts) if has_rows else first)
    return tuple(joined)


class _KeptHead:
    """In place of TRL's function: positions with kept ids by ours, the others by TRL's."""

    def __init__(
        self, kept_ids: SamplingMasks, is_scored: torch.Tensor, original: type[torch.autograd.Function]
    ) -> None:
        self._kept_ids = kept_ids
        self._is_scored = is_scored
        self._original = original

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
        kept_ids = self._kept_ids.to(hidden.device)
        is_scored = self._is_scored.to(hidden.device)
        if len(hidden) != len(is_scored):  # TRL computes the scored ones alone on a GPU
            kept_ids, is_scored = kept_ids[is_scored], is_scored[is_scored]
        has_kept = kept_ids.counts > 0
        of_kept = (is_scored & has_kept).nonzero().squeeze(1)
        rest = (is_scored & ~has_kept).nonzero().squeeze(1)
        transform = (temperature, softcap, scale)
        pair = KeptLogProbs.apply(hidden[of_kept], weight, bias, targets[of_kept], kept_ids[of_kept], *transform)
        parts = [(of_kept, pair)]
        if len(rest) or hasattr(weight, "ds_id"):  # sharded by ZeRO-3: all ranks gather it in the backward pass
            given = (temperature, chunk_size, softcap, scale, outputs)
            pair = self._original.apply(hidden[rest], weight, bias, targets[rest], *given)[:2]
            parts.append((rest, pair))

        def joined(index: int) -> torch.Tensor:
            """(n,) log-probs (0) or entropies (1) of all parts."""
            values = torch.zeros(len(hidden), device=hidden.device)
            for places, of_part in parts:
                values = values.index_copy(0, places, of_part[index])
            return values

        log_probs = joined(0)
        entropies = joined(1) if "entropy" in outputs else None
        return (log_probs, entropies, None, None, None)


class KeptLogProbs(torch.autograd.Function):
    """(n,) log-probs of targets, and entropies, of the distribution over some rows of the head.

    Tokens with about as many ids are computed together (`SamplingMasks.bands`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        kept_ids: SamplingMasks | torch.Tensor,
        temperature: float,
        softcap: float | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states (n, H), a head (V, H) and its bias, targets (n,), kept ids of n tokens."""
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        masks = SamplingMasks.of(kept_ids)
        log_probs = torch.zeros(len(hidden), device=hidden.device)
        entropies = torch.zeros_like(log_probs)
        saved: list[torch.Tensor | None] = []
        for places in masks.bands():
            ids = masks.select(places).padded().long()  # (m, K)
            logits, slope = _logits(hidden, weight, bias, places, ids, dtype, softcap, scale)
            of_ids = torch.log_softmax((logits / temperature).masked_fill(ids < 0, -torch.inf), dim=1)
            probs = of_ids.exp()
            of_ids = of_ids.masked_fill(ids < 0, 0.0)
            entropy = -(probs * of_ids).sum(dim=1)
            is_target = ids == targets[places].unsqueeze(1)
            log_probs[places] = (of_ids * is_target).sum(dim=1)
            entropies[places] = entropy
            saved += [places, ids, probs, of_ids, entropy, is_target, slope]
        ctx.save_for_backward(hidden, weight, bias, *saved)
        ctx.dtype, ctx.factor = dtype, scale / temperature
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, of_log_probs: torch.Tensor, of_entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Gradients of the hidden states, of the head and of its bias."""
        from trl.trainer.utils import maybe_gather_lm_head_ctx

        hidden, weight, bias, *saved = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Once for all bands, of which ranks may have different numbers: sharded by ZeRO-3, all ranks gather together.
        with maybe_gather_lm_head_ctx(weight, bias):
            of_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
            of_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
            of_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
            for start in range(0, len(saved), _SAVED):
                places, ids, probs, of_ids, entropy, is_target, slope = saved[start : start + _SAVED]
                gradient = of_log_probs[places].unsqueeze(1) * (is_target.float() - probs)  # (m, K), of the logits
                gradient -= of_entropy[places].unsqueeze(1) * probs * (of_ids + entropy.unsqueeze(1))
                gradient *= ctx.factor if slope is None else ctx.factor * slope
                rows = ids.clamp(min=0)  # filled up places have gradient 0
                for part in _chunks(ids, hidden.shape[1]):
                    if of_hidden is not None:
                        chosen = weight[rows[part]].to(ctx.dtype)
                        states = torch.bmm(gradient[part].unsqueeze(1).to(ctx.dtype), chosen).squeeze(1)
                        of_hidden[places[part]] = states.float()
                    if of_weight is not None:
                        outer = gradient[part].unsqueeze(2) * hidden[places[part]].float().unsqueeze(1)  # (m, K, H)
                        of_weight.index_add_(0, rows[part].flatten(), outer.flatten(end_dim=1))
                if of_bias is not None:
                    of_bias.index_add_(0, rows.flatten(), gradient.flatten())
        gradients = []
        for gradient, like in ((of_hidden, hidden), (of_weight, weight), (of_bias, bias)):
            gradients.append(None if gradient is None else gradient.to(like.dtype))
        return (*gradients, *[None] * 5)


_SAVED = 7
"""Tensors that the forward pass keeps of each band."""


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    places: torch.Tensor,
    ids: torch.Tensor,
    dtype: torch.dtype,
    softcap: float | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(m, K) logits of the ids, (m, K), at m places of the hidden states; and the slope of the soft cap, if any."""
    rows = ids.clamp(min=0)
    logits = torch.empty(ids.shape, device=hidden.device)
    for part in _chunks(ids, hidden.shape[1]):
        states = hidden[places[part]].to(dtype)
        logits[part] = torch.bmm(weight[rows[part]].to(dtype), states.unsqueeze(2)).squeeze(2).float()
    if bias is not None:
        logits += bias[rows].float()
    logits *= scale
    if softcap is None:
        return logits, None
    bounded = torch.tanh(logits / softcap)
    return softcap * bounded, 1 - bounded**2


def _chunks(ids: torch.Tensor, size: int) -> Iterator[slice]:
    """Stretches of (n, K) ids whose rows of the head, of `size` numbers each, are gathered at once."""
    step = max(1, _CHUNK_NUMBERS // max(1, ids.shape[1] * size))
    return (slice(start, start + step) for start in range(0, len(ids), step))

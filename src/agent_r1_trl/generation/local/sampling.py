"""From logits to sampled ids, many rows at once and each independent of the others.

A row's draw depends on its seed and on how many tokens it has sampled, never on other rows: token n of a
request is the inverse of the cumulative distribution at the n-th number of the request's own counter-based stream.
One uniform number per token is enough, so a step costs no random numbers over the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from agent_r1_trl.generation.base import SamplingParams

# u * total must stay below total in float64, or the draw falls off the end of the vocabulary.
_BELOW_ONE = 1.0 - 2.0**-40


class UniformStream:
    """The request's own random numbers in [0, 1), a function of (seed, n) alone.

    >>> UniformStream(7)[2] == UniformStream(7)[2], UniformStream(7)[2] == UniformStream(8)[2]
    (True, False)
    """

    _BLOCK = 64

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed))
        self._numbers: list[float] = []

    def __getitem__(self, index: int) -> float:
        """Number `index` of the stream."""
        while index >= len(self._numbers):
            self._numbers.extend((self._generator.random(self._BLOCK) * _BELOW_ONE).tolist())
        return self._numbers[index]


def policy_logprobs(logits: torch.Tensor, params: SamplingParams, seen: torch.Tensor | None = None) -> torch.Tensor:
    """Log-probabilities of the distribution that is sampled from.

    The order is transformers': repetition penalty, temperature, top-k, top-p, min-p. Greedy decoding
    (`temperature=0`) reports temperature 1 and no filters.

    Args:
        logits: (B, V), any float dtype.
        params: sampling settings.
        seen: (B, V) bool, the ids that occur in each row so far; needed for a repetition penalty.

    Returns:
        (B, V) float32, normalised over the ids that survive the filters, -inf elsewhere.
    """
    scores = logits.float()
    if params.repetition_penalty != 1.0:
        assert seen is not None
        penalised = torch.where(scores < 0, scores * params.repetition_penalty, scores / params.repetition_penalty)
        scores = torch.where(seen, penalised, scores)
    if params.temperature == 0:
        return torch.log_softmax(scores, dim=-1)
    if params.temperature != 1.0:
        scores = scores / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        smallest_kept = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < smallest_kept, -torch.inf)
    if params.top_p < 1.0:
        scores = _keep_top_p(scores, params.top_p)
    logprobs = torch.log_softmax(scores, dim=-1)
    if params.min_p > 0.0:
        threshold = logprobs.amax(dim=-1, keepdim=True) + float(np.log(params.min_p))
        logprobs = torch.log_softmax(logprobs.masked_fill(logprobs < threshold, -torch.inf), dim=-1)
    return logprobs


def _keep_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Mask all but the smallest set of ids whose probability reaches `top_p`; the likeliest id always stays."""
    ordered, ids = scores.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    dropped = mass_before >= top_p
    dropped[:, 0] = False
    return scores.masked_fill(torch.zeros_like(dropped).scatter(-1, ids, dropped), -torch.inf)


def kept_in(logprobs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The ids of each row of (B, V) log-probabilities that survived the filters, int32 on the CPU."""
    row, ids = (logprobs > -torch.inf).nonzero(as_tuple=True)
    return ids.int().cpu().split(row.bincount(minlength=len(logprobs)).tolist())


def draw(logprobs: torch.Tensor, uniforms: list[float] | None) -> tuple[list[int], list[float]]:
    """One id per row.

    Args:
        logprobs: (B, V) from `policy_logprobs`.
        uniforms: B numbers in [0, 1), or None for the likeliest id.

    Returns:
        The ids and their log-probabilities, B each. A row without a usable distribution has log-probability NaN.
    """
    if uniforms is None:
        chosen = logprobs.argmax(dim=-1, keepdim=True)  # (B, 1)
    else:
        # float64: over a vocabulary of 150,000 the rounding of a float32 sum would bias the rare ids.
        cumulative = logprobs.double().exp().cumsum(dim=-1)
        targets = torch.tensor(uniforms, dtype=torch.float64, device=logprobs.device).unsqueeze(-1)
        chosen = torch.searchsorted(cumulative, targets * cumulative[:, -1:], right=True)
        chosen = chosen.clamp(max=logprobs.shape[-1] - 1)  # only rows full of NaN reach the end
    picked = logprobs.gather(-1, chosen)
    # One transfer from the device instead of two; float64 holds both ids and float32 values exactly.
    ids, values = torch.cat([chosen.double(), picked.double()], dim=-1).t().tolist()
    return [int(token_id) for token_id in ids], values

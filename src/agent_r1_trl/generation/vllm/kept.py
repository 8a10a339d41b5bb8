"""Sampling masks out of vLLM's log-probabilities: what was kept of the vocabulary has a finite one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from agent_r1_trl.generation.base import GenerationError, SamplingParams
from agent_r1_trl.kept_ids import KeptIds

MORE = 8
"""Log-probabilities asked for beyond `top_k`: as many ids may be as likely as the last one that is kept."""
_LEAST = -9000.0
"""Over HTTP vLLM writes -9999 for minus infinity."""


def num_logprobs(params: SamplingParams) -> int:
    """VLLM's `logprobs` (0: of the sampled id alone). An engine must allow for as many (`--max-logprobs`)."""
    return params.top_k + MORE if params.cuts and params.top_k else 0


def read_kept_ids(entries: Iterable[Mapping[int, float]], params: SamplingParams) -> KeptIds | None:
    """The ids that each token was drawn from; None where no mask was asked for.

    `entries` are, for each token, the likeliest ids with their log-probabilities after the filters
    (`logprobs_mode="processed_logprobs"`).

    Raises:
        GenerationError: what is there is not the whole distribution.
    """
    if not num_logprobs(params):
        return None
    kept = []
    for position, entry in enumerate(entries):
        finite = {token: value for token, value in entry.items() if value > _LEAST}
        total = math.fsum(map(math.exp, finite.values()))
        if abs(total - 1.0) > 1e-4:
            raise GenerationError(
                f"vLLM drew sampled token {position} from more ids than the {len(finite)} that it names (their "
                f"probabilities sum to {total:.4f}). Its logprobs_mode must be processed_logprobs; where more than "
                f"{MORE} ids are as likely as the last of top_k={params.top_k}, set another top_k."
            )
        kept.append(list(finite))
    return KeptIds.of(kept)

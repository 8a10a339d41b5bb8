"""Does the reasoning still depend on the prompt? Mutual information and retrieval, from cross-scored log-probs.

Reasoning can keep its entropy and yet become a template that fits every prompt; no signal inside a group shows that.
Source: RAGEN-2 (arXiv 2604.06268).
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def mutual_information(log_probs: Sequence[Sequence[float]], lengths: Sequence[int]) -> tuple[float, float]:
    """Mutual information per token between reasoning and prompt, and how often a reasoning finds its prompt.

        MI        = mean_i( L[i][i] / |Z_i| - log( (1/P) sum_j exp L[i][j] ) / |Z_i| )
        retrieval = share of i for which L[i][i] is the largest of L[i]; among k equal largest ones it counts 1/k

    Args:
        log_probs: (P, P) L[i][j], the sum of the log-probs of the reasoning Z_i after prompt j.
        lengths: (P,) |Z_i| in tokens, at least 1 each.

    Returns:
        MI in nats per token, at most log(P) / |Z| and 0 where all prompts fit alike; retrieval in 0 to 1, where
        chance is 1/P.

    Raises:
        ValueError: the shapes do not fit, or a length is below 1.

    >>> mutual_information([[-2.0, -2.0], [-3.0, -3.0]], [4, 4])
    (0.0, 0.5)
    """
    num = len(lengths)
    if num == 0 or len(log_probs) != num or any(len(row) != num for row in log_probs) or min(lengths) < 1:
        raise ValueError(
            f"mutual_information: log_probs must be a square (P, P) and lengths (P,) of whole numbers >= 1; got "
            f"{len(log_probs)} rows and lengths {list(lengths)[:4]}. Leave out reasonings without a token."
        )
    information, found = [], []
    for place, (row, length) in enumerate(zip(log_probs, lengths, strict=True)):
        largest = max(row)
        log_mean = largest + math.log(math.fsum(math.exp(value - largest) for value in row) / num)
        information.append((row[place] - log_mean) / length)
        found.append(1 / row.count(largest) if row[place] == largest else 0.0)
    return math.fsum(information) / num, math.fsum(found) / num

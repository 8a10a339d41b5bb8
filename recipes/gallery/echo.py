"""ECHO (arXiv 2605.24517): the policy also learns to predict what its tools answer.

A cross-entropy on the tokens that the environment wrote, those of the template left out. Context policies that move
observations into the next prompt (`step`, `strip_thinking`) leave it nothing to predict. In a recipe:

    callbacks: [recipes/gallery/echo.py:Echo]
"""

from itertools import chain

import torch

from agent_r1_trl import RolloutCallback
from agent_r1_trl.trajectory import Author


class Echo(RolloutCallback):
    """`coefficient` times the mean cross-entropy of an observation token; logged as `echo_loss`."""

    name = "echo_loss"
    coefficient = 0.1

    def extra_columns(self, output, trajectories, rows):
        """(R, T) which tokens the environment wrote, in rows whose trajectory counts."""
        observed = torch.zeros(output["completion_mask"].shape, dtype=torch.bool)
        for number, (row, index) in enumerate(zip(rows.rows, rows.index.tolist(), strict=True)):
            if index >= 0 and trajectories[index].in_baseline:
                authors = chain.from_iterable(trajectories[index].authors[start:end] for start, end in row.spans)
                mask = [author is Author.ENVIRONMENT for author in authors]
                observed[number, : len(mask)] = torch.tensor(mask, dtype=torch.bool)
        return {"observed": observed}

    def extra_tokens(self, inputs):
        """The same, which the term is a mean over."""
        return inputs["observed"].bool()

    def extra_loss(self, inputs, log_probs, mask):
        """The sum over them."""
        return -self.coefficient * log_probs.sum()

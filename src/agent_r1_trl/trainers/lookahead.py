"""Looking ahead in the Trainer's batches, so that the next rollout can begin early (`overlap_rollout`).

Covered here: the window of batches, and an order of rows that no draw of the other rollout can change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from agent_r1_trl.rollout import derive_seed


class Lookahead:
    """Passes on the batches of an epoch and can look at later ones, so that their rollout can begin early.

    Batches are counted in the Trainer's micro-steps, one batch each. The Trainer takes those of a whole optimizer step
    before it trains on the first of them.
    """

    def __init__(self) -> None:
        self._source: Iterator[Any] | None = None
        self._batches: dict[int, Any] = {}
        """Micro-step -> batch, from the optimizer step that is trained on to the last batch that was looked at."""
        self._next_step = 0
        """Of the batch that is passed on next."""

    def over(self, source: Iterator[Any], step: int) -> Lookahead:
        """An iterator over `source`; the batches before micro-step `step` are done.

        If `source` is a new one, its next batch is that of micro-step `step`.
        """
        if source is not self._source:
            self._source, self._next_step, self._batches = source, step, {}
        self._batches = {number: batch for number, batch in self._batches.items() if number >= step}
        return self

    def __iter__(self) -> Lookahead:
        return self

    def __next__(self) -> Any:
        batch = self._read(self._next_step)
        self._next_step += 1
        return batch

    def at(self, step: int) -> Any:
        """The batch of micro-step `step`, not one that is done; None if it belongs to another epoch."""
        try:
            return self._read(step)
        except StopIteration:
            return None

    def _read(self, step: int) -> Any:
        assert self._source is not None
        while step not in self._batches:
            self._batches[max(self._batches, default=self._next_step - 1) + 1] = next(self._source)
        return self._batches[step]


ROW_INDEX = "row_index"
"""Entry of TRL's batch that tells its rows apart after TRL has shuffled them."""


def in_seeded_order(buffer: list[dict[str, Any]], seed: int, step: int) -> list[dict[str, Any]]:
    """The micro-batches of a rollout, their rows shuffled anew from `seed` and `step`.

    TRL shuffles with torch's global random numbers, from which a rollout that plays at the same time may draw.

    Args:
        buffer: micro-batches with an entry `ROW_INDEX`, (B,) each, which is removed; without it they stay as they are.
        seed: of the run.
        step: the micro-step that trains on the first of them.
    """
    if ROW_INDEX not in buffer[0]:
        return buffer
    generator = torch.Generator().manual_seed(derive_seed(seed, "rows", step))
    sizes = [len(inputs[ROW_INDEX]) for inputs in buffer]
    as_played = torch.cat([inputs.pop(ROW_INDEX) for inputs in buffer]).argsort().cpu()
    order = as_played[torch.randperm(sum(sizes), generator=generator)]
    shuffled: list[dict[str, Any]] = [{} for _ in buffer]
    for name, value in buffer[0].items():
        has_rows = isinstance(value, torch.Tensor) and value.dim() > 0
        rows = torch.cat([inputs[name] for inputs in buffer])[order].split(sizes) if has_rows else None
        for index, inputs in enumerate(shuffled):
            inputs[name] = buffer[index][name] if rows is None else rows[index]
    return shuffled

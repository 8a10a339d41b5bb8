"""Sampling masks as tensors: the ids that each token of a batch was drawn from.

With top-p or min-p one token may have had 20,000 ids to choose from, and most have a handful. So the ids of all tokens
stand in one line, and nothing is as wide as the widest token: `SamplingMasks` in TRL's batch, from trajectories
(`KeptIds`) to the output head (`kept_head.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from agent_r1_trl.kept_ids import KeptIds


@dataclass(frozen=True, eq=False)
class SamplingMasks:
    """The ids that each of (...) tokens was drawn from; in TRL's batch of (R, T) completion tokens.

    Every choice of tokens, of rows and columns too, is a `select` by the tokens' places.

    >>> masks = SamplingMasks.of(torch.tensor([[[3, 7], [5, -1]], [[-1, -1], [4, 6]]]))
    >>> masks.counts.tolist(), masks.ids.tolist()
    ([[2, 1], [0, 2]], [3, 7, 5, 4, 6])
    >>> masks[1:].pad(right=1).padded().tolist()
    [[[-1, -1], [4, 6], [-1, -1]]]
    """

    counts: torch.Tensor
    """(...) int32, the number of each token's ids; 0 for a token that nobody sampled, or that could be any."""
    ids: torch.Tensor
    """(n,) int32, the ids of all tokens, one token's after another's, each in ascending order."""

    @classmethod
    def of(cls, value: SamplingMasks | torch.Tensor) -> SamplingMasks:
        """Masks as they are; those of a tensor (..., K), filled up with -1, in this form."""
        if isinstance(value, SamplingMasks):
            return value
        is_id = value >= 0
        return cls(is_id.sum(dim=-1, dtype=torch.int32), value[is_id].int())

    @classmethod
    def of_turns(cls, turns: Iterable[tuple[int, int, KeptIds]], shape: tuple[int, int]) -> SamplingMasks:
        """(B, T') over time: (trajectory, first token, ids) of each turn, in the order of trajectories and time."""
        counts = torch.zeros(shape, dtype=torch.int32)
        ids = [np.zeros(0, dtype=np.int32)]
        for trajectory, start, kept in turns:
            of_turn = np.array(kept.counts, dtype=np.int32)
            counts[trajectory, start : start + len(kept)] = torch.from_numpy(of_turn)
            ids.append(np.array(kept.ids, dtype=np.int32))
        return cls(counts, torch.from_numpy(np.concatenate(ids)))

    @staticmethod
    def cat(parts: Sequence[SamplingMasks]) -> SamplingMasks:
        """The rows of all parts, as `torch.cat` does it."""
        counts = torch.cat([part.counts for part in parts])
        ids = torch.cat([part.ids for part in parts])
        return SamplingMasks(counts, ids)

    # ---------------------------------------------------------------- what a tensor has

    @property
    def shape(self) -> torch.Size:
        """Shape of the tokens."""
        return self.counts.shape

    @property
    def device(self) -> torch.device:
        """Where the ids are."""
        return self.ids.device

    @property
    def _version(self) -> int:
        """How often something was written to them."""
        return self.counts._version + self.ids._version

    def __len__(self) -> int:
        return len(self.counts)

    def dim(self) -> int:
        """Number of dimensions of the tokens."""
        return self.counts.dim()

    def to(self, device: torch.device | str) -> SamplingMasks:
        """The masks on a device."""
        return SamplingMasks(self.counts.to(device), self.ids.to(device))

    # ---------------------------------------------------------------- choosing tokens

    def _places(self) -> torch.Tensor:
        return torch.arange(self.counts.numel(), device=self.device).view(self.shape)

    def select(self, places: torch.Tensor) -> SamplingMasks:
        """The masks of some tokens, in the shape of `places`: numbers of tokens, throughout; -1 for none."""
        if not self.counts.numel():
            return SamplingMasks(torch.zeros_like(places, dtype=torch.int32), self.ids)
        all_counts = self.counts.flatten().long()
        all_starts = all_counts.cumsum(0) - all_counts
        chosen = places.flatten()
        known = chosen.clamp(min=0)
        counts = torch.where(chosen >= 0, all_counts[known], 0)
        # The i-th id here is the i-th there, moved by as much as the first id of its token is.
        moved_by = all_starts[known] - (counts.cumsum(0) - counts)
        sources = moved_by.repeat_interleave(counts)
        sources += torch.arange(len(sources), device=self.device)
        return SamplingMasks(counts.int().view(places.shape), self.ids[sources])

    def __getitem__(self, index: torch.Tensor | slice | tuple[slice, slice]) -> SamplingMasks:
        """The masks of some rows, or rows and columns; any index that a tensor of this shape takes."""
        if isinstance(index, torch.Tensor):
            index = index.to(self.device)
        return self.select(self._places()[index])

    def pad(self, *, left: int = 0, right: int = 0, below: int = 0) -> SamplingMasks:
        """(R, T) with columns on both sides, and rows behind the last one, of tokens without ids."""
        places = functional.pad(self._places(), (left, right, 0, below), value=-1)
        return self.select(places)

    def flatten(self) -> SamplingMasks:
        """The tokens in one line."""
        return SamplingMasks(self.counts.flatten(), self.ids)

    # ---------------------------------------------------------------- reading

    def padded(self) -> torch.Tensor:
        """(..., K) int32, filled up with -1; K is the largest number of ids here, at least 1."""
        width = max(1, int(self.counts.max())) if self.counts.numel() else 1
        is_id = torch.arange(width, device=self.device) < self.counts.unsqueeze(-1)  # (..., K)
        empty = torch.full(is_id.shape, -1, dtype=torch.int32, device=self.device)
        return empty.masked_scatter(is_id, self.ids)

    def numbers(self) -> torch.Tensor:
        """(...) a number for each token, equal where the ids are, in the order of the ids."""
        ends = self.counts.flatten().cumsum(0).tolist()
        starts = [0, *ends][: len(ends)]
        content = self.ids.cpu().numpy().astype(">i4").tobytes()  # bytes that sort as the ids do
        keys = [content[4 * start : 4 * end] for start, end in zip(starts, ends, strict=True)]
        number_of = {key: number for number, key in enumerate(sorted(set(keys)))}
        return torch.tensor([number_of[key] for key in keys], dtype=torch.long).view(self.shape)

    def bands(self) -> list[torch.Tensor]:
        """Numbers of the tokens with ids, (m,) each, those with about as many together; tokens in one line.

        Filled up to the widest of its band, no token takes more than twice its place, or 16 ids.
        """
        exponents = torch.frexp((self.counts - 1).clamp(min=0).float()).exponent.clamp(min=4)
        exponents = torch.where(self.counts > 0, exponents, 0)
        return [(exponents == one).nonzero().squeeze(1) for one in exponents.unique().tolist() if one]


torch.serialization.add_safe_globals([SamplingMasks])  # a checkpoint holds the rollout in flight

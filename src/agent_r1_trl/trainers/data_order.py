"""The order of the data: the same in an epoch whether the run was resumed or not.

Not part of the data flow: which rows the Trainer asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Sampler


class EpochOrder(Sampler[int]):
    """A sampler whose permutation depends on seed and epoch alone.

    TRL's draws each epoch's permutation from one generator, which a resumed run starts anew: from the second epoch on
    it would see other rows than the run it goes on with.

    Args:
        sampler: TRL's `RepeatSampler`.
        epoch: tells the epoch that begins.
    """

    def __init__(self, sampler: Any, epoch: Callable[[], int]) -> None:
        self._sampler = sampler
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self._sampler.shuffle:
            self._sampler.generator.manual_seed(self._sampler.seed + self._epoch())
        yield from self._sampler

    def __len__(self) -> int:
        return len(self._sampler)

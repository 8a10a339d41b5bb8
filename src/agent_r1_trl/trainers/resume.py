"""What a resumed run needs besides transformers' checkpoint: the rollout under way, and the order of the data."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler

ROLLOUT_STATE = "rollout_state_rank{rank}.pt"
"""File of each rank in a checkpoint."""


def save_rollout_state(folder: Path, rank: int, *, step: int, buffered_inputs: Any) -> None:
    """Save the position between two rollouts; the file is written completely or not at all.

    Args:
        folder: of the checkpoint.
        rank: of this process.
        step: number of micro-batches trained on.
        buffered_inputs: micro-batches of the last rollout that are still to be trained on; None for none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ROLLOUT_STATE.format(rank=rank)
    torch.save({"step": step, "buffered_inputs": buffered_inputs}, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def load_rollout_state(folder: Path, rank: int, device: torch.device) -> dict[str, Any] | None:
    """What `save_rollout_state` wrote; None for a checkpoint of another trainer."""
    path = folder / ROLLOUT_STATE.format(rank=rank)
    if not path.exists():
        return None
    accept_numbered_cpus()
    return torch.load(path, map_location=device, weights_only=True)


@functools.cache
def accept_numbered_cpus() -> None:
    """Let `torch.load` accept the device `cpu:0` of each of several ranks on a CPU, as it accepts `cuda:0`.

    transformers maps the optimizer to that device when such a run is resumed.
    """
    priority = 5  # asked before any other
    torch.serialization.register_package(priority, lambda storage: None, _stay)


def _stay(storage: Any, location: str) -> Any:
    return storage if location.startswith("cpu:") else None


class EpochOrder(Sampler[int]):
    """A sampler whose permutation depends on seed and epoch alone.

    TRL draws the permutation of every epoch from one generator, which a resumed run starts anew: from the second epoch
    on it would see other rows than the run that it continues.

    Args:
        sampler: TRL's `RepeatSampler`.
        epoch: returns the number of the epoch that begins.
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

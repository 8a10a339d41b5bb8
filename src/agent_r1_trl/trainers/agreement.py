"""What goes wrong on one rank is raised on all of them.

A rank that is alone with its error leaves the others waiting for it in their next collective call, until they run into
its timeout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object

from agent_r1_trl.environments.base import RewardError
from agent_r1_trl.tools.faults import InfrastructureError

_KINDS: tuple[type[Exception], ...] = (RewardError, ValueError, InfrastructureError)
"""Kinds of errors that all ranks raise as they are."""


def is_main_process() -> bool:
    """Whether this is the main process of the run."""
    return PartialState().is_main_process


def raise_everywhere(error: Exception | None) -> None:
    """Raise this rank's error; where it has none, the first of the other ranks' in its words.

    All ranks must call it.

    Raises:
        Exception: `error` itself.
        Exception: another rank's error, as a RewardError, ValueError or InfrastructureError if it is one, else as a
            RuntimeError.
    """
    if PartialState().num_processes == 1:
        texts: list[tuple[type[Exception], str] | None] = []
    else:
        kind = next((item for item in _KINDS if isinstance(error, item)), RuntimeError)
        texts = gather_object([None if error is None else (kind, f"{type(error).__name__}: {error}")])
    if error is not None:
        raise error
    for rank, found in enumerate(texts):
        if found is not None:
            kind, message = found
            raise kind(f"Rank {rank} has stopped all others: {message}")


@contextlib.contextmanager
def raised_everywhere() -> Iterator[None]:
    """Whatever the block raises on one rank is raised on all. All ranks must enter it; it holds no collective call."""
    caught = None
    try:
        yield
    except Exception as error:
        caught = error
    raise_everywhere(caught)


def num_ranks() -> int:
    """Number of ranks that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Agreement:
    """Small collective operations on the CPU, which make no GPU wait.

    Args:
        timeout: of each operation.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._group: Any = None

    def largest(self, signum: int, error: Exception | None) -> tuple[int, list[str]]:
        """The largest `signum` of all ranks, and what has gone wrong on them. All ranks must call it.

        Args:
            signum: number of the signal that this rank has received; 0 for none.
            error: what went wrong on this rank.
        """
        texts = [] if error is None else [f"{type(error).__name__}: {error}"]
        if num_ranks() == 1:
            return signum, texts
        if self._group is None:
            has_gloo = "gloo" in dist.get_backend()
            self._group = dist.group.WORLD if has_gloo else dist.new_group(backend="gloo", timeout=self._timeout)
        both = torch.tensor([signum, len(texts)])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        if both[1]:
            gathered: list[Any] = [None] * num_ranks()
            dist.all_gather_object(gathered, texts, group=self._group)
            texts = [
                f"Rank {rank} has stopped all others: {text}" for rank, found in enumerate(gathered) for text in found
            ]
        return int(both[0]), texts

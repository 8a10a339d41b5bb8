"""Where between two rollouts a checkpoint was made, with the rollout that is still to be trained on."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch

ROLLOUT_STATE = "rollout_state_rank{rank}.pt"
"""File of each rank in a checkpoint."""


def save_rollout_state(folder: Path, rank: int, *, step: int, buffered_inputs: Any) -> None:
    """Write `step` and what of the last rollout is still to be trained on (None for nothing), all or nothing."""
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
    """Let `torch.load` take `cpu:0`, the device of each of several ranks on a CPU, as it takes `cuda:0`.

    Resuming such a run, transformers reads the optimizer to there.
    """
    priority = 5  # asked before any other
    torch.serialization.register_package(priority, lambda storage: None, _stay)


def _stay(storage: Any, location: str) -> Any:
    return storage if location.startswith("cpu:") else None

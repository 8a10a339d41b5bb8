"""What a run shows while it trains: a block of lines in a terminal, a line a step elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_r1_trl.trainers.config import MultiTurnConfig
    from agent_r1_trl.trainers.construction import TrainRows


def make_callbacks(config: MultiTurnConfig, train_dataset: TrainRows) -> list[Any]:
    """One, unless transformers shows the run."""
    from agent_r1_trl.features.progress.training import NoProgress, TrainingProgress

    if config.progress == "transformers":
        return []
    if config.progress == "none":
        return [NoProgress()]
    return [TrainingProgress(is_plain=config.progress == "lines" or config.disable_tqdm)]

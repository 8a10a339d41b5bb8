"""The rollout journal: every turn on disk as it happens, so that a killed run repeats none of it.

    OUTPUT_DIR/journal/rank0/rollout_000000064.journal     the rollout that micro-step 64 begins to train on
    OUTPUT_DIR/journal/rank1/rollout_000000064.journal     the second process's part of it
    OUTPUT_DIR/journal/rank0/rollout_000000064.1.journal   the first round that replaced groups of it
    OUTPUT_DIR/journal/eval.journal                        of `agent-r1-trl eval`

- `records.py`: a file is a row of records, each with length and checksum; what follows the last whole one is dropped
- `reader.py`: what the records of a rollout say about each of its trajectories
- `log.py`: the file of a rollout in flight: finished trajectories are handed out, unfinished ones go on
- `recorders.py`: draft, generator and environment session that write, and first repeat what was written
- `replay.py`: a rollout from its journal alone, without sampler, tools and environment

Not covered here: which rollouts a training run may use again (`training.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent_r1_trl.features.journal.log import RolloutLog, eval_journal
from agent_r1_trl.features.journal.reader import read_rollout
from agent_r1_trl.features.journal.records import VERSION, dump
from agent_r1_trl.features.journal.replay import JournalReplay, ReplayError

if TYPE_CHECKING:
    from agent_r1_trl.trainers.construction import TrainRows

__all__ = ["VERSION", "JournalReplay", "ReplayError", "RolloutLog", "dump", "eval_journal", "read_rollout"]


def make_callbacks(config: Any, train_dataset: TrainRows) -> list[Any]:
    """The journal, unless it is off."""
    from agent_r1_trl.features.journal.training import TrainingJournal

    return [] if config.journal is None else [TrainingJournal(config)]

"""Problems of the journal's settings, read with those of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent_r1_trl.settings import Clash, Need


def _replays(c: Any) -> bool:
    return c.journal is not None and c.journal.replay is not None


NEEDS: tuple[Need, ...] = ()
CLASHES = (
    Clash(
        "journal.replay output_dir",
        lambda c: _replays(c) and Path(c.journal.replay).absolute().is_relative_to(Path(c.output_dir).absolute()),
        "the replay would overwrite the checkpoints of the run that it reads. Set output_dir to another folder.",
    ),
    Clash(
        "journal.replay eval_strategy",
        lambda c: _replays(c) and c.eval_strategy != "no",
        "the journal of a training run holds no evaluations. Set eval_strategy to 'no'.",
    ),
)

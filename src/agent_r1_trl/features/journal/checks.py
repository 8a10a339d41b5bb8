"""What the settings of the journal cannot mean; read with those of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_r1_trl.settings import Clash, Need

NEEDS: tuple[Need, ...] = ()
CLASHES = (
    Clash(
        "replay output_dir",
        lambda c: c.replay is not None and Path(c.replay).absolute().is_relative_to(Path(c.output_dir).absolute()),
        "the replay would overwrite the checkpoints of the run that it reads. Set output_dir to another folder.",
    ),
    Clash(
        "replay eval_strategy",
        lambda c: c.replay is not None and c.eval_strategy != "no",
        "the journal of a training run holds no evaluations. Set eval_strategy to 'no'.",
    ),
)


def settle(config: Any) -> None:
    """Nothing follows from them."""


def find_problems(config: Any) -> Iterator[str]:
    """None besides those of the tables."""
    yield from ()

"""The setting `journal`: every turn of a rollout on disk, and a rollout that is taken from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from agent_r1_trl.settings import CountOrZero, SettingsGroup, Words, setting


@dataclass(kw_only=True)
class JournalSettings(SettingsGroup):
    """How long a journal is kept, and which one is replayed."""

    may_be_off: ClassVar[bool] = True

    keep: CountOrZero = setting(
        4,
        "Number of rollouts of a training whose journal is kept, per process, although a checkpoint has made it "
        "unnecessary. What lies behind the last checkpoint is always kept (nothing, with save_strategy='no').",
    )
    replay: Words | None = setting(
        None,
        "Take the rollouts from the journal of another run or evaluation (its output_dir, or the folder `journal`): "
        "no sampler, no tools, no environment. For debugging reward functions and losses.",
    )


GROUPS = {"journal": JournalSettings}

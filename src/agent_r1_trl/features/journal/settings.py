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
        "Number of rollouts whose journal is kept although a checkpoint has made it unnecessary. Those since the "
        "last checkpoint always are.",
    )
    replay: Words | None = setting(
        None,
        "Take the rollouts from another run's or evaluation's journal (its output_dir, or the folder `journal`), "
        "without sampler, tools and environment.",
    )


GROUPS = {"journal": JournalSettings}

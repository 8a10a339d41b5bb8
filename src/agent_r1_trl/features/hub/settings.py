"""The setting `push`: what `push_to_hub` uploads besides the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from agent_r1_trl.settings import Flag, SettingsGroup, Texts, setting


@dataclass(kw_only=True)
class PushSettings(SettingsGroup):
    """Files that are uploaded with the model; by default private ones stay here."""

    trajectories: Flag = setting(
        False, "Upload the recorded trajectories. They contain prompts and tool results, which may be private."
    )
    critic: Flag = setting(False, "Upload PPO's critic, in `critic/`.")
    allow_secrets: Annotated[list[str], Texts()] | None = setting(
        None,
        "Names of files, or patterns of them, that are uploaded although something in them looks like a secret.",
    )


GROUPS = {"push": PushSettings}

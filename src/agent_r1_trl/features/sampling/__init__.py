"""Which prompts are drawn, and which groups are trained on: filter, dynamic sampling, curriculum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_r1_trl.trainers.construction import TrainRows


def make_callbacks(config: Any, train_dataset: TrainRows) -> list[Any]:
    """The callbacks that the settings ask for, or that the echo guard may switch on."""
    from agent_r1_trl.features.sampling.group_filter import GroupFilter
    from agent_r1_trl.features.sampling.resampling import Resampling, check_can_draw

    asked = config.sampling
    is_asked = asked.resample_rounds or asked.curriculum or asked.filter_groups is not None
    if not is_asked and (config.echo is None or config.echo.actions is None):
        return []
    check_can_draw(train_dataset, config)
    return [GroupFilter(config), Resampling(config)]

"""Where a run stands: the mode, the rewards, the place in the data, the metrics of the step under way.

TRL names that this file touches: `_metrics`, `_step`, `state`, `args`, `model`, `num_generations`,
`num_generations_eval`, `reward_funcs`, `reward_func_names`, `reward_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl import GRPOTrainer

from agent_r1_trl.trainers.under_way import Position


class RunStateTrainer(GRPOTrainer):
    """TRL's trainer, which is asked where the run stands."""

    evaluation: Any
    _step: int  # TRL's own

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _group_size(self) -> int:
        """Rows of one prompt."""
        return self.num_generations if self.model.training else self.num_generations_eval

    @property
    def _reward_table(self) -> dict[str, Any]:
        """TRL's reward functions, their names and weights."""
        weights = self.reward_weights.tolist()
        return {"functions": self.reward_funcs, "names": self.reward_func_names, "weights": weights}

    def _position(self) -> Position:
        return Position(
            micro_step=self._step,
            optimizer_step=self.state.global_step,
            num_micro_steps=self.state.max_steps * self.args.gradient_accumulation_steps,
            group_size=self._group_size,
            is_training=self.model.training,
            first_row=0 if self.model.training else self.evaluation.first_row,
        )

    def _add_metrics(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[self._mode][name].append(value)

"""A curriculum: prompts are drawn by how often their trajectories have passed of late.

With p the pass rate of a prompt, 4 p (1 - p) is 1 where half of its trajectories pass, and 0 where all or none do: a
group of the latter kind has nothing to teach. The weight of a prompt is

    w = max(floor, 4 p (1 - p)),  p <- (1 - rate) p + rate * (share of the group's members that passed)

where p is an exponential moving average over its groups that begins at 1/2, so that a new prompt has the largest
weight, and one unlucky group does not end its days. Prompts are drawn without repetition inside a batch, each with a
chance in proportion to w among those that are left (Efraimidis and Spirakis 2006).

All ranks hold the same numbers. A draw follows from the run's seed, the step and these numbers, which are in every
checkpoint.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agent_r1_trl.rollout import derive_seed

logger = logging.getLogger(__name__)

STATE = "curriculum.pt"
"""In a checkpoint."""
_LATEST = 1e9
"""End of a race between prompts, some of which may have the weight 0."""


class Curriculum:
    """Draws the prompts of each batch, in place of the Trainer's order."""

    def __init__(self, trainer: Any) -> None:
        args = trainer.args
        self.floor, self.rate = args.sampling.curriculum_floor, args.sampling.curriculum_rate
        num = len(trainer.train_dataset)
        self.pass_rates = torch.full((num,), 0.5, dtype=torch.float64)
        """(P,) of each row of the data set."""
        self.num_groups = torch.zeros(num, dtype=torch.int64)
        """(P,) groups of each row that were counted."""
        self._trainer = trainer
        self._drawn: dict[int, list[int]] = {}
        """Micro-step -> the row of each group, for rollouts that are not counted yet."""

    # ---------------------------------------------------------------- drawing

    def weights(self) -> torch.Tensor:
        """(P,) the weight of each row."""
        return (4 * self.pass_rates * (1 - self.pass_rates)).clamp(min=self.floor)

    def order(self, seed: int) -> list[int]:
        """All rows, in the order of a weighted draw without repetition."""
        uniform = torch.rand(len(self.pass_rates), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return (uniform.log() / self.weights()).argsort(descending=True, stable=True).tolist()

    def choose_rows(self, rows: Sequence[dict[str, Any]], micro_step: int) -> list[dict[str, Any]]:
        """This rank's rows of the batch that a micro-step begins to train on, as many as the Trainer has drawn."""
        trainer, size = self._trainer, self._trainer.num_generations
        first = trainer.accelerator.process_index * len(rows)
        num = trainer.accelerator.num_processes * len(rows) // size
        drawn = self._drawn[micro_step] = self.order(derive_seed(trainer.args.seed, "curriculum", micro_step))[:num]
        chosen = [dict(trainer.train_dataset[drawn[(first + row) // size]]) for row in range(len(rows))]
        trainer.row_check.check_batch(chosen)
        return chosen

    def draw_weights(self, prompts: Sequence[int]) -> dict[int, float]:
        """What each prompt of a draw counts for, so that the draw speaks for all prompts alike: 1 / its chance.

        A draw without repetition is a race: prompt i arrives after an exponential time of rate w_i, those are drawn
        that arrive before the time t at which as many are expected; its chance is 1 - exp(-w_i t). To be asked for
        before the groups are counted.
        """
        weights, num = self.weights(), len({*prompts})
        if num >= len(weights):
            return dict.fromkeys(prompts, 1.0)
        low, high = 0.0, 1 / self.floor if self.floor > 0 else 1.0
        while -torch.expm1(-weights * high).sum() < num and high < _LATEST:
            high *= 2
        for _ in range(50):  # bisection
            time = (low + high) / 2
            low, high = (low, time) if -torch.expm1(-weights * time).sum().item() > num else (time, high)
        chances = -torch.expm1(-weights * high)
        return {prompt: 1 / max(chances[prompt].item(), 1 / _LATEST) for prompt in prompts}

    def drawn(self, micro_step: int) -> list[int]:
        """The row of each group of a batch, of all ranks; to be asked for once."""
        return self._drawn.pop(micro_step)

    # ---------------------------------------------------------------- results

    def observe(self, prompts: Sequence[int], passes: Sequence[Sequence[float]]) -> None:
        """Take in the groups that were sampled for a batch.

        Args:
            prompts: the row of each group.
            passes: of its members, 1 or 0; NaN outside the baseline. A group of such members alone is not counted.
        """
        for prompt, group in zip(prompts, passes, strict=True):
            counted = [value for value in group if not math.isnan(value)]
            if not counted:
                continue
            share = sum(counted) / len(counted)
            self.pass_rates[prompt] += self.rate * (share - self.pass_rates[prompt])
            self.num_groups[prompt] += 1

    def metrics(self) -> dict[str, float]:
        """The shares in which the next prompts are drawn."""
        shares, is_seen = self.weights() / self.weights().sum(), self.num_groups > 0
        return {
            "curriculum/seen_share": is_seen.double().mean().item(),
            "curriculum/pass_rate": self.pass_rates[is_seen].mean().item(),
            "curriculum/share_min": shares.min().item(),
            "curriculum/share_max": shares.max().item(),
            "curriculum/effective_prompts": 1 / shares.square().sum().item(),
        }

    # ---------------------------------------------------------------- checkpoints

    def save(self, folder: Path) -> None:
        """Write `STATE`."""
        torch.save({"pass_rates": self.pass_rates, "num_groups": self.num_groups}, folder / STATE)

    def load(self, folder: Path) -> None:
        """Read it; where a checkpoint has none, or one of other data, every prompt is new."""
        path, num = folder / STATE, len(self.pass_rates)
        state = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
        if state is None or len(state["pass_rates"]) != num:
            found = "no such file" if state is None else f"one of {len(state['pass_rates'])} prompts"
            logger.warning("%s: %s for %d prompts. The curriculum begins anew.", path, found, num)
            state = {"pass_rates": torch.full_like(self.pass_rates, 0.5), "num_groups": self.num_groups * 0}
        self.pass_rates, self.num_groups = state["pass_rates"], state["num_groups"]
        self._drawn.clear()

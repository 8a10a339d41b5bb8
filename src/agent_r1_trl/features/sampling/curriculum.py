"""A curriculum: prompts are drawn by how often their trajectories have passed of late.

With p the pass rate of a prompt, 4 p (1 - p) is 1 where half of its trajectories pass, and 0 where all or none do: a
group of the latter kind has nothing to teach. The weight of a prompt is

    w = max(floor, 4 p (1 - p)),  p <- (1 - rate) p + rate * (share of the group's members that passed)

where p is an exponential moving average over its groups that begins at 1/2, so that a new prompt has the largest
weight, and one unlucky group does not end its days. Prompts are drawn without repetition inside a batch, each with a
chance in proportion to w among those that are left (Efraimidis and Spirakis 2006).

A pass rate belongs to the content of a row, not to its number: equal rows share one, and a run that is resumed with
other data (`resume_without: [data]`) keeps the rates of the rows that are still there.

All ranks hold the same numbers. A draw follows from the run's seed, the step and these numbers, which are in every
checkpoint.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset

from agent_r1_trl.rollout import derive_seed

if TYPE_CHECKING:
    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

logger = logging.getLogger(__name__)

STATE = "curriculum.pt"
"""In a checkpoint."""
_NEW_RATE = 0.5
"""Pass rate of a prompt that was not counted yet."""
_LATEST = 1e9
"""End of a race between prompts, some of which may have the weight 0."""


class Curriculum:
    """Draws the prompts of each batch, in place of the Trainer's order."""

    def __init__(self, trainer: MultiTurnTrainer) -> None:
        args = trainer.args
        self.floor = args.sampling.curriculum_floor
        self.rate = args.sampling.curriculum_rate
        num = len(trainer.train_dataset)
        self.pass_rates = torch.full((num,), _NEW_RATE, dtype=torch.float64)
        """(P,) of each row of the data set."""
        self.num_groups = torch.zeros(num, dtype=torch.int64)
        """(P,) groups of each row, or of one that equals it, that were counted."""
        self._trainer = trainer
        self._drawn: dict[int, _Draw] = {}
        """Micro-step -> the draw of a rollout that is not counted yet; with `rollouts_ahead` there are several."""

    # ---------------------------------------------------------------- drawing

    def weights(self, pass_rates: torch.Tensor | None = None) -> torch.Tensor:
        """(P,) the weight of each row, by these pass rates or by the present ones."""
        rates = self.pass_rates if pass_rates is None else pass_rates
        return (4 * rates * (1 - rates)).clamp(min=self.floor)

    def order(self, seed: int) -> list[int]:
        """All rows, in the order of a weighted draw without repetition."""
        uniform = torch.rand(len(self.pass_rates), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return (uniform.log() / self.weights()).argsort(descending=True, stable=True).tolist()

    def choose_rows(self, rows: Sequence[dict[str, Any]], micro_step: int) -> list[dict[str, Any]]:
        """This rank's rows of the batch that a micro-step begins to train on, as many as the Trainer has drawn.

        A rollout that a resumed run begins again has the rows that were drawn for it.
        """
        trainer, size = self._trainer, self._trainer.num_generations
        first = trainer.accelerator.process_index * len(rows)
        num = trainer.accelerator.num_processes * len(rows) // size
        if micro_step not in self._drawn:
            order = self.order(derive_seed(trainer.args.seed, "curriculum", micro_step))
            self._drawn[micro_step] = _Draw(order[:num], self.pass_rates.clone())
        drawn = self._drawn[micro_step].rows
        chosen = [dict(trainer.train_dataset[drawn[(first + row) // size]]) for row in range(len(rows))]
        trainer.row_check.check_batch(chosen)
        return chosen

    def draw_weights(self, prompts: Sequence[int], pass_rates: torch.Tensor) -> dict[int, float]:
        """The weight of each prompt of a draw, so that the draw speaks for all prompts alike: 1 / its chance.

        A draw without repetition is a race: prompt i arrives after an exponential time of rate w_i, those are drawn
        that arrive before the time t at which as many are expected; its chance is 1 - exp(-w_i t).

        Args:
            prompts: the row of each group.
            pass_rates: (P,) those by which they were drawn.
        """
        weights = self.weights(pass_rates)
        num = len(set(prompts))
        if num >= len(weights):
            return dict.fromkeys(prompts, 1.0)
        low = 0.0
        high = 1 / self.floor if self.floor > 0 else 1.0
        while -torch.expm1(-weights * high).sum() < num and high < _LATEST:
            high *= 2
        for _ in range(50):  # bisection
            time = (low + high) / 2
            if -torch.expm1(-weights * time).sum().item() > num:
                high = time
            else:
                low = time
        chances = -torch.expm1(-weights * high)
        return {prompt: 1 / max(chances[prompt].item(), 1 / _LATEST) for prompt in prompts}

    def drawn(self, micro_step: int) -> tuple[list[int], torch.Tensor]:
        """The row of each group of a batch, of all ranks, and the pass rates of the draw; to be asked for once."""
        draw = self._drawn.pop(micro_step)
        return draw.rows, draw.pass_rates

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
            equal_rows = self._rows_of_key[self._row_keys[prompt]]
            self.pass_rates[equal_rows] += self.rate * (share - self.pass_rates[equal_rows])
            self.num_groups[equal_rows] += 1

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

    # ---------------------------------------------------------------- rows

    @functools.cached_property
    def _row_keys(self) -> list[str]:
        """(P,) `row_keys` of the data set, which are read once."""
        return row_keys(self._trainer.train_dataset)

    @functools.cached_property
    def _rows_of_key(self) -> dict[str, list[int]]:
        """Key -> the rows that have it, in their order."""
        rows: dict[str, list[int]] = {}
        for row, key in enumerate(self._row_keys):
            rows.setdefault(key, []).append(row)
        return rows

    # ---------------------------------------------------------------- checkpoints

    def save(self, folder: Path) -> None:
        """Write `STATE`: the keys of the rows that were counted, and the numbers of each."""
        counted: dict[str, int] = {}
        for row in self.num_groups.nonzero().flatten().tolist():
            counted.setdefault(self._row_keys[row], row)
        rows = list(counted.values())
        state = {"keys": list(counted), "pass_rates": self.pass_rates[rows], "num_groups": self.num_groups[rows]}
        # Of rollouts in flight: which prompts were drawn for them, by which pass rates. Later ones are counted.
        state["drawn"] = {
            micro_step: {"keys": [self._row_keys[row] for row in draw.rows], "pass_rates": draw.pass_rates[rows]}
            for micro_step, draw in self._drawn.items()
        }
        torch.save(state, folder / STATE)

    def load(self, folder: Path) -> None:
        """Read it. Rows that are not in it are new, and all are where a checkpoint has none; a warning says so."""
        self._drawn.clear()
        self.pass_rates.fill_(_NEW_RATE)
        self.num_groups.zero_()
        path = folder / STATE
        if not path.exists():
            logger.warning("%s: no such file. The curriculum begins anew.", path)
            return
        state = torch.load(path, map_location="cpu", weights_only=True)
        if "keys" not in state:
            logger.warning(
                "%s holds pass rates by row number, as an earlier version of agent-r1-trl wrote them, and does not "
                "say which rows they are of. The curriculum begins anew.",
                path,
            )
            return
        num_found = 0
        rates, counts = state["pass_rates"].tolist(), state["num_groups"].tolist()
        for key, rate, count in zip(state["keys"], rates, counts, strict=True):
            rows = self._rows_of_key.get(key)
            if rows is None:
                continue
            num_found += 1
            self.pass_rates[rows] = rate
            self.num_groups[rows] = count
        self._load_draws(state.get("drawn", {}), state["keys"])
        if num_found == len(state["keys"]):
            return
        logger.warning(
            "%s has pass rates of %d prompts, of which the data has %d. %s.",
            path,
            len(state["keys"]),
            num_found,
            "The others of the data begin anew" if num_found else "The curriculum begins anew",
        )

    def _load_draws(self, drawn: Mapping[int, Mapping[str, Any]], keys: Sequence[str]) -> None:
        """Know the draws of the rollouts that were in flight again, unless some of their rows are gone."""
        for micro_step, draw in drawn.items():
            if not all(key in self._rows_of_key for key in draw["keys"]):
                continue
            pass_rates = torch.full_like(self.pass_rates, _NEW_RATE)
            for key, rate in zip(keys, draw["pass_rates"].tolist(), strict=True):
                pass_rates[self._rows_of_key.get(key, [])] = rate
            self._drawn[micro_step] = _Draw([self._rows_of_key[key][0] for key in draw["keys"]], pass_rates)


@dataclass
class _Draw:
    """The prompts of a rollout."""

    rows: list[int]
    """The row of each group."""
    pass_rates: torch.Tensor
    """(P,) those by which they were drawn."""


# -------------------------------------------------------------------- keys of rows


def row_keys(dataset: Dataset | Sequence[object]) -> list[str]:
    """(P,) a digest of the whole content of each row, the same in every process; equal rows have the same.

    The `id` column alone is not enough: in many data sets it is the row's number.

    >>> keys = row_keys([{"id": 0, "prompt": "a"}, {"prompt": "a", "id": 0}, {"id": 0, "prompt": "b"}])
    >>> keys[0] == keys[1], keys[0] == keys[2]
    (True, False)
    """
    return [_row_key(row) for row in _plain_rows(dataset)]


def _plain_rows(dataset: Dataset | Sequence[object]) -> Iterable[object]:
    if not isinstance(dataset, Dataset):
        for index in range(len(dataset)):
            yield dataset[index]
        return
    for table in dataset.with_format("arrow").iter(batch_size=1000):  # no transform runs, no image is decoded
        yield from table.to_pylist()


def _row_key(row: object) -> str:
    content = dict(row) if isinstance(row, Mapping) else row
    text = json.dumps(content, sort_keys=True, default=_stable_repr, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _stable_repr(value: object) -> str:
    """The `repr` without the address in memory, which differs between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))

"""Dynamic sampling: zero-variance groups are replaced by groups of fresh prompts (`resample_rounds`).

After a rollout the reward functions are called at once. A group whose returns are all equal, or that has fewer than
two members in the baseline, is without signal (`rules.has_signal`). In up to `resample_rounds` rounds each of them is
replaced by a whole group of another prompt, sampled with the same weights; a group is judged by all its members, when
the last of them has ended. What is left without signal in the end stays in the batch.

Everything that decides is the same on all ranks, and follows from the seed, the step and the trajectories: a resumed
run, whose trajectories come from the journal, makes the same batch. A rank samples what belongs in its own rows.

Not covered: which prompts are worth drawing (`curriculum.py`), excluding groups from the update (`group_filter.py`).
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from agent_r1_trl.features.sampling.curriculum import Curriculum
from agent_r1_trl.features.sampling.rules import has_signal, passes, raw_returns
from agent_r1_trl.rollout import derive_seed
from agent_r1_trl.rollout.requests import example_key
from agent_r1_trl.trainers.callbacks import RolloutCallback, is_main_process, raised_everywhere
from agent_r1_trl.trainers.rollout_batch import Position, ScoredBatch

if TYPE_CHECKING:
    from datasets import Dataset

    from agent_r1_trl.trainers.construction import TrainRows
    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

ADDED_UP = ("time/rollout_s", "time/wait_s", "time/outage_s", "tools/replayed_rollouts")
"""Metrics of a batch's rollouts that are sums over its rounds; the others are those of its first rollout."""


class Resampling(RolloutCallback):
    """Replaces groups without signal in the rollouts of a training."""

    name = "resampling"

    def __init__(self, args: Any) -> None:
        asked = args.sampling
        self.rounds: int = asked.resample_rounds
        """Rounds in which groups are replaced; 0 for none. May be changed during a run, on all ranks alike."""
        self.pass_reward: float = asked.pass_reward
        self.curriculum: Curriculum | None = None
        """Which prompts are drawn; None if the Trainer's order holds."""

    def attach(self, trainer: MultiTurnTrainer) -> None:
        """The curriculum counts the rows of the data set."""
        super().attach(trainer)
        self.begin_run()

    def begin_run(self) -> None:
        """Every prompt is new, unless a checkpoint says otherwise."""
        if self.trainer.args.sampling.curriculum:
            self.curriculum = Curriculum(self.trainer)

    @property
    def samples_more(self) -> bool:
        """Whether groups are replaced, or a curriculum has to see them first."""
        return self.curriculum is not None or self._is_on(self.trainer.num_generations)

    def choose_rows(self, rows: Sequence[dict[str, Any]], micro_step: int) -> Sequence[dict[str, Any]]:
        """Rows that the curriculum draws."""
        return rows if self.curriculum is None else self.curriculum.choose_rows(rows, micro_step)

    def _is_on(self, group_size: int) -> bool:
        """Whether groups are to be replaced, and can be; `rounds` may have changed since the settings were checked."""
        return self.rounds > 0 and group_size > 1 and hasattr(self.trainer.train_dataset, "__len__")

    # ---------------------------------------------------------------- rounds

    def after_scores(self, batch: ScoredBatch) -> None:
        """Replace the groups of a batch that have no signal, until there are none or a limit is reached.

        Its members are resolved anew, and its metrics get those of the rounds.
        """
        if not self.samples_more:
            return
        position, metrics = batch.position, batch.metrics
        start, size = time.perf_counter(), position.group_size
        curriculum, used = self.curriculum, set(self._keys(batch))
        returns, passed, signals = self._judge(batch, size)
        # Of all groups that are sampled for the batch, on all ranks; in the end some of them are in it.
        all_returns, all_passed = [*returns], [*passed]
        all_prompts, rates = ([], None) if curriculum is None else curriculum.drawn(position.micro_step)
        num_groups, num_with_signal = len(signals), sum(signals)
        number, rounds = 0, self.rounds if self._is_on(size) else 0
        while number < rounds and not all(signals):
            groups = [group for group, has_one in enumerate(signals) if not has_one]
            prompts = self._draw(len(groups), position.micro_step, number + 1, used)
            of_group = dict(zip(groups, prompts, strict=True))
            more = self._sample_round(batch, replace(position, round=number + 1), of_group)
            if more is None:
                break
            number += 1
            used.update(self._keys(more))
            returns, passed, signals = self._judge(batch, size)
            all_returns += [returns[group] for group in groups]
            all_passed += [passed[group] for group in groups]
            all_prompts += prompts
        known = _without_nan(all_returns)
        won = _without_nan(all_passed)
        metrics["sampling/resampled_groups"] = float(len(all_returns) - num_groups)
        metrics["sampling/pass_rate"] = sum(won) / len(won) if won else math.nan
        metrics["sampling/reward"] = math.fsum(known) / len(known) if known else math.nan
        metrics["sampling/groups_with_signal_before"] = num_with_signal / num_groups
        metrics["sampling/groups_with_signal"] = sum(signals) / num_groups
        metrics["sampling/resample_rounds"] = float(number)
        tokens = sum(item.num_action_tokens for item in [*batch.trajectories, *batch.replaced])
        metrics["sampling/generated_tokens"] = float(sum(gather_object([tokens])))
        metrics["time/resample_s"] = time.perf_counter() - start
        if curriculum is not None and rates is not None:
            weights = curriculum.draw_weights(all_prompts, rates).items()
            batch.draw_weights = {example_key(self.trainer.train_dataset[row]): weight for row, weight in weights}
            curriculum.observe(all_prompts, all_passed)
            metrics |= curriculum.metrics()

    def _sample_round(self, batch: ScoredBatch, position: Position, prompts: dict[int, int]) -> ScoredBatch | None:
        """Sample a group for each that is replaced, and put it in its place.

        Args:
            batch: the batch, in which groups are replaced.
            position: with the number of the round.
            prompts: which group gets which row of the data set.

        Returns:
            What this rank has sampled, scored; None if a replay has no more.
        """
        trainer = self.trainer
        first = trainer.accelerator.process_index * len(batch.rows)
        places = [place for place in range(len(batch.rows)) if (first + place) // position.group_size in prompts]
        with raised_everywhere():
            indices = [prompts[(first + place) // position.group_size] for place in places]
            rows = [dict(trainer.train_dataset[index]) for index in indices]
            trainer.row_check.check_batch(rows)
        position = replace(position, places=[first + place for place in places])
        more = trainer.rollouts.generate(rows, trainer.model_wrapped, position)
        if trainer.features.replaces_sampling and any(gather_object([len(more.trajectories) < len(rows)])):
            return None
        for name in ADDED_UP:
            if name in more.metrics:
                batch.metrics[name] = batch.metrics.get(name, 0.0) + more.metrics[name]
        scored = trainer.score(more, filler=batch)
        left = batch.put(places, scored)
        for trajectory in left:
            trajectory.is_replaced = True
        batch.replaced += left
        num_groups = trainer.accelerator.num_processes * len(batch.rows) // position.group_size
        batch.replaced_groups += [
            position.round * num_groups + (first + place) // position.group_size for place in places
        ]
        return scored

    # ---------------------------------------------------------------- rewards

    def _judge(self, batch: ScoredBatch, group_size: int) -> tuple[list[list[float]], list[list[float]], list[bool]]:
        """Raw returns of each group's members on all ranks, which of them passed, and which groups have signal."""
        self.trainer.rewards.resolve_members(batch, group_size)
        values = [raw_returns(batch.trajectories).tolist(), passes(batch.trajectories, self.pass_reward).tolist()]
        both = torch.tensor(gather_object([*zip(*values, strict=True)])).view(-1, group_size, 2)
        returns, passed = both.unbind(dim=2)  # (G, n) each
        compared = gather_object(self.trainer.compared_returns(batch.trajectories))
        groups = torch.tensor(compared, dtype=torch.float32).view(*returns.shape, -1)  # (G, n, C)
        signals = has_signal(groups.masked_fill(returns.isnan().unsqueeze(2), math.nan))
        return returns.tolist(), passed.tolist(), signals.tolist()

    # ---------------------------------------------------------------- prompts

    def _keys(self, batch: ScoredBatch) -> list[str]:
        """Names of the prompts, of all ranks."""
        return gather_object([example_key(row) for row in batch.rows])

    def _draw(self, num: int, micro_step: int, number: int, used: set[str]) -> list[int]:
        """Rows of the data set for a round, the same on all ranks."""
        dataset = self.trainer.train_dataset
        seed = derive_seed(self.trainer.args.seed, "fresh", micro_step, number)
        chosen: list[int] = []
        with raised_everywhere():
            if is_main_process():
                limit = min(len(dataset), 16 + 2 * (num + len(used)))
                if self.curriculum is not None:
                    order: Iterable[int] = self.curriculum.order(seed)[:limit]
                else:
                    order = random.Random(seed).sample(range(len(dataset)), limit)
                chosen = choose_fresh(dataset, num, order, used)
        return broadcast_object_list([chosen])[0]

    # ---------------------------------------------------------------- checkpoints

    def save(self, folder: Path) -> None:
        """Write what the curriculum knows into a checkpoint; on one process of each machine."""
        if self.curriculum is not None and self.trainer.accelerator.is_local_main_process:
            self.curriculum.save(folder)

    def load(self, folder: Path) -> None:
        """Read it again, on every process."""
        if self.curriculum is not None:
            self.curriculum.load(folder)


def choose_fresh(
    dataset: Dataset | Sequence[dict[str, Any]], num: int, order: Iterable[int], used: set[str]
) -> list[int]:
    """Indices of `num` rows, the first of `order` whose prompts are not in `used`; different ones, if there are.

    Where the data set has too few of them, used ones come next.

    >>> choose_fresh([{"id": "a"}, {"id": "b"}, {"id": "c"}], 2, [0, 1, 2], {"a"})
    [1, 2]
    >>> choose_fresh([{"id": "a"}, {"id": "b"}], 3, [0, 1], {"a"})
    [1, 0, 1]
    """
    fresh: list[int] = []
    others: list[int] = []
    met = set(used)
    for index in order:
        if len(fresh) == num:
            break
        key = example_key(dict(dataset[index]))
        (others if key in met else fresh).append(index)
        met.add(key)
    return [*itertools.islice(itertools.cycle([*fresh, *others]), num)]


def check_can_draw(dataset: TrainRows, config: Any) -> None:
    """Refuse to draw prompts where there are none to draw from; `dataset` is None where the environment makes them.

    Raises:
        ValueError: names the option, the rule and the fix.
    """
    is_stream = dataset is not None and not hasattr(dataset, "__len__")
    for key in ("resample_rounds", "curriculum"):
        value = getattr(config.sampling, key)
        if value and (is_stream or (dataset is None and key == "curriculum")):
            kind = f"a streamed train_dataset ({type(dataset).__name__})" if is_stream else "train_dataset=None"
            raise ValueError(
                f"sampling.{key}={value} with {kind}: prompts are drawn from anywhere in the data, which a stream or "
                f"an environment that makes its own prompts does not allow. Pass a Dataset (streaming=False), or "
                f"remove sampling.{key}."
            )


def _without_nan(groups: Sequence[Sequence[float]]) -> list[float]:
    """The values of all groups in one list."""
    return [value for group in groups for value in group if not math.isnan(value)]

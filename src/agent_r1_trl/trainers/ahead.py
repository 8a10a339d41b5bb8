"""Rollouts that run ahead of the update (`rollouts_ahead`): which have begun, their rows, and the age of their tokens.

Rollouts are trained on whole and in the order of the data, whichever trajectory ends first. One begins once fewer than
N rollouts stand between it and the update. So its oldest tokens are N rollouts old, and none is dropped for its age.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from transformers.trainer_utils import has_length

from agent_r1_trl.trainers.rollout_batch import Position
from agent_r1_trl.trajectory import Trajectory

if TYPE_CHECKING:
    from agent_r1_trl.trainers.config import MultiTurnConfig

Rows = Sequence[dict[str, Any]]


class RolloutsAhead:
    """The rollouts of a training that are in flight.

    Args:
        args: of the trainer.
        start: begins the rollout of these rows that is trained on from a micro-step on.
        void: is told of a rollout that is thrown away.
    """

    def __init__(
        self,
        args: MultiTurnConfig,
        start: Callable[[Rows, int, Position], Any],
        void: Callable[[Position], object] = lambda position: None,
    ) -> None:
        self._args = args
        self._start = start
        self._void = void
        self.window = Lookahead()
        """The rows of later rollouts."""
        self.limit: int | None = None
        """How many rollouts may run ahead now, where that is fewer than N (`AgeGuard`). The same on all ranks."""
        self._in_flight: dict[int, Any] = {}
        """Micro-step -> the rollout that is trained on from there, in their order."""

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def in_flight(self) -> list[Any]:
        """The rollouts that have begun and that no update has asked for, the oldest first."""
        return list(self._in_flight.values())

    def take(self, rows: Rows, position: Position) -> Any:
        """The rollout of this micro-step, which need not have ended; those that may run ahead of the update begin.

        `rows` are the Trainer's for this micro-step, on this rank.
        """
        args = self._args
        self._forget_lost(position)
        num_micro_steps = args.steps_per_generation * args.num_iterations
        first = position.micro_step // num_micro_steps
        if position.micro_step not in self._in_flight:
            self._in_flight[position.micro_step] = self._start(rows, position.micro_step, position)
        num_ahead = args.rollouts_ahead if self.limit is None else self.limit
        for number in range(first + 1, first + 1 + num_ahead):
            micro_step = number * num_micro_steps
            if micro_step in self._in_flight:
                continue
            if micro_step >= position.num_micro_steps or (later := self.window.at(micro_step)) is None:
                break
            self._in_flight[micro_step] = self._start(later, micro_step, position)
        return self._in_flight.pop(position.micro_step)

    def ended(self, rows: Rows, position: Position) -> Any:
        """`take`, once its trajectories have ended. One that was lost beside others is sampled anew, once."""
        was_begun = position.micro_step in self._in_flight
        rollout = self.take(rows, position)
        rollout.wait()
        if rollout.is_lost and (was_begun or self._in_flight):
            self._void(position)
            rollout = self.take(rows, position)
            rollout.wait()
        return rollout

    def _forget_lost(self, position: Position) -> None:
        """Those that ended with the event loop, because of another rollout's tool as a rule, begin again."""
        lost = [micro_step for micro_step, rollout in self._in_flight.items() if rollout.is_lost]
        for micro_step in lost:
            del self._in_flight[micro_step]
            self._void(replace(position, micro_step=micro_step))

    def begin_again(self, position: Position) -> None:
        """Throw away what is in flight, such as what was sampled while a tool was down. It begins again."""
        for micro_step, rollout in self._in_flight.items():
            rollout.cancel_alone()
            self._void(replace(position, micro_step=micro_step, round=0, places=None))
        self._in_flight.clear()

    def cancel(self) -> None:
        """Stop what no update will train on; what begins later may run ahead again."""
        for rollout in self._in_flight.values():
            rollout.cancel()
        self._in_flight.clear()
        self.window = Lookahead()  # with the worker processes of what it has opened


class Lookahead:
    """Passes on the batches of an epoch, one a micro-step, and can look at later ones: their rollout begins early.

    The Trainer takes those of a whole optimizer step before it trains on the first of them.
    """

    def __init__(self) -> None:
        self._source: Iterator[Any] | None = None
        self._following: Iterator[Any] = iter(())
        self._batches: dict[int, Any] = {}
        """Micro-step -> batch, from the optimizer step that is trained on to the last batch that was looked at."""
        self._later: dict[int, Any] = {}
        """Those of the next epochs, which the Trainer will take from another iterator."""
        self._next_step = 0
        """Micro-step of the batch that is passed on next."""

    def over(self, source: Iterator[Any], step: int, following: Iterator[Any] | None = None) -> Lookahead:
        """An iterator over `source`, whose next batch, if it is a new one, is that of micro-step `step`.

        `following` has the batches of the epochs after it; None where nobody knows their order yet.
        """
        if source is not self._source:
            self._source = source
            self._next_step = step
            self._batches = {}
            self._following = following or iter(())
            self._later = {}
        self._batches = {number: batch for number, batch in self._batches.items() if number >= step}
        return self

    def __iter__(self) -> Lookahead:
        return self

    def __next__(self) -> Any:
        batch = self._read(self._next_step)
        self._next_step += 1
        return batch

    def at(self, step: int) -> Any:
        """The batch of micro-step `step`, not one that is done; None if nobody knows it yet."""
        try:
            return self._read(step)
        except StopIteration:
            pass
        first = self._end
        while step not in self._later:
            batch = next(self._following, None)
            if batch is None:
                return None
            self._later[first + len(self._later)] = batch
        return self._later[step]

    @property
    def _end(self) -> int:
        """The micro-step after the last batch that was read of this epoch."""
        return max(self._batches, default=self._next_step - 1) + 1

    def _read(self, step: int) -> Any:
        assert self._source is not None
        while step not in self._batches:
            self._batches[self._end] = next(self._source)
        return self._batches[step]


def num_micro_steps(dataloader: object, max_steps: int, per_update: int) -> int:
    """Micro-batches of a run of so many optimizer steps, the last of which has fewer in each epoch if they do not fit.

    >>> num_micro_steps(["a", "b", "c"], max_steps=5, per_update=2)
    8
    """
    if not has_length(dataloader):  # streamed
        return max_steps * per_update
    num = len(dataloader)  # type: ignore[arg-type]
    num_epochs, rest = divmod(max_steps, -(-num // per_update))
    return num_epochs * num + rest * per_update


def age_metrics(trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
    """How old the tokens of a batch are, in optimizer steps, over all ranks. All ranks must call it.

    Args:
        trajectories: this rank's.
        step: number of optimizer steps behind the weights that are trained.

    Returns:
        Mean, 95th percentile and maximum over the tokens, and how many sets of weights a trajectory has, on average.
        Empty where no token says its weights.
    """
    ages: Counter[int] = Counter()
    num_versions = []
    for trajectory in trajectories:
        stamps = [stamp for turn in trajectory.turns for stamp in turn.versions]
        num_versions.append(len({version for version, _ in stamps}))
        for version, num in stamps:
            ages[step - version] += num
    found = gather_object([(ages, num_versions)])
    total: Counter[int] = sum((of_rank for of_rank, _ in found), Counter())
    num_tokens = total.total()
    if not num_tokens:
        return {}
    counts = [count for _, of_rank in found for count in of_rank if count]
    num_younger, percentile = 0, 0
    for age in sorted(total):
        percentile = age
        num_younger += total[age]
        if num_younger >= 0.95 * num_tokens:
            break
    return {
        "sampling/staleness": sum(age * num for age, num in total.items()) / num_tokens,
        "sampling/staleness_p95": float(percentile),
        "sampling/staleness_max": float(max(total)),
        "sampling/versions": sum(counts) / len(counts),
    }

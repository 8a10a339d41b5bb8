"""Places what reward functions return on turns and outcomes, and says which trajectories count where.

A trajectory is *in the baseline* if its reward counts in the statistics of its group or batch, and *in the loss* if
its action tokens enter the loss (`agent_r1_trl.trajectory` defines both).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather
from datasets import Dataset

from agent_r1_trl.environments.base import RewardError
from agent_r1_trl.environments.factory import EnvForm
from agent_r1_trl.environments.reward_values import finite_number
from agent_r1_trl.objects import locate_error
from agent_r1_trl.tools.base import is_async_callable
from agent_r1_trl.tools.faults import InfrastructureError, is_infrastructure_error
from agent_r1_trl.tools.pool import prepare_thread
from agent_r1_trl.tools.signature import unwrap_partial
from agent_r1_trl.trainers.callbacks import raise_everywhere, raised_everywhere
from agent_r1_trl.trainers.config import MultiTurnConfig
from agent_r1_trl.trainers.rollouts import RolloutBatch
from agent_r1_trl.trajectory import Trajectory


def environment_reward(trajectory: list[Trajectory], **kwargs: Any) -> list[float | None]:
    """Column of `env=`: the return that the trajectory holds already; None where it is not in the baseline."""
    return [item.total_reward if item.in_baseline else None for item in trajectory]


def class_reward(environment_class: type) -> Callable[..., list[float | None]]:
    """Column of one class of `environment_factory=`: what its `get_reward` returned; None for other classes."""
    name = environment_class.__name__

    def column(environments: list[Any], trajectory: list[Trajectory], **kwargs: Any) -> list[float | None]:
        # A trajectory out of the journal has no environment; its parts name the class that scored it.
        return [
            item.reward_parts.get(name)
            if item.in_baseline and (environment is None or type(environment) is environment_class)
            else None
            for environment, item in zip(environments, trajectory, strict=True)
        ]

    column.__name__ = name
    return column


class Rewards:
    """Places rewards on the trajectories of a batch, in the two moments at which they are known.

    Args:
        args: of the trainer.
        turn_reward_funcs: functions that return one number per turn.
        form: of the environments.

    Raises:
        ValueError: if `turn_reward_weights` does not hold one weight per function.
    """

    def __init__(
        self, args: MultiTurnConfig, turn_reward_funcs: Sequence[Callable], form: EnvForm | None = None
    ) -> None:
        self.turn_reward_funcs = list(turn_reward_funcs)
        self.columns = self._columns(form or EnvForm())
        """TRL reward functions of what the trajectories hold already; they stand after the user's, weight 1 each."""
        self._pays_calls = form is not None and form.pays_calls
        self._has_turn_reward: list[bool] = []
        """Per trajectory of the batch: whether its turns were rewarded."""
        self.turn_reward_weights = check_weights(args.turn_reward_weights, self.turn_reward_funcs)
        self.truncated_trajectories = args.truncated_trajectories
        self.truncation_penalty = args.truncation_penalty
        self.min_group_size = args.min_group_size or (2 if args.estimator.needs_group else 1)

    def _columns(self, form: EnvForm) -> list[Callable]:
        if form.has_reward and form.reward_classes is None:
            return [environment_reward]
        columns = [class_reward(item) for item in form.reward_classes or ()]
        return [*columns, self.turn_rewards] if self.turn_reward_funcs or form.pays_calls else columns

    def turn_rewards(self, trajectory: list[Trajectory], **kwargs: Any) -> list[float | None]:
        """Column of TRL's forms: the sum of the turns' rewards; None where nothing rewards turns."""
        return [
            None if item.stop_reason.is_infrastructure_failure or not has_reward else item.process_reward
            for item, has_reward in zip(trajectory, self._has_turn_reward, strict=True)
        ]

    def place_on_turns(self, trajectories: Sequence[Trajectory], rows: Sequence[dict[str, Any]]) -> None:
        """Before the reward functions: the penalty for truncation, and the user's rewards for turns."""
        if self.truncated_trajectories == "penalise":
            penalise_truncated(trajectories, self.truncation_penalty)
        with raised_everywhere():
            scored = add_turn_rewards(trajectories, rows, self.turn_reward_funcs, self.turn_reward_weights)
        self._has_turn_reward = [self._pays_calls or item for item in scored]

    def place_on_outcomes(
        self,
        trajectories: Sequence[Trajectory],
        values: torch.Tensor,
        *,
        functions: Sequence[Callable],
        names: Sequence[str],
        weights: Sequence[float],
    ) -> None:
        """After the reward functions: their weighted values become part of the outcomes.

        Args:
            trajectories: B of them.
            values: (B, F) what each function returned, NaN for rows that it did not score.
            functions: F of them; the trajectories hold already what those of `columns` returned.
            names: of the functions, for the metrics.
            weights: of the functions.
        """
        for trajectory, row in zip(trajectories, values.tolist(), strict=True):
            trajectory.is_scored = not all(math.isnan(value) for value in row)
            for function, name, weight, value in zip(functions, names, weights, row, strict=True):
                if math.isnan(value) or function in self.columns:
                    continue
                trajectory.outcome_reward += weight * value
                trajectory.reward_parts[name] = trajectory.reward_parts.get(name, 0.0) + weight * value

    def in_loss(self, trajectory: Trajectory) -> bool:
        """Whether the trajectory's action tokens enter the loss, if some reward function scores it."""
        if trajectory.stop_reason.is_infrastructure_failure:
            return False
        return not (trajectory.stop_reason.is_truncated and self.truncated_trajectories == "mask")

    def resolve_members(self, batch: RolloutBatch, group_size: int) -> None:
        """Say which trajectories are in the baseline, and which in the loss. All ranks must call it.

        Args:
            batch: whose values are part of the outcomes; gets `in_baseline` and `in_loss`.
            group_size: trajectories of one prompt, which are consecutive rows; 1 where groups do not matter.
        """
        trajectories, device = batch.trajectories, batch.reward_values.device
        for trajectory in trajectories:
            trajectory.is_group_too_small = False  # may have been so before, with other members
        batch.in_baseline = leave_small_groups(
            trajectories, in_baseline(trajectories, device), group_size, min(self.min_group_size, group_size)
        )
        trained = [self.in_loss(item) and bool(item.completion_ids) for item in trajectories]
        batch.in_loss = batch.in_baseline & torch.tensor(trained, device=device)


def in_baseline(trajectories: Sequence[Trajectory], device: torch.device) -> torch.Tensor:
    """(B,) bool: each trajectory's `in_baseline`, after `place_on_outcomes` has said which are scored."""
    return torch.tensor([trajectory.in_baseline for trajectory in trajectories], dtype=torch.bool, device=device)


def leave_small_groups(
    trajectories: Sequence[Trajectory], in_baseline: torch.Tensor, group_size: int, min_size: int
) -> torch.Tensor:
    """(B,) bool: `in_baseline` without the trajectories of groups of which too few are left; these are marked.

    Args:
        trajectories: this rank's B.
        in_baseline: (B,) bool.
        group_size: trajectories of one prompt, which are consecutive rows of all ranks.
        min_size: number of trajectories in the baseline that make a group.
    """
    if min_size <= 1:
        return in_baseline
    sizes = gather(in_baseline.int()).view(-1, group_size).sum(dim=1)  # a group may lie on several ranks
    first = PartialState().process_index * len(trajectories)
    is_small = (sizes < min_size).repeat_interleave(group_size)[first : first + len(trajectories)]
    for trajectory, is_left in zip(trajectories, (is_small & in_baseline).tolist(), strict=True):
        trajectory.is_group_too_small = is_left
    return in_baseline & ~is_small


def penalise_truncated(trajectories: Sequence[Trajectory], penalty: float) -> None:
    """Add `penalty` to the outcome of every trajectory that a limit ended."""
    for trajectory in trajectories:
        if trajectory.stop_reason.is_truncated:
            trajectory.outcome_reward += penalty
            trajectory.reward_parts["truncation_penalty"] = penalty


def check_weights(weights: Sequence[float] | None, functions: Sequence[Callable]) -> list[float]:
    """One weight per function; 1 each where none are given.

    Raises:
        ValueError: if there are more or fewer weights than functions.
    """
    if weights is None:
        return [1.0] * len(functions)
    if len(weights) != len(functions):
        raise ValueError(
            f"turn_reward_weights={list(weights)} has {len(weights)} entries for {len(functions)} turn_reward_funcs. "
            "Give one weight per function, or remove turn_reward_weights."
        )
    return [float(weight) for weight in weights]


def add_turn_rewards(
    trajectories: Sequence[Trajectory],
    rows: Sequence[dict[str, Any]],
    functions: Sequence[Callable],
    weights: Sequence[float],
) -> list[bool]:
    """Call each function once for the whole batch and add its weighted values to the turns.

    A function, plain or async, receives `trajectory` (list of `Trajectory`) and the data set's columns as lists, and
    returns per trajectory a list with one number per turn. None for a turn is no reward; None for a trajectory means
    that the function does not score it.

    Returns:
        For each trajectory whether any of the functions scored it.

    Raises:
        RewardError: a function raised, the shape does not fit, or a value is not a finite number; names the function
            and the trajectory.
        InfrastructureError: what is behind a function is down.
    """
    if not trajectories:  # of this rank, in a rollout that replaces some
        return []
    names = sorted({name for row in rows for name in row})
    columns = {name: [row.get(name) for row in rows] for name in names}
    is_scored = [False] * len(trajectories)
    for function, weight in zip(functions, weights, strict=True):
        unwrapped = unwrap_partial(function)
        name = getattr(unwrapped, "__name__", type(unwrapped).__name__)

        def call(first: int, last: int, function: Callable = function) -> Any:
            rows = {column: items[first:last] for column, items in columns.items()}
            return wait_for(function(trajectory=list(trajectories[first:last]), **rows))

        try:
            values = call(0, len(trajectories))
        except Exception as error:
            given = ["trajectory", *columns]
            raise reward_failure(error, f"turn_reward_funcs: {name}", trajectories, call, given) from error
        if not hasattr(values, "__len__") or len(values) != len(trajectories):
            returned = f"{len(values)} lists" if hasattr(values, "__len__") else repr(values)
            raise RewardError(
                f"turn_reward_funcs: {name} returned {returned} for {len(trajectories)} trajectories. Return one list "
                "per trajectory."
            )
        for index, (trajectory, per_turn) in enumerate(zip(trajectories, values, strict=True)):
            if per_turn is not None and not trajectory.stop_reason.is_infrastructure_failure:
                _add(trajectory, per_turn, weight=weight, name=name)
                is_scored[index] = True
    return is_scored


def _add(trajectory: Trajectory, per_turn: Sequence[float | None], *, weight: float, name: str) -> None:
    if not hasattr(per_turn, "__len__") or len(per_turn) != len(trajectory.turns):
        returned = f"{len(per_turn)} values" if hasattr(per_turn, "__len__") else repr(per_turn)
        raise RewardError(
            f"turn_reward_funcs: {name} returned {returned} for {trajectory!r}. Return one value per turn "
            "(`trajectory.turns`), None for no reward."
        )
    for turn, value in zip(trajectory.turns, per_turn, strict=True):
        if value is None:
            continue
        number = finite_number(value)
        if number is None:
            raise RewardError(
                f"turn_reward_funcs: {name} returned {value!r} for {trajectory!r}. Return finite numbers, or None for "
                "no reward."
            )
        turn.reward += weight * number
        turn.reward_parts[name] = turn.reward_parts.get(name, 0.0) + weight * number


class RewardCalls:
    """The reward functions of one batch.

    A function that raises, or returns what is no reward, counts as one that scores nothing until TRL has gathered the
    values of all ranks; only then is the error raised.

    Args:
        trajectories: this rank's n, in data order.
        num_rows: of TRL's call, n or more: ranks that score fewer trajectories than others repeat a row, which the
            functions do not get to see.
    """

    def __init__(self, trajectories: Sequence[Trajectory], num_rows: int) -> None:
        self._trajectories = trajectories
        self._num_rows = num_rows
        self._error: Exception | None = None
        """The first one."""

    @contextlib.contextmanager
    def checked(self, trainer: Any) -> Iterator[None]:
        """While it lasts, the trainer's `reward_funcs` are checked ones. Reward models stay as they are."""
        functions = trainer.reward_funcs
        trainer.reward_funcs = [
            self._check(function, name) for function, name in zip(functions, trainer.reward_func_names, strict=True)
        ]
        try:
            yield
        finally:
            trainer.reward_funcs = functions

    def resolve(self, values: torch.Tensor, functions: Sequence[Any], names: Sequence[str]) -> None:
        """Raise on all ranks what was found on any. All ranks must call it.

        Args:
            values: (B, F) of this rank, as TRL holds them.
            functions: F of them; the values of those that are models are checked here.
            names: of the functions.

        Raises:
            RewardError: a function raised, or returned what is no reward; names the function and the trajectory.
            InfrastructureError: what is behind a function is down.
        """
        for column, (function, name) in enumerate(zip(functions, names, strict=True)):
            if isinstance(function, torch.nn.Module):
                self._read(values[:, column].tolist(), name)
        raise_everywhere(self._error)

    def _check(self, function: Any, name: str) -> Any:
        if isinstance(function, torch.nn.Module):
            return function
        if is_async_callable(function):

            async def call(**kwargs: Any) -> list[float | None]:
                try:
                    returned = await function(**self._rows(kwargs)) if self._trajectories else []
                    return self._filled(self._read(returned, name))
                except Exception as error:
                    return self._filled(self._explain(error, function, name, kwargs))

        else:

            def call(**kwargs: Any) -> list[float | None]:  # type: ignore[misc]
                try:
                    returned = function(**self._rows(kwargs)) if self._trajectories else []
                    return self._filled(self._read(returned, name))
                except Exception as error:
                    return self._filled(self._explain(error, function, name, kwargs))

        return call

    def _explain(self, error: Exception, function: Any, name: str, kwargs: dict[str, Any]) -> list[float | None]:
        def call(first: int, last: int) -> Any:
            return function(**self._rows(kwargs, first, last))

        return self._fail(reward_failure(error, f"reward_funcs: {name}", self._trajectories, call, kwargs))

    def _rows(self, kwargs: dict[str, Any], first: int = 0, last: int | None = None) -> dict[str, Any]:
        """A function's arguments for some trajectories, never with the rows that fill up the call."""
        rows = slice(first, len(self._trajectories) if last is None else last)
        return {
            name: value[rows] if isinstance(value, list) and len(value) == self._num_rows else value
            for name, value in kwargs.items()
        }

    def _filled(self, values: list[float | None]) -> list[float | None]:
        return values + [0.0] * (self._num_rows - len(values))

    def _read(self, returned: Any, name: str) -> list[float | None]:
        """One number or None per trajectory."""
        try:
            values = [] if isinstance(returned, dict) else list(returned)
        except TypeError:  # no iterable, as a single number and None
            values = []
        count = len(self._trajectories)
        if len(values) != count:
            found = f"{len(values)} values" if values else f"{returned!r:.100}"
            return self._fail(
                RewardError(
                    f"reward_funcs: {name} returned {found} for {count} trajectories. Return one number per "
                    "trajectory, in a list."
                )
            )
        return [self._number(*pair, name) for pair in zip(self._trajectories, values, strict=True)]

    def _number(self, trajectory: Trajectory, value: Any, name: str) -> float | None:
        if value is None or trajectory.stop_reason.is_infrastructure_failure:  # which earns nothing
            return None
        number = finite_number(value)
        if number is None:
            self._fail(
                RewardError(
                    f"reward_funcs: {name} returned {value!r:.100} for {trajectory!r}. Return finite numbers (of "
                    "float32's range), or None for a trajectory that is not scored."
                )
            )
        return number

    def _fail(self, error: Exception) -> list[float | None]:
        self._error = self._error or error
        return [None] * len(self._trajectories)


def reward_failure(
    error: Exception,
    function: str,
    trajectories: Sequence[Trajectory],
    call: Callable[[int, int], Any],
    names: Iterable[str],
) -> Exception:
    """The error that a raising reward function is reported with: one line, with the place and an example.

    Args:
        error: what it raised for all trajectories.
        function: its name, after the setting that it stands in.
        trajectories: at least one.
        call: calls it for those from the first index up to the second; asked for halves, until one is left.
        names: of its arguments.

    Returns:
        An InfrastructureError if what the function needs is down, else a RewardError.
    """
    said = f"{function} raised {locate_error(error)}."
    place = traceback.extract_tb(error.__traceback__)[-1].filename
    if isinstance(error, TypeError) and Path(place).parent == Path(__file__).parent:  # in our call
        given = ", ".join(sorted(names))
        failure: Exception = RewardError(
            f"{function} cannot be called: {error}. It gets {given}. Name those that it needs, and take the others as "
            "**columns."
        )
    elif is_infrastructure_error(error, has_backend=True):
        failure = InfrastructureError(said)
    else:

        def raises(first: int, last: int) -> bool:
            try:
                wait_for(call(first, last))
            except Exception as again:
                return type(again) is type(error)
            return False

        first, last = 0, len(trajectories)
        while last - first > 1:
            middle = (first + last) // 2
            first, last = (first, middle) if raises(first, middle) else (middle, last)
        culprit = trajectories[first]
        where = f"It was in example {culprit.example_id!r}, generation {culprit.generation}."
        if not raises(first, last):
            where = f"It was called for {len(trajectories)} trajectories, and raises for none of them alone."
        failure = RewardError(f"{said} Correct the function. {where}")
    failure.__cause__ = error
    return failure


def wait_for(value: Any) -> Any:
    """The value, or the result of what is awaitable, also where this thread runs an event loop (a notebook)."""
    if not inspect.isawaitable(value):
        return value

    async def result() -> Any:
        return await value

    with ThreadPoolExecutor(1, initializer=prepare_thread) as pool:
        return pool.submit(asyncio.run, result()).result()


def check_reward_values(values: Any, calculate: Any, shape: tuple[int, int]) -> None:
    """Refuse what a subclass's `_calculate_rewards` returned in place of TRL's tensor.

    Args:
        values: what it returned.
        calculate: the method.
        shape: (N, F), trajectories of all ranks and reward functions.

    Raises:
        ValueError: names the method and what it returned.
    """
    found = f"shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
    if found != f"shape {shape}":
        raise ValueError(
            f"{calculate.__qualname__} returned {found}. Return a tensor of shape {shape}: one finite number for each "
            "trajectory of all ranks and each reward function, NaN for those that are not scored."
        )


def check_finite(values: torch.Tensor, calculate: Any) -> None:
    """Refuse infinite rewards that no reward function returned; they are those of all ranks, so all of them raise."""
    if values.isinf().any():
        raise ValueError(f"{calculate.__qualname__} returned infinite rewards. Return finite numbers, NaN for none.")


_UNSCORED = "All reward functions returned None"


@contextlib.contextmanager
def rows_not_logged() -> Iterator[None]:
    """While it lasts, TRL's warning about a row that no reward function scored does not contain the row."""

    def shorten(record: logging.LogRecord) -> bool:
        if _UNSCORED in str(record.msg):
            record.msg, record.args = (
                f"{_UNSCORED} for at least one trajectory (None is also the reward of an infrastructure failure). It "
                "is not in the baseline.",
                (),
            )
        return True

    logger = logging.getLogger("trl.trainer.grpo_trainer")
    logger.addFilter(shorten)
    try:
        yield
    finally:
        logger.removeFilter(shorten)


# -------------------------------------------------------------------- the rows of the data set


TAKEN_COLUMNS = (
    "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "trajectory",
)  # fmt: skip
"""Names under which reward functions receive something other than a column of the data set."""


class RowCheck:
    """Checks the data: columns at construction, environments before the first rollout, and every batch as it arrives.

    Args:
        form: of the environments.
        train_dataset: of the trainer; None where the environment owns the data.
        eval_dataset: of the trainer: None, one or several by name.

    Raises:
        ValueError: names the column, its value and the fix.
    """

    def __init__(self, form: EnvForm, train_dataset: Any, eval_dataset: Any) -> None:
        self.names = form.names
        self.taken = {*TAKEN_COLUMNS, *(["environments"] if form.hands_over_environments else [])}
        if train_dataset is None and not form.hands_over_environments:
            raise ValueError(
                "train_dataset=None: a `train_dataset` is required unless an environment makes the prompts. Pass "
                "train_dataset=, or env= or environment_factory=."
            )
        if train_dataset is None and self.names is not None:
            raise ValueError(
                "train_dataset=None: a dictionary as environment_factory requires a `train_dataset` whose column "
                f"'environment' says which of {self.names} a row is played in. Pass one."
            )
        evaluated = eval_dataset.values() if isinstance(eval_dataset, Mapping) else [eval_dataset]
        self._unread = [train_dataset, *evaluated]
        for dataset in self._unread:
            self._check_columns(getattr(dataset, "column_names", None) or ())

    def check_batch(self, rows: Sequence[dict[str, Any]]) -> None:
        """Check the rows of one batch; the first time all rows of the data sets that are in memory. Refuses images.

        Raises:
            ValueError: names the column, its value and the fix.
        """
        while self._unread:
            dataset = self._unread.pop()
            # A transform may add columns as rows are read; those rows are checked as they arrive.
            if self.names is not None and isinstance(dataset, Dataset) and dataset.format["type"] != "custom":
                has_column = "environment" in dataset.column_names
                self._check_names(dataset.unique("environment") if has_column else [None])
        self._check_columns({name: None for row in rows for name in row})
        if self.names is not None:
            self._check_names([row.get("environment") for row in rows])
        if any(row.get("image") is not None or row.get("images") for row in rows):
            raise ValueError(
                "The data set has an 'image' or 'images' column with content: images together with tools are not "
                "supported. Remove the column, or train without env= and tools=."
            )

    def _check_columns(self, columns: Iterable[str]) -> None:
        for name in columns:
            if name in self.taken:
                raise ValueError(
                    f"The data set has a column {name!r}, but reward functions receive something else as {name}=. "
                    f"Rename the column: dataset.rename_column({name!r}, ...)."
                )

    def _check_names(self, values: Iterable[Any]) -> None:
        assert self.names is not None
        for value in values:
            if value not in self.names:
                raise ValueError(
                    f"The data set has a row with environment={value!r}, which is not among the environments passed "
                    f"to environment_factory: {self.names}. Give each row one of these in its column 'environment'."
                )

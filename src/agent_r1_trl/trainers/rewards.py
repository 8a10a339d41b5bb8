"""Places what reward functions return on turns and outcomes, and says which trajectories count where.

A trajectory is *in the baseline* if its reward counts in the statistics of its group or batch, and *in the loss* if
its action tokens enter the loss (`agent_r1_trl.trajectory` defines both).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from accelerate.utils import gather
from datasets import Dataset

from agent_r1_trl.environments.base import RewardError
from agent_r1_trl.environments.factory import EnvForm
from agent_r1_trl.environments.reward_values import finite_number
from agent_r1_trl.objects import locate_error
from agent_r1_trl.settings import refuse
from agent_r1_trl.tools.base import is_async_callable
from agent_r1_trl.tools.faults import InfrastructureError, is_infrastructure_error
from agent_r1_trl.tools.pool import prepare_thread
from agent_r1_trl.tools.signature import unwrap_partial
from agent_r1_trl.trainers.callbacks import raise_everywhere, raised_everywhere
from agent_r1_trl.trainers.config import MultiTurnConfig
from agent_r1_trl.trainers.rollout_batch import ScoredBatch
from agent_r1_trl.trajectory import Trajectory

if TYPE_CHECKING:
    from agent_r1_trl.trainers.construction import EvalRows, TrainRows
    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

logger = logging.getLogger(__name__)


def environment_reward(trajectory: list[Trajectory], **kwargs: object) -> list[float | None]:
    """Column of `env=`: the return that the trajectory holds already; None where it is not in the baseline."""
    return [item.total_reward if item.in_baseline else None for item in trajectory]


def class_reward(environment_class: type[Any]) -> Callable[..., list[float | None]]:
    """Column of one class of `environment_factory=`: what its `get_reward` returned; None for other classes.

    Called without trajectories, as TRL's own column may be, it asks the environments; where `get_reward` is async, the
    result is to be awaited.
    """
    name = environment_class.__name__
    is_async = inspect.iscoroutinefunction(getattr(environment_class, "get_reward", None))

    def ask(environment: Any) -> Any:
        return environment.get_reward() if type(environment) is environment_class else None

    async def ask_async(environments: list[Any]) -> list[float | None]:
        return [reward if reward is None else await reward for reward in map(ask, environments)]

    def column(environments: list[Any], trajectory: list[Trajectory] | None = None, **kwargs: object) -> Any:
        if trajectory is None:
            return ask_async(environments) if is_async else [*map(ask, environments)]
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
        self._warned_of_none = False
        weights = args.turn_reward_weights
        if weights is not None and len(weights) != len(self.turn_reward_funcs):
            raise ValueError(
                f"turn_reward_weights={weights} has {len(weights)} entries for {len(self.turn_reward_funcs)} "
                "turn_reward_funcs. Give one weight per function, or remove turn_reward_weights."
            )
        self.turn_reward_weights = [1.0] * len(self.turn_reward_funcs) if weights is None else weights
        self._args = args
        self.min_group_size = args.min_group_size or (2 if args.estimator.needs_group else 1)

    def _columns(self, form: EnvForm) -> list[Callable]:
        if form.has_reward and form.reward_classes is None:
            return [environment_reward]
        columns = [class_reward(item) for item in form.reward_classes or ()]
        return [*columns, self.turn_rewards] if self.turn_reward_funcs or form.pays_calls else columns

    def turn_rewards(self, trajectory: Sequence[Trajectory] = (), **kwargs: Any) -> list[float | None]:
        """Column of TRL's forms: the sum of the turns' rewards; None where nothing rewards turns.

        Called without trajectories, it scores none of the `environments`: these have no turns.
        """
        if not trajectory:
            return [None for _ in kwargs.get("environments") or ()]
        return [
            None if item.stop_reason.is_infrastructure_failure or not has_reward else item.process_reward
            for item, has_reward in zip(trajectory, self._has_turn_reward, strict=True)
        ]

    def place_on_turns(self, trajectories: Sequence[Trajectory], rows: Sequence[dict[str, Any]]) -> None:
        """Before the reward functions: the penalty for truncation, and the user's rewards for turns."""
        for trajectory in trajectories:
            if self._args.truncated_trajectories == "penalise" and trajectory.stop_reason.is_truncated:
                trajectory.truncation_penalty = self._args.truncation_penalty
                add_outcome(trajectory, "truncation_penalty", trajectory.truncation_penalty)
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

        `values` is (B, F), NaN where a function scored nothing. The trajectories hold already what those of the F
        functions returned that are `columns`.
        """
        for trajectory, row in zip(trajectories, values.tolist(), strict=True):
            for function, name, value in zip(functions, names, row, strict=True):
                if math.isnan(value) and is_required(function):
                    note_missing(trajectory, f"reward_funcs: {name}")
            has_failed = trajectory.stop_reason.is_infrastructure_failure
            is_missing = trajectory.error is not None and not has_failed
            is_nothing = all(math.isnan(value) for value in row)
            trajectory.is_scored = not is_missing and not is_nothing
            if is_nothing and not (has_failed or is_missing or self._warned_of_none):
                self._warned_of_none = True
                logger.warning(
                    "All reward functions returned None for a trajectory, which is then not in the baseline. Reported "
                    "once; rollout/unscored_share counts on."
                )
            for function, name, weight, value in zip(functions, names, weights, row, strict=True):
                if not math.isnan(value) and function not in self.columns:
                    add_outcome(trajectory, name, weight * value)

    def in_loss(self, trajectory: Trajectory) -> bool:
        """Whether the trajectory's action tokens enter the loss, if some reward function scores it."""
        is_masked = trajectory.stop_reason.is_truncated and self._args.truncated_trajectories == "mask"
        return not (trajectory.stop_reason.is_infrastructure_failure or is_masked)

    def members(self, trajectories: Sequence[Trajectory], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(B,) bool each: which scored trajectories are in the baseline, and which in the loss."""
        in_baseline = [item.in_baseline for item in trajectories]
        in_loss = [item.in_baseline and self.in_loss(item) and bool(item.completion_ids) for item in trajectories]
        return (
            torch.tensor(in_baseline, dtype=torch.bool, device=device),
            torch.tensor(in_loss, dtype=torch.bool, device=device),
        )

    def resolve_members(self, batch: ScoredBatch, group_size: int) -> None:
        """Take the groups of which too few are left out of a batch's baseline and loss. All ranks must call it.

        A group is `group_size` consecutive rows; 1 where groups do not matter.
        """
        trajectories, device = batch.trajectories, batch.reward_values.device
        for trajectory in trajectories:
            trajectory.is_group_too_small = False  # may have been so before, with other members
        in_baseline, _ = self.members(trajectories, device)
        mark_small_groups(trajectories, in_baseline, group_size, min(self.min_group_size, group_size))
        batch.in_baseline, batch.in_loss = self.members(trajectories, device)


def add_outcome(trajectory: Trajectory, source: str, value: float) -> None:
    """Make a value part of the outcome reward; those of one source add up."""
    trajectory.outcome_reward += value
    trajectory.reward_parts[source] = trajectory.reward_parts.get(source, 0.0) + value


def mark_small_groups(
    trajectories: Sequence[Trajectory], in_baseline: torch.Tensor, group_size: int, min_size: int
) -> None:
    """Mark the trajectories in the baseline of groups of which too few are left there.

    The trajectories are this rank's; those of one prompt are `group_size` consecutive rows of all ranks.
    """
    if min_size <= 1:
        return
    sizes = gather(in_baseline.int()).view(-1, group_size).sum(dim=1)  # a group may lie on several ranks
    first = PartialState().process_index * len(trajectories)
    is_small = (sizes < min_size).repeat_interleave(group_size)[first : first + len(trajectories)]
    for trajectory, is_left in zip(trajectories, (is_small & in_baseline).tolist(), strict=True):
        trajectory.is_group_too_small = is_left


# -------------------------------------------------------------------- reward functions, called and checked


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
        RewardError: a function raised, or returned what is no reward; names the function and the trajectory.
        InfrastructureError: what is behind a function is down.
    """
    if not trajectories:  # of this rank, in a rollout that replaces some
        return []
    columns: dict[str, list[Any]] = {"trajectory": list(trajectories)}
    for name in sorted({name for row in rows for name in row}):
        columns[name] = [row.get(name) for row in rows]
    is_scored = [False] * len(trajectories)
    for function, weight in zip(functions, weights, strict=True):
        unwrapped = unwrap_partial(function)
        name = getattr(unwrapped, "__name__", type(unwrapped).__name__)
        said = f"turn_reward_funcs: {name}"

        def call(rows: slice, function: Callable = function) -> Any:
            return _drawn(wait_for(function(**{column: items[rows] for column, items in columns.items()})))

        try:
            returned = call(slice(None))
        except Exception as error:
            raise reward_failure(error, said, trajectories, call, columns) from error
        values = _one_each(returned, len(trajectories), said, f"{len(trajectories)} trajectories")
        for index, (trajectory, per_turn) in enumerate(zip(trajectories, values, strict=True)):
            if per_turn is None and is_required(function):
                note_missing(trajectory, said)
            if per_turn is None or trajectory.stop_reason.is_infrastructure_failure:
                continue
            is_scored[index] = True
            turn_values = _one_each(per_turn, len(trajectory.turns), said, f"the turns of {trajectory!r}")
            for turn, value in zip(trajectory.turns, turn_values, strict=True):
                if (number := _number(value, said, trajectory)) is not None:
                    turn.reward += weight * number
                    turn.reward_parts[name] = turn.reward_parts.get(name, 0.0) + weight * number
    return is_scored


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
        self.has_begun = False
        """Whether the checked functions have been asked for."""

    @contextlib.contextmanager
    def checked(self, trainer: MultiTurnTrainer) -> Iterator[None]:
        """While it lasts, the trainer's `reward_funcs` are checked ones. Reward models stay as they are."""
        self.has_begun = True
        functions = trainer.reward_funcs
        trainer.reward_funcs = [
            function if isinstance(function, torch.nn.Module) else self._check(function, f"reward_funcs: {name}")
            for function, name in zip(functions, trainer.reward_func_names, strict=True)
        ]
        try:
            yield
        finally:
            trainer.reward_funcs = functions

    def resolve(self, values: torch.Tensor, functions: Sequence[Any], names: Sequence[str]) -> None:
        """Raise on all ranks what `add_turn_rewards` raises, if it was found on any. All ranks must call it.

        The (B, F) values of this rank are as TRL holds them; those of the functions that are models are checked here.
        """
        for column, (function, name) in enumerate(zip(functions, names, strict=True)):
            if isinstance(function, torch.nn.Module):
                self._read(values[:, column].tolist(), f"reward_funcs: {name}")
        raise_everywhere(self._error)

    def _check(self, function: Callable[..., Any], said: str) -> Any:
        untaken = _untaken(function)

        def arguments(kwargs: dict[str, Any], rows: slice = slice(None)) -> dict[str, Any]:
            """The columns of some trajectories, never with the rows that fill up the call."""
            return {
                name: value[: len(self._trajectories)][rows]
                if isinstance(value, list) and len(value) == self._num_rows
                else value
                for name, value in kwargs.items()
                if name not in untaken
            }

        @contextlib.contextmanager
        def explained(kwargs: dict[str, Any]) -> Iterator[None]:
            try:
                yield
            except Exception as error:

                def call_again(rows: slice) -> Any:
                    return function(**arguments(kwargs, rows))

                given = arguments(kwargs)
                found = reward_failure(error, said, self._trajectories, call_again, given)
                found.__cause__ = error
                self._error = self._error or found

        def call(**kwargs: object) -> list[float | None]:
            returned: Any = []
            with explained(kwargs):
                if self._trajectories or getattr(unwrap_partial(function), "gathers", False):
                    returned = _drawn(function(**arguments(kwargs)))
            return self._read(returned, said)

        async def call_async(**kwargs: object) -> list[float | None]:
            returned: Any = []
            with explained(kwargs):
                if self._trajectories:
                    returned = _drawn(await function(**arguments(kwargs)))
            return self._read(returned, said)

        return call_async if is_async_callable(function) else call

    def _read(self, returned: object, said: str) -> list[float | None]:
        """TRL's values, None for failures of the infrastructure, which earn nothing."""
        count = len(self._trajectories)
        values: list[float | None] = [None] * count
        if self._error is None:
            try:
                found = _one_each(returned, count, said, f"{count} trajectories")
                for index, trajectory in enumerate(self._trajectories):
                    if not trajectory.stop_reason.is_infrastructure_failure:
                        values[index] = _number(found[index], said, trajectory)
            except RewardError as error:
                self._error = error
        return values + [0.0] * (self._num_rows - count)


def is_required(function: Callable[..., Any]) -> bool:
    """Whether the trajectories that a reward function does not score count as failures (`rewards.required`)."""
    while isinstance(function, functools.partial) and not getattr(function, "required", False):
        function = function.func
    return bool(getattr(function, "required", False))


def note_missing(trajectory: Trajectory, said: str) -> None:
    """A required function has scored nothing; it may have said why in `trajectory.error`."""
    trajectory.error = trajectory.error or f"{said}, which is required, returned None"


def _untaken(function: Callable[..., Any]) -> set[str]:
    """Our own arguments that a reward function of TRL's form does not take; it is called without them."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin
        return set()
    takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    return set() if takes_all else {"trajectory", "environments"} - {*parameters}


def _drawn(returned: object) -> Any:
    """The result of a function; of a generator the values, since its code runs only now."""
    return list(returned) if isinstance(returned, Iterator) else returned


def _one_each(returned: Any, count: int, said: str, things: str) -> list[Any]:
    """The result of a function as a list of `count` values."""
    try:
        values = [] if isinstance(returned, dict | set | str) else list(returned)  # a set has no order
    except TypeError:  # a single number, or None
        values = []
    if len(values) != count:
        found = f"{len(values)} values" if values else f"{returned!r:.100}"
        raise RewardError(f"{said} returned {found} for {things}. Return a list with one value for each.")
    return values


def _number(value: object, said: str, trajectory: Trajectory) -> float | None:
    number = None if value is None else finite_number(value)
    if number is None and value is not None:
        raise RewardError(
            f"{said} returned {value!r:.100} for {trajectory!r}. Return finite numbers (of float32's range), or None "
            "for no reward."
        )
    return number


def reward_failure(
    error: Exception,
    function: str,
    trajectories: Sequence[Trajectory],
    call: Callable[[slice], Any],
    names: Iterable[str],
) -> Exception:
    """The error that a raising reward function is reported with: one line, with the place and an example.

    `call` calls the function, which has raised `error` and gets arguments of these names, for some trajectories. An
    InfrastructureError if what it needs is down, else a RewardError.
    """
    said = f"{function} raised {locate_error(error)}."
    place = traceback.extract_tb(error.__traceback__)[-1].filename
    if isinstance(error, TypeError) and Path(place).parent == Path(__file__).parent:  # in our call
        return RewardError(
            f"{function} cannot be called: {error}. It gets {', '.join(sorted(names))}. Name those that it needs, and "
            "take the others as **columns."
        )
    if is_infrastructure_error(error, has_backend=True):
        return InfrastructureError(said)
    where = f"It was called for {len(trajectories)} trajectories, and raises for none of them alone."
    for index, trajectory in enumerate(trajectories):
        try:
            _drawn(wait_for(call(slice(index, index + 1))))
        except Exception as again:
            if type(again) is type(error):
                where = f"It was in example {trajectory.example_id!r}, generation {trajectory.generation}."
                break
    return RewardError(f"{said} Correct the function. {where}")


def wait_for(value: object) -> Any:
    """The value, or the result of what is awaitable, also where this thread runs an event loop (a notebook)."""
    if not inspect.isawaitable(value):
        return value

    async def result() -> Any:
        return await value

    with ThreadPoolExecutor(1, initializer=prepare_thread) as pool:
        return pool.submit(asyncio.run, result()).result()


def check_reward_values(values: object, calculate: Callable[..., Any], shape: tuple[int, int]) -> None:
    """Refuse (ValueError) what a subclass's `_calculate_rewards` returned in place of TRL's (N, F) tensor."""
    found = f"shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
    if found != f"shape {shape}":
        raise ValueError(
            f"{calculate.__qualname__} returned {found}. Return a tensor of shape {shape}: one finite number for each "
            "trajectory of all ranks and each reward function, NaN for those that are not scored."
        )


def check_finite(values: torch.Tensor, calculate: Callable[..., Any]) -> None:
    """Refuse infinite rewards that no reward function returned; they are those of all ranks, so all of them raise."""
    if values.isinf().any():
        raise ValueError(f"{calculate.__qualname__} returned infinite rewards. Return finite numbers, NaN for none.")


@contextlib.contextmanager
def rows_not_logged() -> Iterator[None]:
    """While it lasts, TRL does not warn of a row that no reward function scored: it would print the whole row."""

    def is_other(record: logging.LogRecord) -> bool:
        return "All reward functions returned None" not in str(record.msg)

    trl_logger = logging.getLogger("trl.trainer.grpo_trainer")
    trl_logger.addFilter(is_other)
    try:
        yield
    finally:
        trl_logger.removeFilter(is_other)


# -------------------------------------------------------------------- the rows of the data set


TAKEN_COLUMNS = (
    "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "trajectory",
)  # fmt: skip
"""Names under which reward functions receive something other than a column of the data set."""


_IMAGES = (
    "The data set has an 'image' or 'images' column with content, and rollouts are of text. Remove the column, or "
    "take trl.GRPOTrainer, which trains models of images without an environment."
)


class RowCheck:
    """Checks the data: columns and environments at construction, and every batch as it arrives."""

    def __init__(self, form: EnvForm, train_dataset: TrainRows, eval_dataset: EvalRows) -> None:
        self.names = form.names
        self.taken = {*TAKEN_COLUMNS, *(["environments"] if form.hands_over_environments else [])}
        if train_dataset is None and (self.names is not None or not form.hands_over_environments):
            raise ValueError(
                "train_dataset=None: a `train_dataset` is required unless an environment makes the prompts, and a "
                "dictionary as environment_factory requires a `train_dataset` with the column 'environment'. Pass "
                "train_dataset=, or env= or environment_factory=."
            )
        evaluated = eval_dataset.values() if isinstance(eval_dataset, Mapping) else [eval_dataset]
        for dataset in (train_dataset, *evaluated):
            # A transform may add columns as rows are read; those rows are checked as they arrive.
            columns: Any = getattr(dataset, "column_names", None) or ()
            names: list[Any] = []
            if self.names is not None and isinstance(dataset, Dataset) and dataset.format["type"] != "custom":
                names = dataset.unique("environment") if "environment" in columns else [None]
            refuse(self._find_problems(columns, names))

    def check_batch(self, rows: Sequence[dict[str, Any]]) -> None:
        """Check the rows of one batch. Refuses images."""
        columns = dict.fromkeys(name for row in rows for name in row)
        refuse(self._find_problems(columns, [row.get("environment") for row in rows]))
        if any(row.get("image") is not None or row.get("images") for row in rows):
            raise ValueError(_IMAGES)

    def _find_problems(self, columns: Iterable[str], names: Iterable[Any]) -> Iterator[str]:
        for name in columns:
            if name in self.taken:
                yield (
                    f"The data set has a column {name!r}, but reward functions receive something else as {name}=. "
                    f"Rename the column: dataset.rename_column({name!r}, ...)."
                )
        for name in names:
            if self.names is not None and name not in self.names:
                yield (
                    f"The data set has a row with environment={name!r}, which is not among the environments passed to "
                    f"environment_factory: {self.names}. Give each row one of these in its column 'environment'."
                )

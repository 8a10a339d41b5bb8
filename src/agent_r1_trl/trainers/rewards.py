"""Places what reward functions return on turns and outcomes, and says which trajectories count where.

A trajectory is *in the baseline* if its reward counts in the statistics of its group or batch, and *in the loss* if
its action tokens enter the loss (`agent_r1_trl.trajectory` defines both).
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather

from agent_r1_trl.environments.factory import EnvForm
from agent_r1_trl.environments.reward_values import finite_number
from agent_r1_trl.tools.pool import prepare_thread
from agent_r1_trl.tools.signature import unwrap_partial
from agent_r1_trl.trainers.agreement import raised_everywhere
from agent_r1_trl.trainers.config import MultiTurnConfig
from agent_r1_trl.trainers.played import PlayedBatch
from agent_r1_trl.trajectory import Trajectory


def environment_reward(trajectory: list[Trajectory], **kwargs: Any) -> list[float | None]:
    """Column of `env=`: the return that the trajectory holds already; None where it is not in the baseline."""
    return [item.total_reward if item.in_baseline else None for item in trajectory]


def class_reward(environment_class: type) -> Callable[..., list[float | None]]:
    """Column of one class of `environment_factory=`: what its `get_reward` returned; None for other classes.

    Without `trajectory` it asks the environments themselves, as TRL's does.
    """
    name = environment_class.__name__

    def column(
        environments: list[Any], trajectory: list[Trajectory] | None = None, **kwargs: Any
    ) -> list[float | None]:
        # A trajectory out of the journal has no environment; its parts name the class that scored it.
        of_class = [environment is None or type(environment) is environment_class for environment in environments]
        if trajectory is None:
            pairs = zip(environments, of_class, strict=True)
            return [environment.get_reward() if is_one else None for environment, is_one in pairs]
        played = zip(trajectory, of_class, strict=True)
        return [item.reward_parts.get(name) if is_one and item.in_baseline else None for item, is_one in played]

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
        """Before TRL calls its reward functions: the penalty for truncation, and the user's rewards for turns."""
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
        """After TRL has called its reward functions: their weighted values become part of the outcomes.

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

    def settle(
        self,
        played: PlayedBatch,
        *,
        functions: Sequence[Callable],
        names: Sequence[str],
        weights: Sequence[float],
        group_size: int,
    ) -> None:
        """After TRL has called its reward functions: place their values, and say which rows count where.

        All ranks must call it.

        Args:
            played: with its `reward_values`; gets `in_baseline` and `in_loss`.
            functions: as for `place_on_outcomes`, like `names` and `weights`.
            names: of the functions.
            weights: of the functions.
            group_size: trajectories of one prompt, which are consecutive rows; 1 where groups do not matter.
        """
        trajectories, values = played.trajectories, played.reward_values
        for trajectory in trajectories:
            trajectory.is_group_too_small = False  # may have been settled before, with other members
        if not played.has_outcomes:
            self.place_on_outcomes(trajectories, values, functions=functions, names=names, weights=weights)
        played.in_baseline = leave_small_groups(
            trajectories, in_baseline(trajectories, values.device), group_size, min(self.min_group_size, group_size)
        )
        trained = [self.in_loss(item) and bool(item.completion_ids) for item in trajectories]
        played.in_loss = played.in_baseline & torch.tensor(trained, device=values.device)


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
        ValueError: the shape does not fit, or a value is not a finite number; names the function and the trajectory.
    """
    if not trajectories:  # of this rank, in a rollout that replaces some
        return []
    names = sorted({name for row in rows for name in row})
    columns = {name: [row.get(name) for row in rows] for name in names}
    is_scored = [False] * len(trajectories)
    for function, weight in zip(functions, weights, strict=True):
        unwrapped = unwrap_partial(function)
        name = getattr(unwrapped, "__name__", type(unwrapped).__name__)
        values = function(trajectory=list(trajectories), **columns)
        if inspect.isawaitable(values):
            values = _wait_for(values)
        if not hasattr(values, "__len__") or len(values) != len(trajectories):
            returned = f"{len(values)} lists" if hasattr(values, "__len__") else repr(values)
            raise ValueError(
                f"turn_reward_funcs: {name} returned {returned} for {len(trajectories)} trajectories. Return one list "
                "per trajectory."
            )
        for index, (trajectory, per_turn) in enumerate(zip(trajectories, values, strict=True)):
            if per_turn is not None and not trajectory.stop_reason.is_infrastructure_failure:
                _add(trajectory, per_turn, weight=weight, name=name)
                is_scored[index] = True
    return is_scored


def _wait_for(awaitable: Any) -> Any:
    """The result of an async function, also where this thread runs an event loop (a notebook)."""

    async def result() -> Any:
        return await awaitable

    with ThreadPoolExecutor(1, initializer=prepare_thread) as pool:
        return pool.submit(asyncio.run, result()).result()


def _add(trajectory: Trajectory, per_turn: Sequence[float | None], *, weight: float, name: str) -> None:
    if not hasattr(per_turn, "__len__") or len(per_turn) != len(trajectory.turns):
        returned = f"{len(per_turn)} values" if hasattr(per_turn, "__len__") else repr(per_turn)
        raise ValueError(
            f"turn_reward_funcs: {name} returned {returned} for {trajectory!r}. Return one value per turn "
            "(`trajectory.turns`), None for no reward."
        )
    for turn, value in zip(trajectory.turns, per_turn, strict=True):
        if value is None:
            continue
        number = finite_number(value)
        if number is None:
            raise ValueError(
                f"turn_reward_funcs: {name} returned {value!r} for {trajectory!r}. Return finite numbers, or None for "
                "no reward."
            )
        turn.reward += weight * number
        turn.reward_parts[name] = turn.reward_parts.get(name, 0.0) + weight * number

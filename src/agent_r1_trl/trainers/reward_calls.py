"""Calls of the reward functions: what they return is checked before TRL makes a tensor of it.

A reward is a finite number that float32 can hold, or None for a trajectory that the function does not score. Anything
else (NaN as well, which TRL would take for None) is an error that names the function and the trajectory, on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from agent_r1_trl.environments.reward_values import finite_number
from agent_r1_trl.tools.base import is_async_callable
from agent_r1_trl.trainers.agreement import raise_everywhere
from agent_r1_trl.trajectory import Trajectory


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

    def settle(self, values: torch.Tensor, functions: Sequence[Any], names: Sequence[str]) -> None:
        """Raise on all ranks what was found on any. All ranks must call it.

        Args:
            values: (B, F) of this rank, as TRL holds them.
            functions: F of them; the values of those that are models are checked here.
            names: of the functions.

        Raises:
            Exception: what a function raised.
            ValueError: what a function returned is no reward; names the function and the trajectory.
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
                    returned = await function(**self._own(kwargs)) if self._trajectories else []
                    return self._filled(self._read(returned, name))
                except Exception as error:
                    return self._filled(self._fail(error))

        else:

            def call(**kwargs: Any) -> list[float | None]:  # type: ignore[misc]
                try:
                    returned = function(**self._own(kwargs)) if self._trajectories else []
                    return self._filled(self._read(returned, name))
                except Exception as error:
                    return self._filled(self._fail(error))

        return call

    def _own(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A function's arguments without the rows that fill up the call."""
        num, total = len(self._trajectories), self._num_rows
        if num == total:
            return kwargs
        return {
            name: value[:num] if isinstance(value, list) and len(value) == total else value
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
                ValueError(
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
                ValueError(
                    f"reward_funcs: {name} returned {value!r:.100} for {trajectory!r}. Return finite numbers (of "
                    "float32's range), or None for a trajectory that is not scored."
                )
            )
        return number

    def _fail(self, error: Exception) -> list[float | None]:
        self._error = self._error or error
        return [None] * len(self._trajectories)


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

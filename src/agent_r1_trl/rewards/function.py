"""The form in which this package's rewards for whole trajectories and for turns are called."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from agent_r1_trl.objects import did_you_mean, import_object
from agent_r1_trl.trajectory import StopReason, Trajectory


class RewardFunction:
    """A function that scores one trajectory, in the form that trainers call: one value per trajectory of a batch.

    The columns of the data set, which trainers pass as arguments too, are ignored, so that a column never changes an
    option by having its name.

    Args:
        score: `(trajectory, **options) -> float` (an outcome), or a list with a number or None for each turn.
        options: values in place of the defaults of `score`.

    >>> from agent_r1_trl.rewards import thinking_format
    >>> thinking_format(completions=["<think>Two plus two makes four.</think><answer>4</answer>", "4"])
    [1.0, 0.0]
    """

    def __init__(self, score: Callable[..., Any], options: dict[str, Any] | None = None) -> None:
        self.score = score
        self.options = dict(options or {})
        self.__name__ = score.__name__
        self.__qualname__ = score.__qualname__
        self.__module__ = score.__module__
        self.__doc__ = score.__doc__

    def __call__(self, trajectory: Sequence[Any] | None = None, completions: Any = (), **columns: Any) -> list[Any]:
        """Score a batch.

        Args:
            trajectory: B `Trajectory` objects, from the trainers of this package.
            completions: B completions as TRL passes them: message lists, or texts. Read where there is no trajectory.
            columns: what else a trainer passes; not read.
        """
        return [self.score(item, **self.options) for item in (completions if trajectory is None else trajectory)]

    def with_options(self, **options: Any) -> RewardFunction:
        """This reward with other options.

        Raises:
            ValueError: there is no such option, or its value is out of range.

        >>> from agent_r1_trl.rewards import thinking_format
        >>> thinking_format.with_options(answer_tag=None)(completions=["<think>One, two, three.</think>3"])
        [1.0]
        """
        parameters = inspect.signature(self.score).parameters.values()
        known = [item.name for item in parameters if item.kind is item.KEYWORD_ONLY]
        _check_options(self.__name__, options, known)
        changed = RewardFunction(self.score, {**self.options, **options})
        changed([_NOTHING])  # where the values are checked
        return changed

    def __repr__(self) -> str:
        """The name, with the options that were changed."""
        return f"{self.__name__}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"

    def __reduce__(self) -> Any:
        """Pickled by its name, like a function."""
        return _rebuild, (self.__module__, self.__name__, self.options)


def with_options(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """A reward function, ours or plain, with some of its arguments set.

    Raises:
        ValueError: it has no such option, which a function that takes `**kwargs` would swallow.
    """
    if not options:
        return function
    if isinstance(function, RewardFunction):
        return function.with_options(**options)
    named = inspect.signature(function).parameters.values()
    known = [item.name for item in named if item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)]
    _check_options(getattr(function, "__name__", repr(function)), options, known)
    return functools.partial(function, **options)


def _check_options(function: str, options: dict[str, Any], known: list[str]) -> None:
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"{function}: there is no option {name!r}.{hint} Set one of {', '.join(known)}.")


def check_number(name: str, value: Any, *, low: float = 0.0, high: float = math.inf) -> None:
    """Refuse an option that is no finite number from `low` to `high`.

    Raises:
        ValueError: names the option, its value and the rule.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high:
        rule = f">= {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise ValueError(f"{name}={value!r} must be a finite number {rule}. Set {name} to such a value.")


def check_count(name: str, value: Any) -> None:
    """Refuse an option that is no whole number >= 1.

    Raises:
        ValueError: names the option, its value and the rule.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number >= 1. Set {name} to such a value.")


def up_to(total: float, scores: Sequence[float | None]) -> list[float | None]:
    """The scores of the turns in order, until their sum reaches `total`; the rest earns nothing.

    >>> up_to(1.0, [0.75, None, 0.75, 0.75])
    [0.75, None, 0.25, 0.0]
    """
    left, paid = total, []
    for score in scores:
        paid.append(None if score is None else min(score, left))
        left -= paid[-1] or 0.0
    return paid


def _rebuild(module: str, name: str, options: dict[str, Any]) -> RewardFunction:
    found: RewardFunction = import_object(f"{module}.{name}", "reward")
    return RewardFunction(found.score, options)


_NOTHING = Trajectory(
    prompt_messages=[],
    prompt_ids=[],
    completion_ids=[],
    action_mask=[],
    logprobs=[],
    turn_ids=[],
    authors=[],
    turns=[],
    stop_reason=StopReason.MAX_TURNS,
)

"""The form in which this package's rewards for whole trajectories and for turns are called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from agent_r1_trl.objects import did_you_mean, import_object
from agent_r1_trl.trajectory import StopReason, Trajectory


def required(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a reward function whose None means that it failed, such as a judge that could not be asked.

    A trajectory that it does not score is then neither in the baseline nor in the loss, whatever else it earned, and
    counts as a failure (`failures.max_share`). Of other functions None counts as 0 beside the rewards of others.
    """
    if inspect.ismethod(function):  # which has no attributes of its own
        function = functools.partial(function)
    function.required = True  # type: ignore[attr-defined]
    return function


class RunningTotal(float):
    """A total since the run began, given to `log_metric`: a log line holds the last one, not the mean of several.

    For example, `log_metric("judge/calls", RunningTotal(num_calls))`.
    """


class RewardFunction:
    """A function that scores one trajectory, in the form that trainers call: one value per trajectory of a batch.

    The columns of the data set, which trainers pass as arguments too, are ignored, so that a column never changes an
    option by having its name. It is pickled by its name, like a function.

    Args:
        score: `(trajectory, **options) -> float` (an outcome), or a list with a number or None for each turn.
        options: values in place of the defaults of `score`.

    >>> from agent_r1_trl.rewards import thinking_format
    >>> thinking_format(completions=["<think>Two plus two makes four.</think><answer>4</answer>", "4"])
    [1.0, 0.0]
    """

    def __init__(self, score: Callable[..., Any], options: dict[str, Any] | None = None) -> None:
        self.__name__: str
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):  # not the signature, which trainers read
            setattr(self, name, getattr(score, name))
        self.score = score
        self.options = dict(options or {})

    def __call__(self, trajectory: Sequence[Any] | None = None, completions: Any = (), **columns: object) -> list[Any]:
        """Score a batch: B trajectories, or where there are none B completions as TRL passes them."""
        return [self.score(item, **self.options) for item in (completions if trajectory is None else trajectory)]

    def with_options(self, **options: object) -> RewardFunction:
        """This reward with other options.

        Raises:
            ValueError: there is no such option, or its value is out of range.
        """
        _check_options(self.score, options, inspect.Parameter.KEYWORD_ONLY)
        changed = RewardFunction(self.score, {**self.options, **options})
        changed([_NOTHING])  # where the values are checked
        return changed

    def __repr__(self) -> str:
        return f"{self.__name__}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"

    def __reduce__(self) -> Any:
        return _rebuild, (self.__module__, self.__name__, self.options)


def with_options(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """A reward function, ours or plain, with some of its arguments set; one that a class makes of them.

    Raises:
        ValueError: it has no such option, which a function that takes `**kwargs` would swallow.
    """
    if isinstance(function, type):  # JudgeReward
        _check_options(function, options, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        made: Callable[..., Any] = function(**options)
        return made
    if not options:
        return function
    if isinstance(function, RewardFunction):
        return function.with_options(**options)
    _check_options(function, options, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return functools.partial(function, **options)


def _check_options(function: Callable[..., Any], options: dict[str, Any], *kinds: object) -> None:
    known = [item.name for item in inspect.signature(function).parameters.values() if item.kind in kinds]
    for name in options:
        if name not in known:
            owner = getattr(function, "__name__", repr(function))
            hint = did_you_mean(name, known)
            raise ValueError(f"{owner}: there is no option {name!r}.{hint} Set one of {', '.join(known)}.")


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

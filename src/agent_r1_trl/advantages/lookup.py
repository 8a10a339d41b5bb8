"""From `advantage_estimator`, a name, an import path or an object, to a row like those of `ESTIMATORS`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from agent_r1_trl.advantages.credit import Credit, CreditInputs
from agent_r1_trl.advantages.estimators import ESTIMATORS, Estimator
from agent_r1_trl.objects import import_object


class EstimatorName(str):
    """The name of an estimator that was given as an object, with its row at hand.

    Configurations hold it where others hold a string: JSON, logs and checkpoints see a plain string.
    """

    estimator: Estimator

    @classmethod
    def of(cls, estimator: Estimator, text: str) -> EstimatorName:
        """`text`, the name of `estimator` or the path that led to it."""
        name = cls(text)
        name.estimator = estimator
        return name

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> EstimatorName:
        return self


def estimator_names(*, needs_critic: bool) -> tuple[str, ...]:
    """The estimators of the table that read a critic, or those that do without."""
    return tuple(row.name for row in ESTIMATORS.values() if row.needs_critic is needs_critic)


def find_estimator(given: str | Estimator | Callable[[CreditInputs], Credit], *, has_critic: bool) -> Estimator:
    """The row that `advantage_estimator` stands for.

    Args:
        given: a name in `ESTIMATORS`; the path of a function or of an `Estimator`, `package.module.name` or
            `package.module:name`, found in the current directory or among the installed packages; or such an object.
        has_critic: whether the trainer has a critic, and a plain function so reads its values.

    Raises:
        ValueError: there is none, or it is no estimator.

    >>> find_estimator("gigpo", has_critic=False).default_gamma_turn
    0.95
    """
    if isinstance(given, EstimatorName):
        return given.estimator
    if isinstance(given, str):
        if given in ESTIMATORS:
            return ESTIMATORS[given]
        if "." not in given and ":" not in given:
            raise ValueError(
                f"advantage_estimator={given!r} is not one of {', '.join(map(repr, ESTIMATORS))}. Set "
                "advantage_estimator to one of them, or to the path of your own function, such as "
                "my_module.my_estimator."
            )
        name, target = str(given), import_object(given, "advantage_estimator")
    else:
        name, target = _path_of(given), given
    if isinstance(target, Estimator):
        row = target
    elif callable(target):
        row = Estimator(name=name, compute=target, needs_critic=has_critic)
    else:
        raise ValueError(
            f"advantage_estimator={given!r} is of type {type(target).__name__}, which cannot be called. Name a "
            "function from CreditInputs to Credit, or an Estimator."
        )
    _check_own(row)
    return row


def _check_own(row: Estimator) -> None:
    """Refuse a user's row that takes one of our names, more than one argument, or weighted parts with a critic."""
    if row is not ESTIMATORS.get(row.name, row):
        raise ValueError(
            f"advantage_estimator: the name {row.name!r} of this Estimator belongs to one of the package's. Give it "
            "another name."
        )
    if row.needs_critic and row.weighs_parts:
        raise ValueError(
            f"advantage_estimator={row.name!r} has needs_critic=True and weighs_parts=True: the critic's values "
            "belong to the sum of both parts. Set one of them to False."
        )
    try:
        signature = inspect.signature(row.compute)
    except ValueError:  # a builtin without a signature
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise ValueError(
            f"advantage_estimator={row.name!r} takes {signature}: {error}. An estimator takes one argument, a "
            "CreditInputs. Bind the others with functools.partial, or read them from inputs.settings."
        ) from error


def _path_of(target: Any) -> str:
    """The path of a function; "(...)" marks what no path leads to, bound arguments and instances."""
    if isinstance(target, functools.partial):
        return f"{_path_of(target.func)}(...)"
    function = getattr(target, "__qualname__", f"{type(target).__name__}(...)")
    return f"{getattr(target, '__module__', 'builtins')}:{function}"

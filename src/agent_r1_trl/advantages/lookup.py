"""From `advantage_estimator`, a name, an import path or an object, to a row like those of `ESTIMATORS`."""

from __future__ import annotations

from collections.abc import Callable

from agent_r1_trl.advantages.credit import Credit, CreditInputs
from agent_r1_trl.advantages.estimators import ESTIMATORS, Estimator
from agent_r1_trl.objects import OwnObject, check_call, own_object

_FORM = "a function from CreditInputs to Credit, or an Estimator"


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
    if isinstance(given, OwnObject):
        return given.target  # type: ignore[no-any-return]
    if isinstance(given, str) and given in ESTIMATORS:
        return ESTIMATORS[given]
    own = own_object("advantage_estimator", given, ESTIMATORS, _FORM, row=Estimator)
    row = own.target
    if not isinstance(row, Estimator):
        row = Estimator(name=str(own), compute=row, needs_critic=has_critic)
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
    check_call(f"advantage_estimator={row.name!r}", row.compute, _FORM, None)

"""Checks of what an environment's reward methods return: a bug in one must raise, not disappear in an average."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from agent_r1_trl.environments.base import RewardError

Outcome = float | tuple[float, dict[str, float]]
FLOAT32_MAX = 3.4028234663852886e38
"""Rewards become float32."""


def finite_number(value: Any) -> float | None:
    """A finite float, in float32's range, out of a number, a boolean, or a numpy or torch scalar; None for all else.

    >>> finite_number(True), finite_number("1"), finite_number(1e39)
    (1.0, None, None)
    """
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch's, for a tensor of several
        return None
    return number if abs(number) <= FLOAT32_MAX else None  # False for NaN


def read_number(value: object, source: str) -> float:
    """A finite float; a `RewardError` that names the method `source` if the value is none."""
    number = finite_number(value)
    if number is None:
        hint = " Does every path through it end in a return?" if value is None else ""
        raise RewardError(f"{source} returned {value!r:.200}: must be a finite number. Return a float.{hint}")
    return number


def read_outcome(value: Any, source: str, success_reward: float = 1.0, failure_reward: float = -1.0) -> Outcome:
    """A number or (number, parts) out of what `outcome_reward` returned: True, False, a number, or one with parts.

    Raises:
        RewardError: the value, which `source` returned, is no finite number, or its parts do not add up to it.
    """
    has_parts = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)
    first = value[0] if has_parts else value
    if is_bool(first):
        total = success_reward if first else failure_reward
    else:
        total = read_number(first, source)
    if not has_parts:
        return total
    parts = {str(name): read_number(part, f"{source}, part {name!r},") for name, part in value[1].items()}
    if parts and not math.isclose(math.fsum(parts.values()), total, rel_tol=1e-6, abs_tol=1e-6):
        raise RewardError(f"{source} returned {total} with the parts {parts}: the parts must add up to it.")
    return total, parts


def is_bool(value: Any) -> bool:
    """Whether a value is a boolean, of Python, numpy or torch (whose classes do not derive from `bool`)."""
    is_of_bools = str(getattr(value, "dtype", None)) in ("bool", "torch.bool")
    return isinstance(value, bool) or (is_of_bools and math.prod(value.shape) == 1)


def with_read_outcome(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an `outcome_reward` method, plain or async, so that it returns what `read_outcome` makes of its value."""

    def convert(env: Any, value: Any) -> Outcome:
        source = f"{type(env).__name__}.outcome_reward"
        return read_outcome(value, source, env.success_reward, env.failure_reward)

    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def read_async(self: Any, *args: object, **kwargs: object) -> Outcome:
            return convert(self, await method(self, *args, **kwargs))

        return read_async

    @functools.wraps(method)
    def read(self: Any, *args: object, **kwargs: object) -> Outcome:
        return convert(self, method(self, *args, **kwargs))

    return read

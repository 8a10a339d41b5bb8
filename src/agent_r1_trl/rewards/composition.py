"""Weighted sums of reward functions, with their parts kept for the metrics."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from agent_r1_trl.settings import Finite, check_value

Reward = Callable[..., float]


def compose(parts: Mapping[str, Reward | tuple[Reward, float]]) -> Callable[..., tuple[float, dict[str, float]]]:
    """Combine several reward functions into one that returns their weighted sum and the weighted parts by name.

    Args:
        parts: functions, or pairs (function, weight), by name. All of them receive the arguments of the composed one.

    Returns:
        A function whose result `ToolEnv.outcome_reward` may return as it is.

    Raises:
        ValueError: there are no parts, an entry has another form, or a weight is not finite. The composed function
            raises it if a reward or its part is not a finite number.

    >>> from agent_r1_trl.rewards import exact_match, f1_score
    >>> reward = compose({"exact": (exact_match, 1.0), "overlap": (f1_score, 0.5)})
    >>> reward("Paris", "Paris")
    (1.5, {'exact': 1.0, 'overlap': 0.5})
    """
    if not isinstance(parts, Mapping) or not parts:
        raise ValueError(f"compose({parts!r:.200}): pass a mapping from name to function or (function, weight).")
    weighted: dict[str, tuple[Reward, float]] = {}
    for name, entry in parts.items():
        function, weight = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, 1.0)
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ValueError(f"compose: {name!r} is {entry!r:.200}: must be a plain function or (function, weight).")
        check_value(f"compose: the weight of {name!r}", weight, Finite)
        weighted[str(name)] = (function, float(weight))

    def composed(*args: Any, **kwargs: Any) -> tuple[float, dict[str, float]]:
        scores = {}
        for name, (function, weight) in weighted.items():
            value = function(*args, **kwargs)
            scores[name] = weight * _float(value)
            if not math.isfinite(scores[name]):
                times = "" if weight == 1 else f", times its weight {weight}"
                raise ValueError(f"reward {name!r} returned {value!r:.200}{times}: must be a finite number.")
        return math.fsum(scores.values()), scores

    return composed


def _float(value: Any) -> float:
    """As a float; NaN for what is not a number."""
    if isinstance(value, (str, bytes, bytearray)):
        return math.nan
    try:
        return float(value)
    except Exception:  # a tensor of several numbers, an integer of 400 digits: types raise what they like
        return math.nan

"""Two keywords of JSON schemas in place of jsonschema's, which is wrong or slow in them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonschema.protocols import Validator


def check_multiple_of(validator: Validator, step: float, instance: Any, schema: object) -> Iterator[Any]:
    """`multipleOf` of the numbers as they are written: 19.99 is a multiple of 0.01, though no float is."""
    import jsonschema

    if not validator.is_type(instance, "number"):
        return
    is_finite = isinstance(instance, int) or math.isfinite(instance)
    if not is_finite or _exact(instance) % _exact(step):
        yield jsonschema.ValidationError(f"{instance!r} is not a multiple of {step!r}")


def _exact(number: float) -> Fraction:
    return Fraction(number) if isinstance(number, int) else Fraction(repr(number))


def check_unique_items(validator: Validator, is_on: object, instance: object, schema: object) -> Iterator[Any]:
    """`uniqueItems` in a time that grows with the number of items, and not with its square."""
    import jsonschema

    if is_on and isinstance(instance, list) and len(set(map(_key, instance))) < len(instance):
        yield jsonschema.ValidationError("the items are not all different")


def _key(value: object) -> Hashable:
    """Equal for values that are equal in JSON, where 1 is 1.0 and not true."""
    if isinstance(value, dict):
        return dict, frozenset((name, _key(part)) for name, part in value.items())
    if isinstance(value, list):
        return list, tuple(_key(part) for part in value)
    if isinstance(value, bool):
        return bool, value
    if isinstance(value, str):
        return str, value
    return float, value

"""How much the suite tries (the profiles stand in tests/conftest.py).

    @settings(max_examples=examples(200))                    # 80 in the suite, 2,000 in `make fuzz`
    for rng in random_rounds(100):                           # a loop by hand, in a test marked `fuzz`
    @pytest.mark.parametrize("launch", short(KINDS, "ddp", release=["zero3"]))  # the others in `make nightly`
    @pytest.mark.parametrize("kind", ["head", *nightly("adapter", "model")])      # the others in `make nightly`
    @pytest.mark.parametrize("kind", ["head", *for_release("adapter", "model")])  # the others in `make test-release`

`tests/test_fuzzing.py` holds that every property test asks here.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import settings

PLAIN_EXAMPLES = 100
"""What `examples` is relative to: a profile with so many `max_examples` tries what the tests name."""
SUITE_EXAMPLES = 40
"""`max_examples` of the suite, which draws new examples each time: the property tests were a quarter of its time."""


def examples(number: int) -> int:
    """`number`, times what the hypothesis profile asks for."""
    return max(1, number * settings().max_examples // PLAIN_EXAMPLES)


def random_rounds(number: int) -> Iterator[random.Random]:
    """`examples(number)` sources of random numbers: always the same ones, unless FUZZ_SEED asks for others."""
    seed = os.environ.get("FUZZ_SEED", "0")
    for index in range(examples(number)):
        print(f"\rround {index} of FUZZ_SEED={seed}", end="")  # pytest shows it where the test fails
        yield random.Random(f"{seed} {index}")


def nightly(*values: Any) -> list[Any]:
    """Values of a parameter (tuples: of several) beyond the representative ones, for `make nightly` alone."""
    return _marked(values, pytest.mark.matrix)


def for_release(*values: Any) -> list[Any]:
    """Such values for `make test-release`, and so for .ci/run."""
    return _marked(values, pytest.mark.release)


def _marked(values: Iterable[Any], mark: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark) for value in values]


def short(values: Iterable[Any], *kept: Any, release: Sequence[Any] = ()) -> list[Any]:
    """Those that are kept; those of `release` for `make test-release`, and the others for `make nightly`."""
    values = [*values]
    assert all(value in values for value in (*kept, *release)), (kept, release)
    others = [value for value in values if value not in kept and value not in release]
    return [*kept, *for_release(*release), *nightly(*others)]

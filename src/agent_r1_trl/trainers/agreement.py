"""What goes wrong on one rank is raised on all of them.

A rank that is alone with its error leaves the others waiting for it in their next collective call, until they run into
its timeout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from accelerate import PartialState
from accelerate.utils import gather_object


def raise_everywhere(error: Exception | None) -> None:
    """Raise this rank's error; where it has none, the first of the other ranks' in its words.

    All ranks must call it.

    Raises:
        Exception: `error` itself.
        ValueError: another rank has a ValueError.
        RuntimeError: another rank has an error of another kind.
    """
    if PartialState().num_processes == 1:
        texts: list[tuple[bool, str] | None] = []
    else:
        text = None if error is None else (isinstance(error, ValueError), f"{type(error).__name__}: {error}")
        texts = gather_object([text])
    if error is not None:
        raise error
    for rank, found in enumerate(texts):
        if found is not None:
            is_value, message = found
            kind = ValueError if is_value else RuntimeError
            raise kind(f"Rank {rank} has stopped all others: {message}")


@contextlib.contextmanager
def raised_everywhere() -> Iterator[None]:
    """Whatever the block raises on one rank is raised on all. All ranks must enter it; it holds no collective call."""
    caught = None
    try:
        yield
    except Exception as error:
        caught = error
    raise_everywhere(caught)

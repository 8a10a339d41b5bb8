"""Random numbers of a game's own, for games that draw from the generators of Python and NumPy that all threads share.

A game is played on a thread of the rollout while the trainer, other games and the user's code draw on theirs. So the
shared generators stay as they are: modules of the game see, in place of `random` and `numpy.random`, modules whose
functions are those of the generator of the game that this thread is playing, and else the shared ones.

Not covered: what a game draws through the modules of other packages.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np


class _Playing(threading.local):
    """The generators of the game that this thread is playing."""

    python: random.Random | None = None
    numpy: np.random.RandomState | None = None


_playing = _Playing()


class _Draws(ModuleType):
    """A module of random numbers, as a game sees it.

    Args:
        module: the shared one.
        library: whose generator of a game it stands for, "python" or "numpy".
    """

    def __init__(self, module: ModuleType, library: str) -> None:
        super().__init__(module.__name__, module.__doc__)
        self._module, self._library = module, library

    def __getattr__(self, name: str) -> Any:
        own = getattr(_playing, self._library)
        if own is not None and not name.startswith("_") and hasattr(own, name):
            return getattr(own, name)
        return getattr(self._module, name)


class _NumPy(ModuleType):
    """NumPy, as a game sees it."""

    def __init__(self) -> None:
        super().__init__(np.__name__, np.__doc__)
        self.random = _NUMPY_DRAWS

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


_NUMPY_DRAWS = _Draws(np.random, "numpy")
_SEEN_AS: dict[int, ModuleType] = {
    id(random): _Draws(random, "python"),
    id(np.random): _NUMPY_DRAWS,
    id(np): _NumPy(),
}
"""The identity of a shared module -> what a game sees in its place."""


def give_own_draws(entry_point: str | type, library: str) -> None:
    """Let the modules of a game draw from a generator of its own while it is played.

    These are the modules of its class and its bases, those of its package, and those of the library of games.

    Args:
        entry_point: the game's class, or "module:Class", which is imported.
        library: name of the package that games are written for.

    Raises:
        ImportError: there is no such module.
    """
    kind: Any = entry_point
    if isinstance(entry_point, str):
        home, _, class_name = entry_point.partition(":")
        kind = getattr(importlib.import_module(home), class_name, None)
    bases = getattr(kind, "__mro__", ())
    homes = {base.__module__ for base in bases}
    packages = [f"{base.__module__.rpartition('.')[0]}." for base in bases[:1]]
    packages = [package for package in [*packages, f"{library}."] if package != "."]
    for name, module in list(sys.modules.items()):
        if module is not None and (name in homes or name.startswith(tuple(packages))):
            _replace_shared(module)


def _replace_shared(module: ModuleType) -> None:
    """Have a module that has imported a shared one see that of the games."""
    for name, value in list(vars(module).items()):
        seen = _SEEN_AS.get(id(value))
        if seen is not None:
            setattr(module, name, seen)


@contextlib.contextmanager
def drawing_from(draws: random.Random) -> Iterator[None]:
    """In here, modules of games draw from `draws` on this thread; NumPy's numbers follow from it."""
    before = _playing.python, _playing.numpy
    _playing.python = draws
    _playing.numpy = np.random.RandomState(draws.getrandbits(32))
    try:
        yield
    finally:
        _playing.python, _playing.numpy = before

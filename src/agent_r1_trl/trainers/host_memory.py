"""Main memory that rollouts free and the C library keeps."""

from __future__ import annotations

import ctypes
import sys


def release_free_memory() -> None:
    """Give freed memory between live blocks back to the system; does nothing where the C library cannot (glibc can).

    Trajectories differ in length, so every step asks for blocks of other sizes, and from several threads: glibc keeps
    the holes, and a long run on the CPU would grow from step to step. Takes a fraction of a second.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)

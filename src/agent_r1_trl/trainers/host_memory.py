"""Memory that a process on the CPU has freed, given back to the system."""

from __future__ import annotations

import ctypes
import sys


def release_free_memory() -> None:
    """Give back what lies free between live blocks; does nothing where the C library cannot (glibc can).

    Trajectories differ in length, so every step asks for blocks of other sizes, and from several threads: glibc keeps
    the holes, and a long run on the CPU would grow from step to step. Takes a fraction of a second.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)

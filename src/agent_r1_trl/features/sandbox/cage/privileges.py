"""Privileges and the end of processes through ctypes: the parts of Linux that Python 3.11 does not expose."""

from __future__ import annotations

import contextlib
import ctypes
import struct

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.PyDLL(None, use_errno=True)


def die_with_parent(number: int) -> None:
    """Ask for this signal when the parent (process) ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ended, so that a daemon can be found and killed."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def drop_privileges() -> None:
    """Give up every capability for good, also for what this process starts: root is then a user like others.

    Raises:
        PermissionError: some capability stays.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        _prctl(_PR_CAPBSET_DROP, capability)
    _libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24))
    with open("/proc/self/status") as stream:
        left = [line.split() for line in stream if line.startswith(("CapInh:", "CapPrm:", "CapEff:", "CapAmb:"))]
    if kept := [f"{name} {mask}" for name, mask in left if int(mask, 16)]:
        raise PermissionError(f"privileges cannot be dropped here ({', '.join(kept)}): run it as a user without any")


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError):  # not on this system
        _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)

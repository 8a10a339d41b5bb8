"""Processes of Linux: finds, measures and kills those below this one (from /proc), and gives up their privileges.

Also measures and removes a directory. ctypes stands for what Python 3.11 does not expose.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import stat
import struct
import subprocess
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.PyDLL(None, use_errno=True)
_PAGE = os.sysconf("SC_PAGE_SIZE")
KILL_TIMEOUT_S = 5.0
MAX_DEPTH = 100
"""Folders within each other; beyond the length of a path, which code gets to by `chdir`, nothing could be counted."""
_HAS_CHILDREN_FILE = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
"""Most kernels list a thread's children; others (CONFIG_PROC_CHILDREN off) need a look at every process."""


def descendants(root: int, *, skip: Collection[int] = ()) -> list[int]:
    """Ids of the living processes below `root`, without `root`, and without those in `skip` and what is below them."""
    found: list[int] = []
    waiting = [root]
    while waiting:
        parent = waiting.pop()
        for child in set(_children(parent)).difference(skip):
            waiting.append(child)
            if _state(child) not in "ZX":
                found.append(child)
    return found


def count_tasks(uid: int) -> int:
    """Number of the user's processes and threads on the whole system, as RLIMIT_NPROC counts them."""
    total = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                total += len(os.listdir(f"/proc/{name}/task"))
    return total


def memory_bytes(pids: list[int]) -> int:
    """Resident memory of processes together, in bytes; what they share counts for each."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm") as stream:
            total += int(stream.read().split()[1]) * _PAGE
    return total


def kill_descendants(*, keep: int = 0, skip: Collection[int] = ()) -> bool:
    """Kill every process below this one; returns whether none is left.

    The process `keep` stays, but what is below it does not; those in `skip` stay with all that is below them.

    All are stopped before the first is killed, so that none can start another in the meantime.
    """
    deadline = time.monotonic() + KILL_TIMEOUT_S
    stopped: set[int] = set()
    while time.monotonic() < deadline:
        found = {pid for pid in descendants(os.getpid(), skip=skip) if pid != keep}
        reap(keep=(keep, *skip))
        if not found:
            return True
        is_new = bool(found - stopped)
        for pid in found - stopped if is_new else found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP if is_new else signal.SIGKILL)
        if not is_new:
            time.sleep(0.001)
        stopped |= found
    return False


def reap(*, keep: Collection[int] = ()) -> None:
    """Collect the exit codes of children that ended, adopted ones included, except those in `keep`."""
    for pid in _children(os.getpid()):
        if pid not in keep:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def is_stopped(pid: int) -> bool:
    """Whether a signal or a tracer has stopped a process."""
    return _state(pid) in "Tt"


# -------------------------------------------------------------------- a directory


@dataclass
class _Usage:
    """The count below a directory."""

    max_entries: int
    size: int = 0
    entries: int = 0


def directory_usage(path: str, *, max_entries: int = 20_000) -> tuple[int, int]:
    """(bytes on disk, number of entries) below `path`; counting stops at `max_entries`.

    Code cannot hide files from it: folders that it has made unreadable are read, and one that is nested deeper than
    honest code does counts as `max_entries`. No link is followed, whatever changes in the meantime.
    """
    usage = _Usage(max_entries)
    with contextlib.suppress(FileNotFoundError), _opened(path, None) as folder:
        _measure(folder, usage, 0)
    return usage.size, usage.entries


def _measure(folder: int, usage: _Usage, depth: int) -> None:
    with os.scandir(folder) as listing:
        for entry in listing:
            usage.entries += 1
            if usage.entries >= usage.max_entries:
                return
            try:
                found = entry.stat(follow_symlinks=False)
                usage.size += found.st_blocks * 512
                if not stat.S_ISDIR(found.st_mode):
                    continue
                with _opened(entry.name, folder) as inner:
                    if depth == MAX_DEPTH:
                        usage.entries = usage.max_entries
                        return
                    _measure(inner, usage, depth + 1)
            except (FileNotFoundError, NotADirectoryError):  # it is gone, or something else by now
                continue


@contextlib.contextmanager
def _opened(name: str, inside: int | None) -> Iterator[int]:
    """A descriptor of a folder of this user that can be read and searched, whatever its mode is."""
    found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=inside)
    try:
        place, mode = f"/proc/self/fd/{found}", stat.S_IMODE(os.stat(found).st_mode)
        is_hidden = mode & 0o500 != 0o500
        if is_hidden:
            os.chmod(place, mode | 0o500)
        try:
            folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            try:
                yield folder
            finally:
                os.close(folder)
        finally:
            if is_hidden:
                os.chmod(place, mode)
    finally:
        os.close(found)


def remove_tree(path: str) -> None:
    """Remove a directory with whatever code put into it: folders nested thousands deep, or without permissions."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            with contextlib.suppress(OSError):
                subprocess.run([*command, "--", path], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _children(pid: int) -> list[int]:
    if not _HAS_CHILDREN_FILE:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and _parent(int(name)) == pid]
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as stream:
                found += map(int, stream.read().split())
    return found


def _state(pid: int) -> str:
    return _stat(pid)[0]


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the name: state, parent, ...; those of a process that is gone say so."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


# -------------------------------------------------------------------- privileges


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

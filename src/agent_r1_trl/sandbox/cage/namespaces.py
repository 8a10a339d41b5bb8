"""Linux namespaces and privileges through ctypes: the parts of the system that Python 3.11 does not expose.

A supervisor in namespaces of its own is process 1 of a world without network, in which everything but its directory
is read-only, and which the kernel empties when it ends. Root may make namespaces, and ordinary users where the system
lets them (user namespaces). Where it does not, the caller goes on without.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import struct
from collections.abc import Callable

_CLONE = {"x86_64": 56, "aarch64": 220}
_MOUNT_SETATTR = 442
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (
    0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 1 << 14, 1 << 18
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = -100, 0x8000, 1
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522

# PyDLL keeps the interpreter's lock, without which a cloned child could not go on.
_libc = ctypes.PyDLL(None, use_errno=True)


def fork_into_namespaces() -> int:
    """Like `os.fork`, with the child as process 1 of new namespaces; `enter_namespaces` must follow in the child.

    Raises:
        OSError: the system does not allow it.
    """
    number = _CLONE.get(platform.machine())
    if number is None or platform.system() != "Linux":
        raise OSError(f"no namespaces on {platform.system()} {platform.machine()}")
    flags = _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET | signal.SIGCHLD
    if os.geteuid() != 0:
        flags |= _CLONE_NEWUSER
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    pid = _libc.syscall(ctypes.c_long(number), ctypes.c_ulong(flags), *[ctypes.c_long(0)] * 4)
    if pid == 0:
        api.PyOS_AfterFork_Child()
        return 0
    error = ctypes.get_errno()
    api.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, os.strerror(error))
    return pid


def enter_namespaces(directory: str, size_mb: int, *, uid: int, gid: int) -> None:
    """Arrange the file system of a child of `fork_into_namespaces`; `uid` and `gid` are its ids before the fork.

    `directory` becomes an empty file system in memory that holds `size_mb` MiB; everything else becomes read-only.

    Raises:
        OSError: the system does not allow it.
    """
    if uid != 0:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as stream:
                stream.write(line)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    options = f"size={size_mb}m,mode=700,nr_inodes={max(1000, 64 * size_mb)}"
    _mount("tmpfs", directory, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _set_read_only("/", is_read_only=True, is_recursive=True)
    _set_read_only(directory, is_read_only=False)
    if os.path.isdir("/dev/shm"):
        _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=16m,mode=1777")


def can_make_namespaces(directory: str) -> bool:
    """Whether a child can enter namespaces here; tried out with a child that ends at once."""
    uid, gid = os.getuid(), os.getgid()

    def trial() -> None:
        enter_namespaces(directory, 1, uid=uid, gid=gid)

    return _succeeds_in_child(trial)


def _succeeds_in_child(trial: Callable[[], None]) -> bool:
    try:
        pid = fork_into_namespaces()
    except OSError:
        return False
    if pid == 0:
        try:
            trial()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def die_with_parent(number: int) -> None:
    """Ask for this signal when the parent (process) ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ended, so that a daemon can be found and killed."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def drop_privileges() -> None:
    """Give up every capability for good: root's own files stay readable, but limits and mounts cannot be changed."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        _prctl(_PR_CAPBSET_DROP, capability)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    with contextlib.suppress(AttributeError):  # not on this system
        _libc.capset(header, bytes(24))


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError):  # not on this system
        _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = kind.encode() if kind else None
    done = _libc.mount(source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), options.encode())
    _check(done, target)


def _set_read_only(path: str, *, is_read_only: bool, is_recursive: bool = False) -> None:
    change = (_MOUNT_ATTR_RDONLY, 0) if is_read_only else (0, _MOUNT_ATTR_RDONLY)
    attributes = struct.pack("=QQQQ", *change, 0, 0)
    flags = _AT_RECURSIVE if is_recursive else 0
    number, size = ctypes.c_long(_MOUNT_SETATTR), ctypes.c_size_t(len(attributes))
    _check(_libc.syscall(number, ctypes.c_int(_AT_FDCWD), path.encode(), ctypes.c_uint(flags), attributes, size), path)


def _check(done: int, path: str) -> None:
    if done != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), path)

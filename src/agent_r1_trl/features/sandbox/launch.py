"""Starts the interpreter of a sandbox: by a fork under rlimits, or under sandlock."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from agent_r1_trl.features.sandbox import interpreter as interpreter_file
from agent_r1_trl.features.sandbox import processes

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
READABLE = (
    "/usr", "/lib", "/lib64", "/bin", "/sbin", "/opt", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime",
    "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random",
)  # fmt: skip
"""What a program needs to start; no home directory, no /etc/passwd, no /proc."""
DENIED = """
mknod mknodat
chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat file_setattr
setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat
prlimit64 setrlimit setpriority ioprio_set sched_setaffinity sched_setscheduler sched_setparam sched_setattr
migrate_pages move_pages process_madvise process_mrelease process_vm_readv pidfd_getfd kcmp
keyctl add_key request_key mq_open mq_unlink shmget msgget semget memfd_create memfd_secret
quotactl quotactl_fd inotify_add_watch fanotify_mark
"""
"""What Landlock does not judge: calls that change files, processes or keys of the same user, or take memory that is
nobody's."""
MAX_OPEN_FILES = 128
WAIT_S = 2.0
SPARE_TASKS = 256
"""What the user's other processes may start in the meantime before the code can start none any more."""


class Interpreter:
    """A running interpreter, the leader of its own session, and the descriptors of its pipes."""

    def __init__(self, pid: int, requests: int, answers: int, output: int) -> None:
        self.pid = pid
        self.requests = requests
        self.answers = answers
        self.output = output
        self.ended = os.pidfd_open(pid)

    def send(self, request: dict[str, Any]) -> None:
        """Write one request; one that no longer reads is found dead by the wait that follows."""
        with contextlib.suppress(BrokenPipeError):
            interpreter_file.write_all(self.requests, json.dumps(request).encode() + b"\n")

    def resume(self) -> None:
        """Let it run."""
        self._signal(signal.SIGCONT)

    def pause(self) -> None:
        """Stop it, with its threads, until the next call, and what it started as far as that is in its group."""
        self._signal_group(signal.SIGSTOP)

    def wait(self) -> int | None:
        """Exit code once it has ended, minus the signal's number if one killed it; None if unknown."""
        with contextlib.suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return None

    def close(self) -> None:
        """Kill the process and close the pipes."""
        self.kill()
        self.wait()
        for descriptor in (self.requests, self.answers, self.output, self.ended):
            os.close(descriptor)

    def kill(self) -> None:
        """Kill it and what it started, as far as that is in its group: no fork bomb outruns that."""
        self._signal(signal.SIGKILL)
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.pid, number)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.ended, number)


def launch(settings: dict[str, Any]) -> Interpreter:
    """Start the interpreter that the settings describe."""
    return _launch_sandlock(settings) if settings["backend"] == "sandlock" else _launch_fork(settings)


def _launch_fork(settings: dict[str, Any]) -> Interpreter:
    request_end, requests = os.pipe()
    answers, answer_end = os.pipe()
    output, output_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for number, end in enumerate((request_end, answer_end, output_end)):
                os.dup2(end, number)
            os.closerange(3, 1024)
            _confine(settings)
            interpreter_file.serve()
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(1)
    for end in (request_end, answer_end, output_end):
        os.close(end)
    return Interpreter(pid, requests, answers, output)


def _confine(settings: dict[str, Any]) -> None:
    """Put the calling process under the limits."""
    os.setsid()
    processes.die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(settings["directory"])
    os.environ.clear()
    os.environ.update(environment(settings["directory"]))
    for name, soft in limits_of(settings).items():
        with contextlib.suppress(AttributeError, ValueError, OSError):  # not on this system, or lower already
            resource.setrlimit(getattr(resource, name), (soft, soft))


def limits_of(settings: dict[str, Any]) -> dict[str, int]:
    """Values of rlimits by name."""
    limits = {
        "RLIMIT_AS": settings["memory_mb"] << 20,
        "RLIMIT_FSIZE": settings["disk_mb"] << 20,
        "RLIMIT_NOFILE": MAX_OPEN_FILES,
        "RLIMIT_CORE": 0,
    }
    others = processes.count_tasks(os.getuid()) + SPARE_TASKS  # of the user, the trainer's included
    return {**limits, "RLIMIT_NPROC": others + settings["max_processes"]}


def environment(directory: str) -> dict[str, str]:
    """All environment variables that the code sees."""
    variables = {"PATH": PATH, "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8", "TERM": "dumb"}
    return {**variables, "PYTHONDONTWRITEBYTECODE": "1", **dict.fromkeys(THREADS, "1")}


# -------------------------------------------------------------------- sandlock


class SandlockInterpreter(Interpreter):
    """An interpreter that sandlock started; sandlock's own handle must collect its exit code."""

    def __init__(self, process: Any) -> None:
        self._process = process
        super().__init__(process.pid, process.stdin.fileno(), process.stdout.fileno(), process.stderr.fileno())

    def wait(self) -> int | None:
        """Exit code once it has ended, as far as sandlock knows it."""
        result = self._process.wait(WAIT_S)
        return -result.signal if getattr(result, "signal", 0) and result.signal > 0 else result.exit_code

    def close(self) -> None:
        """Kill it and free sandlock's handle."""
        with contextlib.suppress(RuntimeError, OSError):
            self._process.kill()
        with contextlib.suppress(RuntimeError, OSError):
            self._process.wait(WAIT_S)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                stream.close()
        os.close(self.ended)


def _launch_sandlock(settings: dict[str, Any]) -> Interpreter:
    import sandlock

    directory = settings["directory"]
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    readable = [path for path in dict.fromkeys((*READABLE, *prefixes)) if os.path.exists(path)]
    box = sandlock.Sandbox(
        fs_readable=readable,
        fs_writable=[directory, os.devnull],
        cwd=directory,
        clean_env=True,
        env=environment(directory),
        max_memory=settings["memory_mb"] << 21,  # of all processes; one that reaches it is killed
        max_processes=settings["max_processes"],
        no_coredump=True,
        extra_deny_syscalls=DENIED.split(),
    )
    source = Path(interpreter_file.__file__).read_text(encoding="utf-8")
    piped = sandlock.StdioMode.PIPED
    process = box.popen([sys.executable, "-I", "-c", source], stdin=piped, stdout=piped, stderr=piped)
    for name in ("RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE"):
        with contextlib.suppress(OSError):
            limit = limits_of(settings)[name]
            resource.prlimit(process.pid, getattr(resource, name), (limit, limit))
    return SandlockInterpreter(process)

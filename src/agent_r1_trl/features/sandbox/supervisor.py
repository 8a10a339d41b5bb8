"""The supervisors of the local backends, one for each sandbox, and the process that forks them.

    trainer ──socket── fork server ──fork── supervisor ──fork or sandlock── interpreter
       └──────────────────socket────────────────┘

The fork server is a small Python process with a clean environment; `local.py` starts it with a socket as descriptor 0.
Each message on it brings the settings of a sandbox and the supervisor's end of that sandbox's socket. The supervisor
starts the interpreter, passes requests on, enforces the limits, and kills everything when the trainer closes its end
of the socket, on purpose or because it died. A limit that a call breaks kills the interpreter, and the next call
starts another one in the same directory. Between calls nothing runs: what a call left behind is killed, and the
interpreter is stopped.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import secrets
import select
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_trl.features.sandbox import interpreter as interpreter_file
from agent_r1_trl.features.sandbox import processes

if TYPE_CHECKING:
    pass

WATCH_S = 0.05
"""Seconds between two looks at the number of processes and their memory; a shorter call is never looked at."""
DISK_WATCH_S = 0.25
"""Seconds between two looks at the private directory."""
END_GRACE_S = 0.5
"""Seconds in which an interpreter that no longer answers may turn out to have ended."""
DISK_FULL = "Disk full"
MAX_FILES = 10_000
CHUNK = 1 << 16
POLL_S = 1.0
CLOSE_S = 5.0
"""Seconds that the supervisors get to clean up when the trainer ends."""


@dataclass(kw_only=True)
class Call:
    """One call while it runs."""

    deadline: float
    max_output: int
    output: bytearray = field(default_factory=bytearray)
    num_dropped: int = 0
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    """The number in its answer, so that nothing else is taken for it."""
    answer: dict[str, Any] | None = None
    unread: bytearray = field(default_factory=bytearray)
    num_received: int = 0
    broken_limit: str = ""
    next_disk_watch: float = 0.0

    def keep(self, data: bytes) -> None:
        """Keep output up to the limit."""
        room = max(0, self.max_output - len(self.output))
        self.output += data[:room]
        self.num_dropped += len(data) - min(room, len(data))

    def read(self, data: bytes) -> None:
        """Look for the answer in what came through its pipe; whatever else is there, the code wrote itself."""
        self.num_received += len(data)
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                answer = json.loads(line)
                if isinstance(answer, dict) and answer.get("id") == self.id:
                    self.answer = {name: text for name, text in answer.items() if isinstance(text, str)}

    @property
    def text(self) -> str:
        """The output."""
        text = self.output.decode("utf-8", errors="replace")
        return f"{text}\n[truncated: {self.num_dropped} more bytes were printed]" if self.num_dropped else text


class Supervisor:
    """Serves one sandbox over `control`, a stream of JSON lines, until the other side closes it.

    `settings` are `backend`, `directory` and the limits by name.
    """

    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        self._control = control
        self._settings = settings
        self._interpreter: Interpreter | None = None
        self._received = bytearray()
        self._is_abandoned = False

    def serve(self) -> None:
        """Answer requests; returns when the trainer is gone or has closed the sandbox."""
        try:
            processes.drop_privileges()
            self._start()
            self._send({})
        except Exception as error:
            with contextlib.suppress(OSError):
                self._send({"fatal": f"{type(error).__name__}: {error}"})
            return
        while (request := self._next_request()) is not None:
            try:
                result = self._run(request)
            except Exception as error:  # of this file, or no interpreter can be started any more
                result = {"fatal": f"{type(error).__name__}: {error}"}
            if self._is_abandoned:
                return
            self._send(result)

    def close(self) -> None:
        """Kill everything and remove the directory."""
        self._stop()
        processes.remove_tree(self._settings["directory"])

    # ---------------------------------------------------------------- one call

    def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        limits = self._settings
        interpreter = self._interpreter or self._start()
        call = Call(deadline=time.monotonic() + limits["timeout_s"], max_output=4 * limits["max_output_chars"])
        interpreter.resume()
        interpreter.send({**request, "id": call.id, "max_chars": limits["max_output_chars"]})
        self._wait(interpreter, call)
        if self._is_abandoned:
            return {}
        answer = call.answer
        if call.broken_limit == DISK_FULL:
            return self._empty_disk(call)
        if answer is None:
            return self._explain_end(interpreter, call)
        interpreter.pause()
        is_alone = processes.kill_descendants(keep=interpreter.pid)  # what was left running
        self._drain(interpreter, call)
        if not is_alone:
            self._stop()
            return {"output": call.text, "error": "It went on in the background and was stopped.", "lost": "variables"}
        if self._is_disk_full():
            return self._empty_disk(call)
        return {"output": call.text, "value": answer.get("value"), "error": answer.get("error")}

    def _wait(self, interpreter: Interpreter, call: Call) -> bool:
        """Collect output until the answer is there; False if the interpreter ended or a limit was broken."""
        watched: list[Any] = [interpreter.answers, interpreter.output, interpreter.ended, self._control]
        next_watch = time.monotonic() + WATCH_S
        while call.answer is None:
            now = time.monotonic()
            if now >= call.deadline:
                call.broken_limit = (
                    f"Timeout: it ran for longer than {self._settings['timeout_s']:g} s and was stopped."
                )
                return False
            unsent = [interpreter.requests] if interpreter.unsent else []
            wait_s = max(0.0, min(next_watch, call.deadline) - now)
            ready, writable, _ = select.select(watched, unsent, [], wait_s)
            if writable:
                interpreter.send_more()
            if self._control in ready and not self._receive():
                self._is_abandoned = True
                return False
            if interpreter.output in ready:
                data = os.read(interpreter.output, CHUNK)
                call.keep(data)
                if not data:  # the code closed it
                    watched.remove(interpreter.output)
            if interpreter.answers in ready:
                data = os.read(interpreter.answers, CHUNK)
                call.read(data)
                if not data or call.num_received > 16 * CHUNK + 8 * call.max_output:
                    return False
            elif interpreter.ended in ready:
                return False
            if time.monotonic() >= next_watch:  # also while there is output without end
                call.broken_limit = self._find_broken_limit(call)
                if call.broken_limit:
                    return False
                next_watch = time.monotonic() + WATCH_S
        return True

    def _find_broken_limit(self, call: Call) -> str:
        limits = self._settings
        pids = processes.descendants(os.getpid())
        if len(pids) > limits["max_processes"]:
            return f"Too many processes: the limit is {limits['max_processes']}. All were stopped."
        if processes.memory_bytes(pids) > limits["memory_mb"] << 20:
            return f"Out of memory: the limit is {limits['memory_mb']} MB. It was stopped."
        now = time.monotonic()
        if now >= call.next_disk_watch:
            if self._is_disk_full():
                return DISK_FULL
            call.next_disk_watch = time.monotonic() + max(DISK_WATCH_S, 10 * (time.monotonic() - now))
        return ""

    def _is_disk_full(self) -> bool:
        size, entries = processes.directory_usage(self._settings["directory"], max_entries=MAX_FILES)
        return size > self._settings["disk_mb"] << 20 or entries >= MAX_FILES

    def _empty_disk(self, call: Call) -> dict[str, Any]:
        """Result of a call that wrote too much. Ends the interpreter and removes its files."""
        directory, limit = self._settings["directory"], self._settings["disk_mb"]
        self._stop()
        processes.remove_tree(directory)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        error = f"Disk full: the limit is {limit} MB and {MAX_FILES} files in all. It was stopped."
        return {"output": call.text, "error": error, "lost": "everything"}

    def _drain(self, interpreter: Interpreter, call: Call) -> None:
        while select.select([interpreter.output], [], [], 0)[0] and (data := os.read(interpreter.output, CHUNK)):
            call.keep(data)

    def _explain_end(self, interpreter: Interpreter, call: Call) -> dict[str, Any]:
        """Result of a call that has no answer. Ends the interpreter."""
        error = call.broken_limit
        if not error and interpreter.ended in select.select([interpreter.ended], [], [], END_GRACE_S)[0]:
            error = "ended"
        if error != "ended":
            interpreter.kill()
        processes.kill_descendants(keep=interpreter.pid)
        if error == "ended":
            error = self._describe_end(interpreter.wait())
        self._drain(interpreter, call)
        self._stop()
        return {"output": call.text, "error": error or "The interpreter stopped answering.", "lost": "variables"}

    def _describe_end(self, code: int | None) -> str:
        if code == -signal.SIGHUP and self._settings["backend"] == "sandlock":  # how it ends who takes too much
            return f"Out of memory: the limit is {self._settings['memory_mb']} MB. It was stopped."
        if code is not None and code < 0:
            return f"The interpreter crashed ({signal.Signals(-code).name})."
        return f"The code ended the interpreter (exit code {'unknown' if code is None else code})."

    # ---------------------------------------------------------------- processes

    def _start(self) -> Interpreter:
        """Start the interpreter and see it answer; raises RuntimeError if it does not."""
        interpreter = self._interpreter = launch(self._settings)
        call = Call(deadline=time.monotonic() + self._settings["start_timeout_s"], max_output=4000)
        interpreter.send({"language": "ping", "id": call.id})
        if not self._wait(interpreter, call):
            reason = call.broken_limit or self._explain_end(interpreter, call)["error"]
            self._stop()
            raise RuntimeError(f"the interpreter did not start: {reason} {call.text}".strip())
        interpreter.pause()
        return interpreter

    def _stop(self) -> None:
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            interpreter.kill()
            processes.kill_descendants(keep=interpreter.pid)
            interpreter.close()
        processes.kill_descendants()

    # ---------------------------------------------------------------- the other side

    def _receive(self) -> bool:
        try:
            data = self._control.recv(CHUNK)
        except OSError:
            return False
        self._received += data
        return bool(data)

    def _next_request(self) -> dict[str, Any] | None:
        while b"\n" not in self._received:
            if not self._receive():
                return None
        line, _, rest = self._received.partition(b"\n")
        self._received = bytearray(rest)
        return json.loads(line)

    def _send(self, result: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # nobody waits any more, which the next read will show
            self._control.sendall(json.dumps(result).encode() + b"\n")


def supervise(control: socket.socket, settings: dict[str, Any]) -> None:
    """Body of a supervisor's process; returns when the sandbox is closed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    processes.die_with_parent(signal.SIGTERM)
    processes.adopt_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    supervisor = Supervisor(control, settings)
    try:
        supervisor.serve()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        supervisor.close()


# -------------------------------------------------------------------- the fork server


class ForkServer:
    """Forks supervisors for one trainer, and leaves nothing behind when it ends."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._trainer = os.getppid()
        self._base = tempfile.mkdtemp(prefix="agent-r1-trl-sandbox-")
        self._directories: dict[int, str] = {}
        self._count = 0

    def serve(self) -> None:
        """Fork supervisors until the trainer has closed its end or is gone."""
        gc.freeze()  # what is here now is never collected, so the forks go on sharing it
        self._control.send(json.dumps({"base": self._base}).encode())
        while os.getppid() == self._trainer:
            if select.select([self._control], [], [], POLL_S)[0]:
                message, descriptors, _, _ = socket.recv_fds(self._control, CHUNK, 1)
                if not message:
                    return
                self._open(json.loads(message), descriptors[0])
            self._collect()

    def close(self) -> None:
        """End every sandbox and remove the directory."""
        deadline = time.monotonic() + CLOSE_S
        for pid in self._directories:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        while self._directories and time.monotonic() < deadline:
            time.sleep(0.01)
            self._collect()
        processes.kill_descendants()
        processes.remove_tree(self._base)

    def _open(self, settings: dict[str, Any], descriptor: int) -> None:
        self._count += 1
        if settings["backend"] == "sandlock":
            with contextlib.suppress(ImportError):  # once for all forks; the fork says it if there is none
                import sandlock  # noqa: F401
        directory = os.path.join(self._base, str(self._count))
        os.mkdir(directory, mode=0o700)
        pid = os.fork()
        if pid == 0:
            try:
                self._control.close()
                os.open(os.devnull, os.O_RDONLY)  # takes the number of the closed socket, 0
                with socket.socket(fileno=descriptor) as control:
                    supervise(control, {**settings, "directory": directory})
            finally:
                os._exit(0)
        os.close(descriptor)
        self._directories[pid] = directory

    def _collect(self) -> None:
        """Clear up after supervisors that ended, and after processes that outlived theirs."""
        for pid in filter(processes.is_stopped, self._directories):
            with contextlib.suppress(OSError):  # by its own code, which has no isolation
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if directory := self._directories.pop(pid, ""):
                    processes.kill_descendants(skip=self._directories)
                    processes.remove_tree(directory)


def main() -> None:
    """Body of the fork server's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the trainer, which closes its end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes.adopt_orphans()
    server = ForkServer(socket.socket(fileno=0))
    try:
        server.serve()
    finally:
        server.close()


# -------------------------------------------------------------------- starting an interpreter

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
READABLE = (
    "/usr", "/lib", "/lib64", "/bin", "/sbin", "/opt", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime",
    "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random",
)  # fmt: skip
"""The paths that a program needs to start; no home directory, no /etc/passwd, no /proc."""
DENIED = """
mknod mknodat
chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat file_setattr
setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat
prlimit64 setrlimit setpriority ioprio_set sched_setaffinity sched_setscheduler sched_setparam sched_setattr
migrate_pages move_pages process_madvise process_mrelease process_vm_readv pidfd_getfd kcmp
keyctl add_key request_key mq_open mq_unlink shmget msgget semget memfd_create memfd_secret
quotactl quotactl_fd inotify_add_watch fanotify_mark fallocate
"""
"""Calls beyond Landlock: those that change files, processes or keys of the same user, or take memory or disk
space past a limit. `interpreter.seal` denies those of which the arguments decide."""
MAX_OPEN_FILES = 128
WAIT_S = 2.0
SPARE_TASKS = 256
"""Processes that the user may start elsewhere in the meantime, before the code can start none any more."""


class Interpreter:
    """A running interpreter, the leader of its own session, and the descriptors of its pipes."""

    def __init__(self, pid: int, requests: int, answers: int, output: int) -> None:
        self.pid = pid
        self.requests = requests
        self.answers = answers
        self.output = output
        self.ended = os.pidfd_open(pid)
        self.unsent = b""
        """Bytes that the pipe had no room for yet: code may have kept its interpreter from reading."""
        os.set_blocking(requests, False)

    def send(self, request: dict[str, Any]) -> None:
        """Begin to write one request; one that no longer reads is found dead by the wait that follows."""
        self.unsent = json.dumps(request).encode() + b"\n"
        self.send_more()

    def send_more(self) -> None:
        """Write as much of the request as the pipe has room for."""
        try:
            self.unsent = self.unsent[os.write(self.requests, self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.unsent = b""

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

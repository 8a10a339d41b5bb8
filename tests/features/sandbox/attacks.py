"""What a model's code could try, and which sandbox stops it; the table of docs/sandbox.md counts them.

    python -m tests.features.sandbox.attacks sandlock          # {"makes a device node": "yes", ...}

Each attack is tried for real, against a process, files and listeners made for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from agent_r1_trl.features.sandbox import (
    LocalSandbox,
    MontySandbox,
    Sandbox,
    SandboxError,
    SandboxLimits,
    SandboxResult,
    local,
)
from agent_r1_trl.features.sandbox.processes import drop_privileges

LIMITS = SandboxLimits(timeout_s=3, memory_mb=512, disk_mb=16, max_processes=16)


class NoSandbox:
    """Runs the code as a child of this process, without privileges, to see the attacks succeed."""

    def run(self, code: str, language: str = "python") -> SandboxResult:
        with tempfile.TemporaryDirectory() as home, tempfile.TemporaryFile("w+") as stream:
            environment = {**os.environ, "HOME": home}
            subprocess.run(
                [sys.executable, "-c", code], cwd=home, env=environment, stdout=stream, stderr=stream, timeout=60,
                preexec_fn=drop_privileges,
            )  # fmt: skip
            stream.seek(0)
            return SandboxResult(output=stream.read())

    def close(self) -> None:
        pass


BACKENDS: dict[str, Callable[[], Sandbox]] = {
    "sandlock": lambda: LocalSandbox("sandlock", LIMITS),
    "limits": lambda: LocalSandbox("limits", LIMITS),
    "monty": lambda: MontySandbox(LIMITS),
    "none": NoSandbox,
}

PRELUDE = """
import os, sys, time
try:
    import ctypes, platform, resource, signal, socket
    libc = ctypes.CDLL(None, use_errno=True)
except ImportError:  # monty has none of them
    pass
folder, pid, secret, readable = {folder!r}, {pid}, {secret!r}, {readable!r}
target = os.path.join(folder, "target")
def succeeded(holds=True):
    if holds:
        print("the attack", "succeeded")
def number(x86_64, other):  # of a system call
    return x86_64 if platform.machine() == "x86_64" else other
"""

# Name -> code that calls `succeeded`. Everything is done to what `scene` made, and is undone or harmless.
TRIED = {
    # privileges
    "makes a device node": "os.mknod('node', 0o60600, os.makedev(8, 0)); succeeded()",
    "mounts a file system": "os.mkdir('m'); succeeded(libc.mount(b'none', b'm', b'tmpfs', 0, None) == 0)",
    "changes its root directory": "os.mkdir('r'); os.chroot('r'); succeeded()",
    "sets the host name": "socket.sethostname(socket.gethostname()); succeeded()",
    "becomes another user": "os.setuid(12345); succeeded()",
    "becomes another group": "os.setgid(12345); succeeded()",
    "gains by a setuid program": "succeeded(libc.prctl(39, 0, 0, 0, 0) == 0)",
    "regains a capability": "succeeded(any(libc.prctl(23, n, 0, 0, 0) == 1 for n in range(41)) and not os.getuid())",
    "opens a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); succeeded()",
    "opens a packet socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0); succeeded()",
    "sets the clock": "time.clock_settime(time.CLOCK_REALTIME, time.time()); succeeded()",
    "raises a hard limit": "n = resource.RLIMIT_CORE; resource.setrlimit(n, (0, 0))\n"
    "resource.setrlimit(n, (1, 1)); succeeded()",
    "raises its priority": "os.setpriority(os.PRIO_PROCESS, 0, -5); succeeded()",
    "switches swap space": "libc.swapoff(b'/nowhere'); succeeded(ctypes.get_errno() != 1)",
    "makes a user namespace": "n = os.fork(); n or os._exit(libc.unshare(0x10000000) != 0)\n"
    "succeeded(os.waitpid(n, 0)[1] == 0)",
    # files of the user
    "reads a file of the user": "succeeded(open(target).read() == secret)",
    "lists a folder of the user": "succeeded('target' in os.listdir(folder))",
    "reads /etc/passwd": "succeeded('root' in open('/etc/passwd').read())",
    "reads through a symbolic link": "os.symlink(target, 'link'); succeeded(open('link').read() == secret)",
    "hard-links a file into its directory": "os.link(target, 'hard'); succeeded()",
    "learns the size and times of a file": "succeeded(os.stat(target).st_size == len(secret))",
    "watches a folder": "n = libc.inotify_init1(0); succeeded(libc.inotify_add_watch(n, folder.encode(), 2) >= 0)",
    "writes a new file": "open(os.path.join(folder, 'new'), 'w').close(); succeeded()",
    "makes a nameless file": "os.open(folder, os.O_TMPFILE | os.O_RDWR); succeeded()",
    "appends to a file": "open(target, 'a').close(); succeeded()",
    "truncates a file": "os.truncate(target, len(secret)); succeeded()",
    "deletes a file": "os.remove(os.path.join(folder, 'victim')); succeeded()",
    "renames a file": "os.rename(os.path.join(folder, 'old'), os.path.join(folder, 'renamed')); succeeded()",
    "makes a folder": "os.mkdir(os.path.join(folder, 'made')); succeeded()",
    "removes a folder": "os.rmdir(os.path.join(folder, 'empty')); succeeded()",
    "makes a symbolic link": "os.symlink('x', os.path.join(folder, 'made link')); succeeded()",
    "makes a FIFO": "os.mkfifo(os.path.join(folder, 'made fifo')); succeeded()",
    "changes a file's mode": "os.chmod(target, 0o644); succeeded()",
    "changes a mode through a folder": "n = os.open(folder, os.O_PATH)\n"
    "os.chmod('target', 0o644, dir_fd=n); succeeded()",
    "changes a file's owner": "os.chown(target, os.getuid(), os.getgid()); succeeded()",
    "changes a link's owner": "os.lchown(target, os.getuid(), os.getgid()); succeeded()",
    "changes a file's times": "os.utime(target); succeeded()",
    "changes times through a folder": "n = os.open(folder, os.O_PATH)\nos.utime('target', dir_fd=n); succeeded()",
    "sets an extended attribute": "os.setxattr(target, 'user.x', b'1'); succeeded()",
    "removes an extended attribute": "os.removexattr(os.path.join(folder, 'marked'), 'user.x'); succeeded()",
    # files that the code may read, because they lie beside Python's own
    "marks a file": "import fcntl\nf = open(readable); n = bytearray(8); fcntl.ioctl(f, 0x80086601, n)\n"
    "fcntl.ioctl(f, 0x40086602, n); succeeded()",
    "gives a file a project": "import fcntl\nf = open(readable); n = bytearray(28); fcntl.ioctl(f, 0x801C581F, n)\n"
    "fcntl.ioctl(f, 0x401C5820, n); succeeded()",
    "takes a lease on a file": "import fcntl\nf = open(readable); fcntl.fcntl(f, 1024, 0); succeeded()",
    "gives a file a write hint": "import fcntl\nfcntl.fcntl(open(readable), 1036, bytes([2] + [0] * 7)); succeeded()",
    "watches a folder by fcntl": "import fcntl\nn = os.open(os.path.dirname(readable), os.O_RDONLY)\n"
    "signal.signal(signal.SIGIO, signal.SIG_IGN); fcntl.fcntl(n, 1026, 2); succeeded()",
    "locks a file": "import fcntl\nfcntl.flock(open(readable), fcntl.LOCK_EX | fcntl.LOCK_NB); succeeded()",
    "writes into a FIFO": "n = os.open(os.path.join(folder, 'fifo'), os.O_WRONLY | os.O_NONBLOCK); succeeded()",
    "writes to a terminal": "os.write(os.open({terminal!r}, os.O_WRONLY | os.O_NOCTTY), b'x'); succeeded()",
    # processes of the user
    "reads the trainer's environment": "succeeded(secret.encode() in open(f'/proc/{{pid}}/environ', 'rb').read())",
    "reads the trainer's memory": "a = int(next(x for x in open(f'/proc/{{pid}}/maps')).split('-')[0], 16)\n"
    "f = open(f'/proc/{{pid}}/mem', 'rb', 0); f.seek(a); succeeded(len(f.read(4)) == 4)",
    "finds a secret in its own environment": "succeeded(secret in os.environ.values())",
    "signals the trainer": "os.kill(pid, signal.SIGCONT); succeeded()",
    "signals the trainer by a pidfd": "signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGCONT); succeeded()",
    "traces the trainer": "succeeded(libc.ptrace(0x4206, pid, None, None) == 0)",
    "takes a descriptor of the trainer": "succeeded(libc.syscall(438, os.pidfd_open(pid), 0, 0) >= 0)",
    "changes the trainer's limits": "resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0)); succeeded()",
    "changes the trainer's priority": "os.setpriority(os.PRIO_PROCESS, pid, 1); succeeded()",
    "changes the trainer's processors": "os.sched_setaffinity(pid, os.sched_getaffinity(0)); succeeded()",
    "changes the trainer's scheduler": "os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0)); succeeded()",
    "changes the trainer's disk priority": "succeeded(libc.syscall(number(251, 30), 1, pid, (2 << 13) | 7) == 0)",
    # network, and channels between trajectories
    "opens a socket to localhost": "socket.create_connection(('127.0.0.1', {port}), 2); succeeded()",
    "opens a socket to another address": "socket.create_connection(({address!r}, {port}), 2); succeeded()",
    "opens a socket by TCP Fast Open": "s = socket.socket()\n"
    "try:\n    s.sendto(b'x', 0x20000000, ('127.0.0.1', {port}))\nexcept BlockingIOError:\n    time.sleep(0.2)\n"
    "s.getpeername(); succeeded()",
    "opens a socket by Multipath TCP": "s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)\n"
    "s.connect(('127.0.0.1', {port})); succeeded()",
    "sends a datagram": "s = socket.socket(type=socket.SOCK_DGRAM)\n"
    "s.sendto(b'x', ('127.0.0.1', {port})); succeeded()",
    "listens on a port": "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); succeeded()",
    "connects to a unix socket by path": "s = socket.socket(socket.AF_UNIX)\n"
    "s.connect(folder + '/stream'); succeeded()",
    "sends to a unix socket by path": "a, b = socket.socketpair(type=socket.SOCK_DGRAM)\n"
    "a.sendto(b'x', folder + '/datagram'); succeeded()",
    "sends a message to a unix socket": "a, b = socket.socketpair(type=socket.SOCK_DGRAM)\n"
    "a.sendmsg([b'x'], [], 0, folder + '/datagram'); succeeded()",
    "connects to an abstract unix socket": "s = socket.socket(socket.AF_UNIX); s.connect({abstract!r}); succeeded()",
    "writes to the user's keyring": "n = libc.syscall(number(248, 217), b'user', b'box', b'x', 1, -4)\n"
    "succeeded(n >= 0); n >= 0 and libc.syscall(number(250, 219), 9, n, -4)",
    "joins a session keyring": "succeeded(libc.syscall(number(250, 219), 1, b'box') >= 0)",
    "takes System V memory": "n = libc.shmget(0, 4096, 0o1600); succeeded(n >= 0); libc.shmctl(n, 0, None)",
    "makes a System V queue": "n = libc.msgget(0, 0o1600); succeeded(n >= 0); libc.msgctl(n, 0, None)",
    "makes a System V semaphore": "n = libc.semget(0, 1, 0o1600); succeeded(n >= 0); libc.semctl(n, 0, 0)",
    "opens a POSIX queue": "n = libc.mq_open(b'/{secret}', 0o102, 0o600, None); succeeded(n >= 0)\n"
    "libc.mq_unlink(b'/{secret}')",
    "writes to /dev/shm": "p = '/dev/shm/{secret}'; open(p, 'w').close(); os.remove(p); succeeded()",
    "takes memory by memfd": "os.memfd_create('x'); succeeded()",
    "makes an io_uring": "succeeded(libc.syscall(425, 1, ctypes.create_string_buffer(120)) >= 0)",
}


@contextlib.contextmanager
def scene() -> Iterator[dict[str, object]]:
    """A process whose environment holds a secret, files, a terminal and listeners; the attacks name them."""
    secret = f"secret{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for name in ("target", "victim", "old", "marked"):
            Path(folder, name).write_text(secret)
        with contextlib.suppress(OSError):  # a file system without them
            os.setxattr(Path(folder, "marked"), "user.x", b"1")
        Path(folder, "empty").mkdir()
        os.mkfifo(Path(folder, "fifo"))
        terminal, other_end = os.openpty()
        for number in (terminal, other_end, os.open(Path(folder, "fifo"), os.O_RDWR)):
            stack.callback(os.close, number)
        # Without privileges, as a trainer of an ordinary user: root's would be out of reach for other reasons.
        environment = {**os.environ, "TOKEN": secret}
        victim = subprocess.Popen(["sleep", "300"], env=environment, preexec_fn=drop_privileges)
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        abstract = f"\0{secret}"
        for kind, address in (("STREAM", f"{folder}/stream"), ("DGRAM", f"{folder}/datagram"), ("STREAM", abstract)):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SocketKind[f"SOCK_{kind}"]))
            listener.bind(address)
            if kind == "STREAM":
                listener.listen()
        # Python's own folder can be read in every sandbox, by every user who can run Python.
        own = sys.prefix if os.access(sys.prefix, os.W_OK) else folder
        readable = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=own)), "readable")
        readable.write_text("x")
        port = stack.enter_context(socket.create_server(("0.0.0.0", 0))).getsockname()[1]
        yield {
            "folder": folder, "pid": victim.pid, "secret": secret, "port": port, "address": own_address(),
            "abstract": abstract, "terminal": os.ttyname(other_end), "readable": str(readable),
        }  # fmt: skip


def still_answers(sandbox: Sandbox) -> bool:
    """Whether the sandbox works after an attack."""
    return sandbox.run("20 + 22").value == "42"


def own_address() -> str:
    """An address of this machine that is not 127.0.0.1: of its network card, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.2"


def run_within(sandbox: Sandbox, code: str, limit_s: float) -> SandboxResult | None:
    """The result, or None if there is none within so many seconds: nobody stops the code then."""
    results: list[SandboxResult] = []

    def run() -> None:
        with contextlib.suppress(SandboxError):  # it is closed meanwhile
            results.append(sandbox.run(code))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return results[0] if results else None


def seconds_of(sandbox: Sandbox, code: str) -> float:
    began = time.monotonic()
    sandbox.run(code)
    return time.monotonic() - began


def processes_with(mark: str) -> list[int]:
    """Ids of the processes whose command line or name holds a text."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            texts = [Path(f"/proc/{name}/{file}").read_bytes() for file in ("cmdline", "comm", "stat")]
            if mark.encode() in texts[0] + texts[1] and b") Z" not in texts[2]:
                found.append(int(name))
    return found


def is_gone(mark: str) -> bool:
    """Whether no process with this mark is left, also none that is another one at every look; ends those that are."""
    left = [pid for _ in range(30) for pid in processes_with(mark)]
    while pids := processes_with(mark):
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    return not left


def new_mark() -> str:
    return f"{100 + uuid.uuid4().int % 10**9 / 10**9:.9f}"


def fork_bomb(sandbox: Sandbox) -> bool:
    before = len([name for name in os.listdir("/proc") if name.isdigit()])
    began = time.monotonic()
    sandbox.run("import os\nwhile True:\n    os.fork()")
    took = time.monotonic() - began
    time.sleep(0.2)
    after = len([name for name in os.listdir("/proc") if name.isdigit()])
    return took < 3 * LIMITS.timeout_s and after < before + 50 and still_answers(sandbox)


FILL = """
import os
def fill(place="file", size=1 << 20, number=64):
    for index in range(number):
        with open(f"{place}{index}", "wb") as stream:
            stream.write(b"x" * size)
"""


def fills_disk(sandbox: Sandbox) -> bool:
    return sandbox.run(FILL + "fill()\n'all written'").value is None and still_answers(sandbox)


def fills_disk_in_a_hidden_folder(sandbox: Sandbox) -> bool:
    code = "os.mkdir('hidden', 0o300)\nfill('hidden/file')\n'all written'"
    return sandbox.run(FILL + code).value is None and still_answers(sandbox)


def fills_disk_in_a_deep_folder(sandbox: Sandbox) -> bool:
    code = "for _ in range(120):\n    os.mkdir('n' * 50)\n    os.chdir('n' * 50)\nfill()\n'all written'"
    return sandbox.run(FILL + code).value is None and still_answers(sandbox)


def fills_disk_by_fallocate(sandbox: Sandbox) -> bool:
    code = """
import ctypes
file, size = open("large", "wb"), ctypes.c_long(64 << 20)
ctypes.CDLL(None).fallocate(file.fileno(), 1, ctypes.c_long(0), size)
if os.fstat(file.fileno()).st_blocks * 512 >= 64 << 20:
    print("all", "allocated")
"""
    return "all allocated" not in sandbox.run(FILL + code).output and still_answers(sandbox)


def fills_disk_outside(sandbox: Sandbox) -> bool:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        sandbox.run(FILL + f"fill({folder + '/file'!r}, number=32)")
        return len(os.listdir(folder)) < 32


CHATTER = """
import os, time
if os.fork() == 0:
    while True:
        os.write(1, b"x")
        time.sleep(0.005)
"""
"""Its supervisor always has something to read."""
LASTS_S = 2.5
"""Seconds that code goes on after it has exceeded a limit; shorter than its timeout."""


def fills_disk_behind_its_output(sandbox: Sandbox) -> bool:
    code = f"{CHATTER}{FILL}fill(number=32)\ntime.sleep({LASTS_S})"
    return seconds_of(sandbox, code) < LASTS_S and still_answers(sandbox)


def takes_memory(sandbox: Sandbox) -> bool:
    return "10737418240" not in str(sandbox.run("data = b'x' * (10 << 30)\nlen(data)")) and still_answers(sandbox)


SHARE = f"""
import os, time
if os.fork() == 0:
    if os.fork() == 0:
        os.fork()
    else:
        os.fork()
    data = bytearray(b"x") * (200 << 20)
    time.sleep({LASTS_S})
    os._exit(0)
time.sleep({LASTS_S})
"""
"""Four processes that take 800 MB together, and none of them more than it may."""


def takes_memory_by_many_processes(sandbox: Sandbox) -> bool:
    return seconds_of(sandbox, SHARE) < LASTS_S and still_answers(sandbox)


def takes_memory_behind_its_output(sandbox: Sandbox) -> bool:
    return seconds_of(sandbox, CHATTER + SHARE) < LASTS_S and still_answers(sandbox)


def loops(sandbox: Sandbox) -> bool:
    began = time.monotonic()
    sandbox.run("while True:\n    pass")
    return time.monotonic() - began < 2 * LIMITS.timeout_s and still_answers(sandbox)


def answers_for_its_interpreter(sandbox: Sandbox) -> bool:
    """It gives an answer, and never reads the next request, which is longer than a pipe."""
    code = """
import json, os, sys, time
frame = sys._getframe()
while frame.f_code.co_name != "serve":
    frame = frame.f_back
names = frame.f_locals
os.write(names["answers"], b"\\n" + json.dumps({"id": names["request"]["id"]}).encode() + b"\\n")
while True:
    time.sleep(1)
"""
    sandbox.run(code)
    return run_within(sandbox, f"1 # {'x' * 150_000}", 2 * LIMITS.timeout_s) is not None and still_answers(sandbox)


UNSUPERVISED = """
import contextlib, os, signal, time
def parent_of(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
with contextlib.suppress(Exception):
    supervisor = os.getppid()
    for pid in (parent_of(supervisor), supervisor):
        os.kill(pid, signal.SIGSTOP)
"""
"""It stops the supervisor, and what watches over that."""


def loops_unsupervised(sandbox: Sandbox, then: str = "") -> bool:
    sandbox.run("1")
    result = run_within(sandbox, f"{UNSUPERVISED}{then}\nwhile True:\n    time.sleep(1)", 2 * LIMITS.timeout_s)
    if (server := local._server) is not None:
        os.kill(server._process.pid, signal.SIGCONT)  # which then finds the stopped supervisor
    return result is not None and still_answers(sandbox)


def takes_memory_unsupervised(sandbox: Sandbox) -> bool:
    return loops_unsupervised(sandbox, SHARE)


def starts_processes_unsupervised(sandbox: Sandbox) -> bool:
    mark = new_mark()
    start = f"""
for _ in range(2 * {LIMITS.max_processes}):
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "{mark}"])
"""
    is_stopped = loops_unsupervised(sandbox, start)
    return is_gone(mark) and is_stopped


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "{mark}"])
    os._exit(0)
time.sleep(0.3)
"""


def leaves_daemon(sandbox: Sandbox, code: str = DAEMON) -> bool:
    mark = new_mark()
    sandbox.run(code.replace("{mark}", mark))
    sandbox.close()
    time.sleep(0.5)
    return is_gone(mark)


def leaves_daemon_without_supervisor(sandbox: Sandbox) -> bool:
    return leaves_daemon(sandbox, DAEMON + UNSUPERVISED.replace("SIGSTOP", "SIGKILL"))


def leaves_daemon_that_hops(sandbox: Sandbox) -> bool:
    """It is another process, in another session, at every moment."""
    code = """
import ctypes, os, time
until = time.monotonic() + 20
ctypes.CDLL(None).prctl(15, b"{mark}")
if os.fork() == 0:
    while time.monotonic() < until:
        if os.fork():
            os._exit(0)
        os.setsid()
    os._exit(0)
"""
    return leaves_daemon(sandbox, code)


def fills_disk_without_names(sandbox: Sandbox) -> bool:
    code = """
import os
streams = []
for number in range(4):
    streams.append(open("file", "wb"))
    os.remove("file")
    streams[-1].write(b"x" * (12 << 20))
    streams[-1].flush()
print("all", "written")
"""
    return "all written" not in sandbox.run(code).output


WATCHED: dict[str, list[Callable[[Sandbox], bool]]] = {
    "starts a fork bomb": [fork_bomb, starts_processes_unsupervised],
    "fills the disk": [
        fills_disk,
        fills_disk_in_a_hidden_folder,
        fills_disk_in_a_deep_folder,
        fills_disk_by_fallocate,
        fills_disk_behind_its_output,
        fills_disk_outside,
    ],
    "fills the disk with deleted files": [fills_disk_without_names],
    "takes 10 GB of memory": [
        takes_memory,
        takes_memory_by_many_processes,
        takes_memory_behind_its_output,
        takes_memory_unsupervised,
    ],
    "loops for ever": [loops, answers_for_its_interpreter, loops_unsupervised],
    "leaves a daemon behind": [leaves_daemon, leaves_daemon_that_hops, leaves_daemon_without_supervisor],
}
"""Name -> functions that try it and say whether it was stopped: first as code does by mistake, then to get past."""
RACES = [leaves_daemon_that_hops, leaves_daemon_without_supervisor]
"""Those that are luck on a busy machine: they have got past if one of several tries has."""

_STOPPED = """
makes a device node, mounts a file system, changes its root directory, sets the host name, becomes another user,
becomes another group, gains by a setuid program, regains a capability, opens a raw socket, opens a packet socket,
sets the clock, raises a hard limit, raises its priority, switches swap space, finds a secret in its own environment
"""
YES, ACCIDENTS, NO = "yes", "accidents only", "**no**"
"""It is stopped in every way that was tried, only where it is a mistake, or not at all."""
STOPPED_BY_LIMITS = {name.strip() for name in _STOPPED.split(",")}
NOT_STOPPED_BY_SANDLOCK = {
    "learns the size and times of a file",
    "locks a file",
    "fills the disk with deleted files",
}


def of_limits(name: str) -> str:
    if name in WATCHED:
        return ACCIDENTS if len(WATCHED[name]) > 1 else NO
    return YES if name in STOPPED_BY_LIMITS else NO


ATTACKS = {
    name: {"sandlock": NO if name in NOT_STOPPED_BY_SANDLOCK else YES, "limits": of_limits(name), "monty": YES}
    for name in (*TRIED, *WATCHED)
}
"""Attack -> backend -> what the table says of it."""


def try_all(backend: str) -> dict[str, str]:
    """What the backend makes of each attack; those that would harm the machine are left out without a backend."""
    found: dict[str, str] = {}
    with scene() as facts, contextlib.ExitStack() as stack:
        sandbox = BACKENDS[backend]()
        stack.callback(lambda: sandbox.close())
        for name, code in TRIED.items():
            result = sandbox.run(PRELUDE.format(**facts) + code.format(**facts))
            found[name] = NO if "the attack succeeded" in result.output else YES
        sandbox.close()
        for name, ways in WATCHED.items() if backend != "none" else ():
            stopped = []
            for way in ways:
                num_tries = 3 if way in RACES else 1
                stopped.append(all(_is_stopped(backend, way) for _ in range(num_tries)))
                if not stopped[-1]:
                    print(f"{backend} has not stopped {way.__name__}", file=sys.stderr)
            found[name] = YES if all(stopped) else ACCIDENTS if stopped[0] else NO
    return found


def _is_stopped(backend: str, way: Callable[[Sandbox], bool]) -> bool:
    """Whether a fresh sandbox stops this way of an attack."""
    sandbox = BACKENDS[backend]()
    is_stopped = way(sandbox)
    sandbox.close()
    return is_stopped


def try_all_as(user: int, backend: str) -> dict[str, str] | None:
    """The same as another user, who has no privileges; None if that user can run no Python here."""
    root = Path(__file__).resolve().parents[3]
    packages = next(path for path in sys.path if (Path(path) / "sandlock").is_dir())
    with tempfile.TemporaryDirectory() as home:
        Path(home).chmod(0o755)
        made = subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", f"{home}/venv"], capture_output=True)
        if made.returncode:
            return None
        for library in Path(home, "venv", "lib").glob("python*/site-packages"):
            (library / "packages.pth").write_text(packages)
        environment = {"PATH": os.defpath, "PYTHONPATH": f"{root / 'src'}:{root}", "TMPDIR": "/tmp"}
        ended = subprocess.run(
            [f"{home}/venv/bin/python", "-m", "tests.features.sandbox.attacks", backend],
            user=user, group=user, extra_groups=[], env=environment, cwd="/", capture_output=True, timeout=200,
        )  # fmt: skip
        if ended.returncode:
            print(ended.stderr.decode())
            return None
    return json.loads(ended.stdout)


if __name__ == "__main__":
    print(json.dumps(try_all(sys.argv[1])))

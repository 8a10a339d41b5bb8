"""What a model's code could try, and whether a sandbox contains it; the table of docs/sandbox.md is made from it.

    python -m tests.sandbox.attacks subprocess          # {"reads the trainer's environment": true, ...}

`true` means contained. Each attack is tried for real, against a victim process, files and listeners made for it.
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
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agent_r1_trl.sandbox import LocalSandbox, MontySandbox, Sandbox, SandboxLimits, SandboxResult

LIMITS = SandboxLimits(timeout_s=3, cpu_s=3, memory_mb=512, disk_mb=16, max_processes=16)


class NoSandbox:
    """Runs the code as a child of this process, to see the attacks succeed."""

    def run(self, code: str, language: str = "python") -> SandboxResult:
        with tempfile.TemporaryFile("w+") as stream:  # a pipe would stay open as long as a daemon holds it
            subprocess.run([sys.executable, "-c", code], stdout=stream, stderr=stream, timeout=60)
            stream.seek(0)
            return SandboxResult(output=stream.read())

    def close(self) -> None:
        pass


BACKENDS: dict[str, Callable[[], Sandbox]] = {
    "subprocess": lambda: LocalSandbox("subprocess", LIMITS),
    "subprocess, no namespaces": lambda: LocalSandbox("subprocess", LIMITS, namespaces=False),
    "sandlock": lambda: LocalSandbox("sandlock", LIMITS),
    "monty": lambda: MontySandbox(LIMITS),
    "none": NoSandbox,
}


@dataclass
class Scene:
    """What the attacks aim at."""

    sandbox: Sandbox
    folder: Path
    secret: str
    victim: subprocess.Popen[bytes]
    ports: dict[str, int]
    address: str

    def run(self, code: str) -> str:
        """Everything that the code brought out."""
        result = self.sandbox.run(code)
        return f"{result.output}\n{result.value}\n{result.error}"

    def still_answers(self) -> bool:
        """Whether the sandbox works after an attack."""
        return self.sandbox.run("20 + 22").value == "42"


@contextlib.contextmanager
def scene(make: Callable[[], Sandbox]) -> Iterator[Scene]:
    """A victim whose environment holds a secret, a file with the same secret, and listeners on two addresses."""
    secret = f"secret-{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "home").mkdir()
        (folder / "home" / "notes.txt").write_text(secret)
        victim = subprocess.Popen(["sleep", "100"], env={**os.environ, "TOKEN": secret})
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        address = own_address()
        ports = {}
        for host in ("127.0.0.1", address):
            listener = stack.enter_context(socket.create_server((host, 0)))
            ports[host] = listener.getsockname()[1]
        sandbox = make()
        stack.callback(sandbox.close)
        yield Scene(sandbox, folder, secret, victim, ports, address)


def own_address() -> str:
    """An address of this machine that is not 127.0.0.1: of its network card, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.2"


def reads_environment(s: Scene) -> bool:
    code = """
import os
found = [repr(dict(os.environ))]
for name in os.listdir("/proc"):
    try:
        found.append(open(f"/proc/{name}/environ", "rb").read().decode(errors="replace"))
    except Exception:
        pass
print([text for text in found if "secret" in text])
"""
    return s.secret not in s.run(code)


def reads_memory(s: Scene) -> bool:
    code = f"""
maps = open("/proc/{s.victim.pid}/maps").read()
start = next(line for line in maps.splitlines() if "[stack]" in line).split("-")
end = int(start[1].split()[0], 16)
with open("/proc/{s.victim.pid}/mem", "rb") as memory:
    memory.seek(end - 65536)
    data = memory.read(65536)
print(b"{s.secret}" in data, "read")
"""
    return "True read" not in s.run(code)


def connects(s: Scene, host: str) -> bool:
    code = f"""
import socket
with socket.create_connection(("{host}", {s.ports[host]}), timeout=2):
    print("connected")
"""
    return "connected" not in s.run(code)


def fork_bomb(s: Scene) -> bool:
    before = len([name for name in os.listdir("/proc") if name.isdigit()])
    began = time.monotonic()
    s.run("import os\nwhile True:\n    os.fork()")
    took = time.monotonic() - began
    time.sleep(0.2)
    after = len([name for name in os.listdir("/proc") if name.isdigit()])
    return took < 3 * LIMITS.timeout_s and after < before + 50 and s.still_answers()


def fills_disk(s: Scene) -> bool:
    code = """
for number in range(256):
    with open(f"file{number}", "wb") as stream:
        stream.write(b"x" * (1 << 20))
print("all", "written")
"""
    return "all written" not in s.run(code) and s.still_answers()


def takes_memory(s: Scene) -> bool:
    return "10737418240" not in s.run("data = b'x' * (10 << 30)\nlen(data)") and s.still_answers()


def loops(s: Scene) -> bool:
    began = time.monotonic()
    s.run("while True:\n    pass")
    return time.monotonic() - began < 2 * LIMITS.timeout_s and s.still_answers()


def writes_outside(s: Scene) -> bool:
    s.run(f"with open({str(s.folder / 'outside.txt')!r}, 'w') as stream:\n    stream.write('x')")
    return not (s.folder / "outside.txt").exists()


def leaves_daemon(s: Scene) -> bool:
    mark = f"{100 + uuid.uuid4().int % 10**9 / 10**9:.9f}"
    code = f"""
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "{mark}"])
    os._exit(0)
import time
time.sleep(0.3)
"""
    s.run(code)
    s.sandbox.close()
    time.sleep(0.5)
    left = processes_with(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


def processes_with(mark: str) -> list[int]:
    """Ids of the processes whose command line holds a text."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
    return found


def reads_home(s: Scene) -> bool:
    return s.secret not in s.run(f"print(open({str(s.folder / 'home' / 'notes.txt')!r}).read())")


def kills_parent(s: Scene) -> bool:
    s.run(f"import os\nos.kill({s.victim.pid}, 9)")
    time.sleep(0.1)
    return s.victim.poll() is None and s.still_answers()


ATTACKS: dict[str, Callable[[Scene], bool]] = {
    "reads the trainer's environment": reads_environment,
    "reads the trainer's memory": reads_memory,
    "opens a socket to another machine": lambda s: connects(s, s.address),
    "opens a socket to localhost": lambda s: connects(s, "127.0.0.1"),
    "starts a fork bomb": fork_bomb,
    "fills the disk": fills_disk,
    "takes 10 GB of memory": takes_memory,
    "loops for ever": loops,
    "writes outside its directory": writes_outside,
    "leaves a daemon behind": leaves_daemon,
    "reads the home directory": reads_home,
    "kills the trainer": kills_parent,
}


def try_all(backend: str, names: Iterable[str] = ATTACKS) -> dict[str, bool]:
    """Whether the backend contains each attack."""
    contained: dict[str, bool] = {}
    for name in names:
        attack = ATTACKS[name]
        with scene(BACKENDS[backend]) as made:
            contained[name] = attack(made)
    return contained


def try_all_as(user: int, backend: str) -> dict[str, bool] | None:
    """The same as another user, who has no privileges; None if that user can run no Python here."""
    root = Path(__file__).resolve().parents[2]
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": f"{root / 'src'}:{root}",
        "TMPDIR": "/tmp",
    }
    for python in (sys.executable, "/usr/bin/python3"):  # the first may lie in a home directory
        with contextlib.suppress(OSError):
            ended = subprocess.run(
                [python, "-m", "tests.sandbox.attacks", backend],
                user=user, group=user, extra_groups=[], env=environment, cwd="/", capture_output=True, timeout=100,
            )  # fmt: skip
            if ended.returncode == 0:
                return json.loads(ended.stdout)
    return None


if __name__ == "__main__":
    print(json.dumps(try_all(sys.argv[1])))

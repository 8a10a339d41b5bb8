"""Machines on this one: network namespaces joined by a virtual cable, with process ids and a host name of their own.

    here                     machine-0  10.77.0.1                 10.77.0.2  machine-1
    tests, the disk          processes  --------- veth pair ---------  processes

What is real: addresses, sockets between them, two launchers that see nothing of each other's processes, and a machine
that is lost without a goodbye. What is not: the processors and the disk are shared.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import psutil

from tests.distributed.launch import ROOT

CABLE = "cable"
"""Name of the network device on each machine."""


def reason_against():
    """Why machines cannot be made here; None if they can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's; this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces with addresses of their own need root"
    missing = [name for name in ("ip", "unshare", "setpriv", "hostname") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    try:
        with two_machines() as machines:
            machines[0].run("true")
    except subprocess.CalledProcessError as error:
        return f"{' '.join(map(str, error.cmd))} says: {error.stderr.strip()}"
    return None


@contextlib.contextmanager
def two_machines():
    """Two machines that reach each other; their processes end with the block.

    Raises:
        subprocess.CalledProcessError: this system does not allow it.
    """
    machines = [Machine(rank, f"agent-r1-{os.getpid()}-{rank}", f"10.77.0.{rank + 1}") for rank in range(2)]
    try:
        for machine in machines:
            _run("ip", "netns", "add", machine.namespace)
            _run("ip", "-n", machine.namespace, "link", "set", "lo", "up")
        first, second = (machine.namespace for machine in machines)
        _run(
            "ip", "-n", first, "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", second,
        )  # fmt: skip
        for machine in machines:
            _run("ip", "-n", machine.namespace, "address", "add", f"{machine.address}/24", "dev", CABLE)
            _run("ip", "-n", machine.namespace, "link", "set", CABLE, "up")
        yield machines
    finally:
        for machine in machines:
            machine.end()
            subprocess.run(["ip", "netns", "delete", machine.namespace], capture_output=True)


class Machine:
    """One of `two_machines`.

    Args:
        rank: its number.
        namespace: name of its network.
        address: which the other machine knows it by.
    """

    def __init__(self, rank, namespace, address):
        self.rank = rank
        self.namespace = namespace
        self.address = address
        self._started = []

    def start(self, log, *command, **environment):
        """A process on this machine whose output goes to the file `log`."""
        inside = ["setpriv", "--pdeathsig", "KILL"]  # nothing outlives the tests, however they end
        inside += ["ip", "netns", "exec", self.namespace, "unshare", "--pid", "--uts", "--fork", "--kill-child"]
        inside += ["--mount-proc", "sh", "-c", 'hostname "$0" && exec "$@"', f"machine-{self.rank}"]
        with open(log, "w", encoding="utf-8") as file:
            process = subprocess.Popen(
                [*inside, *map(str, command)], cwd=ROOT, env={**os.environ, **environment}, stdout=file, stderr=file
            )
        self._started.append(process)
        return process

    def run(self, *command):
        """Run a command here to its end."""
        _run("ip", "netns", "exec", self.namespace, "unshare", "--pid", "--uts", "--fork", "--mount-proc", *command)

    def lose(self):
        """Cut its power: all processes die, and no packet leaves it any more, not even one that ends a connection."""
        _run("ip", "-n", self.namespace, "address", "flush", "dev", CABLE)
        self.end()

    def end(self):
        """Kill its processes."""
        for process in self._started:
            if process.poll() is None:
                for member in [*psutil.Process(process.pid).children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                        member.send_signal(signal.SIGKILL)
                process.wait()


def _run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)

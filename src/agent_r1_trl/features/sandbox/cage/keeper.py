"""The keeper: forks a supervisor for each sandbox, and leaves nothing behind when the trainer ends.

Started by `local.py` with a socket as descriptor 0. Each message on it brings the settings of a sandbox and the
supervisor's end of that sandbox's socket.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import tempfile
import time
from typing import Any

from agent_r1_trl.features.sandbox.cage import processes
from agent_r1_trl.features.sandbox.cage.supervisor import supervise

POLL_S = 1.0
END_GRACE_S = 5.0
MAX_MESSAGE = 1 << 16


class Keeper:
    """Serves one trainer.

    Args:
        control: socket of messages.
    """

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
                message, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 1)
                if not message:
                    return
                self._open(json.loads(message), descriptors[0])
            self._collect()

    def close(self) -> None:
        """End every sandbox and remove the directory."""
        deadline = time.monotonic() + END_GRACE_S
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
        settings = {**settings, "directory": directory}
        pid = os.fork()
        if pid == 0:
            try:
                self._control.close()
                os.open(os.devnull, os.O_RDONLY)  # takes the number of the closed socket, 0
                with socket.socket(fileno=descriptor) as control:
                    supervise(control, settings)
            finally:
                os._exit(0)
        os.close(descriptor)
        self._directories[pid] = directory

    def _collect(self) -> None:
        """Clear up after supervisors that ended, and after processes that outlived theirs."""
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if directory := self._directories.pop(pid, ""):
                    processes.kill_descendants(skip=self._directories)
                    processes.remove_tree(directory)


def main() -> None:
    """Body of the keeper's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the trainer, which closes its end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes.adopt_orphans()
    keeper = Keeper(socket.socket(fileno=0))
    try:
        keeper.serve()
    finally:
        keeper.close()

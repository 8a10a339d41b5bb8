"""The processes of a run, called ranks: they agree on when to end, and each notices that another one has died.

A collective operation waits for a rank that never comes: gloo until a connection breaks, NCCL until `ddp_timeout`. So
a thread of each rank writes a heartbeat into the process group's key-value store every second and reads those of
the others. Covered here: agreement, heartbeats, a launcher that is gone. Not covered: what a run does then
(`signals.py`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from agent_r1_trl.errors import RunError
from agent_r1_trl.trainers.callbacks import num_ranks

logger = logging.getLogger(__name__)

BEAT_S = 1.0
"""Seconds between two heartbeats."""
PAUSE_S = 4.0
"""Seconds without a look at the others after which their silence is counted from now on."""
EXPLAIN_S = 6.0
"""Seconds that a broken collective operation waits for the reason."""
RUNNING, LEFT, FAILED = "running", "left", "failed"
_BROKEN = ("gloo", "nccl", "connection", "timed out", "peer", "socket")
_LAUNCHED = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")
"""Environment variables that launchers set; a process that none has started may outlive its parent."""


class RankLostError(RunError):
    """Another rank has died or failed; the message names it."""


def this_machine() -> str:
    """A name of this machine, and of the container in it where process ids are its own."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # Linux
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


@dataclass(kw_only=True)
class Sign:
    """What one rank tells the others."""

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    machine: str = field(default_factory=this_machine)
    """Equal for processes that see each other's process ids."""
    beat: int = 0
    phase: str = "start"
    signum: int = 0
    """The signal that it received; 0 for none."""
    state: str = RUNNING
    error: str = ""
    """What went wrong in this rank's rollout; the others need not finish theirs."""


def set_gloo_timeout(timeout: timedelta) -> None:
    """Give gloo the time limit of `ddp_timeout`, which transformers passes on to GPUs alone."""
    if num_ranks() > 1 and "gloo" in dist.get_backend():
        dist.distributed_c10d._set_pg_timeout(timeout)


class RankWatch:
    """A thread that watches the other ranks and the launcher while a run lasts, and calls, from the thread:

    Args:
        timeout_s: seconds without a heartbeat after which a rank counts as dead; one of this machine whose process
            is gone does so at once.
        on_signal: with the number of a signal that another rank received, or with SIGTERM's when the launcher is gone.
        on_error: when a rollout of another rank went wrong.
        on_lost: once with a message that names the rank.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        on_signal: Callable[[int, str], None],
        on_error: Callable[[], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.lost: str | None = None
        """What happened to another rank; None as long as all live."""
        self.own = Sign()
        self._timeout_s = timeout_s
        self._on_signal, self._on_error, self._on_lost = on_signal, on_error, on_lost
        self._is_launched = any(name in os.environ for name in _LAUNCHED)
        self._parent = os.getppid() if self._is_launched else None
        self._stopped, self._awake = False, threading.Event()
        self._found = threading.Event()
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> its last beat and when it was new
        self._hosts: dict[int, str] = {}
        self._looked_at = time.monotonic()
        self._store: Any = None
        self._asked_at: float | None = None
        """When the store was asked for what it has not answered yet."""
        self._thread: threading.Thread | None = None

    def start(self, run: int) -> None:
        """Begin to watch the run of this number in its process; all ranks must call it."""
        if num_ranks() > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            store = store.clone()  # the main thread may block that one
            self._store = dist.PrefixStore(f"agent_r1_trl/{run}", store)
            self._tell()
            threading.Thread(target=self._watch_store, name="store", daemon=True).start()
        elif self._parent is None:
            return
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    def tell(self, **changes: Any) -> None:
        """Change this rank's sign, which the others see within about a second."""
        for name, value in changes.items():
            setattr(self.own, name, value)
        self._awake.set()

    def stop(self, state: str, error: str = "") -> None:
        """Say how this rank ends, and stop watching."""
        self._stopped = True
        self.tell(state=state, error=error)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(BEAT_S)
            if self.lost is not None and self._thread.is_alive():
                return  # the store does not answer, and would not answer this thread either
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # its host may have ended before
                self._tell()

    def explain(self, error: BaseException) -> RankLostError | None:
        """The reason for a broken collective operation, if another rank was lost; waits for the thread to find it."""
        words = str(error).lower()
        is_broken = isinstance(error, dist.DistError) or any(word in words for word in _BROKEN)
        if num_ranks() == 1 or not isinstance(error, RuntimeError) or not is_broken:
            return None
        self._found.wait(EXPLAIN_S)
        return None if self.lost is None else RankLostError(self.lost)

    # ---------------------------------------------------------------- the thread

    def _watch(self) -> None:
        while not self._stopped:
            self._awake.wait(BEAT_S)
            self._awake.clear()
            if self._parent is not None and os.getppid() != self._parent:
                self._parent = None
                self._on_signal(signal.SIGTERM, "its launcher is gone")
            if self._store is not None and self.lost is None and not self._stopped:
                self._look_around()

    def _look_around(self) -> None:
        self._asked_at = time.monotonic()
        try:
            self._tell()
            texts = self._store.multi_get([str(rank) for rank in range(num_ranks())])
        except RuntimeError:
            time.sleep(BEAT_S / 2)  # a process that is killed closes its connections before it is gone
            if self._is_launched and os.getppid() != self._parent:
                self._store = None  # the launcher held it; the next round acts on that
            else:
                self._lose("Rank 0 or the launcher is gone: the process group's key-value store does not answer")
            return
        finally:
            self._asked_at = None
        now = time.monotonic()
        if now - self._looked_at > PAUSE_S:  # this process stood still; with it, perhaps, all the others (Ctrl-Z)
            self._seen = {rank: (beat, now) for rank, (beat, _) in self._seen.items()}
        self._looked_at = now
        for rank, text in enumerate(texts):
            if rank != dist.get_rank():
                self._judge(rank, Sign(**json.loads(text)), now)

    def _watch_store(self) -> None:
        """Notice that the store's machine is gone: no connection breaks, and whoever asks waits for minutes."""
        looked_at = time.monotonic()
        while not self._stopped and self.lost is None:
            time.sleep(BEAT_S)
            now = time.monotonic()
            if now - looked_at > PAUSE_S and self._asked_at is not None:  # as in `_look_around`
                self._asked_at = now
            looked_at, asked_at = now, self._asked_at
            if asked_at is not None and now - asked_at > self._timeout_s:
                host = self._hosts.get(0, os.environ.get("MASTER_ADDR", "an unknown machine"))
                self._lose(
                    f"The process group's key-value store, which rank 0 or its launcher keeps on {host}, has not "
                    f"answered for {now - asked_at:.0f} s (failures.rank_timeout={self._timeout_s:g}): that machine "
                    "or the network is gone"
                )

    def _judge(self, rank: int, sign: Sign, now: float) -> None:
        name = f"Rank {rank} (process {sign.pid} on {sign.host})"
        self._hosts[rank] = sign.host
        if rank not in self._seen or self._seen[rank][0] != sign.beat:
            self._seen[rank] = (sign.beat, now)
        if sign.signum:
            self._on_signal(sign.signum, f"rank {rank} received it")
        if sign.error and sign.state == RUNNING:
            self._on_error()
        silent_s = now - self._seen[rank][1]
        if sign.state == FAILED:
            self._lose(f"{name} failed in its {sign.phase}: {sign.error}")
        elif sign.state == RUNNING and sign.machine == self.own.machine and not is_alive(sign.pid):
            self._lose(f"{name} has died in its {sign.phase} without a word: killed, out of memory, or crashed")
        elif sign.state == RUNNING and silent_s > self._timeout_s:
            self._lose(
                f"{name} has given no heartbeat for {silent_s:.0f} s "
                f"(failures.rank_timeout={self._timeout_s:g}); its last phase was: {sign.phase}"
            )

    def _lose(self, message: str) -> None:
        if self._stopped:
            return
        self.lost = message
        self._found.set()
        self._on_lost(message)

    def _tell(self) -> None:
        self.own.beat += 1
        self._store.set(str(dist.get_rank()), json.dumps(asdict(self.own)))


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True

"""The processes of a run, called ranks: what ends one of them is known to the others within about a second.

They agree when to end where they meet (`signals.py`), and a rollout may keep them apart for long. So whoever receives
a signal or fails leaves a note in the process group's key-value store, which a thread of each rank looks at. A rank
that dies without a note is noticed by the launcher, which ends the others, or by the next collective operation.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from agent_r1_trl.errors import RunError
from agent_r1_trl.trainers.callbacks import num_ranks

LOOK_S = 1.0
"""Seconds between two looks at the store and at the launcher."""
_LAUNCHED = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")
"""Environment variables that launchers set; a process that none has started may outlive its parent."""


class RankLostError(RunError):
    """Another rank has died or failed."""


def set_gloo_timeout(timeout: timedelta) -> None:
    """Give gloo the time limit of `ddp_timeout`, which transformers passes on to GPUs alone."""
    if num_ranks() > 1 and "gloo" in dist.get_backend():
        dist.distributed_c10d._set_pg_timeout(timeout)


class RankWatch:
    """Looks, on a thread, at the note of another rank and at the launcher while a run lasts.

    Args:
        on_signal: called with the number of a signal and how it came here; with SIGTERM's when the launcher is gone.
        on_error: called when another rank has failed.
    """

    def __init__(self, on_signal: Callable[[int, str], None], on_error: Callable[[], None]) -> None:
        self._on_signal, self._on_error = on_signal, on_error
        self._parent = os.getppid() if any(name in os.environ for name in _LAUNCHED) else None
        self._stopped, self._has_failed = threading.Event(), threading.Event()
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self._notes: dict[str, dict[str, Any]] = {}
        """The first `signal` and the first `error` of all ranks."""

    def start(self, run: int) -> None:
        """Begin to watch the run of this number in its process; all ranks must call it."""
        if num_ranks() > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore(f"agent_r1_trl/{run}", store.clone())  # the main thread may block that one
        if self._store is not None or self._parent is not None:
            self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
            self._thread.start()

    def tell(self, *, signum: int = 0, error: str = "") -> None:
        """Leave a note for the other ranks: a signal or an error, unless there is one."""
        if (store := self._store) is None:
            return
        note = json.dumps({"rank": dist.get_rank(), "signum": signum, "error": error})

        def leave() -> None:
            with contextlib.suppress(RuntimeError):  # its host may have ended before
                store.compare_set("error" if error else "signal", "", note)

        thread = threading.Thread(target=leave, name="note", daemon=True)
        thread.start()
        thread.join(LOOK_S)  # a store whose machine is gone answers nobody, and no connection breaks

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(LOOK_S)  # it may wait for a store whose machine is gone

    def explain(self, error: BaseException) -> RankLostError | None:
        """The reason for a broken collective operation; None if the error is another one."""
        is_broken = isinstance(error, dist.DistError) or re.search("gloo|nccl", str(error), re.IGNORECASE)
        if num_ranks() == 1 or not isinstance(error, RuntimeError) or isinstance(error, RunError) or not is_broken:
            return None
        self._has_failed.wait(3 * LOOK_S)
        note = self._notes.get("error")
        if note is not None and note["rank"] != dist.get_rank():
            return RankLostError(f"Rank {note['rank']} has stopped all others: {note['error']}")
        return RankLostError(
            "Another rank is gone: killed, out of memory, crashed, or its machine is lost; or something else kept it "
            f"for longer than ddp_timeout ({error}). Its own output or the launcher's says why. Start all of them "
            "again with resume_from_checkpoint: true, and with a longer ddp_timeout if a rank was only slow."
        )

    # ---------------------------------------------------------------- the thread

    def _watch(self) -> None:
        while not self._stopped.wait(LOOK_S):
            if self._parent is not None and os.getppid() != self._parent:
                self._parent = None
                self._on_signal(signal.SIGTERM, "its launcher is gone")
            if self._store is not None:
                try:
                    self._look()
                except RuntimeError:  # its host has ended, and torch prints a trace of each try
                    self._store = None

    def _look(self) -> None:
        for kind in ("signal", "error"):
            if kind in self._notes or not self._store.check([kind]):
                continue
            note = self._notes[kind] = json.loads(self._store.get(kind))
            if kind == "error":
                self._has_failed.set()
            if note["rank"] == dist.get_rank():
                continue
            if kind == "signal":
                self._on_signal(note["signum"], f"rank {note['rank']} received it")
            else:
                self._on_error()

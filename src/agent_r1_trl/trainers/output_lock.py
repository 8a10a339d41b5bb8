"""One run at a time writes to an `output_dir`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_r1_trl.trainers.checkpoints import CheckpointError

logger = logging.getLogger(__name__)

LOCK_FILE = "_run.lock"
"""Says who trains: process, host and start. The system frees the lock when the process ends, however it ends."""


class OutputInUseError(CheckpointError):
    """Another run trains in `output_dir`; when it has ended, the same command succeeds."""


@contextlib.contextmanager
def output_lock(output_dir: Path) -> Iterator[None]:
    """Hold the lock of a directory. Where the file system has none, a warning says so.

    A POSIX record lock, because it belongs to the process alone: what a tool forks does not keep it, and NFS knows it.

    Raises:
        OutputInUseError: another process holds it.
    """
    with contextlib.ExitStack() as stack:
        try:
            import fcntl

            output_dir.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((output_dir / LOCK_FILE).open("ab", buffering=0))
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputInUseError(_who_holds(output_dir)) from None
        except (ImportError, OSError) as error:
            logger.warning(
                "output_dir=%s cannot be locked (%s). Make sure that no other run writes there.", output_dir, error
            )
        else:
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            _write(file, json.dumps(owner))
            stack.callback(_write, file, "")
        yield


def _write(file: Any, text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk: the lock holds without its text
        file.truncate(0)
        file.write(text.encode())


def _who_holds(output_dir: Path) -> str:
    try:
        owner = json.loads((output_dir / LOCK_FILE).read_text(encoding="utf-8"))
        who = f"process {owner['pid']} on {owner['host']}, which has trained there since {owner['since']}"
        cure = f"Wait for it or end it (kill {owner['pid']}; a launcher that was killed leaves its workers)"
    except (OSError, ValueError, KeyError, TypeError):  # it has just begun or the disk is full
        who, cure = "another process that trains there", "Wait for it or end it"
    return f"output_dir={str(output_dir)!r} is in use by {who}. {cure}, or set another output_dir."

"""One run at a time writes to an `output_dir`, and one evaluation; a run that is there already is moved, not mixed."""

from __future__ import annotations

import contextlib
import itertools
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
EVALUATION_LOCK_FILE = "_eval.lock"
"""Lock of an evaluation, which may write to the directory of a run that goes on."""


class OutputInUseError(CheckpointError):
    """Another run writes to `output_dir`; when it has ended, the same command succeeds."""

    exit_code = 3


@contextlib.contextmanager
def output_lock(output_dir: Path, name: str = LOCK_FILE) -> Iterator[None]:
    """Hold the lock of a directory. Where the file system has none, a warning says so.

    A POSIX record lock, because it belongs to the process alone: what a tool forks does not keep it, and NFS knows it.

    Args:
        output_dir: made if it is not there.
        name: `LOCK_FILE` or `EVALUATION_LOCK_FILE`.

    Raises:
        OutputInUseError: another process holds it.
    """
    with contextlib.ExitStack() as stack:
        try:
            import fcntl

            output_dir.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((output_dir / name).open("ab", buffering=0))
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputInUseError(_who_holds(output_dir, name)) from None
        except (ImportError, OSError) as error:
            logger.warning(
                "output_dir=%s cannot be locked (%s). Make sure that no other run writes there.", output_dir, error
            )
        else:
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            _write(file, json.dumps(owner))
            stack.callback(_write, file, "")
        yield


RUN_FILES = ("trainer_state.json", "checkpoint-*", "trajectories/step_*", "*.safetensors", "training_args.bin")
"""What a run leaves in its `output_dir`, and an evaluation does not."""


def find_run(output_dir: Path) -> str | None:
    """What shows that the folder holds a run, such as "trainer_state.json"; None if nothing does."""
    found = (path for pattern in RUN_FILES for path in sorted(output_dir.glob(pattern)))
    return next((str(path.relative_to(output_dir)) for path in found), None)


def set_aside(output_dir: Path) -> Path | None:
    """Move the folder of a run to the first free one of `output_dir`.1, .2, ...; returns it, or None without a run.

    Raises:
        OutputInUseError: the run goes on.
        OSError: the folder cannot be moved.
    """
    if find_run(output_dir) is None:
        return None
    folder = output_dir.resolve()
    target = next(path for n in itertools.count(1) if not (path := Path(f"{folder}.{n}")).exists())
    with output_lock(folder):
        folder.rename(target)
    return target


def _write(file: Any, text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk: the lock holds without its text
        file.truncate(0)
        file.write(text.encode())


def _who_holds(output_dir: Path, name: str) -> str:
    work = "trained" if name == LOCK_FILE else "evaluated"
    try:
        owner = json.loads((output_dir / name).read_text(encoding="utf-8"))
        who = f"process {owner['pid']} on {owner['host']}, which has {work} there since {owner['since']}"
        cure = f"Wait for it or end it (kill {owner['pid']}; a launcher that was killed leaves its workers)"
    except (OSError, ValueError, KeyError, TypeError):  # it has just begun or the disk is full
        who, cure = "another process", "Wait for it or end it"
    return f"output_dir={str(output_dir)!r} is in use by {who}. {cure}, or set another output_dir."

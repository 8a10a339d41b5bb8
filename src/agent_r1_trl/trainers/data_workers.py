"""Worker processes of data loaders (`dataloader_num_workers`) outlive the signal that ends a run.

Schedulers send SIGTERM, and terminals SIGINT, to the whole process group. A worker that dies of it makes torch raise
in the main process, while the run is about to write its checkpoint.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

LoaderT = TypeVar("LoaderT")


def outlive_signals(dataloader: LoaderT) -> LoaderT:
    """Have the loader's workers, which it has yet to start, ignore signals that do not come from their parent.

    Where Python cannot tell who sent a signal (outside Linux), the loader is left as it is.
    """
    loader: Any = getattr(dataloader, "base_dataloader", dataloader)  # of accelerate
    if getattr(loader, "num_workers", 0) and hasattr(signal, "sigwaitinfo"):
        loader.worker_init_fn = functools.partial(_begin_worker, loader.worker_init_fn)
    return dataloader


def _begin_worker(begin: Callable[[int], None] | None, worker_id: int) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before the thread, which inherits it
    threading.Thread(target=_wait_for_parent, name="signals", daemon=True).start()
    if begin is not None:
        begin(worker_id)


def _wait_for_parent() -> None:
    """End the process by the SIGTERM of its parent, which ends workers so; torch's own check ends orphans."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)

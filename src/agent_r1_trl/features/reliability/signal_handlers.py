"""Signals of the operating system: who is told of one, and how a program ends by it.

Covered here: handlers, and what a forked process does with them. Not covered: what a training run does when it is told
to end (`signals.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from agent_r1_trl.rollout.processes import end_marked_processes, marked_processes
from agent_r1_trl.safe_text import shown

if TYPE_CHECKING:
    from types import FrameType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
"""Signals of users, schedulers and closed terminals; SIGUSR1 is a common warning before preemption."""
REPEAT_S = 2.0
"""Seconds in which signals count as one: schedulers send them to launcher and workers, and launchers pass them on."""

_listening: weakref.WeakSet[SignalListener] = weakref.WeakSet()


def exit_code(signum: int) -> int:
    """The exit code of a process that a signal ended, by the shells' convention: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + signum


def raise_signal(signum: int) -> NoReturn:
    """Raise what ends a program in Python's way: KeyboardInterrupt for SIGINT, else SystemExit with `exit_code`."""
    raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(exit_code(signum))


def end_at_once(code: int, message: str) -> NoReturn:
    """End this process without any cleanup but that of the tools' processes."""
    print(shown(message), file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):
        end_marked_processes(grace_s=0)
    os._exit(code)


def open_signals() -> list[int]:
    """The signals to handle here: none in a thread or a notebook, and none that the program handles itself."""
    # Not `ipykernel`: a program that only starts notebooks (papermill, nbclient) imports it, too.
    ipython = sys.modules.get("IPython")
    is_in_notebook = ipython is not None and ipython.get_ipython() is not None
    if threading.current_thread() is not threading.main_thread() or hasattr(sys, "ps1") or is_in_notebook:
        return []
    unhandled = (signal.SIG_DFL, signal.default_int_handler)
    return [number for number in SIGNALS if signal.getsignal(number) in unhandled]


class SignalListener:
    """Passes the first signal to a function on a thread of its own; a second one ends the process at once.

    A process that is forked meanwhile (`multiprocessing`) gets the handlers of before: else it would ignore SIGTERM,
    and pass it on through the socket that it shares with this one. Does nothing where signals cannot be handled
    (`open_signals`). The handlers that were there before come back.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._before: dict[int, Any] = {}
        self._first_at: float | None = None

    def __enter__(self) -> SignalListener:
        numbers = open_signals()
        if not numbers:
            return self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._others_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in numbers:  # the byte in the socket says it all
            self._before[number] = signal.signal(number, lambda signum, frame: None)
        _listening.add(self)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            self.restore_handlers()
            self._writer.close()

    def restore_handlers(self) -> None:
        """Put back the handlers that were there before."""
        _listening.discard(self)
        signal.set_wakeup_fd(self._others_fd)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _listen(self) -> None:
        while number := self._reader.recv(1):
            if self._others_fd >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._others_fd, number)
            if number[0] in self._before:
                self._take(number[0])
        self._reader.close()

    def _take(self, signum: int) -> None:
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            self._on_signal(signum)
        elif now - self._first_at >= REPEAT_S:
            name = signal.Signals(signum).name
            end_at_once(exit_code(signum), f"{name} for the second time: ending without a checkpoint.")


def _stop_listening_in_child() -> None:
    for listener in [*_listening]:
        if threading.current_thread() is threading.main_thread():  # the thread that forked is the child's main thread
            listener.restore_handlers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_listening_in_child)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """For programs without state to save: signals raise as in `raise_signal`, and tools' processes are ended.

    The second signal ends the process at once.
    """
    received = []

    def handle(signum: int, frame: FrameType | None) -> None:
        received.append(time.monotonic())
        if len(received) == 1:
            raise_signal(signum)
        if received[-1] - received[0] >= REPEAT_S:
            end_at_once(exit_code(signum), f"{signal.Signals(signum).name} for the second time: ending at once.")

    before = {number: signal.signal(number, handle) for number in open_signals()}
    try:
        with marked_processes():
            yield
    except BaseException:
        end_marked_processes()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Signals that a test sends to the process it runs in, nothing that ends that process without a word, and no waste.

A process of `pytest -n 2` that ends takes all of its other tests with it, and pytest cannot say which test it was.
"""

import faulthandler
import functools
import importlib.metadata
import os
import signal
import sys


def signal_this_process(signum):
    """`os.kill(os.getpid(), signum)`, but an error where nothing handles the signal."""
    handler = signal.getsignal(signum)
    assert handler not in (signal.SIG_DFL, signal.default_int_handler), (
        f"{signal.Signals(signum).name} would end pytest"
    )
    os.kill(os.getpid(), signum)


def forbid_ends():
    """In this process the package may neither call `os._exit` nor have `faulthandler` end it; forked ones may."""
    pid = os.getpid()
    leave = os._exit
    dump_later = faulthandler.dump_traceback_later

    def leave_unless_ours(code):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if os.getpid() == pid and caller.startswith("agent_r1_trl"):
            raise AssertionError(f"{caller} would end pytest with code {code}")
        leave(code)

    def dump_only(timeout, repeat=False, file=sys.__stderr__, exit=False):
        dump_later(timeout, repeat=repeat, file=file, exit=False)

    os._exit, faulthandler.dump_traceback_later = leave_unless_ours, dump_only


def look_packages_up_once():
    """accelerate asks fifty times in each training whether a package is installed, and reads its metadata each time.

    That was a third of the suite's time. No package comes or goes while the tests run.
    """
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)

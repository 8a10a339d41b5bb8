"""Python's garbage collector while rollouts are played: it looks at their own objects only.

A rollout makes many objects, so the collector runs often, and each full collection visits everything in the process:
with torch and transformers loaded, a third of the processor time of our part of a rollout. What was there before is
therefore set aside (`gc.freeze`) until no rollout is in flight.
"""

from __future__ import annotations

import gc
import threading

_lock = threading.Lock()
_num_under_way = 0
_has_frozen = False


def rollout_begins() -> None:
    """Set aside what is there, unless the program has done so itself or has switched the collector off."""
    global _num_under_way, _has_frozen
    with _lock:
        if _num_under_way == 0 and gc.isenabled() and gc.get_freeze_count() == 0:
            gc.collect(1)  # young garbage need not wait until the rollout has ended
            gc.freeze()
            _has_frozen = True
        _num_under_way += 1


def rollout_ends() -> None:
    """Take it back when the last rollout in flight has ended."""
    global _num_under_way, _has_frozen
    with _lock:
        _num_under_way -= 1
        if _num_under_way == 0 and _has_frozen:
            gc.unfreeze()
            _has_frozen = False

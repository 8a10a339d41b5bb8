"""What many tests use beside `agent_r1_trl.testing`: open environments, options, objects that are gone."""

import gc
import time

from agent_r1_trl.rollout import RolloutLimits


def counted(env_class):
    """A subclass, and which of its environments are not closed yet."""
    is_open = set()

    class Counted(env_class):
        def __init__(self):
            super().__init__()
            is_open.add(id(self))

        def close(self):
            is_open.discard(id(self))

    return Counted, is_open


def unfold(options):
    """Options in which `"echo.patience": 5` stands for a key of a mapping; what comes later wins."""
    unfolded = {}
    for name, value in options.items():
        group, _, key = name.partition(".")
        found = unfolded.get(group)
        if key:
            unfolded[group] = (found if isinstance(found, dict) else {}) | {key: value}
        elif isinstance(found, dict) and (value is True or isinstance(value, dict)):
            unfolded[group] = found | ({} if value is True else value)
        else:
            unfolded[group] = value
    return unfolded


def limits_of(**options):
    """`RolloutLimits` of options in which `"context.turns": 1` stands for a key of a mapping."""
    return RolloutLimits(**unfold(options))


def is_freed(reference, timeout_s=10.0):
    """Whether what a weak reference points to is gone; a thread that ends may hold it for a moment."""
    deadline = time.monotonic() + timeout_s
    while reference() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return reference() is None

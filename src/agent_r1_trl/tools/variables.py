"""Context variables (`contextvars`) of a trajectory, which its calls share and nobody else sees.

A context can be entered by one thread at a time, so a call on a thread works in another context than the event loop.
What the call has set is handed back when it ends.
"""

from __future__ import annotations

import contextvars
import decimal
from contextvars import Context, ContextVar
from typing import Any

Changes = list[tuple[ContextVar[Any], Any]]
"""Variables and their new values."""


def private_context() -> Context:
    """A copy of the present context whose changes stay in it, those of `decimal.getcontext()` included."""
    context = contextvars.copy_context()
    # The variable holds an object that is changed in place, and a copy of the context would share it.
    context.run(lambda: decimal.setcontext(decimal.getcontext().copy()))
    return context


def changes_since(before: Context, after: Context) -> Changes:
    """Variables of `after` that have another value than in `before`."""
    return [(name, value) for name, value in after.items() if name not in before or before[name] is not value]


def set_all(changes: Changes) -> None:
    """Set variables in the present context."""
    for name, value in changes:
        name.set(value)

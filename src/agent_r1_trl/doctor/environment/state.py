"""Do instances share state, and can they be closed?

Not part of the data flow: a linter's step.
"""

from __future__ import annotations

from agent_r1_trl.doctor.environment.context import Context, innermost
from agent_r1_trl.doctor.environment.episodes import play
from agent_r1_trl.doctor.environment.freeze import changed, snapshot_class, snapshot_instance


def check_shared_state(context: Context) -> None:
    """Whether an episode in one instance changes another, or their class."""
    if not context.rows or context.report.has_errors("step"):
        return
    bystander = context.fresh(context.rows[0])
    if bystander is None:
        return
    other = bystander[0]
    classes_before = snapshot_class(type(innermost(other)))
    other_before = {**snapshot_instance(other), **snapshot_instance(innermost(other))}
    for row in context.rows[:1]:
        play(context, row)
    leaked = changed(classes_before, snapshot_class(type(innermost(other))))
    if leaked:
        context.report.error(
            "state",
            f"An episode changed {', '.join(leaked)}: a class attribute that all trajectories share.",
            "Create it in reset or __init__ (name§ = []); a cache that is meant to be shared: call it *_cache.",
        )
    leaked = changed(other_before, {**snapshot_instance(other), **snapshot_instance(innermost(other))})
    if leaked:
        context.report.error(
            "state",
            f"An episode in one instance changed {', '.join(leaked)} of another: they hold the same object.",
            "Create it in reset or __init__ of each instance; copy what comes from outside.",
        )


def check_close(context: Context) -> None:
    """Before reset, after an episode, and twice."""
    untouched = context.new()
    if untouched is None:
        return
    closed = context.caller.call(untouched.close)
    if closed.failure:
        context.report.error(
            "close",
            f"close {closed.failure} when reset had not run; it is called after a failed reset, too.",
            "Set what close uses in __init__, or use getattr(self, name, None).",
        )
    for row in context.rows[:1]:
        fresh = context.fresh(row)
        if fresh is None:
            return
        for attempt in ("", " a second time"):
            closed = context.caller.call(fresh[0].close)
            if closed.failure:
                add = context.report.warning if attempt else context.report.error
                add(
                    "close",
                    f"close{attempt} {closed.failure}.",
                    "Let it do nothing where nothing is left to free.",
                )

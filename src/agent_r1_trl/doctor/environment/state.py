"""Do instances share state? An episode in one must not change another."""

from __future__ import annotations

import collections
import sys
from typing import Any

from agent_r1_trl.doctor.environment.construction import Trial
from agent_r1_trl.doctor.environment.episodes import play
from agent_r1_trl.doctor.environment.script import valid_messages
from agent_r1_trl.environments.trl_adapters import TRLEnvAdapter
from agent_r1_trl.tools import Tool

_MAX_DEPTH = 6
_MAX_ITEMS = 2000
# Objects of these modules count by identity: what they hold is machinery, not the state of an episode.
_OPAQUE_MODULES = {*sys.stdlib_module_names, "agent_r1_trl"}


def check_shared_state(trial: Trial) -> None:
    """Whether an episode in one instance changes another, or the class."""
    bystander = trial.fresh(trial.rows[0])[0].env
    owners = {f"{type(item.owner).__name__} of the tool {item.name!r}": item.owner for item in _methods(bystander)}
    if isinstance(bystander, TRLEnvAdapter):
        bystander = bystander.environment
    before, before_of_owners = _snapshot(bystander), {name: _freeze(owner) for name, owner in owners.items()}
    if (
        play(trial, trial.rows[0], "a valid call or a plain answer", valid_messages(trial.tools_for(trial.rows[0])))
        is None
    ):
        return
    after = _snapshot(bystander)
    changed = sorted(name for name in before if before[name] != after.get(name, before[name]))
    if changed:
        trial.report.error(
            "state",
            f"An episode in one instance changed {', '.join(changed)} of another: all trajectories share it.",
            "Create it in reset or __init__ of each instance (self.name = []) and copy what comes from outside; a "
            "cache that is meant to be shared: call it *_cache.",
        )
    changed = sorted(name for name, owner in owners.items() if before_of_owners[name] != _freeze(owner))
    if changed:
        trial.report.warning(
            "state",
            f"An episode in one instance changed the {', '.join(changed)}: all trajectories share that object.",
            "Unless that is meant, make one in each instance's __init__ and list its methods there: "
            "self.tools = [self.board.move].",
        )
    trial.report.ok("state", "Two instances share no state.")


def _methods(env: Any) -> list[Tool]:
    """The tools that are methods of an object other than the environment."""
    listed = [item for item in getattr(env, "tools", None) or () if isinstance(item, Tool)]
    return [item for item in listed if item.owner not in (None, env, getattr(env, "environment", None))]


def _snapshot(instance: Any) -> dict[str, str]:
    """The attributes of an instance, its class and its bases (this package's excepted), as text."""
    found = dict(getattr(instance, "__dict__", {}))
    for base in type(instance).__mro__:
        if base is not object and not base.__module__.startswith("agent_r1_trl."):
            found |= {f"{base.__name__}.{name}": value for name, value in vars(base).items()}
    names = [name for name in found if "__" not in name and "cache" not in name.lower()]
    return {name: _freeze(found[name]) for name in names}


def _freeze(value: Any, depth: int = 0, seen: frozenset[int] = frozenset()) -> str:
    """Text that changes when the value's plain content changes; opaque things count by identity."""
    opaque = f"<{type(value).__name__} {id(value)}>"
    if id(value) in seen or depth > _MAX_DEPTH:
        return opaque
    try:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, bytearray)):
            return repr(value)
        if isinstance(value, (set, frozenset)):
            parts: Any = sorted(value, key=repr)
        elif isinstance(value, (list, tuple, collections.deque)):
            parts = value
        elif isinstance(value, dict):
            parts = [part for item in value.items() for part in item]
        elif hasattr(value, "tobytes") and hasattr(value, "shape"):  # an array
            return f"array {value.shape} {hash(value.tobytes())}"
        elif hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in _OPAQUE_MODULES:
            parts = [part for item in vars(value).items() for part in item]
        else:
            return opaque
        frozen = [_freeze(part, depth + 1, seen | {id(value)}) for part in list(parts)[:_MAX_ITEMS]]
        return f"{type(value).__name__} {len(parts)}: {', '.join(frozen)}"
    except Exception:  # a container that another thread is changing, an integer too long to print
        return opaque

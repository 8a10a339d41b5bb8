"""What many tests use: two tools, the environments that offer them, and what a policy says in them."""

import gc
import time

from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.rollout import RolloutLimits
from agent_r1_trl.tools import tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


@tool
def echo(text: str) -> str:
    """Repeat a text.

    Args:
        text: What to repeat.
    """
    return text


class AddEnv(ToolEnv):
    """One tool; the answer is right (+1) if it has an even number of characters."""

    tools = (add,)

    def outcome_reward(self, trajectory):
        return len(trajectory.final_text) % 2 == 0


class AddEchoEnv(AddEnv):
    """Two tools; the same answers are right."""

    tools = (add, echo)


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


def say(text="5"):
    """An assistant message without a tool call."""
    return {"role": "assistant", "content": text}


def calls(*pairs):
    """An assistant message that calls several tools: pairs of name and arguments."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in pairs]
    return say("") | {"tool_calls": [{"type": "function", "function": function} for function in functions]}


def call(name="add", /, **arguments):
    """An assistant message that calls one tool; without arguments, with those of 2 + 3."""
    return calls((name, arguments or {"a": 2, "b": 3}))


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

"""Playing short episodes: valid calls, broken calls, odd answers.

Not part of the data flow: a linter's step.
"""

from __future__ import annotations

import copy
from typing import Any

from agent_r1_trl.doctor.environment.context import Context
from agent_r1_trl.doctor.environment.contracts import check_messages, checked_step
from agent_r1_trl.doctor.environment.script import (
    DEFAULT_EXAMPLE,
    NONSENSE,
    ODD_ANSWERS,
    answer_message,
    bad_messages,
    call_message,
    sample_call,
)
from agent_r1_trl.doctor.environment.tools import check_tools, read_tools
from agent_r1_trl.trajectory import Message, ToolErrorKind, ToolResult

SLOW_S = 5.0
Played = list[tuple[Message, list[Message], float]]


def check_env_tools(context: Context, env: Any) -> None:
    """The tools' names and schemas; keeps those that can be called."""
    listed = context.caller.call(lambda: getattr(env, "tools", ()))
    if listed.failure:
        context.report.error(
            "tools", f"Reading `tools` {listed.failure}.", "Set tools = [function, ...] on the class."
        )
        return
    context.usable_tools = check_tools(context.report, read_tools(context.report, listed.value))


def check_reset(context: Context) -> None:
    """The prompt of every row: its form, and that two instances agree on it."""
    for row in context.rows:
        example = copy.deepcopy(row)
        env, other = context.new(), context.new()
        if env is None or other is None:
            return
        first = context.caller.call(env.reset, example)
        if first.failure:
            if context.are_made_up:
                context.report.warning(
                    "reset",
                    f"reset {first.failure} on a made-up example ({', '.join(DEFAULT_EXAMPLE)}); nothing was played.",
                    "Pass rows of your data set: check_env(env, examples).",
                )
                context.rows = []
            else:
                context.report.error(
                    "reset", f"reset {first.failure}.", "It must turn a row of the data set into messages."
                )
            return
        check_messages(context, "reset", first.value, "reset returned")
        if context.report.has_errors("reset"):
            return
        _check_prompt(context, first.value, example, row, first.duration_s, first.blocked_s)
        second = context.caller.call(other.reset, copy.deepcopy(row))
        if second.failure or second.value != first.value:
            context.report.error(
                "reset",
                "Two instances give different prompts for the same example: members of a group would solve "
                "different tasks and could not be compared.",
                "Derive everything random in reset from the example, e.g. random.Random(example['seed']).",
            )


def _check_prompt(
    context: Context, prompt: list[Message], example: Any, row: Any, seconds: float, blocked_s: float
) -> None:
    if example != row:
        context.report.error(
            "reset",
            "reset changes the example it is given; the other members of the group would see the change.",
            "Copy what you change: copy.deepcopy(example).",
        )
    if prompt[-1].get("role") == "assistant":
        context.report.warning(
            "reset",
            "The prompt ends with an assistant message: it is the model's turn.",
            "End it with role 'user'.",
        )
    if seconds > SLOW_S:
        context.report.warning(
            "reset",
            f"reset took {seconds:.1f} s; it runs once per trajectory.",
            "Load shared data once per process.",
        )
    context.check_blocking("reset", blocked_s)


def check_steps(context: Context) -> None:
    """Every row with valid calls, broken calls and odd answers, each in a fresh environment."""
    for row in context.rows:
        play(context, row)
        for what, message in bad_messages(context.usable_tools).items():
            _play_bad(context, row, what, message)
        for what, text in ODD_ANSWERS.items():
            fresh = context.fresh(row)
            if fresh:
                checked_step(context, fresh[0], answer_message(text), f"an answer that is {what}")
        if context.report.has_errors("step"):
            return
    if context.rows and not context.has_ended:
        context.report.warning(
            "step",
            "No episode ended, neither after tool calls nor after an answer: all trajectories will run into limits.",
            "Return done=True from step when the task is over.",
        )


def play(context: Context, row: dict[str, Any]) -> tuple[Any, list[Message], Played] | None:
    """An episode of valid calls, one by one and all at once, and a wrong answer."""
    fresh = context.fresh(row)
    if not fresh:
        return None
    env, prompt = fresh
    calls = [sample_call(tool) for tool in context.usable_tools]
    messages = [call_message(call) for call in calls]
    if len(calls) > 1:
        messages.append(call_message(*calls))
    played: Played = []
    for message in [*messages, answer_message(NONSENSE)]:
        step = checked_step(context, env, message, "a valid call" if message.get("tool_calls") else "a plain answer")
        if step is None:
            return None
        observations, reward, done, info = step
        played.append((message, list(observations), float(reward)))
        _check_results(context, info)
        if done:
            context.has_ended = True
            break
    return env, prompt, played


def _play_bad(context: Context, row: dict[str, Any], what: str, message: Message) -> None:
    fresh = context.fresh(row)
    if not fresh:
        return
    step = checked_step(context, fresh[0], message, what)
    if step is None:
        return
    _, reward, done, _ = step
    if done:
        context.report.warning(
            "step",
            f"{what.capitalize()} ends the episode: the policy gets no chance to repair it.",
            "Return an observation that says how to call right, and done=False.",
        )
    if reward > 0:
        context.report.warning("step", f"{what.capitalize()} earns {reward:g}.", "Pay failing calls 0 or less.")


def _check_results(context: Context, info: dict[str, Any]) -> None:
    for result in info.get("tool_results", []):
        if not isinstance(result, ToolResult):
            continue  # reported with the other contracts
        if result.error is ToolErrorKind.TIMEOUT:
            context.report.error(
                "tools",
                f"Tool {result.call.name!r} hangs: {result.content[:200]}",
                "Give its inner calls a timeout.",
            )
            context.usable_tools = [tool for tool in context.usable_tools if tool.name != result.call.name]
        elif isinstance(result.content, str) and not result.content:
            context.report.warning(
                "tools", f"Tool {result.call.name!r} returned empty text.", "Say in words that nothing was found."
            )

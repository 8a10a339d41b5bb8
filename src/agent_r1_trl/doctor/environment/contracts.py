"""The contracts of messages and steps, checked on what an environment really returned.

Not part of the data flow: a linter's step.
"""

from __future__ import annotations

import copy
import json
import math
from typing import Any

from agent_r1_trl.doctor.environment.context import Context
from agent_r1_trl.doctor.environment.report import describe_error
from agent_r1_trl.environments.reward_values import is_bool
from agent_r1_trl.trajectory import Message, ToolResult

ROLES = ("system", "developer", "user", "assistant", "tool")


def checked_step(
    context: Context, env: Any, message: Message, what: str
) -> tuple[Any, float, bool, dict[str, Any]] | None:
    """One step, its contract checked; None if it was broken."""
    given = copy.deepcopy(message)
    stepped = context.caller.call(env.step, given)
    context.check_blocking("step", stepped.blocked_s)
    if stepped.failure:
        context.report.error(
            "step",
            f"step {stepped.failure} on {what}.",
            "What a model writes and a tool does must become an observation, not an exception or a hang.",
        )
        return None
    if given != message:
        context.report.warning("step", "step changes the message it is given.", "Copy it: copy.deepcopy(message).")
    result = stepped.value
    if not isinstance(result, (tuple, list)) or len(result) != 4:
        context.report.error(
            "step",
            f"step returned {result!r:.100}, not (observations, reward, done, info).",
            "Return StepResult(observations, reward, done, info).",
        )
        return None
    observations, reward, done, info = result
    is_well_formed = check_messages(context, "step", observations, "step returned as observations")
    if is_well_formed and not done:
        _check_observations(context, message, observations, what)
    return (
        (observations, reward, done, info) if _check_values(context, reward, done, info) and is_well_formed else None
    )


def check_messages(context: Context, check: str, messages: Any, source: str) -> bool:
    """Whether these are chat messages; `source` says where they come from."""
    if not isinstance(messages, (list, tuple)) or (check == "reset" and not messages):
        context.report.error(
            check,
            f"{source} {messages!r:.100}, not a {'non-empty ' if check == 'reset' else ''}list of messages.",
            "Return [{'role': 'user', 'content': '...'}].",
        )
        return False
    for message in messages:
        problem = _describe_bad_message(message)
        if problem:
            context.report.error(
                check,
                f"{source} a message {problem}: {message!r:.120}.",
                "Use dicts like {'role': 'user', 'content': 'text'} (role 'tool' for results).",
            )
            return False
    return True


def _check_observations(context: Context, message: Message, observations: list[Message], what: str) -> None:
    if not observations:
        context.report.error(
            "step",
            f"After {what} the episode goes on, but step returned no observation: the model has nothing to answer.",
            "Return at least one message, or done=True.",
        )
    if any(observation.get("role") == "assistant" for observation in observations):
        context.report.warning(
            "step",
            "An observation has the role 'assistant': the model would read it as its own words.",
            "Use role 'tool' or 'user'.",
        )
    num_calls = len(message.get("tool_calls") or [])
    num_answers = sum(observation.get("role") == "tool" for observation in observations)
    if num_calls and num_answers and num_calls != num_answers:
        context.report.warning(
            "step",
            f"{num_calls} calls were answered by {num_answers} tool messages.",
            "Return one message of role 'tool' per call, in the order of the calls.",
        )


def _check_values(context: Context, reward: Any, done: Any, info: Any) -> bool:
    fine = True
    try:
        is_number = not isinstance(reward, (bool, str)) and math.isfinite(float(reward))
    except (TypeError, ValueError):
        is_number = False
    if not is_number:
        fine = False
        context.report.error("step", f"step returned the reward {reward!r:.60}.", "Return a finite float.")
    if not is_bool(done):
        context.report.error("step", f"step returned done={done!r:.60}.", "Return True or False.")
        fine = False
    if not isinstance(info, dict):
        context.report.error(
            "step", f"step returned info={info!r:.60}.", "Return a dict; {} if there is nothing to say."
        )
        return False
    _check_info(context, info, reward if is_number else 0.0)
    return fine


def _check_info(context: Context, info: dict[str, Any], reward: float) -> None:
    results = info.get("tool_results", [])
    if not isinstance(results, list) or not all(isinstance(result, ToolResult) for result in results):
        context.report.error(
            "step", "info['tool_results'] is no list of ToolResult.", "Fill it with ToolResult objects."
        )
    problem = describe_not_json({name: value for name, value in info.items() if name != "tool_results"})
    if problem:
        context.report.error("step", f"info is not JSON ({problem}): it cannot be recorded.", "Use plain values only.")
    parts = info.get("reward_parts")
    if not parts:
        return
    try:
        total = math.fsum(map(float, parts.values()))
    except (AttributeError, TypeError, ValueError):
        total = math.nan
    if not math.isclose(total, float(reward), rel_tol=1e-6, abs_tol=1e-6):
        context.report.error(
            "step",
            f"info['reward_parts']={parts!r:.100} does not add up to the reward {float(reward):g}.",
            "List every part of the turn's reward by name, or leave it out.",
        )


def _describe_bad_message(message: Any) -> str | None:
    if not isinstance(message, dict):
        return "that is no dict"
    if message.get("role") not in ROLES:
        return f"with the role {message.get('role')!r}"
    content = message.get("content")
    if isinstance(content, list):
        return (
            None if all(isinstance(part, dict) and "type" in part for part in content) else "with odd content blocks"
        )
    if not isinstance(content, str):
        return f"whose content is {type(content).__name__}, not text"
    return describe_not_json(message)


def describe_not_json(value: Any) -> str | None:
    """Why a value cannot be recorded; None if it can."""
    try:
        json.dumps(value, allow_nan=False)
    except Exception as error:
        return describe_error(error, 120)
    return None

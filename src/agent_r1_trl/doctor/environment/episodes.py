"""Playing short episodes: reset, step with what models write, close."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.doctor.environment.construction import Trial
from agent_r1_trl.doctor.environment.script import (
    DEFAULT_EXAMPLE,
    NONSENSE,
    answer_message,
    broken_calls,
    odd_messages,
    valid_messages,
)
from agent_r1_trl.doctor.environment.tools import DESCRIBE, check_result, check_tools
from agent_r1_trl.doctor.report import describe_error
from agent_r1_trl.environments.base import StepResult
from agent_r1_trl.rollout import EnvSession
from agent_r1_trl.tools import ToolSchemaError, shared_pool
from agent_r1_trl.tools.threads import OwnThread
from agent_r1_trl.trajectory import Author, Message, StopReason, ToolErrorKind, ToolResult, Trajectory, Turn

MAX_ANSWERS = 8
"""Answers after which an episode that has not ended counts as endless."""
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(kw_only=True)
class Episode:
    """What was played, and the environment as the episode left it."""

    session: EnvSession
    prompt: list[Message]
    messages: list[Message]
    steps: list[StepResult]
    """One per message, until an episode ends by itself."""

    def trajectory(self, stop_reason: StopReason) -> Trajectory:
        """As the rollout would record it: one token per message, and one more for its observations if it has any."""
        turns: list[Turn] = []
        turn_ids: list[int] = []
        for message, (observations, reward, _, _) in zip(self.messages, self.steps, strict=False):
            start = len(turn_ids)
            turn_ids += [len(turns), -1] if observations else [len(turns)]
            turns.append(Turn(start=start, end=start + 1, message=message, observations=observations, reward=reward))
        return Trajectory(
            prompt_messages=self.prompt,
            prompt_ids=[0],
            completion_ids=[0] * len(turn_ids),
            action_mask=[int(turn_id >= 0) for turn_id in turn_ids],
            logprobs=[0.0] * len(turn_ids),
            turn_ids=turn_ids,
            authors=[Author.POLICY if turn_id >= 0 else Author.ENVIRONMENT for turn_id in turn_ids],
            turns=turns,
            stop_reason=stop_reason,
        )


def check_reset(trial: Trial) -> None:
    """The prompt of every row: its form, and that two instances agree on it."""
    report = trial.report
    for row in trial.rows:
        session, reset = trial.start(row)
        if _has_bad_tools(trial, row, session):
            return
        if reset.failure and trial.are_made_up:
            message = f"{reset.failure}, on a made-up example ({', '.join(DEFAULT_EXAMPLE)}); nothing was played."
            report.warning("reset", message, "Pass rows of your data set: check_env(env, examples).")
            trial.rows = []
            return
        if reset.failure:
            report.error("reset", f"{reset.failure}.", "It must turn a row of the data set into messages.")
            return
        prompt = reset.value[0]
        problem = describe_bad_messages(prompt) if prompt else "an empty prompt"
        if problem:
            cure = "Return a non-empty list of messages: [{'role': 'user', 'content': 'text'}]."
            report.error("reset", f"reset returned {problem}.", cure)
            return
        if prompt[-1]["role"] == "assistant":
            message = "The prompt ends with an assistant message, but it is the model's turn."
            report.warning("reset", message, "End it with role 'user'.")
        if trial.fresh(row)[1] != prompt:
            report.error(
                "reset",
                "Two instances give different prompts for the same example: members of a group would solve different "
                "tasks and could not be compared.",
                "Derive everything random in reset from the example, e.g. random.Random(example['seed']), or from "
                "the reset_seed that a method seed(self, *, reset_seed, dynamics_seed) is given.",
            )
    report.ok("reset", "reset gives the same valid prompt for the same example.")


def _has_bad_tools(trial: Trial, row: dict[str, Any], session: EnvSession) -> bool:
    """Look at the tools as `reset` left them: these are the ones that the model will see."""
    try:
        found = check_tools(trial.report, getattr(session.env, "tools", None) or ())
    except Exception as error:  # a property, or a name in the list that is no method
        cure = DESCRIBE if isinstance(error, ToolSchemaError) else "Set tools = [function, ...] on the class."
        trial.report.error("tools", f"{describe_error(error, 500)}.", cure)
        return True
    trial.tools_of_row[id(row)] = found
    names = {tool.name for tool in trial.tools}
    trial.tools += [tool for tool in found if tool.name not in names]
    return trial.report.has_errors("tools")


def check_steps(trial: Trial) -> None:
    """Every row with valid calls, broken calls and odd messages, each in a fresh environment."""
    report, has_ended = trial.report, False
    for row in trial.rows:
        played = play(trial, row, "a valid call or a plain answer", valid_messages(trial.tools_for(row)))
        has_ended |= played is not None and (played.steps[-1].done or _answers_to_the_end(trial, played))
        for what, message in broken_calls(trial.tools_for(row)).items():
            step = take_step(trial, trial.fresh(row)[0], message, what)
            if step is not None and step.done:
                text = f"{what[:1].upper()}{what[1:]} ends the episode: the policy gets no chance to repair it."
                report.warning("step", text, "Return an observation that says how to call, and done=False.")
            if step is not None and step.reward > 0:
                report.warning(
                    "step", f"{what[:1].upper()}{what[1:]} earns {step.reward:g}.", "Pay failing calls 0 or less."
                )
        for what, message in odd_messages(trial.tools_for(row)).items():
            take_step(trial, trial.fresh(row)[0], message, what)
        if report.has_errors("step"):
            return
    if not has_ended:
        report.warning(
            "step",
            "No episode ended, neither after tool calls nor after an answer: all trajectories will run into limits.",
            "Return done=True from step when the task is over.",
        )
    report.ok("step", "step survives good, bad and odd messages and keeps its contract.")


def _answers_to_the_end(trial: Trial, played: Episode) -> bool:
    """Whether the episode ends if the model goes on answering: there may be several user turns."""
    for _ in range(MAX_ANSWERS):
        step = take_step(trial, played.session, answer_message(NONSENSE), "a plain answer")
        if step is None or step.done:
            return step is not None
    return False


def play(trial: Trial, row: dict[str, Any], what: str, messages: list[Message]) -> Episode | None:
    """Play these messages in a fresh environment, as far as it lets them; None if a step failed."""
    session, prompt = trial.fresh(row)
    steps: list[StepResult] = []
    for message in messages:
        step = take_step(trial, session, message, what)
        if step is None:
            return None
        steps.append(step)
        if step.done:
            break
    return Episode(session=session, prompt=prompt, messages=messages, steps=steps)


def take_step(trial: Trial, session: EnvSession, message: Message, what: str) -> StepResult | None:
    """One step; None if it failed, or if the rollout could not use what it returned. `what` names the message."""
    report = trial.report
    stepped = trial.call("step", session, message)
    if stepped.failure:
        cure = "What a model writes and what a tool does must become an observation, not an exception or a hang."
        report.error("step", f"On {what}: {stepped.failure}.", cure)
        return None
    step: StepResult = stepped.value
    for result in step.info.get("tool_results", []):
        if isinstance(result, ToolResult):
            check_result(report, result)
            if result.error is ToolErrorKind.TIMEOUT:  # once is enough
                trial.hanging.add(result.call.name)
    problem = describe_bad_messages(step.observations)
    if problem:
        report.error("step", f"step returned {problem}.", "Return [{'role': 'tool' or 'user', 'content': 'text'}].")
        return None
    problem = describe_not_json({name: value for name, value in step.info.items() if name != "tool_results"})
    if problem:
        report.error("step", f"info is not JSON and cannot be recorded ({problem}).", "Use plain values only.")
    if not step.done:
        _check_observations(trial, message, step.observations, what)
    return step


def _check_observations(trial: Trial, message: Message, observations: list[Message], what: str) -> None:
    report, roles = trial.report, [observation["role"] for observation in observations]
    if not observations:
        text = f"After {what} the episode goes on, but step returned no observation: the model has nothing to answer."
        report.error("step", text, "Return at least one message, or done=True.")
    if "assistant" in roles:
        text = "An observation has the role 'assistant': the model would read it as its own words."
        report.warning("step", text, "Use role 'tool' or 'user'.")
    num_calls, num_answers = len(message.get("tool_calls") or []), roles.count("tool")
    if num_calls and num_answers and num_calls != num_answers:
        cure = "Return one message of role 'tool' per call, in the order of the calls."
        report.warning("step", f"{num_calls} calls were answered by {num_answers} tool messages.", cure)


def describe_bad_messages(messages: list[Message]) -> str | None:
    """Why a chat template cannot render these; None if it can."""
    for message in messages:
        if message.get("role") not in ROLES:
            return f"a message with the role {message.get('role')!r}: {message!r:.120}"
        content = message.get("content")
        blocks = content if isinstance(content, list) else [None]
        if not isinstance(content, str) and not all(isinstance(part, dict) and "type" in part for part in blocks):
            return f"a message whose content is {type(content).__name__}, not text: {message!r:.120}"
        problem = describe_not_json(message)
        if problem:
            return f"a message that is not JSON ({problem}): {message!r:.120}"
    return None


def describe_not_json(value: Any) -> str | None:
    """Why a value cannot be recorded; None if it can."""
    try:
        json.dumps(value, allow_nan=False)
    except Exception as error:
        return describe_error(error, 120)
    return None


def check_close(trial: Trial) -> None:
    """Before reset has run, and after it."""
    thread, session = OwnThread(), trial.fresh(trial.rows[0])[0]
    made = (("before reset had run", trial.new(thread), thread), ("after reset", session.env, session.thread))
    for when, env, own in made:
        if not hasattr(env, "close"):
            return
        failure = trial.caller.call("close", _close(env, own)).failure
        if failure:
            cure = "Set what close uses in __init__, or use getattr(self, name, None): a failed reset is closed, too."
            trial.report.error("close", f"close, called {when}, failed: {failure}.", cure)
    trial.report.ok("close", "close works before and after reset.")


async def _close(env: Any, thread: OwnThread) -> None:
    is_async = inspect.iscoroutinefunction(env.close)
    closed = env.close() if is_async else await thread.run(env.close, pool=shared_pool(8))
    if inspect.isawaitable(closed):
        await closed

"""Acting in an environment as a rollout does, with a time limit, and what is wrong with a step, a prompt or a tool.

It is shared by `check_env` and the doctor. Importing it loads neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import inspect
import json
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NoReturn

from agent_r1_trl.environments.base import RewardError, StepResult
from agent_r1_trl.environments.trl_adapters import TRLEnvAdapter
from agent_r1_trl.features.doctor.report import Level, Report, describe_error
from agent_r1_trl.generation.base import Generation
from agent_r1_trl.rollout import Draft, EnvironmentFailure, EnvSession, RolloutRequest
from agent_r1_trl.tools import Tool
from agent_r1_trl.tools.base import shown_tool
from agent_r1_trl.tools.event_loop import give_up_loop, shared_loop
from agent_r1_trl.trajectory import Author, Message, StopReason, ToolErrorKind, ToolFault, ToolResult, Trajectory

DESCRIBE = (
    "Give the function type hints and a docstring that says what it does and what each argument means; or describe it "
    "yourself: Tool(fn, schema={...})."
)
_GRACE_S = 2.0
# These point to a mistake in the tool itself, whatever its arguments were.
_BUGS = ("NameError", "ImportError", "ModuleNotFoundError", "SyntaxError", "NotImplementedError", "SystemExit")
_EMPTY = ("", "None", "null", "nan", "NaN", "(no output)")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+|\d{7,}")


class Stopped(Exception):
    """The report says why; nothing further can be checked."""


@dataclass
class CallOutcome:
    """How a call went."""

    value: Any = None
    failure: str | None = None
    """Text of the exception or of the timeout; None if the call went well."""


class Caller:
    """Awaits coroutines on the event loop of the rollouts, without ever being stopped by them.

    Args:
        timeout_s: seconds each call may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._calls: set[concurrent.futures.Future[CallOutcome]] = set()
        """Calls that did not come back."""

    def call(self, name: str, coroutine: Coroutine[Any, Any, Any]) -> CallOutcome:
        """Wait for a coroutine; never raises. `name` is what a timeout calls it."""
        too_slow = CallOutcome(failure=f"{name} did not come back within {self.timeout_s:g} s")

        async def guarded() -> CallOutcome:
            limit = asyncio.timeout(self.timeout_s)
            try:
                async with limit:
                    return CallOutcome(value=await coroutine)
            except (EnvironmentFailure, RewardError) as error:  # their text names the method and its exception
                return CallOutcome(failure=str(error).rstrip("."))
            except BaseException as error:  # SystemExit as well: it would end the loop
                return too_slow if limit.expired() else CallOutcome(failure=describe_error(error))

        thread = shared_loop()
        future = asyncio.run_coroutine_threadsafe(guarded(), thread.loop)
        try:
            return future.result(timeout=self.timeout_s + _GRACE_S)
        except concurrent.futures.TimeoutError:
            self._calls.add(future)
            if not thread.answers():  # it may never let go of the loop: leave that loop to it and go on with another
                give_up_loop(thread)
            return too_slow

    def close(self) -> None:
        """Cancel what still runs."""
        for future in self._calls:
            future.cancel()


@dataclass(kw_only=True)
class EnvTrial:
    """One run of `check_env`: what all checks share. Its methods report what fails, and then raise `Stopped`."""

    rows: list[dict[str, Any]]
    make: Callable[[], Any]
    """Makes a fresh environment."""
    caller: Caller
    report: Report = field(default_factory=Report)
    tools_of_row: dict[int, list[Tool]] = field(default_factory=dict)
    """The tools after the `reset` of a row, by the row's `id`: an environment may choose them there."""
    sessions: list[EnvSession] = field(default_factory=list)
    """The episodes that are open."""

    def close(self, num_kept: int = 0) -> None:
        """Close the environments, as a rollout does, except the last ones: what is behind them may be few."""
        while len(self.sessions) > num_kept:
            self.caller.call("close", self.sessions.pop(0).close())

    def stop(self, check: str, message: str, fix: str, *, level: Level = "error") -> NoReturn:
        """Report what nothing further can be checked after."""
        self.report.add(level, check, message, fix)
        raise Stopped

    def start(self, row: dict[str, Any]) -> tuple[EnvSession, CallOutcome]:
        """Make a fresh environment, driven as in a rollout; returns it and the outcome of its `reset(row)`."""
        self.close(num_kept=1)  # no check needs more than two at once
        session = EnvSession(self.make, truncate=lambda text, max_tokens: text[: 4 * max_tokens])
        self.sessions.append(session)
        return session, self.call("reset", session, RolloutRequest(example=row))

    def fresh(self, row: dict[str, Any]) -> tuple[EnvSession, list[Message]]:
        """Like `start`, but returns the prompt."""
        session, reset = self.start(row)
        if reset.failure:
            self.stop("reset", f"{reset.failure}.", "It must work every time, for every row.")
        return session, reset.value[0]

    def call(self, name: str, session: EnvSession, argument: object) -> CallOutcome:
        """Call the session's `reset`, `step` or `outcome`."""
        method = "outcome_reward" if name == "outcome" else name
        return self.caller.call(f"{session.name}.{method}", getattr(session, name)(argument))

    def step(self, session: EnvSession, message: Message, what: str) -> StepResult:
        """Take a step with a message; `what` says which one that is."""
        report, stepped = self.report, self.call("step", session, message)
        if stepped.failure:
            fix = "What a model writes and what a tool does must become an observation, not an exception or a hang."
            self.stop("step", f"On {what}: {stepped.failure}.", fix)
        step: StepResult = stepped.value
        results = [item for item in step.info.get("tool_results") or () if isinstance(item, ToolResult)]
        for result in results:
            _check_result(report, result)
        if problem := bad_messages(step.observations):
            self.stop("step", f"step returned {problem}.", "Return [{'role': 'tool' or 'user', 'content': 'text'}].")
        if problem := _not_json({name: value for name, value in step.info.items() if name != "tool_results"}):
            report.error("step", f"info is not JSON and cannot be recorded ({problem}).", "Use plain values only.")
        if not step.done:
            if not step.observations:
                text = f"After {what} the episode goes on, but step returned no observation: the model has no answer."
                report.error("step", text, "Return at least one message, or done=True.")
            num_calls = len(message.get("tool_calls") or [])
            num_answers = [observation["role"] for observation in step.observations].count("tool")
            has_surplus = any(result.error is ToolErrorKind.TOO_MANY for result in results)  # one answer for all of it
            if num_calls and num_answers and num_calls != num_answers and not has_surplus:
                fix = "Return one message of role 'tool' per call, in the order of the calls."
                report.warning("step", f"{num_calls} calls were answered by {num_answers} tool messages.", fix)
        return step

    def run(self, row: dict[str, Any], what: str, messages: list[Message]) -> EnvEpisode:
        """Run these messages in a fresh environment, as far as it lets them."""
        session, prompt = self.fresh(row)
        episode = EnvEpisode(session=session, prompt=prompt, messages=messages)
        for message in messages:
            episode.steps.append(self.step(session, message, what))
            if episode.steps[-1].done:
                break
        return episode


@dataclass(kw_only=True)
class EnvEpisode:
    """The conversation, and the environment as the episode left it."""

    session: EnvSession
    prompt: list[Message]
    messages: list[Message]
    steps: list[StepResult] = field(default_factory=list)
    """One per message, until an episode ends by itself."""

    def trajectory(self, stop_reason: StopReason) -> Trajectory:
        """As the rollout would record it: one token per message, and one more for its observations if it has any."""
        draft = Draft(request=RolloutRequest(example={}), prompt_messages=self.prompt, prompt_ids=[0])
        for message, (observations, reward, _, _) in zip(self.messages, self.steps, strict=False):
            turn = draft.add_turn(Generation(token_ids=[0], logprobs=[0.0], stop="stop"), message, generate_s=0.0)
            turn.observations, turn.reward = observations, reward
            draft.add_context([0] * bool(observations), [Author.ENVIRONMENT] * bool(observations))
        return draft.finish(stop_reason, duration_s=0.0)


def make_env(given: object) -> Any:
    """An environment with our protocol, from a class, a function or what TRL takes."""
    if isinstance(given, dict):
        return TRLEnvAdapter(given)
    if not callable(given):
        raise TypeError(f"{given!r:.100} is no class or function that makes environments")
    env = given()
    if hasattr(env, "step") or not callable(getattr(env, "reset", None)):
        return env
    # TRL's `environment_factory` takes classes without step, with get_reward or a reset(self, **row).
    parameters = inspect.signature(env.reset).parameters.values()
    is_for_trl = hasattr(type(env), "get_reward") or any(item.kind is item.VAR_KEYWORD for item in parameters)
    return TRLEnvAdapter(given) if is_for_trl else env


def check_tools(report: Report, declared: Any) -> list[Tool]:
    """Check names, schemas and descriptions of tools; returns those that a model can call."""
    usable: list[Tool] = []
    for item in declared:
        try:
            found = shown_tool(item)
            properties = found.schema["function"]["parameters"].get("properties", {})
        except Exception as error:  # a user's hints, docstring or schema may fail in any way
            report.error("tools", f"{describe_error(error, 500)}.", DESCRIBE)
            continue
        usable.append(found)
        said = ("description", "enum", "const", "minimum", "maximum", "pattern")
        specs = [(name, spec) for name, spec in properties.items() if isinstance(spec, dict)]
        bare = [name for name, spec in specs if spec.get("type") != "boolean" and not any(map(spec.get, said))]
        if bare:
            text = f"Tool {found.name!r} has no description of {', '.join(map(repr, bare))}: a model has to guess."
            report.warning("tools", text, "Describe every argument in the docstring's 'Args:'.")
    for name, count in collections.Counter(found.name for found in usable).items():
        if count > 1:
            text = f"{count} tools are called {name!r}: the model can reach only one of them."
            report.error("tools", text, "Give each its own name with @tool(name=...).")
    return usable


def _check_result(report: Report, result: ToolResult) -> None:
    """The answer to a call that the tool's schema allows; other calls never reach the tool."""
    name, text = result.call.name, _ADDRESS.sub("...", result.content[:300])  # else no two findings are the same
    first = "".join(text.splitlines()[:1])
    if result.error in (ToolErrorKind.TIMEOUT, ToolErrorKind.INFRASTRUCTURE):
        fix = (
            "See that what it needs is up, give its inner calls a timeout, and open connections in each call, in "
            "reset, or with sqlite3.connect(..., check_same_thread=False)."
        )
        report.error("tools", f"Tool {name!r} cannot do its work here: {first}", fix)
    elif result.error is ToolErrorKind.EXCEPTION:
        error = "".join(re.findall(r"failed: (\w+)", text)[:1])
        if error == "ValueError" or result.fault is ToolFault.MODEL:  # so a tool answers arguments without sense
            return
        fix = "Correct it, or describe the allowed arguments more exactly (Literal[...], 'Args:')."
        message = f"Tool {name!r} failed on {result.call.arguments!r:.200}, which its schema allows. {first}"
        if not result.is_charged:
            message += " The policy is not charged for it."
            fix += f" If arguments cause it, declare it: @tool(user_errors=({error or 'ItsError'},))."
        (report.error if error in _BUGS else report.warning)("tools", message, fix)
    elif result.error is None and (text.strip() in _EMPTY or re.search(r"<.+ at \.\.\.>", text)):
        message = f"Tool {name!r} returned {text!r}, which tells the model nothing."
        report.warning("tools", message, "Return text or plain JSON values; say in words that nothing was found.")


def bad_messages(messages: list[Message]) -> str | None:
    """Why a chat template cannot render these; None if it can."""
    for message in messages:
        if message.get("role") not in ("system", "developer", "user", "assistant", "tool"):
            return f"a message with the role {message.get('role')!r}: {message!r:.120}"
        content = message.get("content")
        blocks = content if isinstance(content, list) else [None]
        if not isinstance(content, str) and not all(isinstance(part, dict) and "type" in part for part in blocks):
            return f"a message whose content is {type(content).__name__}, not text: {message!r:.120}"
        if problem := _not_json(message):
            return f"a message that is not JSON ({problem}): {message!r:.120}"
    return None


def _not_json(value: object) -> str | None:
    """Why a value cannot be recorded; None if it can."""
    try:
        json.dumps(value, allow_nan=False)
    except Exception as error:
        return describe_error(error, 120)
    return None

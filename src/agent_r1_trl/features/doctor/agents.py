"""How check_env examines an agent (`AgentEnv`): it acts against a script, through the endpoint of the training.

The script says what policies say: valid calls of the tools that the agent sends, mistakes, nothing, a plain answer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from agent_r1_trl.chat.errors import ChatFormatError
from agent_r1_trl.environments.factory import made_and_closed
from agent_r1_trl.features import feature
from agent_r1_trl.features.doctor.episodes import Caller
from agent_r1_trl.features.doctor.messages import NONSENSE, broken_calls, say_text, valid_messages
from agent_r1_trl.features.doctor.report import Report
from agent_r1_trl.generation.scripted import ScriptedGenerator, ScriptedRequest
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner
from agent_r1_trl.tools import shared_pool
from agent_r1_trl.tools.pool import OwnThread
from agent_r1_trl.trajectory import Author, Message, StopReason, Trajectory

if TYPE_CHECKING:
    from agent_r1_trl.chat.format import ChatFormat

MAX_CALLS = 16
"""Calls after which an agent that goes on counts as endless."""
RUN_TIMEOUTS = 6
"""A whole run may take as many times `timeout_s`."""
SCRIPTS = ("tool calls", "a plain answer", "an unknown tool", "a call cut off half way", "an empty answer")
"""The beginning of a run; then every tool is called, and then the answer is text."""
_APPENDED = {
    "system": "Leave the system message as it is: put what changes (a clock, a state) into a new message",
    "tools": "Send the same tools in the same order with every call",
    "assistant": "Send the model's messages back as they came, calls as calls",
}
Schema = dict[str, Any]
Start = tuple[list[Message], list[Schema]]


class _PlainChat:
    """In place of a `ChatFormat` where no model is named: messages as JSON, a byte a token."""

    stop_token_ids, reasoning_rule = (256,), None

    def __init__(self) -> None:
        self.encoder = self

    def hide(self, data: object, *, special_only: bool) -> Any:
        return data

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_id for token_id in token_ids if token_id < 256).decode(errors="replace")

    def truncate(self, text: str, max_tokens: int) -> str:
        return text[:max_tokens]

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Schema] | None) -> list[int]:
        return [*json.dumps([tools, *messages], default=str).encode()]

    def encode_observations(
        self, message: Message, observations: Sequence[Message], tools: Sequence[Schema] | None
    ) -> tuple[list[int], list[Author]]:
        ids = self.encode_prompt(observations, None)
        return ids, [Author.ENVIRONMENT] * len(ids)

    def encode_turn_end(self, token_ids: Sequence[int], stopped: bool) -> list[int]:
        return []

    def encode_reply(self, message: Message) -> list[int]:
        return [*json.dumps(message).encode(), *self.stop_token_ids]

    def parse(self, token_ids: Sequence[int], *_: object, **__: object) -> Message:
        try:
            return dict(json.loads(self.decode(token_ids)))
        except ValueError:  # a stop string of the agent has cut it
            return say_text(self.decode(token_ids))


@dataclass
class _AgentRun:
    """One trajectory of an agent; in place of its chat format, which takes down what the agent sends."""

    script: str
    chat: Any
    tools: list[Schema] = field(default_factory=list)
    """The request of the latest call."""
    start: Start | None = None
    """Messages and tools of the first call."""
    has_late_system: bool = False
    """Whether a system message came after others."""
    env: Any = None
    trajectory: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.chat, name)

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Schema] | None) -> list[int]:
        self.tools = list(tools or ())
        self.start = self.start or (list(messages), self.tools)
        self.has_late_system |= any(message["role"] == "system" for message in messages[1:])
        return list(self.chat.encode_prompt(messages, tools))

    def encode_observations(
        self, message: Message, observations: Sequence[Message], tools: Sequence[Schema] | None
    ) -> Any:
        self.tools = list(tools or ())
        self.has_late_system |= any(item["role"] == "system" for item in observations)
        return self.chat.encode_observations(message, observations, tools)

    def refusal(self) -> str:
        """A server's objection to a system message after others; empty if none."""
        if isinstance(self.chat, _PlainChat):
            return "which many chat templates refuse (agent-r1-trl doctor tries that of your model)"
        try:
            self.chat.encode_prompt([{"role": role, "content": "."} for role in ("user", "assistant", "system")])
        except ChatFormatError as error:
            return f"which is shown as the user's here, and refused by a server. {error.problem.rstrip('.')}"
        return ""

    def say(self, request: ScriptedRequest) -> list[int]:
        """Ids of the next turn; the first of its calls alone, or a text, where the template writes no more."""
        functions = [{"parameters": {}, **schema["function"]} for schema in self.tools]
        tools: list[Any] = [SimpleNamespace(name=each["name"], schema={"function": each}) for each in functions]
        mistakes = {**broken_calls(tools), SCRIPTS[4]: say_text("")}
        turns = [mistakes[self.script]] if self.script in mistakes else []
        turns += [message for message in valid_messages(tools) if message.get("tool_calls")][: MAX_CALLS // 2]
        is_over = self.script == SCRIPTS[1] or request.index >= len(turns)
        turn = say_text(NONSENSE) if is_over else turns[request.index]
        for message in (turn, {**turn, "tool_calls": (turn.get("tool_calls") or [])[:1]}):
            with contextlib.suppress(Exception):
                return list(self.chat.encode_reply(message))
        return list(self.chat.encode_reply(say_text(NONSENSE)))


def is_agent(make: Callable[[], Any], timeout_s: float) -> bool:
    """Whether this makes agents; False if it makes nothing, which the checks of environments report."""

    def drives() -> bool:
        with made_and_closed(make) as env:
            return hasattr(env, "drive")

    with contextlib.closing(Caller(timeout_s)) as caller:
        made = caller.call("making the environment", shared_pool(8).run(drives, thread=OwnThread()))
    return bool(made.value)


def examine_agent(
    report: Report,
    make: Callable[[], Any],
    rows: Sequence[dict[str, Any]],
    *,
    timeout_s: float,
    chat: ChatFormat | None = None,
) -> list[Start]:
    """Let an agent act on every row, and on the first one against all scripts.

    Args:
        report: takes the findings.
        make: makes the environment.
        rows: of the data set.
        timeout_s: seconds for which a call may hold the event loop; a run may take `RUN_TIMEOUTS` times that.
        chat: the `ChatFormat` of the model; None if none is named.

    Returns:
        Messages and tools of the first call of every run.
    """
    limits = RolloutLimits(
        context="agent",  # type: ignore[arg-type]
        max_turns=MAX_CALLS,
        max_completion_length=10**8,
        rollout_timeout=RUN_TIMEOUTS * timeout_s,
        stall_timeout=timeout_s,
    )
    runs: list[_AgentRun] = []
    for row, script in [*((rows[0], script) for script in SCRIPTS), *((row, SCRIPTS[0]) for row in rows[1:])]:
        run: Any = _AgentRun(script, chat or _PlainChat())
        generator = ScriptedGenerator(run.say, stop_token_ids=run.stop_token_ids)
        with contextlib.closing(RolloutRunner(make, generator, run, limits, keep_going=True)) as runner:
            (run.trajectory,) = runner.run([RolloutRequest(example=row)])
            (run.env,) = runner.environments
        runs.append(run)
        if not _has_run(report, run, limits):
            break
        _check_run(report, run)
    else:
        _check_all(report, runs)
    return [run.start for run in runs if run.start is not None]


def _has_run(report: Report, run: _AgentRun, limits: RolloutLimits) -> bool:
    trajectory: Trajectory = run.trajectory
    error = str(trajectory.error).rstrip(".")
    fix = (
        "It must ask the model at door.base_url with door.api_key: openai.AsyncOpenAI(**door.settings). If it is the "
        "row that is wrong, pass rows of your data set."
    )
    if trajectory.stop_reason is StopReason.TIMEOUT:
        error = f"after {limits.rollout_timeout:g} s and {len(trajectory.turns)} answers it has not returned"
        fix = "Bound its turns and the time of its tools. check_env(..., timeout_s=60) waits longer."
    elif not trajectory.stop_reason.is_infrastructure_failure:
        return True
    elif "held the event loop" in error:
        fix = "An async run must await: use door.async_client, or a plain function, which has a thread."
    report.error("agent", f"On {run.script}: {error}.", fix)
    return False


def _check_run(report: Report, run: _AgentRun) -> None:
    info = run.trajectory.info
    env = run.env
    what = f"On {run.script}"
    if info.get("agent/raised"):
        text = f"{what} it raised: {info.get('agent_error')}. Such a trajectory earns {env.unfinished_reward:g}."
        fix = "Tell the model in a message what it did wrong, so that it learns to correct it."
        report.warning("agent", text, fix)
    if "agent_refused" in info:
        text = f"{what} the chat template refused its messages: {info['agent_refused']}"
        report.error("agent", text, "Send messages that the template takes: system first, then user.")
    elif run.has_late_system and (refusal := run.refusal()):
        text = f"{what} it sends a system message after others, {refusal}."
        report.warning("agent", text, "Send it as user.")
    if "agent/taking_turns" in info and not env.shared_reward:
        text = f"{what} conversations take turns, as players do, and are trained with one reward."
        fix = "Give each player door.seat(name) and return {name: reward}; for one task, pass shared_reward=True."
        report.warning("agent", text, fix)
    if "agent_overridden" in info:
        text = f"It sets {info['agent_overridden']}, which does not count: turns are sampled as the run says."
        report.warning("agent", text, "Remove it, or ask in the prompt for the form that is needed.")


def _check_all(report: Report, runs: Sequence[_AgentRun]) -> None:
    """Whether runs are scored and end, whether conversations are append-only, and what it costs if not."""
    unscored = feature("doors", "check_env of an agent").AgentEnv.outcome_reward
    ended = [run.env for run in runs if run.env.is_finished and type(run.env).outcome_reward is unscored]
    without_score = [env.answer for env in ended if env.answer is None or isinstance(env.answer, str)]
    if without_score:
        text = f"run returned {without_score[0]!r:.60}: the environment's reward is 0."
        fix = "Return a number from run, or define outcome_reward in a subclass. Fine with reward_funcs."
        report.warning("outcome", text, fix)
    if not any(run.trajectory.stop_reason is StopReason.DONE for run in runs):
        text = f"No run ended by itself within {MAX_CALLS} calls, neither after tool calls nor after answers."
        report.warning("agent", text, "Return when the model answers with text, or after a number of turns.")
    split: dict[str, list[_AgentRun]] = {}
    for run in runs:
        if len(run.trajectory.rows) > 1:
            change = run.trajectory.info.setdefault("agent_drift", "calls that go on from the same messages")
            split.setdefault(change.split()[0], []).append(run)
    for kind, found in split.items():
        num_calls = sum(len(run.trajectory.turns) for run in found)
        num_rows = sum(len(run.trajectory.rows) for run in found)
        text = f"{len(found)} of {len(runs)} runs are not append-only: {num_calls} calls stand in {num_rows} rows"
        first = f"First on {found[0].script}: {found[0].trajectory.info['agent_drift']}"
        fix = _APPENDED.get(kind, "Append messages, and edit or drop no earlier one")
        report.warning("history", f"{text}. {first}.", f"{fix}. Fine for sub-agents, parallel calls and summaries.")
    num_calls = sum(len(run.trajectory.turns) for run in runs)
    report.ok("agent", f"{len(runs)} runs, {num_calls} calls; all ended by themselves or with their limit.")
    report.ok("history", f"Append-only: {len(runs)} runs stand in {len(runs)} rows.")
    report.ok("outcome", "Every run that returned was scored.")

"""Making environments, and whether they have the methods and settings that training needs."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.doctor.environment.caller import Caller, Outcome
from agent_r1_trl.doctor.report import Report
from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.environments.trl_adapters import TRLEnvAdapter
from agent_r1_trl.rollout import EnvSession, RolloutRequest
from agent_r1_trl.tools import Tool, shared_pool
from agent_r1_trl.tools.threads import OwnThread
from agent_r1_trl.trajectory import Message

BLOCKING_S = 0.5
_METHODS = {
    "reset": "(self, example)",
    "step": "(self, message)",
    "close": "(self)",
    "outcome_reward": "(self, trajectory)",
    "process_reward": "(self, call, result)",
    "next_user_message": "(self, message)",
}


class Stopped(Exception):
    """No environment could be made or reset. The report says why; nothing further can be checked."""


@dataclass(kw_only=True)
class Trial:
    """One run of `check_env`: what all checks share."""

    rows: list[dict[str, Any]]
    """Examples to play; none are left if the made-up one does not suit the environment."""
    are_made_up: bool
    """The rows are `check_env`'s own, not the user's."""
    caller: Caller
    report: Report = field(default_factory=Report)
    make: Callable[[], Any] = lambda: None
    """Makes a fresh environment."""
    is_instance: bool = False
    """An instance was given, so fresh ones are copies."""
    tools: list[Tool] = field(default_factory=list)
    """The tools that a model can call, in any of the rows."""
    tools_of_row: dict[int, list[Tool]] = field(default_factory=dict)
    """The tools after the `reset` of a row, by the row's `id`: an environment may choose them there."""
    hanging: set[str] = field(default_factory=set)
    """Names of tools that did not come back."""

    def tools_for(self, row: dict[str, Any]) -> list[Tool]:
        """The tools to call in the episodes of a row."""
        return [found for found in self.tools_of_row.get(id(row), self.tools) if found.name not in self.hanging]

    def new(self, thread: OwnThread | None = None) -> Any:
        """Make a fresh environment, on its own thread. A failure is reported and raises `Stopped`."""
        making = (thread or OwnThread()).run(self.make, pool=shared_pool(8))
        made = self.caller.call("making the environment", making)
        if made.failure:
            self.report.error(
                "construction",
                f"No environment could be made: {made.failure}.",
                "Pass a class or function that works without arguments, e.g. functools.partial(MyEnv, argument=...). "
                "A class for TRL's environment_factory needs reset(self, **row), and type hints and docstrings on "
                "its tools.",
            )
            raise Stopped
        return made.value

    def start(self, row: dict[str, Any]) -> tuple[EnvSession, Outcome]:
        """Make a fresh environment, driven as in a rollout; returns it and the outcome of its `reset(row)`."""
        session = EnvSession(self.make, truncate=lambda text, max_tokens: text[: 4 * max_tokens])
        reset = self.call("reset", session, RolloutRequest(example=row))
        if not reset.failure and isinstance(session.env, ToolEnv):
            # Less than `step` may take, so that a tool that hangs is told from a step that hangs.
            limit_s, executor = 0.8 * self.caller.timeout_s, session.env.executor
            executor.timeout_s = min(executor.timeout_s or limit_s, limit_s)
            for name, found in executor.tools.items():
                if (found.timeout_s or 0.0) > limit_s:
                    executor.tools[name] = copy.copy(found)  # the tool itself may belong to the class
                    executor.tools[name].timeout_s = limit_s
        return session, reset

    def fresh(self, row: dict[str, Any]) -> tuple[EnvSession, list[Message]]:
        """Like `start`, but returns the prompt. A failure is reported and raises `Stopped`."""
        session, reset = self.start(row)
        if reset.failure:
            self.report.error("reset", f"{reset.failure}.", "It must work every time, for every row.")
            raise Stopped
        return session, reset.value[0]

    def call(self, name: str, session: EnvSession, argument: Any) -> Outcome:
        """Call the session's `reset`, `step` or `outcome`; report an async one that blocks the event loop."""
        method = "outcome_reward" if name == "outcome" else name
        outcome = self.caller.call(f"{session.name}.{method}", getattr(session, name)(argument))
        if outcome.blocked_s > BLOCKING_S and inspect.iscoroutinefunction(getattr(session.env, method, None)):
            self.report.error(
                name,
                f"An async method or tool blocked the event loop for {outcome.blocked_s:.1f} s, and with it all other "
                "trajectories.",
                "Use `await` versions (asyncio.sleep, an async HTTP client), or make it a plain function: those run "
                "on threads.",
            )
        return outcome


def check_construction(trial: Trial, given: Any) -> Any:
    """Make an environment from what the user passed, and find out how to make more of them."""
    report = trial.report
    if isinstance(given, dict):
        trial.make = functools.partial(TRLEnvAdapter, given)
    elif inspect.isclass(given) or (callable(given) and not hasattr(given, "reset")):
        trial.make = given
    elif hasattr(given, "reset"):
        trial.is_instance, trial.make = True, functools.partial(copy.deepcopy, given)
        report.warning(
            "construction",
            "An instance was given: whether trajectories share state could not be checked.",
            "Pass the class, or a function that makes an instance.",
        )
    else:
        message = f"{type(given).__name__} is neither an environment nor a function that makes one."
        report.error("construction", message, "Pass the environment's class.")
        raise Stopped
    env = trial.new()
    if trial.make is given and _looks_like_trl(env):
        trial.make = functools.partial(TRLEnvAdapter, given)
        env = trial.new()
    if trial.new() is env:
        report.error(
            "construction",
            "The factory returns the same object every time: all trajectories would act in one environment.",
            "Return a new instance from it, or pass the class itself.",
        )
    report.ok("construction", "Every trajectory gets an instance of its own.")
    return env


def env_factory(given: Any) -> Callable[[], Any]:
    """A function that makes environments with our protocol, from a class, a function, an instance or TRL's forms."""
    if isinstance(given, dict):
        return functools.partial(TRLEnvAdapter, given)
    if hasattr(given, "reset") and not inspect.isclass(given):
        return functools.partial(copy.deepcopy, given)
    return functools.partial(TRLEnvAdapter, given) if _looks_like_trl(given()) else given


def check_methods(trial: Trial, env: Any) -> None:
    """The protocol's methods and their arguments, and the settings of a `ToolEnv`."""
    report, name = trial.report, type(env).__name__
    for method, form in _METHODS.items():
        if hasattr(env, method) or method in ("reset", "step"):
            try:
                inspect.signature(getattr(env, method, None)).bind(*[None] * form.count(","))  # type: ignore[arg-type]
            except TypeError:
                cure = f"Define {method}{form}, or subclass agent_r1_trl.ToolEnv, which has it."
                report.error("methods", f"{name} has no method {method}{form}.", cure)
    if getattr(env, "outcome_reward", None) is None:
        report.warning(
            "methods",
            f"{name} has no outcome_reward: finished trajectories earn nothing from it.",
            "Define outcome_reward(self, trajectory), or pass reward_funcs to the trainer.",
        )
    if isinstance(env, ToolEnv):
        _check_settings(trial, env)
    report.ok("methods", "All methods are there and take the right arguments.")


def _check_settings(trial: Trial, env: ToolEnv) -> None:
    report, cls, name = trial.report, type(env), type(env).__name__
    try:
        env._check_settings()
    except ValueError as error:
        report.error("methods", str(error), "Set it to a value in that range.")
        return
    pays_for_calls = env.has_reward and env.tool_call_reward > 0
    has_outcome = cls.outcome_reward is not ToolEnv.outcome_reward
    cap, span = env.max_process_reward, env.success_reward - env.failure_reward
    if pays_for_calls and has_outcome and (cap is None or cap > span):
        message = f"{name}.max_process_reward={cap}: calling tools can earn more than solving the task ({span:g})."
        report.warning("methods", message, f"Set max_process_reward to at most {span:g}.")
    if env.tool_error_reward > 0:
        message = f"{name}.tool_error_reward={env.tool_error_reward}: failing calls are rewarded."
        report.warning("methods", message, "Set it to 0 or below.")


def _looks_like_trl(env: Any) -> bool:
    """Whether it is made for TRL's `environment_factory`: it has no step, but get_reward or a reset(self, **row)."""
    if hasattr(env, "step") or not callable(getattr(env, "reset", None)):
        return False
    parameters = inspect.signature(env.reset).parameters.values()
    return hasattr(type(env), "get_reward") or any(item.kind is item.VAR_KEYWORD for item in parameters)

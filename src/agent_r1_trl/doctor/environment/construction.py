"""Can environments be made, and have they the right methods?

Not part of the data flow: a linter's step.
"""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

from agent_r1_trl.doctor.environment.context import Context
from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.environments.trl_adapters import TRLEnvAdapter


def check_construction(context: Context) -> Any:
    """Make an environment, and find out how to make more; None if it cannot be made."""
    given = context.given
    if isinstance(given, dict):
        return _use_trl_factories(context, given)
    if not inspect.isclass(given) and (hasattr(given, "reset") or not callable(given)):
        return _use_instance(context, given)
    made = context.caller.call(given)
    if made.failure:
        context.report.error(
            "construction",
            f"Making the environment {made.failure}.",
            "Pass a class or function that works without arguments, e.g. functools.partial(MyEnv, argument=...).",
        )
        return None
    env, context.make = made.value, given
    if _looks_like_trl(env):
        return _use_trl_factories(context, given)
    other = context.caller.call(given)
    if other.value is env:
        context.report.error(
            "construction",
            "The factory returns the same object every time: all trajectories would act in one environment.",
            "Return a new instance from it, or pass the class itself.",
        )
    return env


def _use_trl_factories(context: Context, given: Any) -> Any:
    context.make = lambda: TRLEnvAdapter(given)
    adapted = context.caller.call(context.make)
    if adapted.failure:
        context.report.error(
            "construction",
            f"As environment_factory: {adapted.failure}.",
            "Give the class reset(self, **row), and its tools type hints and docstrings.",
        )
    return adapted.value


def _use_instance(context: Context, given: Any) -> Any:
    if not hasattr(given, "reset"):
        context.report.error(
            "construction",
            f"{type(given).__name__} is neither an environment nor a function that makes one.",
            "Pass the environment's class.",
        )
        return None
    context.is_instance = True
    context.report.warning(
        "construction",
        "An instance was given: whether trajectories share state could not be checked.",
        "Pass the class, or a function that makes an instance.",
    )

    def duplicate() -> Any:
        try:
            return copy.deepcopy(given)
        except Exception:
            return given

    context.make = duplicate
    return given


def check_methods(context: Context, env: Any) -> None:
    """The protocol's methods, their arguments, and a `ToolEnv`'s settings."""
    name = type(env).__name__
    required = {
        "reset": (1, "def reset(self, example) -> list of messages"),
        "step": (1, "def step(self, message) -> (observations, reward, done, info)"),
        "close": (0, "def close(self) -> None"),
    }
    optional = {
        "outcome_reward": (1, "def outcome_reward(self, trajectory) -> float"),
        "process_reward": (2, "def process_reward(self, call, result) -> float"),
    }
    for method, (num_arguments, form) in {**required, **optional}.items():
        found = getattr(env, method, None)
        if found is None and method in required:
            context.report.error(
                "methods",
                f"{name} has no method {method}.",
                f"Define {form}, or subclass agent_r1_trl.ToolEnv, which has it.",
            )
        elif found is not None and not _accepts(found, num_arguments):
            context.report.error(
                "methods", f"{name}.{method} does not take {num_arguments} argument(s).", f"Define it as {form}."
            )
    if getattr(env, "outcome_reward", None) is None:
        context.report.warning(
            "methods",
            f"{name} has no outcome_reward: finished trajectories earn nothing from it.",
            "Define outcome_reward(self, trajectory), or pass reward_funcs to the trainer.",
        )
    if isinstance(env, ToolEnv):
        _check_settings(context, env)


def _check_settings(context: Context, env: ToolEnv) -> None:
    cls, name = type(env), type(env).__name__
    try:
        env._check_settings()
    except ValueError as error:
        context.report.error("methods", str(error), "Set it to a value in that range.")
        return
    own_outcome = cls.outcome_reward is not ToolEnv.outcome_reward
    if env.has_reward and not own_outcome and cls.process_reward is ToolEnv.process_reward and env.tools:
        context.report.warning(
            "methods",
            f"{name} defines neither outcome_reward nor process_reward: it pays for calls, whatever the answer.",
            "Define outcome_reward(self, trajectory), or set tool_call_reward = 0 and pass reward_funcs.",
        )
    cap, span = env.max_process_reward, env.success_reward - env.failure_reward
    if own_outcome and env.has_reward and env.tool_call_reward > 0 and (cap is None or cap > span):
        context.report.warning(
            "methods",
            f"{name}.max_process_reward={cap}: calling tools can earn more than solving the task ({span:g}).",
            f"Set max_process_reward to at most {span:g}.",
        )
    if env.tool_error_reward > 0:
        context.report.warning(
            "methods",
            f"{name}.tool_error_reward={env.tool_error_reward}: failing calls are rewarded.",
            "Set it to 0 or below.",
        )
    if env.tool_timeout_s is None or env.tool_timeout_s == math.inf:
        context.report.warning(
            "methods",
            f"{name}.tool_timeout_s sets no limit: a tool that hangs stops its trajectory.",
            "Set a number of seconds.",
        )


def _looks_like_trl(env: Any) -> bool:
    """A class for TRL's `environment_factory`: no step, and a reset that takes a row as keywords, or a get_reward."""
    if hasattr(env, "step") or not callable(getattr(env, "reset", None)):
        return False
    if hasattr(type(env), "get_reward"):
        return True
    try:
        parameters = inspect.signature(env.reset).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _accepts(method: Any, num_arguments: int) -> bool:
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:  # no signature to be had
        return True
    return True

"""From the names in a recipe to environments, functions and directories."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_r1_trl.cli.errors import UsageError, users_mistakes
from agent_r1_trl.cli.recipe import found_paths
from agent_r1_trl.environments.factory import made_and_closed, makes_environments
from agent_r1_trl.generation.base import as_generator
from agent_r1_trl.objects import did_you_mean, import_object, locate_error, make_own
from agent_r1_trl.rewards.function import with_options
from agent_r1_trl.safe_text import rules
from agent_r1_trl.tools.signature import function_name

BUILT_IN_ENVS = {
    "search_qa": "agent_r1_trl.environments.SearchQAEnv",
    "bandit": "agent_r1_trl.features.games.BanditEnv",
    "frozen_lake": "agent_r1_trl.features.games.FrozenLakeEnv",
    "sokoban": "agent_r1_trl.features.games.SokobanEnv",
    "countdown": "agent_r1_trl.features.games.CountdownEnv",
}
FIRST_ROWS = 5
"""In which an episode is started before a model is loaded, until one starts."""


def resolve_env(name: str, kwargs: Mapping[str, Any] | None = None) -> Callable[[], Any]:
    """Find a factory of environments; one environment is made at once, so that a mistake shows here."""
    path = BUILT_IN_ENVS.get(name, name)
    if not any(mark in path for mark in ".:/"):
        raise UsageError(
            f"env={name!r}: must be a built-in environment ({', '.join(BUILT_IN_ENVS)}) or an import path."
            f"{did_you_mean(name, BUILT_IN_ENVS)} Set env to one of them, or to a path such as my_module.MyEnv."
        )
    target, kwargs = resolve_object("env", found_paths(path)), found_paths(dict(kwargs or {}))
    rules().note(kwargs)
    if not callable(target) or (hasattr(target, "step") and not inspect.isclass(target)):
        problem: str | None = f"is a {type(target).__name__}, and every trajectory needs its own environment"
    elif (problem := makes_environments(target)) is None:
        factory: Callable[[], Any] = functools.partial(target, **kwargs) if kwargs else target
        try:
            with made_and_closed(factory) as env:
                missing = [method for method in ("reset", "step") if not callable(getattr(env, method, None))]
        except Exception as error:  # the user's class may raise anything
            accepted = list(inspect.signature(target).parameters)
            hints = "".join(did_you_mean(key, accepted) for key in kwargs if key not in accepted)
            raise UsageError(
                f"env={name!r} with env_kwargs={kwargs} cannot be created: {locate_error(error)}.{hints} Set "
                "env_kwargs accordingly, or correct the environment."
            ) from error
        if not missing:
            return factory
        problem = f"makes a {type(env).__name__}, which has no {' and no '.join(missing)} method"
    raise UsageError(
        f"env={name!r} {problem}. Name a class with reset and step (subclass agent_r1_trl.ToolEnv), or a function in "
        "a module of yours that makes one (def make() -> MyEnv: ...)."
    )


def check_first_row(env: str, env_factory: Callable[[], Any], data: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Start an episode as the rollout will, so that a mistake shows before a model is loaded.

    Some bad rows are no mistake: it is one if none of the first `FIRST_ROWS` can start. `env` and `data` are the
    settings that name the environment and the data set, for errors.
    """
    if (problem := first_start_problem(env_factory, rows)) is not None:
        raise UsageError(
            f"{env} cannot start on the first rows of {data}: {str(problem).rstrip('.')}. Correct one of the two; "
            "agent-r1-trl doctor examines both."
        ) from problem


def check_start_without_data(env: str, env_factory: Callable[[], Any]) -> None:
    """As `check_first_row`, where no data set is named: the environment must make its own prompts."""
    problem = first_start_problem(env_factory, None)
    if problem is not None:
        raise UsageError(
            f"dataset_name=None: {env} cannot start without a row of data: {str(problem).rstrip('.')}. Set "
            "dataset_name to a file of rows or an id on the Hub, or env to one that makes its own prompts."
        ) from problem


def first_start_problem(env_factory: Callable[[], Any], rows: Sequence[Mapping[str, Any]] | None) -> Exception | None:
    """Why an episode starts on none of the first rows, or without a data set; None if it starts."""
    from agent_r1_trl.rollout import EnvironmentFailure, EnvSession, RolloutRequest
    from agent_r1_trl.tools.event_loop import run_on_loop
    from agent_r1_trl.trainers.construction import NO_PROMPT

    async def start(row: Mapping[str, Any]) -> None:
        session = EnvSession(env_factory, truncate=lambda text, max_tokens: text)
        try:
            messages, _ = await session.reset(RolloutRequest(example=dict(row)))
            if messages == NO_PROMPT:
                raise ValueError("reset returned an empty prompt")
        finally:
            if session.env is not None:
                await session.close()

    first: Exception | None = None
    rows = [{"prompt": NO_PROMPT}] if rows is None else rows
    for index in range(min(FIRST_ROWS, len(rows))):
        try:
            run_on_loop(start(rows[index]))
            return None
        except EnvironmentFailure as error:
            first = first or error
        except ValueError as error:
            return error
    return first


def resolve_object(flag: str, path: str) -> Any:
    """Import an object by its path; see `import_object`."""
    with users_mistakes():
        return import_object(path, flag)


def resolve_function(flag: str, path: str) -> Callable[..., Any]:
    """Import a function by its path."""
    function = resolve_object(flag, path)
    if not callable(function):
        raise UsageError(
            f"{flag}={path!r} is {function!r:.50}, which cannot be called. Name a function, as in "
            "my_module.my_function."
        )
    return function


def resolve_generator(path: str) -> Any:
    """Import a generator by its path; a class is called without arguments."""
    with users_mistakes():
        return as_generator(make_own(f"generator={path!r}", import_object(path, "generator")), path)


def resolve_callback(path: str) -> Any:
    """Import a callback by its path; a class is called without arguments."""
    from transformers import TrainerCallback

    with users_mistakes():
        made = make_own(f"callbacks={path!r}", import_object(path, "callbacks"))
    if not isinstance(made, TrainerCallback):
        raise UsageError(
            f"callbacks={path!r} is {made!r:.50}, which is no TrainerCallback. Name a subclass of "
            "transformers.TrainerCallback or agent_r1_trl.RolloutCallback, as in my_module.MyCallback."
        )
    return made


def with_reward_options(task: Mapping[str, Any], options: Mapping[str, Any] | None) -> dict[str, Any]:
    """`reward_funcs` and `turn_reward_funcs` of a task (lists or None) with their options, by a function's name."""
    functions = {flag: task[flag] for flag in ("reward_funcs", "turn_reward_funcs")}
    names = [function_name(function) for listed in functions.values() for function in listed or ()]
    options = dict(options or {})
    for name, given in options.items():
        if name not in names or not isinstance(given, dict):
            hint = did_you_mean(name, names) if name not in names else ""
            raise UsageError(
                f"reward_options={options}: {name}={given!r} must be one of the reward functions "
                f"({', '.join(names) or 'there are none'}) with a mapping of its options.{hint} Write it as "
                "{NAME: {option: value}}."
            )
    try:
        return {
            flag: listed and [with_options(function, options.get(function_name(function), {})) for function in listed]
            for flag, listed in functions.items()
        }
    except ValueError as error:
        raise UsageError(f"reward_options={options}: {error}") from error


@contextlib.contextmanager
def reading_folder(flag: str, path: str) -> Iterator[None]:
    """An error of the system while a directory is read becomes one with the flag and the fix."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{flag}={path!r:.200}: cannot be read ({error.strerror}). Pass a directory that you may read and write."
        ) from error


def make_folder(flag: str, path: str) -> Path:
    """Make the directory if it does not exist."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # of a null byte
        raise UsageError(
            f"{flag}={path!r}: cannot be created ({error}). Pass a directory that you may write to."
        ) from error
    return Path(path)

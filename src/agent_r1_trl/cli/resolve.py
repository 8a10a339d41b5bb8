"""From the names in a recipe to environments, functions, data sets and directories."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_r1_trl.cli.errors import UsageError
from agent_r1_trl.cli.shipped_recipes import found_paths
from agent_r1_trl.environments.factory import made_and_closed, makes_environments
from agent_r1_trl.objects import did_you_mean, import_object, locate_error
from agent_r1_trl.rewards import RewardFunction
from agent_r1_trl.safe_text import rules
from agent_r1_trl.tools.signature import function_name

BUILT_IN_ENVS = {
    "search_qa": "agent_r1_trl.environments.SearchQAEnv",
    "bandit": "agent_r1_trl.environments.games.BanditEnv",
    "frozen_lake": "agent_r1_trl.environments.games.FrozenLakeEnv",
    "sokoban": "agent_r1_trl.environments.games.SokobanEnv",
    "countdown": "agent_r1_trl.environments.games.CountdownEnv",
    "reasoning_gym": "agent_r1_trl.environments.games.ReasoningGymEnv",
}
FIRST_ROWS = 5
"""In which an episode is started before a model is loaded, until one starts."""
FILE_FORMATS = {".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


# ---------------------------------------------------------------- objects


def resolve_env(name: str, kwargs: Mapping[str, Any] | None = None) -> Callable[[], Any]:
    """Find a factory of environments; one environment is made at once, so that a mistake shows here.

    Raises:
        UsageError: there is no such environment, or it does not accept the arguments.
    """
    path = BUILT_IN_ENVS.get(name, name)
    if not any(mark in path for mark in ".:/"):
        hint = did_you_mean(name, BUILT_IN_ENVS)
        raise UsageError(
            f"env={name!r}: must be a built-in environment ({', '.join(BUILT_IN_ENVS)}) or an import path.{hint} Set "
            "env to one of them, or to a path such as my_module.MyEnv."
        )
    target = resolve_object("env", found_paths(path))
    kwargs = found_paths(dict(kwargs or {}))
    if not callable(target) or (hasattr(target, "step") and not inspect.isclass(target)):
        raise UsageError(
            f"env={name!r} is a {type(target).__name__}: every trajectory needs its own environment. Name the class, "
            "or a function that makes one."
        )
    rules().note(kwargs)
    problem = makes_environments(target, named=True)
    if problem is not None:
        raise UsageError(
            f"env={name!r} {problem}; it was not called. Name a class with reset and step (subclass "
            "agent_r1_trl.ToolEnv), or a function in a module of yours that makes one (def make() -> MyEnv: ...)."
        )
    try:
        inspect.signature(target).bind(**kwargs)
    except TypeError as error:
        accepted = list(inspect.signature(target).parameters)
        hints = "".join(did_you_mean(key, accepted) for key in kwargs if key not in accepted)
        raise UsageError(
            f"env_kwargs={kwargs}: {name} takes ({', '.join(accepted)}): {error}.{hints} Set env_kwargs accordingly."
        ) from error
    except ValueError:  # a builtin without a signature; the call below decides
        pass
    factory: Callable[[], Any] = functools.partial(target, **kwargs) if kwargs else target
    try:
        with made_and_closed(factory) as env:
            made = type(env).__name__
            missing = [method for method in ("reset", "step") if not callable(getattr(env, method, None))]
    except Exception as error:  # the user's class may raise anything
        accepted = _arguments_of(target)
        hints = "".join(did_you_mean(key, accepted) for key in kwargs if key not in accepted)
        raise UsageError(
            f"env={name!r} with env_kwargs={kwargs} cannot be created: {locate_error(error)}.{hints} Set env_kwargs "
            "accordingly, or correct the environment."
        ) from error
    if missing:
        raise UsageError(
            f"env={name!r} makes a {made}, which has no {' and no '.join(missing)} method. Subclass "
            "agent_r1_trl.ToolEnv, or give it the methods of agent_r1_trl.Environment."
        )
    return factory


def check_first_row(env: str, env_factory: Callable[[], Any], data: str, rows: Any) -> None:
    """Start an episode as the rollout will, so that a mistake shows before a model is loaded.

    Some bad rows are no mistake: it is one if none of the first `FIRST_ROWS` can start.

    Args:
        env: the setting that names the environment or its tools, for errors.
        env_factory: makes environments.
        data: the setting that names the data set, for errors.
        rows: the data set.

    Raises:
        UsageError: the environment refuses all of these rows, or its prompt or tools do not have the right form.
    """
    from agent_r1_trl.rollout import EnvironmentFailure, EnvSession, RolloutRequest

    async def play(row: Mapping[str, Any]) -> None:
        session = EnvSession(env_factory, truncate=lambda text, max_tokens: text)
        try:
            await session.reset(RolloutRequest(example=dict(row)))
        finally:
            if session.env is not None:
                await session.close()

    first: Exception | None = None
    for index in range(min(FIRST_ROWS, len(rows))):
        try:
            asyncio.run(play(rows[index]))
            return
        except EnvironmentFailure as error:
            first = first or error
        except ValueError as error:
            first = error
            break
    raise UsageError(
        f"{env} cannot start on the first rows of {data}: {str(first).rstrip('.')}. Correct one of the two; "
        "agent-r1-trl doctor examines both."
    ) from first


def _arguments_of(target: Any) -> list[str]:
    """Names of the arguments of a class and of those that its `**kwargs` go to, or of a function."""
    makers = [vars(kind).get("__init__") for kind in target.__mro__] if isinstance(target, type) else [target]
    found: list[str] = []
    for maker in makers:
        if inspect.isfunction(maker):
            named = inspect.signature(maker).parameters.values()
            found += [item.name for item in named if item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)]
    return [name for name in found if name != "self"]


def resolve_function(flag: str, path: str) -> Callable[..., Any]:
    """Import a function by its path.

    Raises:
        UsageError: there is no such object, or it cannot be called.
    """
    function = resolve_object(flag, path)
    if not callable(function):
        raise UsageError(
            f"{flag}={path!r} is {function!r:.50}, which cannot be called. Name a function, as in "
            "my_module.my_function."
        )
    return function


def with_reward_options(task: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """`reward_funcs` and `turn_reward_funcs` with their options.

    Args:
        task: the functions, or None, under these two names.
        options: mappings from option to value, by the name of the function.

    Raises:
        UsageError: no function has the name, or the function does not take the option.
    """
    functions = {flag: task[flag] for flag in ("reward_funcs", "turn_reward_funcs")}
    names = [function_name(function) for listed in functions.values() for function in listed or ()]
    for name, given in options.items():
        if name not in names:
            hint = did_you_mean(name, names)
            raise UsageError(
                f"reward_options={dict(options)}: {name!r} is none of the reward functions "
                f"({', '.join(names) or 'there are none'}).{hint} Correct the name, or remove it."
            )
        if not isinstance(given, dict):
            raise UsageError(
                f"reward_options: {name}={given!r} must be a mapping from option to value. Write it as "
                f"{{{name}: {{option: value}}}}."
            )
    return {
        flag: listed and [_with_options(function, options.get(function_name(function))) for function in listed]
        for flag, listed in functions.items()
    }


def _with_options(function: Callable[..., Any], options: dict[str, Any] | None) -> Callable[..., Any]:
    if not options:
        return function
    name = function_name(function)
    if isinstance(function, RewardFunction):
        try:
            return function.with_options(**options)
        except ValueError as error:
            raise UsageError(f"reward_options={{{name}: {options}}}: {error}") from error
    # A function that takes **kwargs, as most do, would swallow a misspelt option.
    known = [
        item.name for item in inspect.signature(function).parameters.values() if item.kind is not item.VAR_KEYWORD
    ]
    for option in options:
        if option not in known:
            raise UsageError(
                f"reward_options={{{name}: {options}}}: {name} takes no {option!r}.{did_you_mean(option, known)} Set "
                f"one of its arguments ({', '.join(known)})."
            )
    return functools.partial(function, **options)


def resolve_object(flag: str, path: str) -> Any:
    """Import an object by its path; see `import_object`.

    Raises:
        UsageError: there is no such object.
    """
    try:
        return import_object(path, flag)
    except ValueError as error:
        raise UsageError(str(error)) from error


# ---------------------------------------------------------------- data


def load_rows(
    flag: str, name: str, *, config: str | None = None, split: str = "train", limit: int | None = None
) -> Any:
    """Load a `datasets.Dataset` from a file, a directory, or the Hub.

    Args:
        flag: the setting that holds the name, for errors.
        name: a .jsonl, .json, .csv or .parquet file, a directory, or a Hub id.
        config: configuration of a Hub data set.
        split: of a Hub data set or of a directory.
        limit: number of rows to keep, from the first; None: all.

    Raises:
        UsageError: the data set cannot be found or read (with the line), or it is empty.
    """
    path = Path(name)
    if path.suffix.lower() in FILE_FORMATS:
        if not path.is_file():
            near = [str(item) for item in path.parent.iterdir()] if path.parent.is_dir() else []
            raise UsageError(
                f"{flag}={name!r}: no such file (looked in {Path.cwd()}).{did_you_mean(name, near)} Pass the path of "
                "a data file, relative to the current directory, or a Hub id."
            )
        rows = _read_file(flag, path)
    elif path.is_file():
        raise UsageError(
            f"{flag}={name!r}: must be a file of type {', '.join(FILE_FORMATS)}. Convert it to one of them."
        )
    elif not path.is_dir() and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise UsageError(
            f"{flag}={name!r}: no such directory (looked in {Path.cwd()}). Pass a data file, a directory, or a Hub id."
        )
    else:
        rows = _load_dataset(flag, name, config, split)
    if not len(rows):
        raise UsageError(_no_rows(flag, name))
    return rows.select(range(min(limit, len(rows)))) if limit is not None else rows


def _no_rows(flag: str, name: str) -> str:
    return f"{flag}={name!r} has no rows. Pass a data set with at least one."


def _read_file(flag: str, path: Path) -> Any:
    from datasets import Dataset

    rows: list[dict[str, Any]] = []
    try:
        if not path.stat().st_size:
            return rows
        if FILE_FORMATS[path.suffix.lower()] != "jsonl":
            return _load_dataset(flag, FILE_FORMATS[path.suffix.lower()], None, "train", data_files=str(path))
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{flag}={str(path)!r}: cannot be read ({error}). Pass a file that you may read.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:  # UnicodeDecodeError is one
            raise UsageError(
                f"{flag}={str(path)!r}, line {number}: not valid JSON in UTF-8 ({error}). Correct the line."
            ) from error
        if not isinstance(row, dict):
            raise UsageError(
                f"{flag}={str(path)!r}, line {number}: must be an object with the columns of the row, not "
                f"{type(row).__name__}. Correct the line."
            )
        rows.append(row)
    columns = dict.fromkeys(name for row in rows for name in row)  # `datasets` would take those of the first row
    rows = [{name: row.get(name) for name in columns} for row in rows]
    # Dicts with different keys stay as they are, instead of all of them having all keys.
    make = functools.partial(Dataset.from_list, on_mixed_types="use_json")
    mixed = _mixed_column(rows)
    try:
        if mixed is None:
            made = make(rows)
            mixed = _changed_column(rows, made)
            if mixed is None:
                return made
    except Exception as error:  # arrow's errors share no base class
        mixed = f"{_unfit_column(rows, make)} ({error})"
    raise UsageError(f"{flag}={str(path)!r}: {mixed}. Give each column one type.")


def _mixed_column(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Names a column with values of several types; None if there is none."""
    for column in dict.fromkeys(name for row in rows for name in row):
        kinds: dict[str, int] = {}
        for number, row in enumerate(rows, start=1):
            value = row.get(column)
            if value is not None:
                kinds.setdefault("number" if type(value) in (int, float) else type(value).__name__, number)
        if len(kinds) > 1:
            found = " and ".join(f"{kind} (row {number})" for kind, number in kinds.items())
            return f"the column {column!r} holds {found}"
    return None


def _changed_column(rows: Sequence[Mapping[str, Any]], made: Any) -> str | None:
    """Names a column that `datasets` keeps as JSON and gives back changed; None if there is none.

    Where lists or dicts of a column hold several types, it takes a text such as "4" for the JSON of a number.
    """
    for column in [name for name, feature in made.features.items() if "Json(" in repr(feature)]:
        for number, (row, value) in enumerate(zip(rows, made[column], strict=True), start=1):
            if value != row[column]:
                return (
                    f"the column {column!r} holds values of several types inside its lists or objects, so that "
                    f"{row[column]!r:.100} (row {number}) would be read as {value!r:.100}"
                )
    return None


def _unfit_column(rows: Sequence[Mapping[str, Any]], make: Callable[[list[Any]], Any]) -> str:
    """Names the first column that makes no data set even alone."""
    for column in dict.fromkeys(name for row in rows for name in row):
        try:
            make([{column: row.get(column)} for row in rows])
        except Exception:
            return f"the column {column!r} holds values of different types"
    return "two columns do not fit together"


def _load_dataset(flag: str, name: str, config: str | None, split: str, **options: Any) -> Any:
    from datasets import load_dataset, load_from_disk

    try:
        if Path(name).is_dir() and any((Path(name) / item).exists() for item in ("state.json", "dataset_dict.json")):
            loaded = load_from_disk(name)
            return loaded[split] if isinstance(loaded, dict) else loaded
        return load_dataset(name, config, split=split, **options)
    except Exception as error:  # a wrong name, no network, a broken file: of many types
        source = options.get("data_files", name)
        if "corresponds to no data" in str(error):  # of a file with a header alone, or `[]`
            raise UsageError(_no_rows(flag, source)) from error
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {' '.join(str(cause).splitlines()[:1]).rstrip('.')}."
        if options:
            raise UsageError(
                f"{flag}={source!r}: cannot be read as {name}. {reason} Correct the file (text in UTF-8, a row for "
                "each example), or pass another one."
            ) from error
        is_local = Path(name).is_dir()
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" and not is_local else ""
        raise UsageError(
            f"{flag}={source!r}, split {split!r}: cannot be loaded{offline}. {reason} "
            "Pass a data file, a directory, or the id of a data set on the Hub, and one of its splits."
        ) from error


# ---------------------------------------------------------------- folders


def make_folder(flag: str, path: str) -> Path:
    """Make the directory if it does not exist.

    Raises:
        UsageError: a file is in the way, or the directory cannot be made.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next(item for item in (folder, *folder.parents) if item.is_file())
        raise UsageError(f"{flag}={path!r}: {file} is a file, not a directory. Pass another {flag}.") from error
    except OSError as error:
        raise UsageError(
            f"{flag}={path!r}: cannot be made ({error}). Pass a directory that you may write to."
        ) from error
    return folder

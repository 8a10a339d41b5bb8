"""Python objects by their import path, which is how recipes and configurations name classes and functions."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any


def import_object(path: str, flag: str) -> Any:
    """Import the object that a path names.

    Modules are looked for in the current directory and among the installed packages.

    Args:
        path: "package.module.name", "package.module:name" or "folder/file.py:name".
        flag: the setting that holds the path, for errors.

    Raises:
        ValueError: there is no such module or name, or the module raises; the message names flag, value and cure.

    >>> import_object("math.sqrt", "reward_funcs")(9.0)
    3.0
    """
    module_name, colon, name = path.rpartition(":")
    if not colon:
        module_name, _, name = path.rpartition(".")
    if not module_name or not name:
        raise ValueError(
            f"{flag}={path!r}: must be an import path. Set {flag} to one, such as my_module.my_name or "
            "folder/my_file.py:my_name."
        )
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    setting = f"{flag}={path!r}"
    module = _load_file(setting, module_name) if module_name.endswith(".py") else _import(setting, module_name)
    if not hasattr(module, name):
        hint = did_you_mean(name, [item for item in dir(module) if not item.startswith("_")])
        raise ValueError(f"{setting}: {module_name} has no {name!r}.{hint} Correct the name.")
    return getattr(module, name)


def _import(setting: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{setting}: there is no module {error.name!r} in {Path.cwd()} or among the installed packages. "
                "Correct the path, or run the command from the directory that holds the module."
            ) from error
        raise _import_error(setting, error) from error
    except Exception as error:  # whatever the user's module does when it is imported
        raise _import_error(setting, error) from error


def _load_file(setting: str, file_name: str) -> ModuleType:
    file = Path(file_name)
    if not file.is_file():
        raise ValueError(f"{setting}: there is no file {file} in {Path.cwd()}. Correct the path.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file does
        raise _import_error(setting, error) from error
    return module


def _import_error(setting: str, error: Exception) -> ValueError:
    return ValueError(f"{setting}: importing it raises {locate_error(error)}. Correct the module.")


def locate_error(error: Exception) -> str:
    """Type and message of an error, and the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error).rstrip('.')} ({last.filename}, line {last.lineno})"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The question "Did you mean ...?" with the closest known name, starting with a blank; "" if none is close.

    >>> did_you_mean("learning_rat", ["learning_rate", "beta"])
    " Did you mean 'learning_rate'?"
    """
    by_lower = {item.lower().replace("-", "_"): item for item in known}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[found[0]]!r}?" if found else ""

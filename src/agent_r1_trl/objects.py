"""Python objects by their import path, which is how recipes and configurations name classes and functions.

Whatever a setting takes as "one of your own" (estimator, loss term, context policy) is found by
`own_object`: the object itself or its path, checked before a model is loaded. What is refused is so with a ValueError
that names the setting, its value and the fix.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from agent_r1_trl.closeness import closest
from agent_r1_trl.errors import RunError

_PACKAGE = str(Path(__file__).parent)
_LIBRARIES = ("<frozen", _PACKAGE, *{sysconfig.get_path(name) for name in ("stdlib", "purelib")})
"""How the file names of Python, of installed packages and of this one begin."""


def import_object(path: str, flag: str) -> Any:
    """Import the object that a path names: "package.module.name", "package.module:name" or "folder/file.py:name".

    Modules are looked for in the current directory and among the installed packages.

    >>> import_object("math.sqrt", "reward_funcs")(9.0)
    3.0
    """
    setting = f"{flag}={path!r}"
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    if not module_name or not name:
        raise ValueError(
            f"{setting}: must be an import path. Set {flag} to one, such as my_module.my_name or "
            "folder/my_file.py:my_name."
        )
    if path.endswith(".py"):
        raise ValueError(
            f"{setting}: names a file, and nothing in it. Write {path}:my_name, the name of a class or function."
        )
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    is_file = module_name.endswith(".py")
    if is_file and not Path(module_name).is_file():
        raise ValueError(f"{setting}: there is no file {module_name} in {Path.cwd()}. Correct the path.")
    try:
        module = _load_file(Path(module_name)) if is_file else importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module does when it is imported
        missing = error.name if isinstance(error, ModuleNotFoundError) and not is_file else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise ValueError(
                f"{setting}: there is no module {missing!r} in {Path.cwd()} or among the installed packages. "
                "Correct the path, or run the command from the directory that holds the module."
            ) from error
        raise ValueError(f"{setting}: importing it raises {locate_error(error)}. Correct the module.") from error
    if not hasattr(module, name):
        hint = did_you_mean(name, [item for item in dir(module) if not item.startswith("_")]) or _own_names(module)
        raise ValueError(f"{setting}: {module_name} has no {name!r}.{hint} Correct the name.")
    return getattr(module, name)


def _own_names(module: ModuleType) -> str:
    """The sentence "It has ..." with classes and functions that a module defines itself; "" if there are none."""
    own = [name for name, item in vars(module).items() if getattr(item, "__module__", None) == module.__name__]
    names = [repr(name) for name in own if not name.startswith("_")]
    return f" It has {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}." if names else ""


def _load_file(file: Path) -> ModuleType:
    read = (file.resolve(), file.stat().st_mtime_ns)
    if (known := sys.modules.get(file.stem)) is not None and getattr(known, "_read", None) == read:
        return known  # what several settings take from one file is of one module
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["_read"] = read
    return module


class OwnObjectError(RunError, ValueError):
    """A function of the user's own, which a setting names, has failed in the run."""

    exit_code = 2


@contextlib.contextmanager
def users_code(name: str) -> Iterator[None]:
    """An exception of the user's code inside is reported with its line; `name`, of setting or method, comes first."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:  # whatever the user's code does
        raise OwnObjectError(f"{name} raised {locate_error(error)}. Correct it.") from error


class OwnObject(str):
    """The value of a setting that stands for an object of the user's own, which it holds and calls.

    Configurations hold it where others hold a string: JSON, logs, checkpoints and the journal see a plain one.
    """

    flag: str
    target: Any

    @classmethod
    def of(cls, flag: str, target: object, text: str) -> OwnObject:
        """`text`, the path that led to `target` or what tells it from others."""
        own = cls(text)
        own.flag, own.target = flag, target
        return own

    def __call__(self, *arguments: object) -> Any:
        """Call the object; what it raises is reported with setting, object and line."""
        with users_code(f"{self.flag}={str(self)!r}"):
            return self.target(*arguments)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnObject:
        return self


def own_object(
    flag: str, given: object, names: Iterable[str], form: str, num_arguments: int = 1, row: type[Any] = OwnObject
) -> OwnObject:
    """An object of the user's own: given itself, or by its path.

    Args:
        flag: the setting.
        given: of it. A class is called without arguments, and what it makes is the object.
        names: of the package's own, which are looked for elsewhere.
        form: what the object has to be, for errors: "a function from ... to ...".
        num_arguments: with how many arguments it is called, all by position.
        row: a type whose instances are taken as they are.
    """
    if isinstance(given, OwnObject):
        return given
    if isinstance(given, str) and names and not any(mark in given for mark in ".:"):
        raise ValueError(
            f"{flag}={given!r} is not one of {', '.join(map(repr, names))}.{did_you_mean(given, names)} Set {flag} to "
            f"one of them, or to the path of {form}, such as my_module.my_name."
        )
    text = path_of(given) if callable(given) else str(given)
    setting = f"{flag}={(text if callable(given) else given)!r:.200}"
    target = make_own(setting, import_object(given, flag) if isinstance(given, str) else given)
    if not callable(target) and not isinstance(target, row):
        raise ValueError(f"{setting} is of type {type(target).__name__}, which cannot be called. Name {form}.")
    if callable(target):
        check_call(setting, target, form, *[None] * num_arguments)
    return OwnObject.of(flag, target, text)


def make_own(setting: str, target: object) -> Any:
    """The object itself; a class is called without arguments."""
    if not isinstance(target, type):
        return target
    try:
        return target()
    except Exception as error:  # whatever the user's class does
        raise ValueError(
            f"{setting} cannot be made without arguments: {locate_error(error)}. Name an object, or a class that "
            "needs none."
        ) from error


def check_call(setting: str, function: Any, form: str, /, *arguments: object, **named: object) -> None:
    """Refuse a function that cannot be called with these arguments, of any values; `form` says what to name."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        raise ValueError(
            f"{setting} takes {signature}: {error}. Name {form}; functools.partial binds other arguments."
        ) from error


def path_of(target: object) -> str:
    """The path of a function; with what tells it from others where no path leads to it: arguments, or its `repr`.

    >>> path_of(functools.partial(traceback.format_tb, limit=1))
    'traceback:format_tb(limit=1)'
    """
    if isinstance(target, functools.partial):
        bound = [*map(repr, target.args), *(f"{name}={value!r}" for name, value in target.keywords.items())]
        return f"{path_of(target.func)}({', '.join(bound)})"
    kind = type(target)
    has_repr = kind.__repr__ is not object.__repr__
    function = getattr(target, "__qualname__", None) or (repr(target) if has_repr else f"{kind.__qualname__}(...)")
    return f"{getattr(target, '__module__', 'builtins')}:{function}"


def locate_error(error: Exception) -> str:
    """Type and message of an error, and the last line of the user's that led to it: no library's, if there is one.

    None of ours either: where the user's code could not be called at all, the message says it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    last = of_user[-1] if of_user else frames[-1]
    is_ours = last.filename.startswith(f"{_PACKAGE}{os.sep}")
    place = "" if is_ours else f" ({last.filename}, line {last.lineno})"
    return f"{type(error).__name__}: {str(error).rstrip('.')}{place}"


REPLACED = {"overlap_rollout": "rollouts_ahead: 1", "model": "model_name_or_path"}
"""A setting that is gone, or has another name elsewhere -> what says the same here."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The question "Did you mean ...?" with the closest known name, starting with a blank; "" if none is close.

    `known` has the most important names first, and the first of equally close ones is taken.

    >>> did_you_mean("learning_rat", ["learning_rate", "beta"])
    " Did you mean 'learning_rate'?"
    >>> did_you_mean("vllm_server_urls", ["vllm_server_host", "servers.urls"])
    " Did you mean 'servers.urls'?"
    >>> did_you_mean("overlap_rollout", ["rollouts_ahead", "retry_failed"])
    " Did you mean 'rollouts_ahead: 1'?"
    """
    listed = [*known]
    given = name.lower().replace("-", "_")
    if given in REPLACED and REPLACED[given].partition(":")[0] in listed:
        return f" Did you mean {REPLACED[given]!r}?"
    found = _key_of_a_mapping(given, listed) or closest(name, listed)
    return f" Did you mean {found!r}?" if found else ""


def _key_of_a_mapping(given: str, known: Iterable[str]) -> str | None:
    """A key by its bare name, or with its mapping's old prefix: vllm_server_urls for servers.urls."""
    keys = []
    for item in known:
        group, _, key = item.rpartition(".")
        prefix = given.removesuffix(key).strip("_") if group and f"_{given}".endswith(f"_{key}") else None
        if prefix is not None and (not prefix or group.rstrip("s") in prefix):
            keys.append(item)
    return max(keys, key=len, default=None)

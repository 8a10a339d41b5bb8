"""Settings in groups, read from their dataclasses: for the help of every command, recipe.yaml and docs/options.md."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from agent_r1_trl.features import mappings

_HEADING = re.compile(r"    # ---- (?P<title>[^(]+?)\s*(?:\(.*)?$")
_FIELD = re.compile(r"    (?P<name>\w+): .+ = ")
_TITLES = {
    "TaskArguments": "Task and data",
    "TrainArguments": "Task and data",
    "RolloutSettings": "Limits of a rollout",
    "MultiTurnPPOConfig": "PPO",
    "ModelConfig": "Model and adapter (TRL)",
}
_LIBRARIES = {3: "Training (TRL)", 4: "Training (transformers)"}


def option_groups(*kinds: type) -> dict[str, list[Any]]:
    """Title -> fields of dataclasses, each in the group of the first class that declares it; ours come first."""
    bases: list[tuple[type, dict[str, Any]]] = []
    for kind in kinds:
        known = {item.name: item for item in dataclasses.fields(kind) if item.init}
        bases += [(base, known) for base in reversed(kind.__mro__)]
    bases.sort(key=lambda item: _rank(item[0]))
    groups: dict[str, list[Any]] = {}
    seen: set[str] = set()
    for base, known in bases:
        sections = _sections(base) if base.__module__.startswith("agent_r1_trl.") else {}
        title = _TITLES.get(base.__name__, _LIBRARIES.get(_rank(base), "Settings"))
        for name in inspect.get_annotations(base):
            if name in known and name not in seen:
                seen.add(name)
                groups.setdefault(sections.get(name, title), []).append(known[name])
    for kind in kinds:
        for flag, group in mappings(kind).items():
            groups[f"Keys of {flag}"] = list(_keys(flag, group))
    return groups


def _keys(flag: str, group: type) -> Iterator[Any]:
    """The keys of a mapping as fields that are named `setting.key`."""
    for item in dataclasses.fields(group):
        key: Any = copy.copy(item)
        key.name = f"{flag}.{item.name}"
        yield key


def _rank(kind: type) -> int:
    """0: ours; then TRL's of the model, TRL's and transformers'."""
    if kind.__name__ == "ModelConfig":
        return 2
    return {"trl": 3, "transformers": 4}.get(kind.__module__.partition(".")[0], 0)


def _sections(kind: type) -> dict[str, str]:
    """Heading of each field, as the comments of the class have it."""
    heading, sections = "", {}
    for line in inspect.getsource(kind).splitlines():
        if title := _HEADING.match(line):
            heading = title["title"].strip()
            heading = heading if heading.startswith("vLLM") else heading[0].upper() + heading[1:]
        elif (named := _FIELD.match(line)) and heading:
            sections[named["name"]] = heading
    return sections


def default_text(item: dataclasses.Field[Any]) -> str:
    """The default of a field as YAML writes it."""
    value = item.default
    if value is dataclasses.MISSING:
        value = item.default_factory() if item.default_factory is not dataclasses.MISSING else None
    value = getattr(value, "value", value)  # of an Enum
    if value is None or isinstance(value, bool | list | dict):
        return json.dumps(value)
    return str(value) or '""'


def help_of(item: dataclasses.Field[Any]) -> str:
    """The metadata of a field."""
    return " ".join(str(item.metadata.get("help") or "").split()).replace("%%", "%")


class HelpPage(NamedTuple):
    """The parts of a command's `--help`, for `help_text`."""

    about: str
    kinds: tuple[type, ...]
    """Dataclasses of its settings."""


def help_text(command: str, about: str, kinds: Sequence[Any]) -> str:
    """The help of a command that reads the settings of some dataclasses from recipes."""
    width = min(shutil.get_terminal_size().columns, 120)
    use = (
        f"{about} Each setting has the same name in a recipe and on the command line, which wins. --config RECIPE "
        "names a YAML file with any of these settings, or a recipe that comes with the package (agent-r1-trl train "
        "--list-recipes shows them)."
    )
    lines = [f"usage: {command} [-h, --help] [--config RECIPE] [--name value ...]", "", *textwrap.wrap(use, width)]
    for title, fields in option_groups(*kinds).items():
        lines += ["", f"{title}:"]
        for item in fields:
            names = [f"--{item.name}", *item.metadata.get("aliases", ())]
            names += [f"--no_{item.name}"] if item.default is True else []
            choices = " {" + ",".join(map(str, item.metadata["choices"])) + "}" if item.metadata.get("choices") else ""
            text = f"{help_of(item)} [default: {default_text(item)}]".lstrip()
            lines += [f"  {', '.join(names)}{choices}", textwrap.indent(textwrap.fill(text, width - 6), " " * 6)]
    return "\n".join(lines) + "\n"

"""All settings of `train`: `train --help` and docs/options.md.

Importing TRL to list its settings takes seconds. The list is therefore made from the dataclasses once, by
`python -m agent_r1_trl.cli.options` (`make options`), and kept beside this file; a test compares the two.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("train_options.json")
PAGE = Path("docs/options.md")
_HEADING = re.compile(r"    # ---- (?P<title>[^(]+?)\s*(?:\(.*)?$")
_FIELD = re.compile(r"    (?P<name>\w+): [^=]+ = ")
_INTRODUCTION = """\
# Options of training

Every setting of `agent-r1-trl train`, ours first. A recipe writes `name: value` and the command line `--name value`;
in a script, all but those of task, data and model are arguments of `MultiTurnGRPOConfig` or `MultiTurnPPOConfig`.
Where PPO has another default, both stand there. This page is made from the code by `make options`.
"""


def show_help(command: str, argv: Sequence[str], about: str, groups: Callable[[], list[dict[str, Any]]]) -> bool:
    """Print the help of a command if it is asked for, without importing what the command needs to run.

    Args:
        command: as the user types it.
        argv: its arguments.
        about: what the command does, in one sentence.
        groups: makes the groups of its settings, each with `title` and `options`.

    Returns:
        Whether it was asked for.
    """
    if not {"-h", "--help"} & set(argv):
        return False
    print(help_text(command, about, groups()), end="")
    return True


def help_text(command: str, about: str, groups: list[dict[str, Any]], *, width: int | None = None) -> str:
    """The help of a command; see `show_help`.

    Args:
        command: as the user types it.
        about: what it does, in one sentence.
        groups: its settings.
        width: columns; None: those of the terminal.
    """
    width = min(width or shutil.get_terminal_size().columns, 120)
    use = (
        f"{about} Each setting has the same name in a recipe and on the command line, which wins. --config RECIPE "
        "names a YAML file with any of these settings, or a recipe that comes with the package (agent-r1-trl train "
        "--list-recipes shows them)."
    )
    if any(group["title"].endswith("(transformers)") for group in groups):
        use += " Settings that newer releases of TRL and transformers add are taken, too."
    usage = f"usage: {command} [-h, --help] [--config RECIPE] [--name value ...]"
    lines = [usage, "", *textwrap.wrap(use, width)]
    for group in groups:
        lines += ["", f"{group['title']}:"]
        for option in group["options"]:
            lines += _option_lines(option, width)
    return "\n".join(lines) + "\n"


def _option_lines(option: dict[str, Any], width: int) -> list[str]:
    off = [f"no_{option['name']}"] if option["default"] == "true" else []
    flags = ", ".join(f"--{name}" for name in (option["name"], *option["aliases"], *off))
    choices = " {" + ",".join(map(str, option["choices"])) + "}" if option["choices"] else ""
    text = f"{option['help']} [default: {_defaults(option)}]".lstrip()
    indent = " " * 6
    return [f"  {flags}{choices}", *textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)]


def _defaults(option: dict[str, Any]) -> str:
    own, ppo = option["default"], option.get("default_ppo", option["default"])
    return own if own == ppo else f"{own}; PPO: {ppo}"


def read_options(*titles: str) -> list[dict[str, Any]]:
    """The groups of `train`'s settings as they are kept beside this file: those of these titles, or all."""
    groups = json.loads(LIST.read_text(encoding="utf-8"))
    return [group for group in groups if not titles or group["title"] in titles]


def options_of(**kinds: Any) -> list[dict[str, Any]]:
    """Groups of the settings of light dataclasses.

    Args:
        kinds: title with underscores -> dataclass; a setting stands in the first group that has it, with the default
            of the last one, which is the command's own.
    """
    own = {item.name: item for kind in kinds.values() for item in dataclasses.fields(kind)}
    seen: set[str] = set()
    groups = []
    for title, kind in kinds.items():
        names = [item.name for item in dataclasses.fields(kind) if item.init and item.name not in seen]
        seen |= set(names)
        groups.append({"title": title.replace("_", " "), "options": [_option(own[name], None) for name in names]})
    return groups


def page_text() -> str:
    """The text of docs/options.md."""
    parts = [_INTRODUCTION]
    for group in read_options():
        rows = [f"| `{item['name']}` | {_cell(_defaults(item))} | {_cell(_help(item))} |" for item in group["options"]]
        parts.append("\n".join([f"## {group['title']}", "", "| option | default | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _help(option: dict[str, Any]) -> str:
    choices = ", ".join(map(repr, option["choices"]))
    return f"{option['help']} Choices: {choices}." if choices else str(option["help"])


def _cell(text: str) -> str:
    """Text in a table of Markdown; what looks like a tag or a link in it stays text.

    Between backticks a backslash would be shown, but for the one before a bar.
    """
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(re.sub(r"(\|)" if part.startswith("`") else r"([|<\[\]*_])", r"\\\1", part) for part in parts)


# ---------------------------------------------------------------- from the dataclasses


def make_options() -> list[dict[str, Any]]:
    """The groups of settings, from the dataclasses."""
    from agent_r1_trl.cli.arguments import TaskArguments, TrainArguments
    from agent_r1_trl.rollout.limits import RolloutSettings
    from agent_r1_trl.trainers.config import MultiTurnConfig, MultiTurnGRPOConfig
    from agent_r1_trl.trainers.fault_settings import FaultSettings
    from agent_r1_trl.trainers.ppo_config import MultiTurnPPOConfig
    from agent_r1_trl.trainers.stability_settings import StabilitySettings
    from agent_r1_trl.trainers.trl_arguments import ModelConfig

    def fields_of(kind: Any) -> dict[str, Any]:
        return {item.name: item for item in dataclasses.fields(kind)}

    ppo, shared = fields_of(MultiTurnPPOConfig), fields_of(MultiTurnGRPOConfig)
    groups: list[dict[str, Any]] = []
    seen: set[str] = set()

    def add(kind: Any, title: str, fields: Any) -> None:
        sections = _sections(kind) if kind.__module__.startswith("agent_r1_trl.") else {}
        for name in inspect.get_annotations(kind):
            if name in seen or name not in fields or not fields[name].init:
                continue
            seen.add(name)
            heading = sections.get(name, title)
            heading = heading if heading.startswith("vLLM") else heading[0].upper() + heading[1:]
            if not groups or groups[-1]["title"] != heading:
                groups.append({"title": heading, "options": []})
            groups[-1]["options"].append(_option(fields[name], ppo.get(name)))

    arguments = fields_of(TrainArguments)
    add(TaskArguments, "Task and data", arguments)
    add(TrainArguments, "Task and data", arguments)
    for kind in RolloutSettings.__mro__[:-1]:
        add(kind, "Limits of a rollout", shared)
    add(MultiTurnConfig, MultiTurnConfig.__name__, shared)
    add(MultiTurnPPOConfig, "PPO", {name: item for name, item in ppo.items() if name not in shared})
    for kind in (StabilitySettings, FaultSettings):
        add(kind, kind.__name__, shared)
    for kind in reversed(ModelConfig.__mro__[:-1]):
        add(kind, "Model and adapter (TRL)", fields_of(ModelConfig))
    for kind in MultiTurnConfig.__mro__:
        library = kind.__module__.partition(".")[0]
        if library in ("trl", "transformers"):
            add(kind, "Training (TRL)" if library == "trl" else "Training (transformers)", shared)
    return _merged(groups)


def _merged(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for group in groups:
        merged.setdefault(group["title"], {"title": group["title"], "options": []})["options"] += group["options"]
    return list(merged.values())


def _sections(kind: type) -> dict[str, str]:
    """Heading of each field, as the comments of the class have it."""
    heading, sections = None, {}
    for line in inspect.getsource(kind).splitlines():
        if title := _HEADING.match(line):
            heading = title["title"].strip()
        elif (named := _FIELD.match(line)) and heading:
            sections[named["name"]] = heading
    return sections


def _option(item: Any, of_ppo: Any) -> dict[str, Any]:
    option = {
        "name": item.name,
        "aliases": [alias.lstrip("-") for alias in item.metadata.get("aliases", ())],
        "choices": list(item.metadata.get("choices") or ()),
        "default": _default(item),
        "help": " ".join(str(item.metadata.get("help") or "").split()).replace("%%", "%"),
    }
    if of_ppo is not None and _default(of_ppo) != option["default"]:
        option["default_ppo"] = _default(of_ppo)
    return option


def _default(item: Any) -> str:
    value = item.default
    if value is dataclasses.MISSING:
        value = item.default_factory() if item.default_factory is not dataclasses.MISSING else None
    value = getattr(value, "value", value)  # of an Enum
    text = "null" if value is None else json.dumps(value) if isinstance(value, bool | list | dict) else str(value)
    return text if text != "" else '""'


def main() -> None:
    """Write the list and the page anew; run it from the repository."""
    LIST.write_text(json.dumps(make_options(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page_text(), encoding="utf-8")


if __name__ == "__main__":
    main()

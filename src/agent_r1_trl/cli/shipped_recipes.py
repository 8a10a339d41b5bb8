"""The recipes that come with the package, by name: `multihop_qa/grpo/cpu` is multihop_qa/grpo/config_cpu.yaml.

Their paths begin with `recipes/`, as in the repository; in a recipe that is called by its name they mean the files of
the package, so that it runs from any directory.
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


def recipe_list() -> str:
    """What `train --list-recipes` prints: a name and the first comment of the file on each line."""
    recipes = shipped_recipes()
    width = max(map(len, recipes), default=0)
    lines = [f"{name:{width}}  {_summary(path)}".rstrip() for name, path in recipes.items()]
    return "\n".join([*lines, "", f"agent-r1-trl train --config NAME runs one; the files are in {FOLDER}."]) + "\n"


def _summary(path: Path) -> str:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip().partition(". ")[0].rstrip(".") if first.startswith("#") else ""

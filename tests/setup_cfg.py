"""What setup.cfg declares."""

import configparser
import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

SETUP = Path(__file__).resolve().parents[1] / "setup.cfg"


def declared() -> dict[str, dict[str, SpecifierSet]]:
    """Per list of setup.cfg (`""` is install_requires, the others are extras) the ranges of its packages."""
    config = configparser.ConfigParser()
    config.read(SETUP, encoding="utf-8")
    lists = {"": config["options"]["install_requires"], **config["options.extras_require"]}
    found = {}
    for extra, text in lists.items():
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("#", "agent-r1-trl"))]
        found[extra] = {plain(item.name): item.specifier for item in map(Requirement, lines)}
    return found


def declared_pythons() -> tuple[SpecifierSet, list[str]]:
    """`python_requires`, and the minor releases that the classifiers name."""
    config = configparser.ConfigParser()
    config.read(SETUP, encoding="utf-8")
    named = re.findall(r"Python :: (3\.\d+)", config["metadata"]["classifiers"])
    return SpecifierSet(config["options"]["python_requires"]), named


def plain(name: str) -> str:
    """The name of a package as indexes compare names.

    >>> plain("docstring_parser"), plain("PyYAML")
    ('docstring-parser', 'pyyaml')
    """
    return re.sub(r"[-_.]+", "-", name).lower()

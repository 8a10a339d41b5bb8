"""Optional parts of a run: each folder is one feature, and the package trains without it.

`FEATURES` is the one list of them. Nothing outside imports a feature's modules by name: whoever needs one asks
`feature`, which refuses by name what is not installed.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from types import ModuleType
from typing import Any, NamedTuple

from agent_r1_trl.settings import SettingsGroup, groups_of


class FeatureRow(NamedTuple):
    """One row of the table."""

    about: str
    """Its purpose, in messages."""
    settings: str | None
    """Training arguments that it alone reads, with blanks between: without it, another value than their default is
    refused. Its package then has `make_callbacks(config, train_dataset)`, the callbacks that the settings ask for,
    and a module `checks` where settings have to fit others. None: it takes no part in training."""
    commands: dict[str, str]
    """Commands of `agent-r1-trl` that it brings: name -> help. Command `x` is the module `x_command` of its folder."""
    has_mapping: bool = False
    """Whether its `settings` are mappings: setting -> class of the keys is `GROUPS` of its module `settings`."""


FEATURES = {
    "journal": FeatureRow("every turn on disk, for resumes and replays", "journal", {}, has_mapping=True),
    "reliability": FeatureRow(
        "failure budget, tool outages, report of learning, steps that are not finite, signals, ranks",
        "failures outages",
        {},
        has_mapping=True,
    ),
    "sampling": FeatureRow(
        "group filter, dynamic sampling and curriculum",
        "sampling",
        {},
        has_mapping=True,
    ),
    "echo_trap": FeatureRow(
        "the watch for collapsing runs, and the guard that acts on it",
        "echo",
        {},
        has_mapping=True,
    ),
    "progress": FeatureRow("the block in a terminal, and the lines elsewhere", "progress", {}),
    "sandbox": FeatureRow("tools that run a model's code", None, {}),
    "games": FeatureRow("games as environments", None, {}),
    "search": FeatureRow("search servers", None, {}),
    "doors": FeatureRow("agents and environments of others as environments", None, {}),
    "distillation": FeatureRow("self-distillation with hints", None, {}),
    "inspector": FeatureRow("a run as one HTML file", None, {}),
    "doctor": FeatureRow(
        "checks before a run",
        None,
        {
            "doctor": "check model, template, tools and environment before a run",
            "memory": "estimate the memory that a recipe needs on each GPU",
        },
    ),
    "hub": FeatureRow(
        "cards, secrets and uploads",
        "push",
        {
            "export": "write recorded trajectories as a data set, or as conversations for SFT",
            "push": "send a trained agent, or its trajectories, to the Hub",
        },
        has_mapping=True,
    ),
    "serve": FeatureRow(
        "talking to a trained agent",
        None,
        {
            "chat": "talk to an agent, with its tools, as it was trained",
            "serve": "serve an agent with its tools",
            "merge": "write a plain Hugging Face model from an adapter or a checkpoint",
        },
    ),
}
"""Callbacks are called in this order; what is around a run is so from the outside in."""


MAPPINGS = tuple(name for row in FEATURES.values() if row.has_mapping for name in (row.settings or "").split())
"""Training arguments that are mappings of a feature."""


def has_feature(name: str) -> bool:
    """Whether the folder of a feature is there."""
    return name in FEATURES and importlib.util.find_spec(f"{__name__}.{name}") is not None


def mappings_of(name: str) -> dict[str, Any]:
    """Setting -> class of its keys, of a feature whose settings are mappings; none where it is not there."""
    if not (FEATURES[name].has_mapping and has_feature(name)):
        return {}
    found: dict[str, Any] = importlib.import_module(f"{__name__}.{name}.settings").GROUPS
    return found


def mappings(kind: Any) -> dict[str, type[SettingsGroup]]:
    """Each field of a dataclass that is a mapping -> class of its keys; without those of features that are missing."""
    of_features: dict[str, Any] = {}
    for name in FEATURES:
        of_features |= mappings_of(name)
    found = dict(groups_of(kind))
    for flag in kind.__dataclass_fields__:
        if flag in of_features:
            found[flag] = of_features[flag]
    return found


def keys_of(kind: Any) -> list[str]:
    """The keys of all mappings of a dataclass, as `setting.key`."""
    return [f"{flag}.{item.name}" for flag, group in mappings(kind).items() for item in dataclasses.fields(group)]


def feature(name: str, asked_by: str) -> ModuleType:
    """The package of a feature.

    Args:
        name: a key of `FEATURES`.
        asked_by: what needs it, such as a setting and its value, for the message.

    Raises:
        ValueError: it is not there.
    """
    if not has_feature(name):
        raise ValueError(
            f"{asked_by}: needs the feature {name!r} ({FEATURES[name].about}), which this installation lacks. Install "
            "the whole package, or remove the setting."
        )
    return importlib.import_module(f"{__name__}.{name}")

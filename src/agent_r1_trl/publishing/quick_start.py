"""The lines of the card that start the agent: commands of a shell, which a test runs as they stand there."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

from agent_r1_trl.environments.trl_adapters import FunctionToolsEnv, SingleTurnEnv
from agent_r1_trl.rollout.limits import RolloutSettings
from agent_r1_trl.safe_text import markdown_code, shown, shown_all

INSTALL = "pip install agent-r1-trl"
READ_SETTINGS = (
    "thinking",
    "chat_template_kwargs",
    "response_template",
    "context_policy",
    "context_turns",
    "context_tokens",
    "summary_tokens",
    "summary_prompt",
    "max_tokens_per_turn",
    "max_observation_tokens",
    "max_invalid_calls",
)
"""Settings that decide what the model reads and writes in a turn, in training and in a chat."""
_DEFAULTS: dict[str, Any] = {"thinking": "keep"} | {
    item.name: item.default for item in dataclasses.fields(RolloutSettings) if item.name in READ_SETTINGS
}


def quick_start_section(model: str, recipe: Mapping[str, Any], factory: Callable[..., Any] | None) -> str:
    """The commands that start a chat with the agent and its tools.

    Args:
        model: Hub id or directory.
        recipe: settings of the training; empty if they are not known.
        factory: of the environment; None if there is none, or if it cannot be made here.
    """
    options = agent_options(recipe, factory)
    note = "It was trained without tools."
    if options:
        note = (
            "The agent's tools come with its environment. What the lines below name, a corpus or a module of the "
            "author's, has to be there."
        )
    elif factory is not None and not _has_no_tools(factory):
        name = str(getattr(getattr(factory, "func", factory), "__name__", "environment"))
        note = (
            f"Its tools come from the code of the training ({markdown_code(name)}), which is not in this repository: "
            "give their import paths, `--env my_module.MyEnv` or `--tools my_module:search`."
        )
    elif not recipe:
        note = (
            "Its tools are not recorded here: `--tools my_module:search` gives it some, or `--env my_module.MyEnv` an "
            "environment."
        )
    command = shlex.join(shown(part) for part in ("agent-r1-trl", "chat", model, *options, *setting_options(recipe)))
    fence = "```"
    while fence in command:
        fence += "`"
    return "\n".join(["## Quick start", "", note, "", f"{fence}bash", INSTALL, command, fence])


def agent_options(recipe: Mapping[str, Any], factory: Callable[..., Any] | None) -> list[str]:
    """The options that name the environment or the tools; none where a reader cannot import them.

    Args:
        recipe: names it under `env` and `env_kwargs`, or under `tools`, if it was started from one.
        factory: of the environment, which is looked at if there is no such name.
    """
    if recipe.get("env"):
        named = recipe.get("env_kwargs")
        named = named if isinstance(named, Mapping) else {}
        given = {name: value for name, value in named.items() if value is not None}
        return _env_options(str(recipe["env"]), _without_defaults(given, factory))
    if recipe.get("tools"):
        tools = recipe["tools"]
        return ["--tools", *map(str, tools if isinstance(tools, list) else [tools])]
    if factory is None or _has_no_tools(factory):
        return []
    made_by: Any = factory
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    if isinstance(factory, functools.partial):
        made_by, arguments, keywords = factory.func, factory.args, factory.keywords
    if made_by is FunctionToolsEnv and len(arguments) == 1:
        paths = [_path_of(getattr(item, "fn", item), ":") for item in arguments[0]]
        return ["--tools", *paths] if all(paths) and not keywords else []  # type: ignore[list-item]
    path = _path_of(made_by, ".")
    return [] if path is None or arguments else _env_options(path, keywords)


def setting_options(recipe: Mapping[str, Any]) -> list[str]:
    """The settings of the training that a chat has to be told, because they are not the defaults."""
    options = []
    for name in READ_SETTINGS:
        value = recipe.get(name)
        if value in (None, {}, "") or value == _DEFAULTS.get(name):
            continue
        text = value if isinstance(value, str) else _json_of(value)
        options += [f"--{name}", text] if text is not None else []
    return options


def _env_options(name: str, keywords: Mapping[str, Any]) -> list[str]:
    text = _json_of(keywords)
    if text is None:
        return []
    return ["--env", name, *(["--env_kwargs", text] if keywords else [])]


def _without_defaults(keywords: Mapping[str, Any], factory: Callable[..., Any] | None) -> dict[str, Any]:
    """The arguments that differ from the defaults of what makes the environment."""
    made_by = factory.func if isinstance(factory, functools.partial) else factory
    if made_by is None:
        return dict(keywords)
    defaults = {item.name: item.default for item in inspect.signature(made_by).parameters.values()}
    return {name: value for name, value in keywords.items() if name not in defaults or defaults[name] != value}


def _has_no_tools(factory: Callable[..., Any]) -> bool:
    return (factory.func if isinstance(factory, functools.partial) else factory) is SingleTurnEnv


def _path_of(target: Any, mark: str) -> str | None:
    """The import path of a class or a function; None where a reader cannot import it."""
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        return None
    found = getattr(sys.modules.get(module), name, None)
    return f"{module}{mark}{name}" if getattr(found, "fn", found) is target else None


def _json_of(value: Any) -> str | None:
    """A value as JSON, with secrets masked; None if it is none."""
    try:
        text = json.dumps(shown_all(value), ensure_ascii=False)
        return text if json.loads(text) == shown_all(value) else None
    except (TypeError, ValueError):
        return None

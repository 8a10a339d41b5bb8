"""What our trainers add to TRL's model card: environment, tools, settings, result, method."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from agent_r1_trl.environments.factory import env_name, tool_schemas
from agent_r1_trl.publishing.sections import (
    SETTINGS,
    environment_section,
    method_section,
    metrics_section,
    settings_section,
    tools_section,
)
from agent_r1_trl.safe_text import markdown

if TYPE_CHECKING:
    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

LIBRARIES = {"agent-r1-trl": "Agent-R1-TRL", "peft": "PEFT"}
"""Distributions that TRL's list of versions leaves out, and their names there."""
VERSIONS, CITATIONS = "### Framework versions\n\n", "## Citations"
"""Headings of TRL's template where our parts go."""


def add_sections(path: Path, trainer: MultiTurnTrainer) -> None:
    """Add our sections to the card that TRL wrote, in front of its citations.

    Args:
        path: the card, a `README.md`.
        trainer: the one that trained the model.
    """
    card = path.read_text(encoding="utf-8")
    # TRL's template links to the base model, also where a local folder has no page on the Hub.
    card = card.replace("[None](https://huggingface.co/None)", "a local checkpoint")
    card = card.replace(VERSIONS, VERSIONS + _versions(), 1)
    before, heading, after = card.partition(CITATIONS)
    path.write_text(f"{before.rstrip()}\n\n{_sections(trainer)}\n\n{heading}{after}", encoding="utf-8")


def _sections(trainer: MultiTurnTrainer) -> str:
    args, factory = trainer.args, trainer.env_factory
    parts = []
    if factory is not None:
        names = (*SETTINGS, *args.estimator.options)
        settings = {name: getattr(args, name) for name in names if hasattr(args, name)}
        parts = [
            environment_section(env_name(factory)),
            tools_section(tool_schemas(factory)),
            settings_section(settings, args.estimator),
        ]
    parts += [metrics_section(trainer.state.log_history), _guard_section(trainer), method_section(args.estimator)]
    return "\n\n".join(part for part in parts if part)


def _guard_section(trainer: MultiTurnTrainer) -> str:
    """What was done about a collapse; nothing if there was no guard, or nothing to do."""
    guard = trainer.echo_guard
    if guard is None or not guard.state.events:
        return ""
    names = ("step", "state", "action", "outcome", "text")
    rows = [" | ".join(markdown(str(event[name])) for name in names) for event in guard.state.events]
    steps = f"Steps made: {guard.state.num_steps}, those included that a roll back has undone."
    table = ["| step | the run was | action | outcome | what it did |", "|---|---|---|---|---|"]
    return "\n".join(["## What the guard did", "", steps, "", *table, *[f"| {row} |" for row in rows]])


def _versions() -> str:
    lines = []
    for distribution, name in LIBRARIES.items():
        try:
            lines.append(f"- {name}: {version(distribution)}\n")
        except PackageNotFoundError:  # an optional library
            continue
    return "".join(lines)

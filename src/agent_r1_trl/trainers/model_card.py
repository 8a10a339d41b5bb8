"""What our trainers add to TRL's model card: environment, tools, settings, result, method."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_trl.environments.factory import env_name, tool_schemas
from agent_r1_trl.safe_text import markdown, markdown_code, shown

if TYPE_CHECKING:
    from agent_r1_trl.advantages.estimators import Estimator
    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

AGENT_R1 = {
    "title": "Agent-R1: Training Powerful LLM Agents with End-to-End Reinforcement Learning",
    "id": "2511.14460",
    "citation": """\
@misc{cheng2025agentr1,
  title         = {{Agent-R1: Training Powerful LLM Agents with End-to-End Reinforcement Learning}},
  author        = {Cheng, Mingyue and Ouyang, Jie and Yu, Shuo and Yan, Ruiran and Luo, Yucong and Liu, Zirui and
                   Wang, Daoyu and Liu, Qi and Chen, Enhong},
  year          = {2025},
  eprint        = {2511.14460},
  archivePrefix = {arXiv},
}""",
}
"""The paper of both trainers, as TRL's `_paper`."""
PAPERS = (
    (AGENT_R1["title"], AGENT_R1["id"]),
    ("RAGEN: Understanding Self-Evolution in LLM Agents via Multi-Turn Reinforcement Learning", "2504.20073"),
)
LIBRARIES = {"agent-r1-trl": "Agent-R1-TRL", "peft": "PEFT"}
"""Distributions that TRL's list of versions leaves out, and their names there."""
ROLLOUT_SETTINGS = (
    "max_turns",
    "max_tokens_per_turn",
    "max_completion_length",
    "max_observation_tokens",
    "max_invalid_calls",
    "truncated_trajectories",
    "advantage_estimator",
    "loss_mask",
    "advantage_mask",
    "num_generations",
    "rollout_shape",
    "temperature",
    "learning_rate",
    "beta",
    "critic",
)
"""Settings that every card lists; those that the estimator reads come with its row."""
HEADLINE_METRICS = ("reward", "reward/process", "reward/outcome", "rollout/turns", "rollout/tool_calls")


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
    estimator = trainer.args.estimator
    sections = []
    if trainer.env_factory is not None:
        sections += [
            f"## Environment\n\n{markdown_code(env_name(trainer.env_factory))}\n\nThe chat template saved with the "
            "tokenizer is the one that the model was trained with.",
            _tools_section(trainer),
            _settings_section(trainer.args, estimator),
        ]
    sections += [_metrics_section(trainer.state.log_history), _guard_section(trainer), _method_section(estimator)]
    return "\n\n".join(section for section in sections if section)


def _tools_section(trainer: MultiTurnTrainer) -> str:
    schemas = tool_schemas(trainer.env_factory) if trainer.env_factory is not None else []
    if not schemas:
        return "## Tools\n\nNone, or chosen for each row."
    lines = ["## Tools"]
    for schema in schemas:
        function = schema["function"]
        lines.append(
            f"- {markdown_code(function['name'])}: {markdown(str(function.get('description') or ''))}\n\n"
            f"  ```json\n  {shown(json.dumps(function.get('parameters', {}), ensure_ascii=False))}\n  ```"
        )
    return "\n\n".join(lines)


def _settings_section(args: Any, estimator: Estimator) -> str:
    names = dict.fromkeys((*ROLLOUT_SETTINGS, *estimator.options))
    rows = [f"| {name} | {markdown(str(getattr(args, name)))} |" for name in names if hasattr(args, name)]
    return "\n".join(["## Training settings", "", "| setting | value |", "|---|---|", *rows])


def _metrics_section(history: list[dict[str, Any]]) -> str:
    """First and last logged value of the headline metrics, train and eval, and of the environment's own."""
    values: dict[str, list[float]] = {}
    for entry in history:
        for name, value in entry.items():
            plain = name.removeprefix("eval_")
            if isinstance(value, int | float) and (plain in HEADLINE_METRICS or plain.startswith("env/")):
                values.setdefault(name, []).append(float(value))
    if not values:
        return ""
    rows = [f"| {markdown(name)} | {series[0]:.4g} | {series[-1]:.4g} |" for name, series in sorted(values.items())]
    return "\n".join(["## Metrics", "", "| metric | first | last |", "|---|---|---|", *rows])


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


def _method_section(estimator: Estimator) -> str:
    summary = "; ".join(part for part in (estimator.baseline, estimator.credit) if part)
    papers = [f"- [{title}](https://arxiv.org/abs/{arxiv_id})" for title, arxiv_id in (*PAPERS, *estimator.papers)]
    return "\n".join(["## Method", "", f"Advantages: `{estimator.name}`{summary and f' ({summary})'}", "", *papers])


def _versions() -> str:
    lines = []
    for distribution, name in LIBRARIES.items():
        try:
            lines.append(f"- {name}: {version(distribution)}\n")
        except PackageNotFoundError:  # an optional library
            continue
    return "".join(lines)

"""The parts of a model card: method, tools, settings, logged figures. Texts of others are escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agent_r1_trl.safe_text import markdown, markdown_code, shown

if TYPE_CHECKING:
    from agent_r1_trl.advantages.estimators import Estimator

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
SETTINGS = (
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


def is_headline(name: str) -> bool:
    """Whether a logged name, of training or evaluation, is shown in the card."""
    plain = name.removeprefix("eval_")
    if plain in HEADLINE_METRICS or plain.startswith("env/"):
        return True
    # Of several evaluation sets, the metrics of each have its name: eval_hard_reward.
    return plain != name and (plain.endswith(tuple(f"_{metric}" for metric in HEADLINE_METRICS)) or "_env/" in plain)


def environment_section(name: str) -> str:
    """The environment by its name."""
    return (
        f"## Environment\n\n{markdown_code(name)}\n\nThe chat template saved with the tokenizer is the one that the "
        "model was trained with."
    )


def data_section(names: Mapping[str, str]) -> str:
    """The data sets.

    Args:
        names: what it was used for -> Hub id or path.
    """
    rows = [f"- {markdown(use)}: {markdown_code(name)}" for use, name in names.items() if name]
    return "\n".join(["## Data", "", *rows]) if rows else ""


def tools_section(schemas: Sequence[Mapping[str, Any]]) -> str:
    """The tools with their schemas.

    Args:
        schemas: JSON schemas in the form that chat templates take.
    """
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


def settings_section(settings: Mapping[str, Any], estimator: Estimator | None) -> str:
    """The settings that decide what was trained; those that are not known are left out."""
    names = dict.fromkeys((*SETTINGS, *(estimator.options if estimator else ())))
    rows = [f"| {name} | {markdown(str(settings[name]))} |" for name in names if name in settings]
    return "\n".join(["## Training settings", "", "| setting | value |", "|---|---|", *rows]) if rows else ""


def metrics_section(history: Iterable[Mapping[str, Any]]) -> str:
    """First and last logged value of the headline metrics, train and eval, and of the environment's own."""
    values: dict[str, list[float]] = {}
    for entry in history:
        for name, value in entry.items():
            if isinstance(value, int | float) and is_headline(name):
                values.setdefault(name, []).append(float(value))
    if not values:
        return ""
    rows = [f"| {markdown(name)} | {series[0]:.4g} | {series[-1]:.4g} |" for name, series in sorted(values.items())]
    return "\n".join(["## Metrics", "", "| metric | first | last |", "|---|---|---|", *rows])


def method_section(estimator: Estimator | None) -> str:
    """The estimator with what it compares, and the papers."""
    papers, said = [*PAPERS], []
    if estimator is not None:
        summary = "; ".join(part for part in (estimator.baseline, estimator.credit) if part)
        said = [f"Advantages: `{estimator.name}`{summary and f' ({summary})'}", ""]
        papers += estimator.papers
    return "\n".join(
        ["## Method", "", *said, *(f"- [{title}](https://arxiv.org/abs/{arxiv_id})" for title, arxiv_id in papers)]
    )

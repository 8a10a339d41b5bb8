"""The parts of a model card: method, tools, settings, figures, a quick start. Texts of others are escaped."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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
NOT_METRICS = ("num_examples", "num_generations", "duration_s")
"""Numbers of an evaluation that are no results."""


def is_headline(name: str) -> bool:
    """Whether a logged name, of training or evaluation, is shown in the card."""
    plain = name.removeprefix("eval_")
    return plain in HEADLINE_METRICS or plain.startswith("env/")


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


# ---------------------------------------------------------------- results


def results_of(evaluation: Mapping[str, Any]) -> dict[str, tuple[float, tuple[float, float] | None]]:
    """Metric -> (value, 95% interval) of an `evaluation.json`; what has no value is left out."""
    intervals = evaluation.get("intervals")
    intervals = intervals if isinstance(intervals, Mapping) else {}
    results: dict[str, tuple[float, tuple[float, float] | None]] = {}
    for name, value in evaluation.items():
        if name in NOT_METRICS or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        bounds = intervals.get(name)
        is_pair = isinstance(bounds, list | tuple) and len(bounds) == 2 and None not in bounds
        results[name] = (float(value), (float(bounds[0]), float(bounds[1])) if is_pair else None)  # type: ignore[index]
    return results


def results_section(evaluation: Mapping[str, Any], data: str) -> str:
    """The figures of an `evaluation.json` with their intervals.

    Args:
        evaluation: its content.
        data: name of the data set.
    """
    results = results_of(evaluation)
    if not results:
        return ""
    settings = evaluation.get("settings")
    temperature = settings.get("temperature") if isinstance(settings, Mapping) else None
    played = {None: "", 0: ", greedy"}.get(temperature, f", sampled at temperature {temperature}")
    num = evaluation.get("num_examples", "?")
    rows = [
        f"| {markdown(name)} | {value:.4g} | {'' if bounds is None else f'{bounds[0]:.4g} to {bounds[1]:.4g}'} |"
        for name, (value, bounds) in results.items()
    ]
    head = f"{num} examples{f' of {markdown_code(data)}' if data else ''}{played}; 95% bootstrap intervals."
    return "\n".join(["## Results", "", head, "", "| metric | value | 95% interval |", "|---|---|---|", *rows])


# ---------------------------------------------------------------- starting the agent


def quick_start_section(model: str, factory: Callable[..., Any] | None) -> str:
    """Three lines that play one task with the model and its tools.

    Args:
        model: Hub id or directory.
        factory: of the environment; None if there is none.
    """
    made = None if factory is None else environment_code(factory)
    imported, expression = made or ("from agent_r1_trl import ToolEnv", "ToolEnv")
    note = (
        "The agent's tools come with its environment (`pip install agent-r1-trl`). What the lines below name, a "
        "corpus or a module of the author's, has to be there."
    )
    if made is None and factory is not None:
        name = getattr(getattr(factory, "func", factory), "__name__", "environment")
        note = (
            f"Its tools come with the environment {markdown_code(str(name))}, which stands in the code of the "
            "training and not in this repository: put it in the place of `ToolEnv`, which has no tools."
        )
    elif factory is None:
        note = "It was trained without tools."
    row = '{"prompt": "What is the capital of Norway?", "answer": "Oslo"}'
    code = [
        "from agent_r1_trl.evaluation import evaluate_model",
        imported,
        f"print(evaluate_model({model!r}, {expression}, [{row}]).trajectories[0].messages)",
    ]
    return "\n".join(["## Quick start", "", note, "", "```python", *code, "```"])


def environment_code(factory: Callable[..., Any]) -> tuple[str, str] | None:
    """(import line, expression) that make the factory again; None where a reader cannot import it."""
    keywords = dict(factory.keywords) if isinstance(factory, functools.partial) else {}
    made_by = factory.func if isinstance(factory, functools.partial) else factory
    if isinstance(factory, functools.partial) and factory.args:
        return None
    module, name = getattr(made_by, "__module__", None), getattr(made_by, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier() or not _is_importable(module, name, made_by):
        return None
    plain = (bool, int, float, str, list, tuple, dict)
    if not all(value is None or isinstance(value, plain) for value in keywords.values()):
        return None
    arguments = ", ".join(f"{key}={shown(repr(value))}" for key, value in keywords.items())
    return f"from {module} import {name}", f"lambda: {name}({arguments})" if keywords else name


def _is_importable(module: str, name: str, target: Any) -> bool:
    return getattr(sys.modules.get(module), name, None) is target

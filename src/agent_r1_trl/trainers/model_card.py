"""The model card of a trained agent: how it was trained, in what environment, with which tools and to what result."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData

from agent_r1_trl.environments.factory import env_name, tool_schemas

if TYPE_CHECKING:
    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

LIBRARIES = ("agent-r1-trl", "trl", "transformers", "peft", "torch", "datasets")
PAPERS = {
    "Agent-R1: Training Powerful LLM Agents with End-to-End Reinforcement Learning": "2511.14460",
    "RAGEN: Understanding Self-Evolution in LLM Agents via Multi-Turn Reinforcement Learning": "2504.20073",
}
_GRPO = ("DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models (GRPO)", "2402.03300")
_REINFORCE_PP = (
    "REINFORCE++: An Efficient RLHF Algorithm with Robustness to Both Prompt and Reward Models",
    "2501.03262",
)
_PPO = ("Proximal Policy Optimization Algorithms", "1707.06347")
ESTIMATOR_PAPERS = {
    "grpo": [_GRPO],
    "turn_grpo": [_GRPO],
    "dr_grpo": [("Understanding R1-Zero-Like Training: A Critical Perspective (Dr. GRPO)", "2503.20783")],
    "rloo": [("Back to Basics: Revisiting REINFORCE Style Optimization (RLOO)", "2402.14740")],
    "reinforce_pp": [_REINFORCE_PP],
    "reinforce_pp_baseline": [_REINFORCE_PP],
    "gigpo": [("Group-in-Group Policy Optimization for LLM Agent Training", "2505.10978")],
    "gae": [_PPO, ("High-Dimensional Continuous Control Using Generalized Advantage Estimation", "1506.02438")],
    "bilevel_gae": [_PPO, ("VAGEN: Reinforcing World Model Reasoning for Multi-Turn VLM Agents", "2510.16907")],
}
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
    "temperature",
    "learning_rate",
    "beta",
    "critic",
    "gamma",
    "lam",
)
HEADLINE_METRICS = ("reward", "reward/process", "reward/outcome", "rollout/turns", "rollout/tool_calls")


def write_model_card(
    trainer: MultiTurnTrainer,
    *,
    model_name: str | None,
    dataset_name: str | None,
    tags: str | list[str] | None,
) -> Path:
    """Write `README.md` into the trainer's output directory and return its path."""
    base_model = getattr(trainer.model.config, "_name_or_path", "") or None
    if base_model and Path(base_model).is_dir():
        base_model = None  # a local path means nothing to a reader on the Hub
    all_tags = {*trainer._tag_names, *([tags] if isinstance(tags, str) else tags or [])}
    data = ModelCardData(
        base_model=base_model,
        datasets=dataset_name,
        library_name="transformers",
        model_name=model_name,
        tags=sorted(all_tags),
    )
    path = Path(trainer.args.output_dir) / "README.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{_body(trainer, model_name, base_model)}").save(path)
    return path


def _body(trainer: MultiTurnTrainer, model_name: str | None, base_model: str | None) -> str:
    name = model_name or Path(trainer.args.output_dir).name
    origin = f" from [{base_model}](https://huggingface.co/{base_model})" if base_model else ""
    sections = [
        f"# {name}",
        f"A tool-using agent, trained{origin} with multi-turn reinforcement learning by `{type(trainer).__name__}` of "
        "[agent-r1-trl](https://pypi.org/project/agent-r1-trl/) on top of [TRL](https://github.com/huggingface/trl). "
        "The chat template saved with the tokenizer is the one it was trained with.",
    ]
    if trainer.env_factory is not None:
        sections += [
            f"## Environment\n\n`{env_name(trainer.env_factory)}`",
            _tools_section(trainer),
            _settings_section(trainer),
        ]
    sections += [
        _metrics_section(trainer.state.log_history),
        _papers_section(trainer.args.advantage_estimator),
        _versions_section(),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _tools_section(trainer: MultiTurnTrainer) -> str:
    schemas = tool_schemas(trainer.env_factory) if trainer.env_factory is not None else []
    if not schemas:
        return "## Tools\n\nNone."
    lines = ["## Tools"]
    for schema in schemas:
        function = schema["function"]
        lines.append(
            f"- `{function['name']}`: {function.get('description', '').strip()}\n\n"
            f"  ```json\n  {json.dumps(function.get('parameters', {}), ensure_ascii=False)}\n  ```"
        )
    return "\n\n".join(lines)


def _settings_section(trainer: MultiTurnTrainer) -> str:
    rows = [f"| {name} | {getattr(trainer.args, name)} |" for name in ROLLOUT_SETTINGS if hasattr(trainer.args, name)]
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
    rows = [f"| {name} | {series[0]:.4g} | {series[-1]:.4g} |" for name, series in sorted(values.items())]
    return "\n".join(["## Metrics", "", "| metric | first | last |", "|---|---|---|", *rows])


def _papers_section(estimator: str) -> str:
    papers = [*PAPERS.items(), *ESTIMATOR_PAPERS[estimator]]
    lines = [f"- [{title}](https://arxiv.org/abs/{arxiv_id})" for title, arxiv_id in papers]
    return "\n".join(["## Method", "", *lines])


def _versions_section() -> str:
    lines = []
    for library in LIBRARIES:
        try:
            lines.append(f"- {library}: {version(library)}")
        except ModuleNotFoundError:  # an optional library that is not installed
            continue
    return "\n".join(["## Versions", "", *lines])

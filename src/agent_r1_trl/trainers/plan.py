"""A run in a few lines, before its first step: what is trained on what, in which shape, and where it writes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from agent_r1_trl.environments.trl_adapters import SingleTurnEnv
from agent_r1_trl.trainers.construction import is_placeholder

if TYPE_CHECKING:
    from agent_r1_trl.trainers.config import MultiTurnConfig
    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

NO_ROWS = "made by the environment"


def plan_of(trainer: MultiTurnTrainer) -> str:
    """The plan of a trainer that is about to train."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    base = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
    name = getattr(base, "name_or_path", "") or type(base).__name__
    adapters = getattr(policy, "peft_config", None) or {}
    ranks = [item.r for item in adapters.values() if hasattr(item, "r")]
    evaluated = "" if trainer.eval_dataset is None else f"; evaluation on {_num_rows(trainer.eval_dataset)}"
    rows = NO_ROWS if is_placeholder(trainer.train_dataset) else _num_rows(trainer.train_dataset)
    return plan_text(
        trainer.args,
        model=f"{name}, LoRA r={ranks[0]}" if ranks else name,
        environment=_name_of(trainer.env_factory),
        data=rows + evaluated,
        method="ppo" if trainer.args.has_critic else "grpo",
        num_steps=trainer.state.max_steps,
    )


def plan_text(
    args: MultiTurnConfig, *, model: str, environment: str, data: str, method: str, num_steps: int = 0
) -> str:
    """The plan in words; `num_steps` optimizer steps, 0 where they are not known yet."""
    device = f"{args.device}"
    if args.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(args.device)})"
    estimator = "" if args.advantage_estimator == method else f" ({args.advantage_estimator})"
    shape, engine = args.rollout_shape, "vLLM" if args.use_vllm else "transformers"
    limits = f"at most {args.max_turns} turns and {args.max_completion_length} tokens each, by {engine}"
    steps = f"; {num_steps} steps in all" if num_steps > 0 else ""
    return f"""\
model        {model} on {device}, {args.world_size} process(es)
environment  {environment}
data         {data}
method       {method}{estimator}, learning rate {args.learning_rate:g}
rollout      {shape.prompts_per_rollout} prompts x {shape.responses_per_prompt} trajectories, {limits}
updates      {shape.updates_per_rollout:g} per rollout, of {shape.trajectories_per_update} trajectories each{steps}
output       {args.output_dir}"""


def _num_rows(dataset: object) -> str:
    """The number of rows; those of several data sets, one by one; a stream has none."""
    if isinstance(dataset, dict):
        return ", ".join(f"{_num_rows(rows)} of {name}" for name, rows in dataset.items())
    return f"{len(dataset)} rows" if hasattr(dataset, "__len__") else "a stream of rows"


def _name_of(factory: object) -> str:
    while isinstance(factory, functools.partial):
        factory = factory.func
    if factory is SingleTurnEnv:
        return "none"
    return str(getattr(factory, "__qualname__", type(factory).__qualname__))

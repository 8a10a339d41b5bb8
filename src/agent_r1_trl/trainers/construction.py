"""Turns the user's arguments, reward functions and data set into those for TRL's constructor.

They are checked here, before a model is loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset

from agent_r1_trl.environments.factory import EnvFactory, has_own_reward
from agent_r1_trl.environments.trl_adapters import SingleTurnEnv
from agent_r1_trl.trainers.config import MultiTurnConfig
from agent_r1_trl.trainers.rewards import environment_reward


def as_list(functions: Any) -> list[Any]:
    """A list of what the user gave: nothing, one function or several."""
    if functions is None:
        return []
    return list(functions) if isinstance(functions, list | tuple) else [functions]


def default_output_dir(model: Any, trainer_name: str) -> str:
    """TRL's: the name of the model and that of the trainer."""
    name = model if isinstance(model, str) else model.config._name_or_path
    return f"{name.split('/')[-1]}-{trainer_name}"


def single_turn_factory(
    config: MultiTurnConfig, train_dataset: Any, generator: Any, turn_reward_funcs: Any
) -> EnvFactory | None:
    """`SingleTurnEnv` if an argument asks for what TRL's own rollout cannot do; None leaves everything to TRL.

    Raises:
        ValueError: something was asked for, and the prompts are plain text, which a chat cannot stand for.
    """
    asked = config.asked_features()
    asked += ["generator"] if generator is not None else []
    asked += ["turn_reward_funcs"] if as_list(turn_reward_funcs) else []
    if not asked:
        return None
    row: Any = next(iter(train_dataset), {}) if train_dataset is not None else {}
    if isinstance(row.get("prompt"), str):
        raise ValueError(
            f"{asked[0]} was set without env= and tools=, so the prompts are answered by our rollout, which plays "
            "chats; the prompts of this data set are plain text, which TRL continues without a chat template. Make "
            "each prompt a list of messages, [{'role': 'user', 'content': text}], or remove "
            f"{' and '.join(asked)}."
        )
    return SingleTurnEnv


TRL_CHANGES = ("use_vllm", "mask_truncated_completions", "reward_weights")
"""Arguments that TRL's constructor sees with other values than the user's."""


def trl_rewards(
    reward_funcs: list[Any], config: MultiTurnConfig, turn_reward_funcs: Sequence[Callable], env_factory: EnvFactory
) -> tuple[list[Any], MultiTurnConfig]:
    """The reward functions and arguments that TRL sees.

    The environment's return comes first, with a weight of 1, if there is one. TRL makes no engine of its own, and does
    not mask truncated completions a second time.

    Raises:
        ValueError: nothing scores a trajectory, or there are more or fewer weights than functions.
    """
    has_own = bool(turn_reward_funcs) or has_own_reward(env_factory)
    if not has_own and not reward_funcs:
        raise ValueError(
            "No reward source: nothing scores a trajectory (plain functions as tools= earn nothing). Pass "
            "reward_funcs= or turn_reward_funcs=, or env= with an outcome_reward."
        )
    args = copy.copy(config)
    args.use_vllm = False
    args.mask_truncated_completions = False
    if args.reward_weights is not None:
        if len(args.reward_weights) != len(reward_funcs):
            raise ValueError(
                f"reward_weights={args.reward_weights} has {len(args.reward_weights)} entries for "
                f"{len(reward_funcs)} reward_funcs. Give one weight per function of yours (the environment's own "
                "reward always counts 1)."
            )
        if has_own:
            args.reward_weights = [1.0, *args.reward_weights]
    return ([environment_reward, *reward_funcs] if has_own else reward_funcs), args


def trl_dataset(train_dataset: Any, config: MultiTurnConfig) -> Any:
    """The data set that TRL sees: the user's, or empty rows that drive the loop when the environment owns the data.

    Raises:
        ValueError: for too few rows, and if neither the data nor `max_steps` sets the length.
    """
    num_prompts = max(1, config.generation_batch_size // config.num_generations)
    if train_dataset is None:
        if config.max_steps <= 0:
            raise ValueError(
                f"train_dataset=None with max_steps={config.max_steps}: without a data set the environment makes its "
                "own prompts and max_steps sets the length of the run. Pass train_dataset=, or set max_steps > 0."
            )
        return Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * num_prompts})
    # TRL drops what does not fill a batch; of too few rows nothing is left, and the run would end without a step.
    num_rows = len(train_dataset) if hasattr(train_dataset, "__len__") else num_prompts
    if num_rows < num_prompts:
        raise ValueError(
            f"train_dataset has {num_rows} rows, and a rollout takes {num_prompts} of them "
            f"(generation_batch_size={config.generation_batch_size} / num_generations={config.num_generations}), so "
            "no step could be made. Pass more rows, or set per_device_train_batch_size x gradient_accumulation_steps "
            f"x processes to at most {num_rows * config.num_generations}."
        )
    return train_dataset


def check_rollout_func(rollout_func: Any) -> None:
    """Refuse TRL's `rollout_func` beside a rollout of ours.

    Raises:
        ValueError: if there is one.
    """
    if rollout_func is not None:
        raise ValueError(
            "rollout_func= replaces generation, and so does the rollout that env=, tools= or an argument of ours asks "
            "for. Remove rollout_func, or all of the others."
        )


def check_tokenizer(processing_class: Any, *, is_vlm: bool) -> None:
    """Refuse processors of images.

    Raises:
        ValueError: for a vision model's processor.
    """
    if is_vlm:
        raise ValueError(
            f"processing_class={type(processing_class).__name__}: images together with tools are not "
            "supported. Pass a text-only tokenizer as processing_class, or train without env= and tools=."
        )


def check_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Refuse rows with images.

    Raises:
        ValueError: if a row of the batch has one.
    """
    if any(row.get("image") is not None or row.get("images") for row in rows):
        raise ValueError(
            "The data set has an 'image' or 'images' column with content: images together with tools are not "
            "supported. Remove the column, or train without env= and tools=."
        )


def trajectory_store(config: MultiTurnConfig, rank: int) -> Any:
    """Where this rank's trajectories are written; None where they are not."""
    if config.record_trajectories == "none":
        return None
    from agent_r1_trl.recording import TrajectoryStore

    return TrajectoryStore(config.output_dir, format=config.record_trajectories, rank=rank)

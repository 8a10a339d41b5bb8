"""Turns the user's arguments, reward functions and data set into those for TRL's constructor.

They are checked here, before a model is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PreTrainedModel
from trl import GRPOTrainer

from agent_r1_trl import rewards
from agent_r1_trl.critic.attach import base_causal_lm
from agent_r1_trl.generation.adapter_folders import check_whole_model
from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.safe_text import set_rules
from agent_r1_trl.tools.pool import prepare_threads_with
from agent_r1_trl.trainers.callbacks import is_main_process
from agent_r1_trl.trainers.config import MultiTurnConfig
from agent_r1_trl.trainers.metrics import RENAMED

if TYPE_CHECKING:
    import asyncio

    from transformers import PreTrainedTokenizerBase, TrainerCallback

    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

logger = logging.getLogger(__name__)

TrainRows: TypeAlias = Dataset | IterableDataset | Sequence[dict[str, Any]] | None
"""A user's `train_dataset`; None where the environment makes its own prompts."""
EvalRows: TypeAlias = TrainRows | dict[str, Dataset | IterableDataset]
"""A user's `eval_dataset`: one set, or several by name."""


def as_list(functions: object) -> list[Any]:
    """A list of what the user gave: nothing, one function or several."""
    if functions is None:
        return []
    return list(functions) if isinstance(functions, list | tuple) else [functions]


def default_output_dir(model: str | PreTrainedModel, trainer_name: str) -> str:
    """TRL's: the name of the model and that of the trainer."""
    name = model if isinstance(model, str) else model.config._name_or_path
    return f"{name.split('/')[-1]}-{trainer_name}"


def check_callbacks(callbacks: list[TrainerCallback] | None) -> None:
    """Refuse what the Trainer could not call, with a ValueError."""
    is_list = callbacks is None or isinstance(callbacks, list)
    wrong = [item for item in callbacks or () if not hasattr(item, "on_init_end")] if is_list else [callbacks]
    if wrong:
        raise ValueError(
            f"callbacks: {wrong[0]!r:.200} is no {'callback' if is_list else 'list'}. Pass callbacks=[MyCallback()], "
            "a list of objects or classes that inherit from RolloutCallback or TrainerCallback (recipes take paths)."
        )


@contextlib.contextmanager
def as_trl_sees(config: MultiTurnConfig, num_columns: int) -> Iterator[None]:
    """While TRL's constructor runs: it makes no engine of its own, does not mask truncated completions a second time,
    and weighs the columns of the environment 1 each, behind the user's functions.
    """
    own = {name: getattr(config, name) for name in ("use_vllm", "mask_truncated_completions", "reward_weights")}
    values: dict[str, Any] = config.__dict__
    values.update(use_vllm=False, mask_truncated_completions=False)
    if config.reward_weights is not None:
        config.reward_weights = [*config.reward_weights, *[1.0] * num_columns]
    try:
        yield
    finally:
        values.update(own)


def check_arguments(kind: type, model: object, others: Mapping[str, Any]) -> None:
    """Refuse arguments of a trainer that TRL would only trip over.

    Args:
        kind: the trainer's class.
        model: its first argument.
        others: those that go on to TRL's constructor, by name.

    Raises:
        ValueError: a model that is none, or a callback that is none.
        TypeError: nobody takes an argument of this name.
    """
    if model is None:
        raise ValueError("model=None: there is no model to train. Pass a directory, a Hub id or a loaded model.")
    check_whole_model(model, flag="model")
    check_callbacks(others.get("callbacks"))
    makers = [vars(parent)["__init__"] for parent in kind.__mro__ if "__init__" in vars(parent)]
    known = [name for maker in makers for name in inspect.signature(maker).parameters if name != "self"]
    for name in others:
        if name not in known:
            raise TypeError(
                f"{kind.__name__} has no argument {name!r}.{did_you_mean(name, known)} Correct or remove it."
            )


def trl_rewards(
    reward_funcs: list[Any], columns: Sequence[Callable], config: MultiTurnConfig, processing_classes: object
) -> dict[str, Any]:
    """The user's `reward_funcs` and `reward_processing_classes` as TRL's constructor sees them, with the environment's
    `columns` behind them, which hand over what the trajectories have earned already.

    Raises:
        ValueError: nothing scores a trajectory, or there are more or fewer weights or processing classes than
            functions.
    """
    if not columns and not reward_funcs:
        raise ValueError(
            "No reward source provided: nothing scores a trajectory (plain functions as tools= earn nothing). Pass "
            "reward_funcs= or turn_reward_funcs=, an environment_factory= with a get_reward, or env= with an "
            "outcome_reward."
        )
    for item in reward_funcs:
        _check_reward(item)
    classes = None if processing_classes is None else as_list(processing_classes)
    for name, given in (("reward_weights", config.reward_weights), ("reward_processing_classes", classes)):
        if given is not None and len(given) != len(reward_funcs):
            raise ValueError(
                f"{name}={given!r:.200} has {len(given)} entries for {len(reward_funcs)} reward_funcs: the numbers "
                "must match. Give one per function of yours (None as the class of one that is no model; the "
                "environment's own reward always counts 1)."
            )
    return {
        "reward_funcs": [*reward_funcs, *columns],
        "reward_processing_classes": None if classes is None else [*classes, *[None] * len(columns)],
    }


def _check_reward(item: object) -> None:
    """Refuse what is neither a function nor a model; a text is the name of a reward model."""
    if isinstance(item, str) and item in rewards.__all__:
        raise ValueError(
            f"reward_funcs={item!r}: a text names a reward model. Pass the function, agent_r1_trl.rewards.{item}, or "
            "one of yours that calls it."
        )
    if not isinstance(item, str) and not callable(item):
        raise ValueError(f"reward_funcs={item!r:.100}: must be a function, a model or its name. Pass one of these.")


def trl_dataset(train_dataset: TrainRows, config: MultiTurnConfig, eval_dataset: EvalRows = None) -> Any:
    """The data set that TRL sees: the user's, or empty rows that drive the loop when the environment owns the data.

    Raises:
        ValueError: for an empty data set, for too few rows, and if neither the data nor `max_steps` sets the length.
    """
    evaluated = eval_dataset if isinstance(eval_dataset, dict) else {None: eval_dataset}
    given = {f"eval_dataset[{name!r}]" if name else "eval_dataset": rows for name, rows in evaluated.items()}
    for name, rows in ({"train_dataset": train_dataset} | given).items():
        if rows is not None and hasattr(rows, "__len__") and len(rows) == 0:
            raise ValueError(f"{name} has 0 rows. Pass a data set with at least one.")
    num_prompts = max(1, config.generation_batch_size // config.num_generations)
    if train_dataset is None:
        if config.max_steps <= 0:
            raise ValueError(
                f"train_dataset=None with max_steps={config.max_steps}: without a data set the environment makes its "
                "own prompts and max_steps sets the length of the run. Pass train_dataset=, or set max_steps > 0."
            )
        return Dataset.from_dict({"prompt": [NO_PROMPT] * num_prompts})
    # TRL drops what does not fill a batch; of too few rows nothing is left, and the run would end without a step.
    num_rows = len(train_dataset) if hasattr(train_dataset, "__len__") else num_prompts
    if num_rows < num_prompts:
        raise ValueError(
            f"train_dataset has {num_rows} rows, and a rollout takes {num_prompts} of them "
            f"(generation_batch_size={config.generation_batch_size} / num_generations={config.num_generations}), so "
            "no step could be made. Pass more rows, or set per_device_train_batch_size x steps_per_generation (which "
            "is gradient_accumulation_steps by default) x processes to at most "
            f"{num_rows * config.num_generations}."
        )
    return train_dataset


def check_best_metric(config: MultiTurnConfig, eval_dataset: EvalRows) -> None:
    """Look at what the best checkpoint is chosen by, which else shows at the first evaluation, or never.

    Raises:
        ValueError: of several evaluation sets none has such a metric, or metrics of this name have another one now.
    """
    best = config.metric_for_best_model
    if best is None or str(getattr(config.eval_strategy, "value", config.eval_strategy)) == "no":
        return
    for old, new in RENAMED.items():
        if old in best:
            raise ValueError(
                f"metric_for_best_model={best!r}: there is no such metric. Did you mean {best.replace(old, new)!r}? "
                "Set metric_for_best_model to a name of docs/metrics.md."
            )
    name = f"eval_{best.removeprefix('eval_')}"
    sets = [*eval_dataset] if isinstance(eval_dataset, Mapping) else []
    if sets and not name.startswith(tuple(f"eval_{key}_" for key in sets)):
        raise ValueError(
            f"metric_for_best_model={best!r} with eval_dataset={{{', '.join(f'{key!r}: ...' for key in sets)}}}: each "
            "set's metrics carry its name, so no evaluation logs this one. Set metric_for_best_model="
            f"'eval_{sets[0]}_reward', or another metric of one of the sets."
        )
    if name.endswith("_loss") and is_main_process():
        logger.warning(
            "metric_for_best_model=%r (what load_best_model_at_end takes if nothing is set): advantages are relative, "
            "so a better policy has no smaller loss, and the best checkpoint will be one at random. Set "
            "metric_for_best_model='%s'.",
            best,
            f"{name.removesuffix('loss')}reward",
        )


NO_PROMPT = [{"role": "user", "content": ""}]


def is_placeholder(dataset: TrainRows) -> bool:
    """Whether the rows are those of `trl_dataset`, where the environment owns the data."""
    if not isinstance(dataset, Dataset) or dataset.column_names != ["prompt"]:
        return False
    return bool(dataset.with_format(None)[0]["prompt"] == NO_PROMPT)


def find_backbone(model: nn.Module) -> None:
    """Let `base_model` of a causal LM be its backbone, where its class names an attribute that it does not have.

    Llama 4's text model says `language_model` and has `model`. TRL's output head, and the packed layouts, would take
    the whole model for the backbone.
    """
    base = base_causal_lm(model)
    if base.base_model is base and isinstance(getattr(base, "model", None), PreTrainedModel):
        base.base_model_prefix = "model"


NEVER_CALLED = {
    "_generate": "pass generator= (an object with an async `generate`) to sample in another way, or env= to act in "
    "another way; trainer.last_trajectories holds what was sampled",
    "_generate_single_turn": "pass generator=, an object with an async `generate` that samples one turn",
    "_tool_call_loop": "pass env=, a ToolEnv or an Environment whose `step` answers each turn",
    "_tokenize_prompts": "set chat_template=, or return other messages from the environment's `reset`",
    "_get_tool_suffix_ids": "set chat_template=, which writes the answers of tools",
}
"""TRL's methods that our rollout replaces, and what to use instead of overriding each."""


def check_overrides(trainer: MultiTurnTrainer, rollout_func: object = None) -> None:
    """Refuse what replaces a method of TRL's that our rollout never calls: it would be ignored in silence."""
    if rollout_func is not None:
        raise ValueError(
            "rollout_func= replaces generation, which this trainer does itself. Pass generator= or env= instead, or "
            "take trl.GRPOTrainer, which calls rollout_func."
        )
    trls_file = sys.modules[GRPOTrainer.__module__].__file__
    for name, fix in NEVER_CALLED.items():
        foreign = ["an attribute of the trainer"] if name in vars(trainer) else []
        foreign += [
            kind.__name__ for kind in type(trainer).__mro__ if name in vars(kind) and not _is_ours_or_trls(kind)
        ]
        code = getattr(vars(GRPOTrainer).get(name), "__code__", None)
        if code is None or code.co_filename != trls_file:
            foreign.append("GRPOTrainer, patched")
        if foreign:
            raise ValueError(
                f"{name} of TRL's trainer is replaced ({foreign[0]}), and the rollout that env=, tools= or an "
                f"argument of ours asks for never calls it. Remove it and {fix}."
            )


def _is_ours_or_trls(kind: type) -> bool:
    return kind is GRPOTrainer or _is_ours(kind)


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith(__name__.partition(".")[0] + ".")


def use_gpu_in_threads(device: torch.device, reward_loop: asyncio.AbstractEventLoop | None) -> None:
    """Make this rank's GPU the current one of every thread that runs a user's tools, environments and rewards.

    `reward_loop` is TRL's event loop for async reward functions, on a thread of its own; None without any.
    """
    if device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index  # a process alone is on "cuda"
    set_device = functools.partial(torch.cuda.set_device, index)
    set_device()  # whatever is wrong with it must show here: it would end a thread that somebody waits for
    prepare_threads_with(set_device)
    if reward_loop is not None:
        reward_loop.call_soon_threadsafe(set_device)


def check_tokenizer(processing_class: PreTrainedTokenizerBase, *, is_vlm: bool) -> None:
    """Refuse processors of images, with a ValueError."""
    if is_vlm:
        raise ValueError(
            f"processing_class={type(processing_class).__name__}: a processor of images, but rollouts are text. "
            "Pass a text-only tokenizer as processing_class, or take trl.GRPOTrainer, which trains models of images "
            "without an environment."
        )


def trajectory_store(config: MultiTurnConfig, rank: int) -> Any:
    """Where this rank's trajectories are written; None where they are not. From here on secrets are masked."""
    set_rules(config.secrets.names, config.secrets.patterns)
    if config.record_trajectories == "none":
        return None
    from agent_r1_trl.recording import TrajectoryStore

    credit = {"estimator": config.estimator.name}
    if "scale_rewards" in config.estimator.options:
        credit["scale"] = str(config.scale_rewards)
    return TrajectoryStore(config.output_dir, rank=rank, credit=credit)

"""Warns of trained weights in 16 bits, which rounding puts back to where they were.

Weights are about 0.02. There bfloat16's next number is 1.2e-4 away, so that an update of Adam, whose size is the
learning rate, is lost whenever it is below half of that; nothing adds up over the steps. Of a model in bfloat16 at a
learning rate of 1e-6, 2% of the weights had moved after 20 steps and no weight of a norm. DeepSpeed keeps a float32
copy and is not warned of.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import TrainerCallback
from trl import GRPOConfig

logger = logging.getLogger(__name__)

LEAST_RATE = 1e-4
"""Smallest learning rate at which most weights in bfloat16 move."""
REMEDY = (
    "Set dtype: float32 (with bf16: true the model still computes in 16 bits), or train an adapter (use_peft: true; "
    "with load_in_4bit also learning_rate: 1.0e-4), or launch with DeepSpeed, which keeps a float32 copy."
)


def rounding_problem(dtype: Any, learning_rate: float) -> str:
    """Why weights of a dtype are hardly trained at a learning rate; empty if they are.

    >>> rounding_problem("bfloat16", 1e-3), rounding_problem("float32", 1e-6)
    ('', '')
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ("bfloat16", "float16") or learning_rate >= LEAST_RATE:
        return ""
    return (
        f"The trained weights are in {name} and the learning rate is {learning_rate:g}: most updates are smaller than "
        "what 16 bits resolve and are rounded away, so the run hardly trains."
    )


def problem_of_groups(groups: Iterable[Mapping[str, Any]]) -> str:
    """The first `rounding_problem` among an optimizer's parameter groups, whatever their schedule is at."""
    found = (
        rounding_problem(parameter.dtype, group.get("initial_lr", group["lr"]))
        for group in groups
        for parameter in group["params"]
        if parameter.requires_grad
    )
    return next(filter(None, found), "")


def problem_of_recipe(recipe: Mapping[str, Any]) -> str:
    """The `rounding_problem` of a recipe, as far as its settings tell.

    Adapters are float32, unless the base is quantised: TRL then casts them to bfloat16.

    Args:
        recipe: settings by name; those that are missing have their defaults.
    """
    if recipe.get("use_peft") and not (recipe.get("load_in_4bit") or recipe.get("load_in_8bit")):
        return ""
    dtype = "bfloat16" if recipe.get("use_peft") else recipe.get("dtype", "float32")
    return rounding_problem(dtype, float(recipe.get("learning_rate", GRPOConfig.learning_rate)))


class RoundingWarning(TrainerCallback):
    """Says once, when training begins, if rounding will undo most of it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """The optimizer has been made."""
        problem = problem_of_run(args, optimizer)
        if problem and state.is_world_process_zero:
            logger.warning("%s %s", problem, REMEDY)


def problem_of_run(args: Any, optimizer: Any) -> str:
    """The `rounding_problem` of a trainer whose optimizer has been made."""
    return "" if args.deepspeed_plugin is not None else problem_of_groups(optimizer.param_groups)

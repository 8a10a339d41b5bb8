"""What can be said of a model's weights: digests, whether they are finite, whether rounding undoes their training.

On rounding: weights are about 0.02. There bfloat16's next number is 1.2e-4 away, so that an update of Adam, whose size
is the learning rate, is lost whenever it is below half of that; nothing adds up over the steps. Of a model in bfloat16
at a learning rate of 1e-6, 2% of the weights had moved after 20 steps and no weight of a norm. DeepSpeed keeps a
float32 copy and is not warned of.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from transformers import TrainerCallback
from trl import GRPOConfig

CHUNK = 2**22
"""Elements that are summed at once, so that the fingerprint needs no memory to speak of."""


def fingerprint(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of the trained parameters, of this process's part of them where they are sharded.

    The bits of each tensor are added up as whole numbers: exact in any order, at the speed of reading them.
    """
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    return _digest([name for name, _ in trained], _bit_sums([parameter for _, parameter in trained]))


def base_fingerprint(model: nn.Module, accelerator: Any) -> str | None:
    """A digest of the frozen weights below an adapter, the same on any number of processes. All ranks must call it.

    Returns:
        None without an adapter: then a checkpoint holds all weights. Adapters count as none of the base: TRL's "ref"
        is a copy of the one that is trained.
    """
    marks = [f".{name}." for name in getattr(model, "peft_config", None) or ()]
    if not marks:
        return None
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    frozen = {name: value for name, value in frozen.items() if not any(mark in f"{name}." for mark in marks)}
    sums = _bit_sums(list(frozen.values()))
    if any(hasattr(value, "ds_tensor") for value in frozen.values()):  # the parts of the ranks add up
        sums = accelerator.reduce(sums.to(accelerator.device), "sum")
    return _digest([*frozen], sums)


def _digest(names: list[str], sums: torch.Tensor) -> str:
    return hashlib.blake2b(json.dumps([names, sums.tolist()]).encode(), digest_size=8).hexdigest()


def _bit_sums(parameters: list[torch.Tensor]) -> torch.Tensor:
    """(N,) on the device of the first, so that one copy brings them to the host."""
    sums = [_bit_sum(_local(parameter)) for parameter in parameters]
    return torch.stack([item.to(sums[0].device) for item in sums]) if sums else torch.zeros(0, dtype=torch.int64)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """The values that this process holds, under DeepSpeed ZeRO-3 and FSDP2 as well."""
    if hasattr(parameter, "to_local"):
        return parameter.to_local()
    if parameter.numel() == 0 and hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor
    return parameter


def _bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(-1).view(whole)
    return torch.stack([chunk.sum(dtype=torch.int64) for chunk in bits.split(CHUNK)]).sum()


# -------------------------------------------------------------------- finite


def nonfinite_problem(trainer: Any) -> str | None:
    """What is wrong with the weights of a trainer's model, in words; None if they are finite."""
    bad = nonfinite_weights(trainer.model)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:  # then all ranks save together
        bad = [name for names in gather_object([bad]) for name in names]
    return f"{len(bad)} tensors of the model hold NaN or infinity (first {bad[0]})" if bad else None


def nonfinite_weights(model: nn.Module) -> list[str]:
    """Names of the trainable parameters that hold NaN or infinity; of sharded ones this rank's part is looked at."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        return []
    device = named[0][1].device
    is_finite = torch.stack([torch.isfinite(_own_part(p)).all().to(device) for _, p in named]).tolist()
    return [name for (name, _), finite in zip(named, is_finite, strict=True) if not finite]


def _own_part(parameter: Any) -> torch.Tensor:
    """The values of a parameter that lie on this rank."""
    if hasattr(parameter, "ds_tensor"):  # ZeRO-3; what fills up the last rank's part was never written
        rank = torch.distributed.get_rank(parameter.ds_process_group)
        size = parameter.ds_tensor.ds_numel
        return parameter.ds_tensor.detach().flatten()[: max(0, parameter.ds_numel - rank * size)]
    data = parameter.detach()
    return data.to_local() if hasattr(data, "to_local") else data  # FSDP2


# -------------------------------------------------------------------- rounding


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

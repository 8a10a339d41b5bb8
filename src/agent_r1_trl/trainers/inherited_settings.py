"""Settings of TRL and transformers that they do not check themselves, or only once the model is loaded."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.settings import (
    Count,
    CountOrZero,
    NotNegative,
    Number,
    OneOf,
    Positive,
    PositiveShare,
    Rate,
    Rule,
    Share,
    Text,
    Whole,
)

if TYPE_CHECKING:
    from agent_r1_trl.trainers.config import MultiTurnConfig

LOSS_TYPES = ("bnpo", "cispo", "dapo", "dr_grpo", "grpo", "luspo", "sapo", "vespo")
"""The loss types of TRL, which itself finds an unknown one after the first rollout."""
SCALES = ("group", "batch", "none")
_STEPS = Rule(
    "-1, for num_train_epochs, or a whole number >= 1",
    lambda value: isinstance(value, int) and not isinstance(value, bool) and (value == -1 or value >= 1),
)
"""transformers takes 0 and every negative number for -1."""
_SCALE = Rule(
    f"one of {', '.join(map(repr, SCALES))}, True or False", lambda value: isinstance(value, bool) or value in SCALES
)
_WEIGHTS = Rule("a list of finite numbers", lambda value: all(map(Number().accepts, value)), is_list=True)


def _is_compile_mode(value: object) -> bool:
    import torch._inductor

    return value in ("default", *torch._inductor.list_mode_options())


_COMPILE_MODE = Rule(
    "a mode of torch.compile, such as 'default', 'reduce-overhead' or 'max-autotune'", _is_compile_mode
)
"""It has to be known before TRL reads it: accelerate hands it on in the environment's variables."""
_MOMENT = Annotated[float, Number(minimum=0, below=1)]
_SEED = Annotated[int, Whole(0, 2**32 - 1)]
"""NumPy takes no others."""
_TEMPERATURE = Annotated[float, Number(minimum=1e-3, maximum=1e3)]
"""Beyond these, float32 logits divided by it overflow, or all tokens become equally likely."""
TRL_FIELDS: dict[str, Any] = {
    "output_dir": Annotated[str, Text()] | None,
    "max_steps": Annotated[int, _STEPS],
    "num_train_epochs": Positive,
    "num_generations": Count,
    "loss_type": Annotated[str, OneOf(*LOSS_TYPES)],
    "vllm_mode": Annotated[str, OneOf("colocate", "server")],
    "per_device_train_batch_size": Count,
    "per_device_eval_batch_size": Count,
    "gradient_accumulation_steps": Count,
    "steps_per_generation": Count | None,
    "generation_batch_size": Count | None,
    "num_iterations": Count,
    "num_generations_eval": Count | None,
    "seed": _SEED,
    "data_seed": _SEED | None,
    "learning_rate": Rate,
    "warmup_steps": NotNegative,
    "weight_decay": Rate,
    "adam_beta1": _MOMENT,
    "adam_beta2": _MOMENT,
    "adam_epsilon": NotNegative,
    "max_grad_norm": NotNegative | None,
    "beta": NotNegative,
    "epsilon": NotNegative,
    "epsilon_high": NotNegative | None,
    "delta": NotNegative | None,
    "scale_rewards": Annotated[str, _SCALE],
    "reward_weights": Annotated[list[float], _WEIGHTS] | None,
    "top_entropy_quantile": Share,
    "logging_steps": Positive,
    "save_steps": Positive,
    "eval_steps": Positive | None,
    "eval_delay": NotNegative,
    "save_total_limit": Count | None,
    "dataloader_num_workers": CountOrZero,
    "dataloader_prefetch_factor": Count | None,
    "torch_empty_cache_steps": Count | None,
    "ddp_timeout": Count,
    "torch_compile_mode": Annotated[str, _COMPILE_MODE] | None,
}
"""The rules of TRL's fields, as annotations."""
ROLLOUT_FIELDS: dict[str, Any] = {
    "max_completion_length": Count,
    "max_tool_calling_iterations": CountOrZero | None,
    "temperature": _TEMPERATURE,
    "top_p": PositiveShare,
    "top_k": Annotated[int, Whole(-1)] | None,
    "min_p": Share | None,
    "repetition_penalty": Positive,
}
"""The rules of TRL's fields where our rollout runs."""
_OPTIMIZER_PACKAGES = {
    "8bit": "bitsandbytes",
    "paged": "bitsandbytes",
    "bnb": "bitsandbytes",
    "galore": "galore_torch",
    "apollo": "apollo_torch",
    "schedule_free": "schedulefree",
    "stable_adamw": "optimi",
    "torch_4bit": "torchao",
    "apex": "apex",
}
"""Part of an optimizer's name -> the package that it needs, by the name under which Python imports it."""
_CHECKPOINTING = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
"""Options of `torch.utils.checkpoint`."""


def find_inherited_problems(config: MultiTurnConfig) -> Iterator[str]:
    """Mistakes that transformers or torch would find only once the model is loaded, or in the first update."""
    yield from _find_optimizer_problems(str(getattr(config.optim, "value", config.optim)))
    yield from _find_scheduler_problems(config)
    if getattr(config.accelerator_config, "dispatch_batches", None):
        yield (
            "accelerator_config={'dispatch_batches': True}: the main process would cut each batch into pieces for the "
            "others, which accelerate can do with tensors, and a batch here is a list of rows. Remove "
            "dispatch_batches, or set it to False: each process then reads its own rows."
        )
    given = config.gradient_checkpointing_kwargs
    if isinstance(given, Mapping):
        yield from _find_unknown("gradient_checkpointing_kwargs", given, _CHECKPOINTING)


def _find_optimizer_problems(name: str) -> Iterator[str]:
    for part, package in _OPTIMIZER_PACKAGES.items():
        if part in name and importlib.util.find_spec(package) is None:
            yield (
                f"optim={name!r}: its package is not installed. Install it ({package}), or set optim to 'adamw_torch'."
            )
            return


def _find_scheduler_problems(config: MultiTurnConfig) -> Iterator[str]:
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    given = config.lr_scheduler_kwargs
    make = TYPE_TO_SCHEDULER_FUNCTION.get(config.lr_scheduler_type)
    if not isinstance(given, Mapping) or make is None:
        return
    parameters = inspect.signature(make).parameters
    own = ("optimizer", "num_warmup_steps", "num_training_steps")  # the trainer's
    if not any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
        yield from _find_unknown("lr_scheduler_kwargs", given, [name for name in parameters if name not in own])


def _find_unknown(flag: str, given: Mapping[str, Any], known: list[str] | tuple[str, ...]) -> Iterator[str]:
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            listed = ", ".join(map(repr, known)) or "none"
            yield f"{flag}: {name!r} is no option.{hint} Correct or remove it; there are: {listed}."

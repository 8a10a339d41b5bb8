"""Whether the installed release of TRL still has what this package stands on.

The tables say what that is; a test compares them with our overrides, calls and imports, and the trainers compare them
with the installed release when they are imported. What is gone, or asked for anew, is an `ImportError`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

TESTED = "1.16.0"
"""The release that the suite runs with."""

METHODS = {
    "__init__": "model reward_funcs args train_dataset eval_dataset *",
    "_calculate_rewards": "inputs prompts completions completion_ids_list",
    "_compute_loss": "model inputs",
    "_generate_and_score_completions": "inputs",
    "_get_eval_sampler": "eval_dataset",
    "_get_per_token_logps_and_entropies": "model input_ids attention_mask logits_to_keep *",
    "_get_train_sampler": "dataset",
    "_load_optimizer_and_scheduler": "checkpoint",
    "_prepare_inputs": "generation_batch",
    "_save_checkpoint": "model trial",
    "compute_loss": "model inputs *",
    "create_model_card": "model_name dataset_name tags",
    "log": "logs start_time",
    "training_step": "model inputs num_items_in_batch",
}
"""TRL's methods that ours override, and the arguments that these name; `*` where they pass any others on."""
ATTRIBUTES = """
    _buffered_inputs _is_vlm _last_world_entropy _logs _metrics _name _pending_extra_logs _pending_metrics _step
    _tokenizer
    aux_loss_enabled beta entropy_coef environments eos_token_ids epsilon_high epsilon_low loss_type
    max_completion_length num_generations num_generations_eval num_iterations ref_model reward_func_names reward_funcs
    pad_to_multiple_of reward_weights tools use_vllm
"""
"""Attributes of TRL's trainer that are read or set."""
IMPORTS = {
    "trl": "GRPOConfig GRPOTrainer ModelConfig chat_template_utils get_peft_config get_quantization_config",
    "trl.chat_template_utils": "get_training_chat_template",
    "trl.models": "unwrap_model_for_generation",
    "trl.models.utils": "disable_gradient_checkpointing",
    "trl.trainer.callbacks": "SyncRefModelCallback",
    "trl.trainer.utils": """RepeatSampler _ChunkedLogProbFunction disable_dropout_in_model maybe_gather_lm_head_ctx
    nanstd use_adapter""",
}
"""What is imported, by module."""


@functools.cache
def check_trl() -> None:
    """Compare the installed release with the tables, once, and say all that is missing in one message.

    Raises:
        ImportError: something is gone, or asked for anew.
    """
    import trl

    lacks = [*_lacking_imports()]
    if not lacks:
        trainer = trl.GRPOTrainer
        lacks += _lacking_attributes(trainer)
        for name, arguments in METHODS.items():
            problems = compare_arguments(getattr(trainer, name, None), arguments.split())
            lacks += [f"GRPOTrainer.{name} {text}" for text in problems]
    if lacks:
        raise ImportError(
            f"trl {trl.__version__} differs from {TESTED}, which agent-r1-trl was tested with, in what it builds on: "
            f"{'; '.join(lacks)}. The trainers cannot run on it: pip install trl=={TESTED}"
        )


def _lacking_imports() -> Iterator[str]:
    for module, names in IMPORTS.items():
        try:
            found = dir(importlib.import_module(module))  # of a lazy module too, without loading what it names
        except ModuleNotFoundError:
            found = []
        yield from (f"{module}.{name} is gone" for name in names.split() if name not in found)


def _lacking_attributes(trainer: Any) -> Iterator[str]:
    """Names that neither a class of TRL's has, nor any of its methods mentions."""
    known = set(dir(trainer))
    for kind in trainer.__mro__:
        if kind.__module__.startswith("trl."):
            for method in vars(kind).values():
                known.update(_names(getattr(inspect.unwrap(method), "__code__", None)))
    return (f"GRPOTrainer.{name} is gone" for name in ATTRIBUTES.split() if name not in known)


def _names(code: CodeType | None) -> Iterator[str]:
    if code is None:
        return
    yield from code.co_names
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield from _names(item)


def compare_arguments(method: Any, known: list[str]) -> list[str]:
    """What rules an override out, in words.

    `known` are the arguments that ours name, in order, then `*` if it passes others on; a `method` of None is gone.

    >>> compare_arguments(lambda self, a, b, c=0: 0, ["a", "b"])
    []
    >>> compare_arguments(lambda self, b, a: 0, ["a", "b", "*"])
    ["takes 'b', 'a' in this order"]
    """
    if method is None:
        return ["is gone"]
    parameters = [*inspect.signature(method).parameters.values()][1:]
    named = [name for name in known if name != "*"]
    order = [item.name for item in parameters if item.name in named]
    lacks = [f"takes no {name!r}" for name in named if name not in order]
    if not lacks and order != named:
        lacks.append(f"takes {', '.join(map(repr, order))} in this order")
    is_any = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [item.name for item in parameters if item.default is item.empty and item.kind not in is_any]
    return lacks + [f"needs {name!r}" for name in needed if name not in named and "*" not in known]

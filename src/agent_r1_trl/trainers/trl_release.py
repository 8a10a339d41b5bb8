"""Whether the installed release of TRL still has what this package stands on.

The tables say what that is; a test compares them with our overrides, calls and imports, and the trainers compare them
with the installed release when they are imported. What is gone, or asked for anew, is an `ImportError`; what is new
and may be switched off, a warning.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import logging
import textwrap
from collections.abc import Iterator
from types import CodeType
from typing import Any

logger = logging.getLogger(__name__)

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
    "_set_signature_columns_if_needed": "",
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
    "trl.chat_template_utils": "get_training_chat_template has_generation_markers is_chat_template_stop_token_trained",
    "trl.models": "unwrap_model_for_generation",
    "trl.models.utils": "disable_gradient_checkpointing",
    "trl.trainer.callbacks": "SyncRefModelCallback",
    "trl.trainer.utils": "RepeatSampler disable_dropout_in_model nanstd use_adapter",
}
"""What is imported, by module."""
BATCH_KEYS = """
    advantages completion_ids completion_mask image_grid_thw image_position_ids image_sizes importance_sampling_ratio
    mm_token_type_ids num_images num_items_in_batch num_tiles old_per_token_logps pixel_attention_mask pixel_values
    prompt_ids prompt_mask ref_per_token_logps sampling_per_token_logps spatial_shapes token_type_ids tool_mask
"""
"""Entries of a batch that TRL's `_compute_loss` reads."""


@functools.cache
def check_trl() -> None:
    """Compare the installed release with the tables, once, and say all that differs in one message.

    Raises:
        ImportError: something is gone, or asked for anew.
    """
    import trl

    lacks, news = [*_lacking_imports()], []
    if not lacks:
        trainer = trl.GRPOTrainer
        lacks += _lacking_attributes(trainer)
        for name, arguments in METHODS.items():
            lacking, new = compare_arguments(getattr(trainer, name, None), arguments.split())
            lacks += [f"GRPOTrainer.{name} {text}" for text in lacking]
            news += [f"GRPOTrainer.{name} {text}" for text in new]
        unknown = set() if lacks else batch_keys(trainer._compute_loss) - set(BATCH_KEYS.split())
        news += [f"GRPOTrainer._compute_loss reads inputs[{name!r}]" for name in sorted(unknown)]
    if not lacks and not news:
        return
    text = (
        f"trl {trl.__version__} differs from {TESTED}, which agent-r1-trl was tested with, in what it builds on: "
        f"{'; '.join(lacks + news)}. "
    )
    if lacks:
        raise ImportError(f"{text}The trainers cannot run on it: pip install trl=={TESTED}")
    logger.warning("%sThe trainers may work; if they do not: pip install trl==%s", text, TESTED)


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


def compare_arguments(method: Any, known: list[str]) -> tuple[list[str], list[str]]:
    """What rules an override out, and what is new, in words.

    `known` are the arguments that ours name, in order, then `*` if it passes others on; a `method` of None is gone.

    >>> compare_arguments(lambda self, a, b, c=0: 0, ["a", "b"])
    ([], ["takes 'c'"])
    >>> compare_arguments(lambda self, b, a: 0, ["a", "b", "*"])
    (["takes 'b', 'a' in this order"], [])
    """
    if method is None:
        return ["is gone"], []
    parameters = [*inspect.signature(method).parameters.values()][1:]
    is_open = "*" in known
    known = [name for name in known if name != "*"]
    names = [item.name for item in parameters]
    lacks = [f"takes no {name!r}" for name in known if name not in names]
    if not lacks and (order := [name for name in names if name in known]) != known:
        lacks.append(f"takes {', '.join(map(repr, order))} in this order")
    added = [item for item in parameters if item.name not in known and not is_open]
    is_any = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [item for item in added if item.default is item.empty and item.kind not in is_any]
    lacks += [f"needs {item.name!r}" for item in needed]
    return lacks, [f"takes {item.name!r}" for item in added if item not in needed]


def batch_keys(method: Any) -> set[str]:
    """The entries of its argument `inputs` that a method reads, from its source; none if that cannot be read.

    >>> batch_keys(check_trl)
    set()
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):
        return set()
    keys: list[ast.expr] = []
    for node in ast.walk(tree):
        match node:
            case (
                ast.Subscript(value=ast.Name(id="inputs"), slice=key)
                | ast.Call(func=ast.Attribute(value=ast.Name(id="inputs"), attr="get" | "pop"), args=[key, *_])
                | ast.Compare(left=key, comparators=[ast.Name(id="inputs")])
            ):
                keys.append(key)
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}

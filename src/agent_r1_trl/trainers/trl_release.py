"""Whether the installed release of TRL still has what this package stands on.

The tables say what that is; a test compares them with our overrides, calls and imports, and the trainers compare them
with the installed release when they are imported. What is gone, or asked for anew, is an `ImportError`; a method whose
code is not the tested one is a warning. What the loss of another release computes is measured (`trl_canary.py`).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
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
    "compute_loss": "model inputs *",
    "create_model_card": "model_name dataset_name tags",
    "get_eval_dataloader": "eval_dataset",
    "get_train_dataloader": "",
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
    "trl.trainer.utils": """RepeatSampler _ChunkedLogProbFunction maybe_gather_lm_head_ctx
    nanstd use_adapter""",
}
"""The imports, by module."""
BODIES = {
    "_calculate_rewards": "ea911f6773cc1e45",
    "_compute_loss": "b6a060b6501c4bf1",
    "_generate": "0912c576652cb134",
    "_generate_and_score_completions": "b959814ceef2c84d",
    "_get_per_token_logps_and_entropies": "ee7009c7a37df5e3",
    "_prepare_inputs": "451c99a1151c3a76",
    "compute_loss": "6fe861f41f3e48c8",
    "training_step": "9fb6212d48606120",
}
"""TRL's methods whose meaning the training rests on, those that ours call and those that ours stand in for, and hashes
of their code in the tested release (`hash_of_code`). What is new in a release is read by someone, and ported where it
concerns ours, before a hash is changed."""


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
    warn_of_other_code()


def refuse_replaced() -> None:
    """Refuse a trainer or a config that another package has put in the place of TRL's, as Unsloth does.

    Raises:
        ImportError: names the module that it comes from, its file and the way out.
    """
    import trl

    for name in ("GRPOTrainer", "GRPOConfig"):
        kind: type | None = getattr(trl, name, None)
        module = "trl" if kind is None else kind.__module__
        if kind is None or module.partition(".")[0] == "trl":
            continue
        file = getattr(sys.modules.get(module), "__file__", None) or _file_of(kind)
        raise ImportError(
            f"trl.{name} is not TRL's: {_who_replaces(module)} has put {kind.__qualname__} in its place, of the "
            f"module {module!r} ({file or 'without a file'}). Our trainers are subclasses of TRL's own. Import them "
            "before it, in the first line of the program: from agent_r1_trl import MultiTurnGRPOConfig, "
            "MultiTurnGRPOTrainer. Or do without the other package."
        )


def _file_of(kind: type) -> str | None:
    try:
        return inspect.getfile(kind)
    except (OSError, TypeError):
        return None


def _who_replaces(module: str) -> str:
    """The package behind a module: Unsloth's are compiled, and have names of their own."""
    return "Unsloth (import unsloth)" if "unsloth" in module.lower() else f"the package {module.partition('.')[0]!r}"


def warn_of_other_code() -> None:
    """Say once, on the main process, which methods are not the ones that were tested, and with which release."""
    import trl

    changed = changed_bodies(trl.GRPOTrainer)
    if changed and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "trl %s is installed, and agent-r1-trl was tested with %s. Methods of TRL's that its training rests on "
            "have other code: %s. The first training step compares TRL's loss with the objective by hand; the rest is "
            "untested. To be sure: pip install trl==%s",
            trl.__version__,
            TESTED,
            ", ".join(changed),
            TESTED,
        )


def changed_bodies(trainer: type) -> list[str]:
    """Names in `BODIES` whose code in a trainer class is not the tested one, or cannot be read."""
    return [name for name, known in BODIES.items() if hash_of_code(getattr(trainer, name, None)) != known]


def hash_of_code(function: Callable[..., Any] | None) -> str | None:
    """A hash of a function's syntax tree: comments, docstrings, annotations and line breaks do not enter it.

    Returns:
        None where there is no function, or no source of it.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError):
        return None
    return hashlib.sha256(repr(_plain(tree.body[0])).encode()).hexdigest()[:16]


_NO_MEANING = ("annotation", "returns", "type_comment", "type_params", "kind")
"""Fields of syntax trees that change nothing of what is computed, or that some Pythons do not have."""


def _plain(node: object) -> object:
    """A syntax tree as nested tuples, the same on every Python: what is empty is left out."""
    if isinstance(node, list):
        return tuple(_plain(item) for item in node if not _is_docstring(item))
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name not in _NO_MEANING and value is not None and value != []:
            fields.append((name, _plain(value)))
    return (type(node).__name__, *fields)


def _is_docstring(node: object) -> bool:
    """A string that stands alone as a statement."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _lacking_imports() -> Iterator[str]:
    for module, names in IMPORTS.items():
        try:
            found = dir(importlib.import_module(module))  # of a lazy module too, without loading what it names
        except ModuleNotFoundError:
            found = []
        yield from (f"{module}.{name} is gone" for name in names.split() if name not in found)


def _lacking_attributes(trainer: type) -> Iterator[str]:
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


def compare_arguments(method: Callable[..., object] | None, known: list[str]) -> list[str]:
    """The reason against an override, in words.

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

"""`agent-r1-trl memory`: estimate the memory that a recipe needs on each GPU, without loading a weight.

    agent-r1-trl memory --config recipe.yaml
    agent-r1-trl memory --config recipe.yaml --accelerate_config recipes/accelerate_configs/zero2.yaml
    agent-r1-trl memory --model_name_or_path Qwen/Qwen2.5-7B-Instruct --use_peft --gpu_memory_gb 24

Exit code 0: the run fits. 1: it does not. 2: it could not be estimated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from rich import box
from rich.table import Table
from transformers import AutoConfig

from agent_r1_trl.cli.arguments import TrainArguments
from agent_r1_trl.cli.console import PlainConsole
from agent_r1_trl.cli.errors import UsageError
from agent_r1_trl.cli.parser import OF_RECIPES, RecipeParser
from agent_r1_trl.cli.recipe import read_recipe
from agent_r1_trl.cli.train import find_trainer, trainer_class
from agent_r1_trl.features.doctor.command_arguments import DoctorArguments, MemoryArguments
from agent_r1_trl.features.doctor.memory import (
    GIB,
    PHASES,
    Estimate,
    MemorySetup,
    ModelShape,
    estimate_memory,
    find_savings,
    read_shape,
)
from agent_r1_trl.rollout.context_policies import ContextSettings
from agent_r1_trl.trainers.config import ModelConfig, get_peft_config

COMMAND = "agent-r1-trl memory"
ONE_ROW = (
    "With context.policy={policy!r} a trajectory counts as one row here, as long as context and limits allow: how "
    "many it becomes cannot be foreseen. With max_tokens_per_micro_batch the update does not depend on it."
)
_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "bold red"}


def run(argv: Sequence[str]) -> int:
    """Print the estimate; returns the exit code."""
    setup, estimate, savings = estimate_recipe(argv)
    console, verdict, peak = PlainConsole(), estimate.verdict, estimate.peak / GIB
    table = Table("on each GPU", "GiB", "when", title=f"{setup.num_processes} process(es)", box=box.SIMPLE_HEAD)
    table.columns[1].justify = "right"
    for line in sorted(estimate.lines, key=lambda line: PHASES.index(line.phase)):
        table.add_row(line.name, f"{line.bytes / GIB:.2f}", line.phase)
    table.add_section()
    table.add_row("peak", f"{peak:.2f}", "always + the larger of update and rollout")
    console.print(table)
    share = peak / estimate.gpu_memory_gb
    console.print(f"{verdict}: {peak:.1f} of {estimate.gpu_memory_gb:g} GiB ({share:.0%})", style=_STYLES[verdict])
    if setup.context_policy != "keep":
        console.print("  " + ONE_ROW.format(policy=setup.context_policy))
    for change, peak in savings.items() if verdict != "fits" else ():
        console.print(f"  {change}: {peak / GIB:.1f} GiB")
    return int(verdict == "does not fit")


def estimate_recipe(argv: Sequence[str]) -> tuple[MemorySetup, Estimate, dict[str, float]]:
    """What a recipe depends on, its estimate, and what would lower it.

    Raises:
        UsageError: there is a mistake in the recipe or on the command line, or it cannot be estimated.
    """
    settings, model_args = read_arguments(argv)
    shape = read_model(model_args, trust_remote_code=settings["trust_remote_code"])
    try:
        setup = make_setup(settings, model_args, max_positions=shape.max_positions)
        return setup, estimate_memory(shape, setup), find_savings(shape, setup)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def read_arguments(argv: Sequence[str]) -> tuple[dict[str, Any], ModelConfig]:
    """Every setting by its name, and those of the model.

    The trainer's own arguments are not made: they would ask whether this machine has the GPU that is estimated for.

    Raises:
        UsageError: there is a mistake in the recipe or on the command line.
    """
    kinds = (MemoryArguments, TrainArguments, trainer_class(find_trainer(argv)).config_class, ModelConfig)
    about = "Estimate the memory that a recipe needs on each GPU."
    elsewhere = (*OF_RECIPES, DoctorArguments)
    parser = RecipeParser(kinds, command=COMMAND, about=about, elsewhere=elsewhere)
    parser.read(argv)
    settings = {name: getattr(value, "value", value) for name, value in parser.settings.items()}
    parser.make(MemoryArguments)
    if "adam" not in settings["optim"]:
        raise UsageError(
            f"optim={settings['optim']!r}: only the states of Adam are estimated. Pass --optim adamw_torch."
        )
    if settings["vllm_mode"] not in ("colocate", "server"):
        raise UsageError(f"--vllm_mode {settings['vllm_mode']!r}: must be 'colocate' or 'server'. Pass one of them.")
    if not settings["model_name_or_path"]:
        raise UsageError("--model_name_or_path: not set. Pass the directory or the Hub id of a model.")
    return settings, parser.make(ModelConfig)


def read_model(model_args: Any, *, trust_remote_code: bool = False) -> ModelShape:
    """Read the sizes of the model; from the Hub only config.json is fetched.

    Raises:
        UsageError: there is no such model, or it is not a causal language model.
    """
    name, options = model_args.model_name_or_path, {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(name, revision=model_args.model_revision, **options)
        if model_args.dtype == "auto":
            model_args.dtype = str(config.dtype or "float32").removeprefix("torch.")
        return read_shape(config, get_peft_config(model_args))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"model_name_or_path={name!r}: {str(error).splitlines()[0]} Pass a directory with a config.json, or the "
            "Hub id of a causal language model."
        ) from error


def make_setup(settings: dict[str, Any], model_args: Any, *, max_positions: int | None = None) -> MemorySetup:
    """Translate a recipe and an accelerate configuration into what the estimate depends on.

    Args:
        settings: every setting by its name.
        model_args: of the model.
        max_positions: tokens that a context of the model can hold; None if unknown.

    Raises:
        ValueError: a value is out of range.
        UsageError: the accelerate configuration cannot be estimated.
    """
    values = {item.name: settings[item.name] for item in dataclasses.fields(MemorySetup) if item.name in settings}
    launch = read_accelerate_config(settings["accelerate_config"])
    is_full, uses_16_bits = not model_args.use_peft, launch.pop("mixed_precision") in ("bf16", "fp16")
    launch["num_processes"] = settings["num_processes"] or launch["num_processes"]
    if values["gpu_memory_gb"] is None:
        has_gpu = torch.cuda.is_available()
        values["gpu_memory_gb"] = torch.cuda.get_device_properties(0).total_memory / GIB if has_gpu else 80.0
    if max_positions is not None:  # no context is longer than the model's
        values["prompt_tokens"] = min(values["prompt_tokens"], max_positions - 1)
        left = max_positions - values["prompt_tokens"]
        values["max_completion_length"] = min(left, values["max_completion_length"] or left)
    batch = settings["per_device_train_batch_size"]
    of_rollout = batch * settings["gradient_accumulation_steps"] * (settings["updates_per_rollout"] or 1)
    if settings["prompts_per_rollout"] is not None:
        num_rows = settings["prompts_per_rollout"] * settings["num_generations"]
        of_rollout = math.ceil(num_rows / launch["num_processes"])
    elif settings["steps_per_generation"] is not None:
        of_rollout = batch * settings["steps_per_generation"]
    critic = settings.get("critic") or ("model" if is_full else "adapter")
    vllm = "server" if settings["vllm_mode"] == "server" else "vllm"
    context: Any = ContextSettings.read("context", settings["context"])
    values |= launch | {
        "dtype": model_args.dtype,
        "mixed_precision": bool(settings["bf16"] in (True, None) or settings["fp16"] or uses_16_bits),
        "quantization": "4bit" if model_args.load_in_4bit else "8bit" if model_args.load_in_8bit else None,
        "optimizer_bytes": 2 if "8bit" in settings["optim"] else 8,
        "update_rows": batch * settings["gradient_accumulation_steps"],
        "has_attention_masks": model_args.attn_implementation in (None, "sdpa", "eager"),
        "reference_model": settings["beta"] != 0 and is_full,
        "critic": critic if trainer_class(settings["trainer"]).config_class.has_critic else None,
        "generator": vllm if settings["use_vllm"] else "transformers",
        "generation_batch_rows": min(settings["generation_batch_rows"], of_rollout),
        "context_policy": context.policy,
    }
    return MemorySetup(**values)


def read_accelerate_config(path: str | None) -> dict[str, Any]:
    """Read what memory depends on from a file of `accelerate config`.

    Raises:
        UsageError: the file cannot be read, or its method is not estimated.
    """
    values = read_recipe(path, flag="--accelerate_config") if path is not None else {}
    kind = str(values.get("distributed_type", "NO")).upper()
    section = values.get("deepspeed_config") or {}
    if kind in ("FSDP", "MEGATRON_LM", "XLA") or "deepspeed_config_file" in section:
        what = "deepspeed_config_file" if kind == "DEEPSPEED" else kind
        raise UsageError(
            f"accelerate_config={path!r}: {what} is not estimated. Pass a file of recipes/accelerate_configs (ZeRO-3 "
            "splits what FSDP's full sharding splits)."
        )
    is_zero = kind == "DEEPSPEED"
    offloads = {"offload_optimizer": "offload_optimizer_device", "offload_parameters": "offload_param_device"}
    return {
        "zero_stage": int(section.get("zero_stage", 2)) if is_zero else 0,
        "num_processes": int(values.get("num_processes", 1)),
        "mixed_precision": values.get("mixed_precision", "no"),
        **{ours: is_zero and section.get(name, "none") != "none" for ours, name in offloads.items()},
    }

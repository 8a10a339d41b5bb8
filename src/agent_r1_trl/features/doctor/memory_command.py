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
from dataclasses import replace
from typing import Any

import torch
from rich import box
from rich.table import Table
from transformers import AutoConfig

from agent_r1_trl.cli.arguments import TrainArguments
from agent_r1_trl.cli.errors import UsageError, model_problem, users_mistakes
from agent_r1_trl.cli.parser import OF_RECIPES, RecipeParser
from agent_r1_trl.cli.recipe import read_recipe
from agent_r1_trl.cli.train import config_class_of, find_trainer
from agent_r1_trl.display.console import PlainConsole
from agent_r1_trl.features.doctor.command_arguments import HELP, MemoryArguments
from agent_r1_trl.features.doctor.savings import find_savings
from agent_r1_trl.generation.adapter_folders import check_whole_model
from agent_r1_trl.trainers.config import ModelConfig, get_peft_config
from agent_r1_trl.trainers.memory import (
    GIB,
    PHASES,
    MemorySetup,
    estimate_memory,
    find_peak,
    find_token_limit,
    is_checkpointing_needless,
    judge,
    read_shape,
)
from agent_r1_trl.update.layout import AUTO

_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "bold red"}


def run(argv: Sequence[str]) -> int:
    """Print the estimate; returns the exit code."""
    setup = read_setup(argv)
    lines, console = estimate_memory(setup), PlainConsole()
    peak, memory = find_peak(lines), setup.gpu_memory_gb
    table = Table("on each GPU", "GiB", "when", title=f"{setup.num_processes} process(es)", box=box.SIMPLE_HEAD)
    table.columns[1].justify = "right"
    for line in sorted(lines, key=lambda line: PHASES.index(line.phase)):
        table.add_row(line.name, f"{line.bytes / GIB:.2f}", line.phase)
    table.add_section()
    table.add_row("peak", f"{peak / GIB:.2f}", "always + the larger of update and rollout")
    console.print(table)
    if setup.max_tokens_per_micro_batch is not None:
        limit = f"{setup.max_tokens_per_micro_batch:,}"
        console.print(f"update_layout: {setup.update_layout}, max_tokens_per_micro_batch: {limit}")
    verdict = judge(peak, memory)
    share = peak / GIB / memory
    console.print(f"{verdict}: {peak / GIB:.1f} of {memory:g} GiB ({share:.0%})", style=_STYLES[verdict])
    for change, lower in find_savings(setup).items() if verdict != "fits" else ():
        console.print(f"  {change}: {lower / GIB:.1f} GiB")
    if is_checkpointing_needless(setup):
        console.print("It would fit with gradient_checkpointing: false as well, which computes no forward pass twice.")
    return int(verdict == "does not fit")


def read_setup(argv: Sequence[str]) -> MemorySetup:
    """Read what the estimate depends on from a recipe, the command line and an accelerate configuration.

    The trainer's own arguments are not made: they would ask whether this machine has the GPU that is estimated for.

    Raises:
        UsageError: there is a mistake in one of them, or the run cannot be estimated.
    """
    trainer = config_class_of(find_trainer(argv))
    kinds = (MemoryArguments, TrainArguments, trainer, ModelConfig)
    parser = RecipeParser(kinds, command="agent-r1-trl memory", about=HELP["memory"].about, elsewhere=OF_RECIPES)
    parser.read(argv)
    settings = {name: getattr(value, "value", value) for name, value in parser.settings.items()}
    parser.make(MemoryArguments)
    model, name = parser.make(ModelConfig), settings["model_name_or_path"]
    if not name:
        raise UsageError("--model_name_or_path: not set. Pass the directory or the Hub id of a model.")
    with users_mistakes():
        check_whole_model(name, flag="model_name_or_path")
    try:  # from the Hub only config.json is fetched
        options = {"revision": model.model_revision, "trust_remote_code": settings["trust_remote_code"]}
        config = AutoConfig.from_pretrained(name, **options)
        shape = read_shape(config, get_peft_config(model))
    except (OSError, ValueError) as error:
        raise UsageError(model_problem(name, error)) from error
    except AttributeError as error:  # of models without attention
        raise UsageError(f"model_name_or_path={name!r}: not estimated ({error}). Choose another model.") from error
    if settings["dtype"] == "auto":
        settings["dtype"] = str(config.dtype or "float32").removeprefix("torch.")
    launch = read_accelerate_config(settings["accelerate_config"])
    launch["num_processes"] = settings["num_processes"] or launch["num_processes"]
    is_16_bit = launch.pop("mixed_precision") in ("bf16", "fp16")
    batch, processes = settings["per_device_train_batch_size"], launch["num_processes"]
    update_rows = batch * settings["gradient_accumulation_steps"]
    of_rollout = update_rows * (settings["updates_per_rollout"] or 1)
    if settings["prompts_per_rollout"] is not None:
        of_rollout = math.ceil(settings["prompts_per_rollout"] * settings["num_generations"] / processes)
    elif settings["steps_per_generation"] is not None:
        of_rollout = batch * settings["steps_per_generation"]
    critic = settings.get("critic") or ("adapter" if settings["use_peft"] else "model")
    if settings["gpu_memory_gb"] is None:
        has_gpu = torch.cuda.is_available()
        settings["gpu_memory_gb"] = torch.cuda.get_device_properties(0).total_memory / GIB if has_gpu else 80.0
    if shape.max_positions is not None:  # no context is longer than the model's
        settings["prompt_tokens"] = min(settings["prompt_tokens"], shape.max_positions - 1)
        left = shape.max_positions - settings["prompt_tokens"]
        settings["max_completion_length"] = min(left, settings["max_completion_length"] or left)
    values = {item.name: settings[item.name] for item in dataclasses.fields(MemorySetup) if item.name in settings}
    values |= launch | {
        "shape": shape,
        "mixed_precision": bool(settings["bf16"] in (True, None) or settings["fp16"] or is_16_bit),
        "update_rows": update_rows,
        "critic": critic if trainer.has_critic else None,
        "generation_batch_rows": min(settings["generation_batch_rows"], of_rollout),
    }
    with users_mistakes(TypeError):
        return _with_auto(values)


def _with_auto(values: dict[str, Any]) -> MemorySetup:
    """The setup, with what `auto` takes on a CUDA GPU of this size, as far as it can be known before the run."""
    if values["update_layout"] == AUTO:  # DeepSpeed brings a model to its GPU too late for packed rows to be tried
        has_limit = isinstance(values["max_tokens_per_micro_batch"], int)
        values["update_layout"] = "shared" if has_limit or not values["zero_stage"] else "grouped"
    is_auto = values["max_tokens_per_micro_batch"] == AUTO
    if is_auto:
        values["max_tokens_per_micro_batch"] = None
    setup = MemorySetup(**values)
    if is_auto and setup.is_packed:
        return replace(setup, max_tokens_per_micro_batch=find_token_limit(setup).tokens)
    return setup


def read_accelerate_config(path: str | None) -> dict[str, Any]:
    """Read what memory depends on from a file of `accelerate config`.

    Raises:
        UsageError: the file cannot be read, or its method is not estimated.
    """
    values = read_recipe(path, flag="--accelerate_config") if path is not None else {}
    kind = str(values.get("distributed_type", "NO")).upper()
    section = values.get("deepspeed_config") or {}
    of_fsdp = values.get("fsdp_config") or {}
    is_zero, is_fsdp = kind == "DEEPSPEED", kind == "FSDP"
    is_fsdp1 = is_fsdp and str(of_fsdp.get("fsdp_version", 1)) != "2"
    if kind in ("MEGATRON_LM", "XLA") or is_fsdp1 or "deepspeed_config_file" in section:
        what = "deepspeed_config_file" if is_zero else "FSDP1" if is_fsdp1 else kind
        raise UsageError(
            f"accelerate_config={path!r}: {what} is not estimated. Pass another file of recipes/accelerate_configs."
        )
    is_offloaded = is_fsdp and str(of_fsdp.get("fsdp_offload_params", False)).lower() == "true"
    return {
        "is_fsdp": is_fsdp,
        "zero_stage": int(section.get("zero_stage", 2)) if is_zero else 0,
        "num_processes": int(values.get("num_processes", 1)),
        "mixed_precision": values.get("mixed_precision", "no"),
        "offload_optimizer": is_offloaded or (is_zero and section.get("offload_optimizer_device", "none") != "none"),
        "offload_parameters": is_offloaded or (is_zero and section.get("offload_param_device", "none") != "none"),
    }

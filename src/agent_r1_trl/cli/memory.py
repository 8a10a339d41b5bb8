"""`agent-r1-trl memory`: estimate the memory that a recipe needs on each GPU, without loading a weight.

    agent-r1-trl memory --config recipe.yaml
    agent-r1-trl memory --config recipe.yaml --accelerate_config recipes/accelerate_configs/zero2.yaml
    agent-r1-trl memory --model_name_or_path Qwen/Qwen2.5-7B-Instruct --use_peft --gpu_memory_gb 24

Exit code 0: the run fits. 1: it does not. 2: it could not be estimated.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agent_r1_trl.cli.errors import UsageError, run_command
from agent_r1_trl.cli.recipe import read_recipe, split_config

if TYPE_CHECKING:
    from rich.table import Table

    from agent_r1_trl.cli.arguments import MemoryArguments
    from agent_r1_trl.memory import Estimate, MemorySetup, ModelShape, RowBounds

COMMAND = "agent-r1-trl memory"
EXIT_TOO_LARGE = 1
_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "bold red"}


def run(argv: Sequence[str]) -> int:
    """Print the estimate; returns the exit code."""
    from agent_r1_trl.cli.arguments import MemoryArguments
    from agent_r1_trl.cli.options import options_of, read_options, show_help

    def options() -> list[dict[str, Any]]:
        return options_of(Settings=MemoryArguments) + read_options("Model and adapter (TRL)")

    if show_help(COMMAND, argv, "Estimate the memory that a recipe needs on each GPU.", options):
        return 0
    config_path, _ = split_config(argv)
    if config_path is not None:
        read_recipe(config_path)

    from agent_r1_trl.cli.console import PlainConsole
    from agent_r1_trl.memory import estimate_memory, find_savings

    arguments, model_args = read_arguments(argv)
    shape = read_model(model_args, trust_remote_code=arguments.trust_remote_code)
    try:
        setup = make_setup(arguments, model_args, max_positions=shape.max_positions)
        estimate = estimate_memory(shape, setup)
    except ValueError as error:
        raise UsageError(str(error)) from error
    console = PlainConsole()
    console.print(memory_table(estimate, f"{model_args.model_name_or_path}, {setup.num_processes} process(es)"))
    console.print(_verdict(estimate))
    for problem in estimate.problems:
        console.print(f"  {problem}")
    for note in not_counted(arguments):
        console.print(f"  not counted: {note}")
    if estimate.verdict != "fits":
        for saving in find_savings(shape, setup):
            console.print(f"  {saving.change}: {saving.peak / 2**30:.1f} GiB")
    return EXIT_TOO_LARGE if estimate.verdict == "does not fit" else 0


def read_arguments(argv: Sequence[str]) -> tuple[MemoryArguments, Any]:
    """Parse the arguments of the command and of the model.

    Raises:
        UsageError: there is a mistake in the recipe or on the command line.
    """
    from agent_r1_trl.cli.arguments import DoctorArguments, EvalArguments, MemoryArguments, TrainArguments
    from agent_r1_trl.cli.parser import RecipeParser
    from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig
    from agent_r1_trl.trainers.trl_arguments import ModelConfig

    parser = RecipeParser(
        (MemoryArguments, ModelConfig),
        command=COMMAND,
        elsewhere=(TrainArguments, MultiTurnGRPOConfig, MultiTurnPPOConfig, EvalArguments, DoctorArguments),
    )
    arguments, model_args = parser.parse(argv)
    if not model_args.model_name_or_path:
        raise UsageError("--model_name_or_path: not set. Pass the directory or the Hub id of a model.")
    return arguments, model_args


def read_model(model_args: Any, *, trust_remote_code: bool = False) -> ModelShape:
    """Read the sizes of the model; from the Hub only config.json is fetched.

    Raises:
        UsageError: there is no such model, or it is not a causal language model.
    """
    from transformers import AutoConfig

    from agent_r1_trl.memory import read_shape
    from agent_r1_trl.trainers.trl_arguments import get_peft_config

    name = model_args.model_name_or_path
    try:
        config = AutoConfig.from_pretrained(
            name, revision=model_args.model_revision, trust_remote_code=trust_remote_code
        )
        if model_args.dtype == "auto":
            model_args.dtype = str(config.dtype or "float32").removeprefix("torch.")
        return read_shape(config, get_peft_config(model_args))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"model_name_or_path={name!r}: {str(error).splitlines()[0]} Pass a directory with a config.json, or the "
            "Hub id of a causal language model."
        ) from error


def make_setup(arguments: MemoryArguments, model_args: Any, *, max_positions: int | None = None) -> MemorySetup:
    """Translate a recipe and an accelerate configuration into what the estimate depends on.

    Args:
        arguments: of the command.
        model_args: of the model.
        max_positions: tokens that a context of the model can hold; None if unknown.

    Raises:
        ValueError: a value is out of range.
        UsageError: the accelerate configuration cannot be estimated.
    """
    from agent_r1_trl.memory import MemorySetup

    launch = read_accelerate_config(arguments.accelerate_config)
    is_ppo, is_full = arguments.trainer == "ppo", not model_args.use_peft
    mixed = (arguments.bf16 if arguments.bf16 is not None else not arguments.fp16) or arguments.fp16
    num_processes = arguments.num_processes or launch["num_processes"]
    vllm = "server" if arguments.vllm_mode == "server" else "vllm"
    rows = bounds_of_rows(arguments)
    most = max_positions or rows.tokens
    return MemorySetup(
        dtype=model_args.dtype,
        mixed_precision=mixed or launch["mixed_precision"] in ("bf16", "fp16"),
        quantization="4bit" if model_args.load_in_4bit else "8bit" if model_args.load_in_8bit else None,
        nested_quantization=model_args.use_bnb_nested_quant,
        optimizer_bytes=2 if "8bit" in arguments.optim else 8,
        num_processes=num_processes,
        micro_batch=arguments.per_device_train_batch_size,
        prompt_tokens=min(rows.opening, max(1, most - 1)),
        completion_tokens=min(rows.completion, most),
        row_tokens=min(rows.tokens, most),
        rows_per_trajectory=rows.rows,
        trajectory_tokens=min(rows.total, rows.rows * most),
        is_packed=arguments.update_layout in ("packed", "shared"),
        max_tokens_per_micro_batch=arguments.max_tokens_per_micro_batch,
        update_rows=arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps,
        critic_prefix=arguments.critic_context_tokens if is_ppo and arguments.critic_context else 0,
        gradient_checkpointing=arguments.gradient_checkpointing,
        saves_attention_mask="flash" not in (model_args.attn_implementation or ""),
        reference_model=arguments.beta != 0 and is_full,
        critic=(arguments.critic or ("model" if is_full else "adapter")) if is_ppo else None,
        generator=vllm if arguments.use_vllm else "transformers",
        rollout_rows=min(arguments.generation_batch_rows, _rollout_rows(arguments, num_processes)),
        vllm_share=arguments.vllm_gpu_memory_utilization,
        vllm_sleeps=arguments.vllm_enable_sleep_mode,
        gpu_memory_gb=_gpu_memory_gb() if arguments.gpu_memory_gb is None else arguments.gpu_memory_gb,
        zero_stage=launch["zero_stage"],
        offload_optimizer=launch["offload_optimizer"],
        offload_parameters=launch["offload_parameters"],
    )


def bounds_of_rows(arguments: MemoryArguments) -> RowBounds:
    """The rows of a trajectory of this recipe, at most.

    Raises:
        ValueError: the limits do not go together.
    """
    from agent_r1_trl.memory import row_bounds
    from agent_r1_trl.rollout.limits import RolloutSettings
    from agent_r1_trl.rollout.thinking import settle_thinking

    _, policy = settle_thinking(arguments.thinking, arguments.context_policy)
    lengths = ("max_turns", "max_tokens_per_turn", "max_completion_length", "max_observation_tokens")
    names = (*lengths, "context_turns", "context_tokens", "summary_tokens")
    limits = RolloutSettings(context_policy=policy, **{name: getattr(arguments, name) for name in names})
    limits.check_limits()
    return row_bounds(limits, arguments.prompt_tokens)


def not_counted(arguments: MemoryArguments) -> list[str]:
    """What the recipe has and the estimate leaves out, in words."""
    if bounds_of_rows(arguments).is_counted:
        return []
    return [
        f"how many rows context_policy={arguments.context_policy!r} makes of a trajectory; it stands for one row "
        "here. With max_tokens_per_micro_batch the update's memory does not depend on it."
    ]


def _rollout_rows(arguments: MemoryArguments, num_processes: int) -> int:
    """Trajectories of one rollout that are one process's."""
    if arguments.prompts_per_rollout is not None:
        responses = arguments.num_generations or (1 if arguments.trainer == "ppo" else 8)
        return math.ceil(arguments.prompts_per_rollout * responses / num_processes)
    forwards = arguments.steps_per_generation
    if forwards is None:
        forwards = arguments.gradient_accumulation_steps * (arguments.updates_per_rollout or 1)
    return arguments.per_device_train_batch_size * forwards


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
    return {
        "zero_stage": int(section.get("zero_stage", 2)) if is_zero else 0,
        "offload_optimizer": is_zero and section.get("offload_optimizer_device", "none") != "none",
        "offload_parameters": is_zero and section.get("offload_param_device", "none") != "none",
        "num_processes": int(values.get("num_processes", 1)),
        "mixed_precision": values.get("mixed_precision", "no"),
    }


def memory_table(estimate: Estimate, title: str) -> Table:
    """A table with the lines of the estimate, then the sums."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("per GPU", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("when", no_wrap=True)
    table.add_column("formula", overflow="fold", style="dim")
    order = {"always": 0, "update": 1, "rollout": 2}
    for line in sorted(estimate.lines, key=lambda line: order[line.phase]):
        when = line.phase if line.place == "gpu" else f"{line.phase}, main memory"
        table.add_row(line.name, f"{line.bytes / 2**30:.2f}", when, line.formula)
    table.add_section()
    table.add_row("peak", f"{estimate.peak / 2**30:.2f}", "", "always + the larger of update and rollout")
    if estimate.host:
        table.add_row("main memory", f"{estimate.host / 2**30:.2f}", "", "per process")
    return table


def _verdict(estimate: Estimate) -> Any:
    from rich.text import Text

    peak = estimate.peak / 2**30
    text = f"{estimate.verdict}: {peak:.1f} of {estimate.gpu_memory_gb:g} GiB ({peak / estimate.gpu_memory_gb:.0%})"
    return Text(text, style=_STYLES[estimate.verdict])


def _gpu_memory_gb() -> float:
    import torch

    if not torch.cuda.is_available():
        return 80.0
    return torch.cuda.get_device_properties(0).total_memory / 2**30


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m agent_r1_trl.cli.memory`."""
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())

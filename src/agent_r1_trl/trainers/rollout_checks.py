"""Checks of arguments that only matter where our rollout plays the trajectories.

`check_rollout` refuses what the rollout cannot honour, and what would have no effect: nothing is dropped in silence.
TRL accepts all of it, so a trainer without environment and tools does not call it. Options whose names begin with
`vllm_` wait for `use_vllm`: a recipe may hold them for the day it is switched on.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from agent_r1_trl.rollout.limits import check_whole_number

if TYPE_CHECKING:
    from agent_r1_trl.trainers.config import MultiTurnConfig

_NO_PREDICTIONS = "leave it unset: the trainer computes its metrics from trajectories, not from predictions"
_OWN_BATCHES = "leave it off: the rollout batches requests itself"

_NOT_BY_FSDP = (
    "shard with DeepSpeed instead, as in recipes/accelerate_configs/zero3.yaml. (FSDP2 gathers weights only while all "
    "ranks call the model together, but each rank samples at its own pace, and weights go to samplers one by one; "
    "docs/hardware.md says what is missing)"
)
LAUNCHED = {
    "fsdp": ("ACCELERATE_USE_FSDP", "`--use_fsdp` or `distributed_type: FSDP`"),
    "parallelism_config": ("ACCELERATE_USE_PARALLELISM_CONFIG", "`--use_parallelism_config`"),
}
"""Options that accelerate also takes from its launcher: name -> (environment variable, what sets it there)."""

UNSUPPORTED_OPTIONS: dict[str, tuple[Any, str]] = {
    "generation_kwargs": (None, "set temperature, top_p, top_k, min_p or repetition_penalty directly"),
    "cache_implementation": (None, "leave it unset: the rollout manages its own cache"),
    "use_transformers_paged": (False, _OWN_BATCHES),
    "use_transformers_continuous_batching": (False, _OWN_BATCHES),
    "transformers_continuous_batching_config": (None, _OWN_BATCHES),
    "multi_objective_aggregation": ("sum_then_normalize", "keep 'sum_then_normalize'"),
    "remove_unused_columns": (False, "set remove_unused_columns=False: environments read the other columns"),
    "vllm_structured_outputs_regex": (None, "leave it unset: tool calls are free text"),
    "vllm_tensor_parallel_size": (
        1,
        "set it to 1; for a model that does not fit on one GPU start a server with --tensor-parallel-size, and set "
        "vllm_mode='server' (docs/serving.md says why)",
    ),
    "fsdp": (None, _NOT_BY_FSDP),
    "parallelism_config": (None, _NOT_BY_FSDP),
    "train_sampling_strategy": ("random", "keep 'random': TRL draws whole groups, and shuffle_dataset is its option"),
    "length_column_name": ("length", "keep 'length': rows are not drawn by length"),
    "label_smoothing_factor": (0.0, "keep 0.0: the loss has no labels to smooth"),
    "label_names": (None, _NO_PREDICTIONS),
    "include_for_metrics": (None, _NO_PREDICTIONS),
    "batch_eval_metrics": (False, _NO_PREDICTIONS),
}
"""Options that the rollout or TRL's loop cannot honour: name -> (the only value accepted, the cure)."""


@dataclass(frozen=True)
class Need:
    """Options that are read only if another one has certain values."""

    options: tuple[str, ...]
    other: str
    values: tuple[Any, ...] | None
    """None: any but the default."""


_CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
TRL_NEEDS = (
    Need(("sapo_temperature_neg", "sapo_temperature_pos"), "loss_type", ("sapo",)),
    Need(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), "loss_type", ("vespo",)),
    Need(("delta",), "loss_type", _CLIPPED_LOSSES),
    Need(("epsilon", "epsilon_high"), "loss_type", (*_CLIPPED_LOSSES, "cispo")),
    Need(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        "use_adaptive_entropy",
        (True,),
    ),
    Need(("use_bias_correction_kl",), "beta", None),
    Need(("ref_model_mixup_alpha", "ref_model_sync_steps"), "sync_ref_model", (True,)),
    Need(("num_completions_to_print", "log_unique_prompts"), "log_completions", (True,)),
    Need(
        (
            "vllm_server_base_url",
            "vllm_server_host",
            "vllm_server_port",
            "vllm_server_timeout",
            "vllm_group_port",
            "vllm_health_timeout",
            "vllm_retry_window",
            "vllm_sync_timeout",
            "vllm_weight_transfer",
            "vllm_allow_public_servers",
        ),
        "vllm_mode",
        ("server",),
    ),
    Need(("vllm_gpu_memory_utilization", "vllm_model_impl", "vllm_dtype"), "vllm_mode", ("colocate",)),
    Need(("vllm_server_base_url", "vllm_server_host", "vllm_server_port"), "vllm_server_urls", (None,)),
    Need(("vllm_server_host", "vllm_server_port"), "vllm_server_base_url", (None,)),
    Need(
        ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
        "vllm_importance_sampling_correction",
        (True,),
    ),
)
"""TRL's own options that TRL would ignore."""


def check_rollout(config: MultiTurnConfig, *, has_generator: bool) -> None:
    """Refuse what the rollout cannot honour, and what would have no effect.

    Args:
        config: whose fields have been checked one by one.
        has_generator: whether the user brought a generator.

    Raises:
        ValueError: names the option, its value and the cure.
    """
    config.check_limits()
    check_whole_number("max_tool_calling_iterations", config.max_tool_calling_iterations, minimum=0, is_optional=True)
    check_unsupported(config)
    check_needs(config, TRL_NEEDS)
    check_sampling(config)
    check_correction(config)
    check_gather(config, has_generator=has_generator)
    check_launched(config)
    if config.max_sync_logprob_gap is not None and not (config.use_vllm or has_generator):
        raise ValueError(
            f"max_sync_logprob_gap={config.max_sync_logprob_gap} with use_vllm={config.use_vllm}: the sampler is the "
            "very model that is trained, so nothing is synced. Set use_vllm=True, or remove max_sync_logprob_gap."
        )


def check_unsupported(config: MultiTurnConfig) -> None:
    """Refuse every option of `UNSUPPORTED_OPTIONS` that has another value than the accepted one."""
    for name, (accepted, cure) in UNSUPPORTED_OPTIONS.items():
        value, source = getattr(config, name, accepted), ""
        is_unset = accepted is None and value in (None, "", {}, [], False)
        variable, setting = LAUNCHED.get(name, ("", ""))
        if is_unset and os.environ.get(variable, "").lower() in ("1", "true"):
            value, is_unset = True, False
            source = f" ({variable}={os.environ[variable]}: accelerate launch sets it for {setting})"
        if value == accepted or is_unset or _waits_for_vllm(config, name):
            continue
        raise ValueError(f"{name}={value!r}{source} is not supported by the multi-turn rollout. Cure: {cure}.")


def check_needs(config: MultiTurnConfig, needs: tuple[Need, ...]) -> None:
    """Refuse options that nothing reads, because another one has a value that leaves them out.

    Raises:
        ValueError: names both options and both ways out.
    """
    problems = []
    for need in needs:
        found, default = getattr(config, need.other), config.default_of(need.other)
        if (found != default) if need.values is None else (found in need.values):
            continue
        for name in need.options:
            value = getattr(config, name)
            if value in (None, config.default_of(name)) or _waits_for_vllm(config, name):
                continue
            others = f"another value than {default}" if need.values is None else " or ".join(map(repr, need.values))
            problems.append(
                f"{name}={value!r} has no effect with {need.other}={found!r}. Remove {name} (or set it to its "
                f"default, {config.default_of(name)!r}), or set {need.other} to {others}."
            )
    if problems:
        raise ValueError(" ".join(problems))


def _waits_for_vllm(config: MultiTurnConfig, name: str) -> bool:
    return name.startswith("vllm_") and not config.use_vllm


def check_sampling(config: MultiTurnConfig) -> None:
    """The sampling options are in the ranges in which they say something."""
    is_in_range = {
        "temperature": (config.temperature > 0, "> 0 in training (eval_temperature=0 evaluates greedily)"),
        "top_p": (0 < config.top_p <= 1, "> 0 and <= 1 (1.0 keeps all tokens)"),
        "top_k": (config.top_k is None or config.top_k >= -1, ">= 0 (0 keeps all tokens)"),
        "min_p": (config.min_p is None or 0 <= config.min_p <= 1, "between 0 and 1, or None"),
        "repetition_penalty": (config.repetition_penalty > 0, "> 0 (1.0 is none)"),
    }
    for name, (is_right, rule) in is_in_range.items():
        value = getattr(config, name)
        if not is_right or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{name}={value} must be {rule}. Set {name} to a value in that range.")


def check_correction(config: MultiTurnConfig) -> None:
    """Importance ratios need the sampler's whole distribution, not one that top_p and the like have cut."""
    if not (config.use_vllm and config.vllm_importance_sampling_correction):
        return
    neutral = {"top_p": (1.0,), "top_k": (0, -1, None), "min_p": (None, 0.0), "repetition_penalty": (1.0,)}
    for name, accepted in neutral.items():
        value = getattr(config, name)
        if value not in accepted:
            raise ValueError(
                f"{name}={value!r} with importance sampling: the engine samples from a cut distribution, the "
                f"trainer scores the whole one, and the ratio of the two is meaningless. Remove {name}, or set "
                "vllm_importance_sampling_correction=False."
            )
    if config.loss_type == "vespo" and not config.vllm_importance_sampling_mode.startswith("token_"):
        raise ValueError(
            f"vllm_importance_sampling_mode={config.vllm_importance_sampling_mode!r} with loss_type='vespo', which "
            "multiplies the ratios of the tokens itself. Set vllm_importance_sampling_mode to 'token_truncate' or "
            "'token_mask'."
        )


def check_gather(config: MultiTurnConfig, *, has_generator: bool) -> None:
    """Ranks that sample at their own pace cannot gather ZeRO-3 parameters layer by layer."""
    plugin = getattr(config, "deepspeed_plugin", None)
    is_sharded = plugin is not None and plugin.zero_stage == 3 and config.world_size > 1
    if is_sharded and not (config.ds3_gather_for_generation or config.use_vllm or has_generator):
        raise ValueError(
            "ds3_gather_for_generation=False with DeepSpeed ZeRO-3: every forward pass would be a collective call, "
            "and ranks whose trajectories differ in length would wait for each other for ever. Set "
            "ds3_gather_for_generation=True, or use_vllm=True."
        )


def check_launched(config: MultiTurnConfig) -> None:
    """DeepSpeed joins a process group, of one process too, which launchers announce in the environment."""
    if config.deepspeed and config.device and not torch.distributed.is_initialized():
        raise ValueError(
            f"deepspeed={config.deepspeed!r:.200} in a process that no launcher has started: DeepSpeed needs a "
            "process group, for one GPU too. Start it with `torchrun --nproc_per_node 1 -m agent_r1_trl.cli.train` (a "
            "script: `torchrun --nproc_per_node 1 script.py`), or remove deepspeed."
        )

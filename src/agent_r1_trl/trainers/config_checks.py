"""Checks across the training arguments: consequences, and combinations that cannot work.

The values of single settings are checked by their fields (`agent_r1_trl.settings`). Here `check_config` sets the
arguments that follow from others, then refuses what nothing would read (`NEEDS`) and what contradicts itself
(`CLASHES`). `find_rollout_problems` says what TRL accepts and the rollout cannot do: nothing is dropped in silence.
Refusals are ValueErrors, evaluated in the order in which they stand here; each names the flag, its value, the rule and
the fix.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from accelerate.utils.environment import get_int_from_env
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from agent_r1_trl.advantages.estimators import ESTIMATORS, Estimator, find_estimator
from agent_r1_trl.features import FEATURES, feature, has_feature, mappings_of
from agent_r1_trl.generation.vllm.server_file import ServerFile
from agent_r1_trl.generation.vllm.server_routes import check_urls
from agent_r1_trl.objects import OwnObject, did_you_mean, own_object
from agent_r1_trl.rollout.limits import find_limit_problems
from agent_r1_trl.settings import (
    Clash,
    Need,
    check_settings,
    default_of,
    find_clashes,
    find_unread,
    plain_value,
    refuse,
    shown,
)
from agent_r1_trl.trainers.inherited_settings import TRL_FIELDS, find_inherited_problems
from agent_r1_trl.trainers.launcher import find_launch_problem
from agent_r1_trl.trainers.sharding import find_fsdp_problems
from agent_r1_trl.update.layout import AUTO, PACKED_LAYOUTS, REGROUPING_LAYOUTS

if TYPE_CHECKING:
    from agent_r1_trl.trainers.config import MultiTurnConfig

# -------------------------------------------------------------------- what has no effect

CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""TRL's loss types that clip the ratio to [1 - epsilon, 1 + epsilon_high]."""
_CLIPS = (*CLIPPED_LOSSES, "cispo")
NEEDS = (
    Need("truncation_penalty", {"truncated_trajectories": ("penalise",)}),
    Need("bootstrap_truncated", {"truncated_trajectories": ("keep", "penalise")}),
    Need("importance_sampling_unit", {"use_vllm": (True,)}),
    Need("importance_sampling_unit", {"vllm_importance_sampling_correction": (True,)}),
    Need("cut_turns failures.min_effective_share", {"rollouts_ahead": None}),
    Need("pad_to_multiple_of", {"update_layout": ("padded", AUTO)}),
    Need("max_tokens_per_micro_batch", {"update_layout": (*PACKED_LAYOUTS, AUTO)}),
    Need("use_bias_correction_kl", {"kl_placement": ("loss",)}),
)
"""Options that have no effect beside one of our own, or that are ours and have none beside one of TRL's."""
TRL_NEEDS = (
    Need("sapo_temperature_neg sapo_temperature_pos", {"loss_type": ("sapo",)}),
    Need("vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", {"loss_type": ("vespo",)}),
    Need("delta", {"loss_type": CLIPPED_LOSSES}),
    Need("epsilon epsilon_high", {"loss_type": _CLIPS}),
    Need("entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target", {"use_adaptive_entropy": (True,)}),
    Need("use_bias_correction_kl", {"beta": None}),
    Need("ref_model_mixup_alpha ref_model_sync_steps", {"sync_ref_model": (True,)}),
    Need("num_completions_to_print log_unique_prompts", {"log_completions": (True,)}),
    Need(
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout servers.health_timeout "
        "servers.retry_window servers.sync_timeout servers.weight_transfer",
        {"vllm_mode": ("server",)},
    ),
    Need("vllm_gpu_memory_utilization vllm_model_impl vllm_dtype", {"vllm_mode": ("colocate",)}),
    Need("vllm_server_base_url vllm_server_host vllm_server_port", {"servers.urls": (None,)}),
    Need("vllm_server_base_url vllm_server_host vllm_server_port", {"servers.urls_file": (None,)}),
    Need("vllm_server_host vllm_server_port", {"vllm_server_base_url": (None,)}),
    Need(
        "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min",
        {"vllm_importance_sampling_correction": (True,)},
    ),
)
"""TRL's own options that TRL would ignore; checked where our rollout runs."""


# -------------------------------------------------------------------- what contradicts itself


def optimizer_in_backward(c: MultiTurnConfig) -> bool:
    """Whether the optimizer updates weights inside the backward pass, as LOMO and the layer-wise ones do."""
    name = str(getattr(c.optim, "value", c.optim))
    return name in ("lomo", "adalomo") or name.endswith("_layerwise")


def _mode_of(c: MultiTurnConfig) -> str:
    return str(c.vllm_importance_sampling_mode.partition("_")[0])


def _deepspeed_file(c: MultiTurnConfig) -> Any:
    return getattr(c, "hf_deepspeed_config", None) if c.deepspeed else None


def _lacks_batch_size(c: MultiTurnConfig) -> bool:
    read, names = _deepspeed_file(c), ("train_micro_batch_size_per_gpu", "train_batch_size")
    return read is not None and all(read.get_value(name) is None for name in names)


def _splits_a_rollout(c: MultiTurnConfig) -> bool:
    small, large = sorted((c.steps_per_generation, c.gradient_accumulation_steps))
    return bool(large % small)


_ADAMW = "Set another optim, such as 'adamw_torch'"
_MULTIPLIES = "this loss multiplies the ratios of the tokens itself. Set"


def _moves_rows(name: str, values: tuple[str, ...] | None = None) -> Clash:
    """TRL averages, or takes a quantile, inside each micro-batch, between which no row may then be moved."""
    return Clash.of(
        {"update_layout": (), "max_tokens_per_micro_batch": (), name: values},
        f"this moves rows between micro-batches, and {name} depends on which rows share one. Remove "
        "max_tokens_per_micro_batch and set update_layout='packed' or 'padded', which then move none; without it, "
        "gradient_accumulation_steps=1 does as well.",
        lambda c: (
            isinstance(c.max_tokens_per_micro_batch, int)
            or (c.update_layout in REGROUPING_LAYOUTS and c.gradient_accumulation_steps > 1)
        ),
    )


CLASHES = (
    # ---- serving
    Clash.of(
        {"servers.urls": None, "use_vllm": (), "vllm_mode": ()},
        "nothing would speak to these servers. Set use_vllm=True and vllm_mode='server', or remove servers.urls.",
        lambda c: not (c.use_vllm and c.vllm_mode == "server"),
    ),
    Clash.of(
        {"servers.urls_file": None, "use_vllm": (), "vllm_mode": ()},
        "nothing would speak to these servers. Set use_vllm=True and vllm_mode='server', or remove servers.urls_file.",
        lambda c: not (c.use_vllm and c.vllm_mode == "server"),
    ),
    Clash.of(
        {"servers.urls": None, "servers.urls_file": None},
        "both name the servers. Remove one of them: the file is read again at each weight sync.",
    ),
    Clash.of(
        {"importance_sampling_unit": ("turn", "sequence"), "loss_type": ("vespo",)},
        f"{_MULTIPLIES} another loss_type, or remove importance_sampling_unit.",
    ),
    Clash.of(
        {"off_policy_mask_threshold": None, "loss_mask": (False,), "use_vllm": (True,)},
        "the mask would compare log-probabilities of observation tokens, which the engine did not sample. Remove "
        "off_policy_mask_threshold, or set loss_mask=True.",
    ),
    # ---- groups, rewards and advantages
    Clash.of(
        {"min_group_size": None, "num_generations": ()},
        "no group could count. Set min_group_size to at most num_generations, or to None.",
        lambda c: c.min_group_size > c.num_generations,
    ),
    Clash.of(
        {"mask_truncated_completions": (True,), "truncated_trajectories": ("penalise",)},
        "a masked trajectory is not trained on, so the penalty would have no effect. Remove one of the two.",
    ),
    Clash.of(
        {"kl_placement": ("reward",), "beta": (0,)},
        "this changes nothing. Set beta > 0 (0.001 is usual), or remove kl_placement.",
    ),
    Clash.of(
        {"kl_placement": ("reward",), "separate_process_advantages": (True,), "outcome_reward_weight": (0,)},
        "the KL penalty belongs to the outcome there and would count 0, too. Set outcome_reward_weight above 0, or "
        "kl_placement='loss'.",
    ),
    Clash.of(
        {"separate_process_advantages": (True,), "advantage_estimator": ()},
        "the critic's values belong to the sum of both. Set separate_process_advantages=False and weigh the rewards "
        "instead (process_reward_weight, outcome_reward_weight).",
        lambda c: c.estimator.needs_critic,
    ),
    Clash.of(
        {"loss_type": (), "advantage_estimator": ()},
        "the loss of this estimator has a normaliser of its own. Remove loss_type, or set "
        "loss_type={c.estimator.loss_type!r}.",
        lambda c: c.estimator.loss_type not in (None, c.loss_type),
    ),
    # ---- update
    Clash.of(
        {"max_tokens_per_micro_batch": None, "steps_per_generation": (), "gradient_accumulation_steps": ()},
        "neither is a multiple of the other, so that an optimizer step would hold a part of a rollout's rows. Set "
        "steps_per_generation to a multiple of gradient_accumulation_steps, or remove max_tokens_per_micro_batch.",
        _splits_a_rollout,
    ),
    Clash.of(
        {"max_tokens_per_micro_batch": None, "optim": ()},
        "this updates each weight inside the backward pass, and an optimizer step may be several of them here. "
        f"{_ADAMW}, or remove max_tokens_per_micro_batch.",
        optimizer_in_backward,
    ),
    _moves_rows("loss_type", ("bnpo",)),
    _moves_rows("top_entropy_quantile"),
    _moves_rows("entropy_coef"),
    _moves_rows("use_adaptive_entropy"),
    # ---- what DeepSpeed and transformers would refuse once the model is loaded
    Clash.of(
        {"deepspeed": None},
        "train_micro_batch_size_per_gpu is not in it, nor is train_batch_size, and DeepSpeed needs one of them. Write "
        '"train_micro_batch_size_per_gpu": "auto" there, which is per_device_train_batch_size.',
        _lacks_batch_size,
    ),
    Clash.of(
        {"deepspeed": None},
        '{c.hf_deepspeed_config.mismatches}: both must be equal. Write "auto" for that key there, which takes the '
        "value of the training arguments, or set the arguments to the same.",
        lambda c: getattr(_deepspeed_file(c), "mismatches", None),
    ),
)
"""In the order in which mistakes are reported."""

CRITIC_CLASHES = (
    Clash.of({"max_grad_norm": (None,)}, "the Trainer compares it with 0. Set max_grad_norm=0 for no clipping."),
    Clash.of(
        {"optim": ()},
        "this updates each weight inside the backward pass, where policy and critic can have neither rates nor "
        f"gradient norms of their own. {_ADAMW}.",
        optimizer_in_backward,
    ),
    Clash.of(
        {"loss_mask": (False,), "advantage_mask": (True,)},
        "observation tokens would enter the loss without an advantage. Set advantage_mask=False as well, or keep "
        "loss_mask=True.",
    ),
    Clash.of(
        {"use_liger_kernel": (True,)},
        "it exchanges layers that the critic reads, too, and was never run with one. Set use_liger_kernel=False.",
    ),
)

_WHOLE = {"top_p": (1.0,), "min_p": (None, 0.0)}
"""Sampling options that keep another number of ids for each token -> the values with which they keep all."""


def _cuts(name: str) -> Clash:
    return Clash.of(
        {name: ()},
        "vLLM names the ids that a token was drawn from only where their number is bounded, and without them the "
        f"trainer would score another distribution than was sampled from. Set top_k as well, such as 100, or remove "
        f"{name}.",
        lambda c: c.use_vllm and c.temperature != 0 and getattr(c, name) not in _WHOLE[name] and (c.top_k or 0) <= 0,
    )


ROLLOUT_CLASHES = (
    *map(_cuts, _WHOLE),
    Clash.of(
        {"repetition_penalty": ()},
        "the engine samples from penalised logits, the trainer scores those of the model, and the ratio of the two is "
        "meaningless. Remove repetition_penalty, or set vllm_importance_sampling_correction=False.",
        lambda c: c.use_vllm and c.vllm_importance_sampling_correction and c.repetition_penalty != 1.0,
    ),
    Clash.of(
        {"vllm_importance_sampling_mode": (), "loss_type": ("vespo",)},
        f"{_MULTIPLIES} vllm_importance_sampling_mode to 'token_truncate' or 'token_mask'.",
        lambda c: c.use_vllm and c.vllm_importance_sampling_correction and _mode_of(c) != "token",
    ),
    Clash.of(
        {"deepspeed": None},
        "no launcher has started this process, and DeepSpeed needs a process group, for one GPU too. Start it with "
        "`torchrun --nproc_per_node 1 -m agent_r1_trl.cli.train` (a script: `torchrun --nproc_per_node 1 script.py`), "
        "or remove deepspeed.",
        lambda c: c.deepspeed and c.device and not torch.distributed.is_initialized(),
    ),
)
"""Contradictions with our rollout."""

WHOLE_ROWS = {
    "importance_sampling_level": "token",
    "off_policy_mask_threshold": None,
    "loss_mask": True,
    "advantage_mask": True,
}
"""Options that look at a row as a whole, or at observations that another row holds -> their default."""


def _of_a_row(name: str, values: tuple[str, ...] | None, fix: str) -> Clash:
    """Where a trajectory may have several rows, nothing may be computed over a row as if it were all there is."""
    return Clash.of(
        {name: values, "context.policy": None},
        "it is computed over whole rows, and a row may hold only some of a trajectory's turns. Set "
        f"{fix}, or context.policy='keep'.",
        # Where every turn is a row of its own, a ratio of the row is one of the turn.
        lambda c: name != "importance_sampling_level" or c.context.policy != "step",
    )


ROW_CLASHES = (
    *(_of_a_row(name, None, f"{name}={default!r}") for name, default in WHOLE_ROWS.items()),
    _of_a_row("loss_type", ("vespo",), "another loss_type"),
)
"""Contradictions with trajectories of several rows."""


_TRACKER_PACKAGES = {
    "clearml": "clearml",
    "codecarbon": "codecarbon",
    "comet_ml": "comet-ml",
    "dagshub": "dagshub",
    "dvclive": "dvclive",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""Value of `report_to` -> the package that it needs and nothing else."""


# -------------------------------------------------------------------- the checks


def check_fields(config: MultiTurnConfig) -> None:
    """Check each field by itself, also before TRL reads them; of each mapping of a feature make its settings."""
    for name, row in FEATURES.items():
        kinds = mappings_of(name)
        for flag in (row.settings or "").split() if row.has_mapping else ():
            given = getattr(config, flag)  # without the feature it stays what was given
            setattr(config, flag, kinds[flag].read(flag, given) if flag in kinds else given or None)
    limit = config.max_tokens_per_micro_batch
    if isinstance(limit, str) and limit.isdecimal():  # TRL's parser knows one type for each field, here text
        config.max_tokens_per_micro_batch = int(limit)
    check_settings(config, TRL_FIELDS)


FLOAT16_ON_A_CPU = Clash.of(
    {"fp16": (True,)},
    "a CPU does not train in float16. Set fp16=False, and bf16=True where the CPU computes in bfloat16 (with both off "
    "it trains in float32); or train on a GPU.",
    lambda c: c.device.type == "cpu",
)
"""Looked at behind all others: what does not go with fp16 at all is the better message."""


def check_config(config: MultiTurnConfig) -> None:
    """Check the arguments of a trainer, and set those that follow from others."""
    check_fields(config)
    resolve(config)
    for checks in _feature_checks():
        if hasattr(checks, "resolve"):
            checks.resolve(config)
    refuse(_find_problems(config))
    refuse(find_clashes(config, (FLOAT16_ON_A_CPU,)))
    refuse(filter(None, [find_launch_problem(os.environ, config.world_size)]))
    if (urls := plain_value(config, "servers.urls")) is not None:
        check_urls(urls)
    if (file := plain_value(config, "servers.urls_file")) is not None:
        ServerFile(Path(file)).read()  # it may not be there yet; if it is, it must be one


def layout_problem(config: MultiTurnConfig, layout: str, limit: int | None = None) -> str:
    """Why a layout of the update, and a limit of tokens if given, clash with other settings; "" if they do not."""
    other = copy.copy(config)
    other.update_layout = layout
    if limit is not None:
        other.max_tokens_per_micro_batch = limit
    clash = next(find_clashes(other, CLASHES), "")
    return clash or find_unread(other, NEEDS)


def resolve(config: MultiTurnConfig) -> None:
    """Set the arguments that follow from others."""
    if config.mask_truncated_completions and config.truncated_trajectories == "keep":
        config.truncated_trajectories = "mask"  # TRL's name for it
    is_reentrant = config.gradient_checkpointing and (config.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if is_reentrant and config.ddp_find_unused_parameters is None:
        # DDP must not search for unused parameters, which would be all of them. transformers switches the search off
        # for plain models, but not for peft models.
        config.ddp_find_unused_parameters = False
    given: Any = config.advantage_estimator
    row = find_estimator(given, has_critic=config.has_critic)
    if row.name not in ESTIMATORS:  # a user's own is looked up once, here
        text = given if isinstance(given, str) else row.name
        config.advantage_estimator = OwnObject.of("advantage_estimator", row, text)
    if config.loss_term is not None:
        form = "a function (inputs, log_probs, mask) -> a scalar tensor, the term summed over the tokens of mask"
        config.loss_term = own_object("loss_term", config.loss_term, (), form, num_arguments=3)
    if config.gamma_turn is None:
        config.gamma_turn = row.default_gamma_turn
    if row.loss_type is not None and config.loss_type == default_of(config, "loss_type"):
        config.loss_type = row.loss_type


def _feature_checks() -> list[Any]:
    """The modules `checks` of the features: each has `NEEDS` and `CLASHES`, some `resolve` and `find_problems`."""
    names = [name for name, row in FEATURES.items() if row.settings is not None and has_feature(name)]
    modules = [f"agent_r1_trl.features.{name}.checks" for name in names]
    return [importlib.import_module(module) for module in modules if importlib.util.find_spec(module) is not None]


def _find_problems(config: MultiTurnConfig) -> Iterator[str]:
    for name, row in FEATURES.items():
        for setting in (row.settings or "").split():
            if plain_value(config, setting) not in (None, default_of(config, setting)):
                feature(name, shown(config, setting))  # refuses it where the feature is not installed
    yield from find_limit_problems(config)
    yield from find_other_shape(config)
    checks = _feature_checks()
    if unread := find_unread(config, itertools.chain(NEEDS, *(item.NEEDS for item in checks))):
        yield unread
    tables = [CLASHES, *([CRITIC_CLASHES] if config.has_critic else []), *(item.CLASHES for item in checks)]
    yield from find_clashes(config, itertools.chain(*tables))
    yield from _find_estimator_problems(config)
    for item in checks:
        if hasattr(item, "find_problems"):
            yield from item.find_problems(config)
    yield from find_clashes(config, ROW_CLASHES)
    yield from _find_tracker_problems(config.report_to or ())
    yield from find_inherited_problems(config)


def _find_tracker_problems(names: Iterable[str]) -> Iterator[str]:
    """A tracker that does not exist or is not installed; transformers finds it once the model is loaded."""
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(map(repr, sorted(INTEGRATION_TO_CALLBACK)))
            suggestion = did_you_mean(name, INTEGRATION_TO_CALLBACK)
            yield f"report_to={name!r}: no such tracker.{suggestion} Set report_to to some of {known}, or to 'none'."
        elif name in _TRACKER_PACKAGES and name not in get_available_reporting_integrations():
            package = _TRACKER_PACKAGES[name]
            yield (
                f"report_to={name!r}: its package is not installed. Install it (pip install {package}), or set "
                "report_to to 'none'."
            )


# ---- the estimator

_SCALE_OF = {
    **dict.fromkeys(("dr_grpo", "rloo", "gae", "bilevel_gae", "step_gae"), "none"),
    **dict.fromkeys(("reinforce_pp", "reinforce_pp_baseline"), "batch"),
}
"""The `scale_rewards` that says what an estimator does anyway."""
_ESTIMATOR_OPTIONS = ("gamma", "gamma_turn", "lam", "lam_turn", "step_weight", "scale_rewards")


def _find_estimator_problems(config: MultiTurnConfig) -> Iterator[str]:
    """The estimator fits the trainer, has the groups that it needs, and reads what was set for it."""
    row = config.estimator
    others = [other for other in ESTIMATORS.values() if other.needs_critic is config.has_critic]  # of this trainer
    name = f"advantage_estimator={row.name!r}"
    if row.needs_critic is not config.has_critic:
        trainer = "MultiTurnPPOTrainer (PPO)" if row.needs_critic else "MultiTurnGRPOTrainer (GRPO)"
        yield (
            f"{name} is {'made with' if row.needs_critic else 'made without'} a critic. Use {trainer} with its "
            f"config, or one of {_names_of(others)} here."
        )
    if config.num_generations == 1 and row.needs_group:
        yield (
            f"num_generations=1 with {name}, which compares the trajectories of a group. Set num_generations >= 2, or "
            f"advantage_estimator to one of {_names_of(other for other in others if not other.needs_group)}."
        )
    if config.kl_placement == "reward" and not row.reads_token_rewards:
        yield (
            f"kl_placement='reward' has no effect with {name}, which reads no token rewards. Set kl_placement='loss', "
            f"or advantage_estimator to one of {_names_of(other for other in others if other.reads_token_rewards)}; "
            "an estimator of your own that reads them says so in an Estimator(reads_token_rewards=True)."
        )
    is_ours = ESTIMATORS.get(row.name) is row
    same = {"gamma_turn": row.default_gamma_turn, "scale_rewards": _SCALE_OF.get(row.name) if is_ours else "none"}
    # A user's own estimator says itself which options it ignores.
    for option in [option for option in _ESTIMATOR_OPTIONS if option not in row.options] if is_ours else row.ignores:
        value = getattr(config, option, None)
        if value is not None and value not in (default_of(config, option), same.get(option)):
            readers = _names_of(other for other in others if option in other.options)
            fix = f", or set advantage_estimator to one of {readers}" if readers else ""
            yield f"{option}={value!r} has no effect with {name}, which does not read it. Remove {option}{fix}."


def _names_of(rows: Iterable[Estimator]) -> str:
    return ", ".join(repr(row.name) for row in rows)


# ---- where our rollout runs

_NO_PREDICTIONS = "leave it unset: the trainer computes its metrics from trajectories, not from predictions"
_OWN_BATCHES = "leave it off: the rollout batches requests itself"
LAUNCHED = {
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
    "vllm_group_port": (51216, "leave it unset: NCCL chooses its own ports (NCCL_SOCKET_IFNAME names the network)"),
    "vllm_structured_outputs_regex": (None, "leave it unset: tool calls are free text"),
    "vllm_tensor_parallel_size": (
        1,
        "set it to 1; for a model that does not fit on one GPU start a server with --tensor-parallel-size, and set "
        "vllm_mode='server' (docs/serving.md says why)",
    ),
    "parallelism_config": (
        None,
        "split the model with FSDP2 (recipes/accelerate_configs/fsdp2.yaml) or DeepSpeed (zero3.yaml) alone; tensor "
        "and context parallelism are not supported",
    ),
    "train_sampling_strategy": ("random", "keep 'random': TRL draws whole groups, and shuffle_dataset is its option"),
    "length_column_name": ("length", "keep 'length': rows are not drawn by length"),
    "label_smoothing_factor": (0.0, "keep 0.0: the loss has no labels to smooth"),
    "label_names": (None, _NO_PREDICTIONS),
    "include_for_metrics": (None, _NO_PREDICTIONS),
    "batch_eval_metrics": (False, _NO_PREDICTIONS),
}
"""Options that the rollout or TRL's loop cannot honour: name -> (the only value accepted, the fix)."""


def find_rollout_problems(config: MultiTurnConfig, has_generator: bool) -> Iterator[str]:
    """Settings that the rollout cannot honour, and settings without effect."""

    def is_waiting(name: str) -> bool:
        """A recipe may hold the options of vLLM for the day that it is switched on."""
        return name.startswith(("vllm_", "servers.")) and not config.use_vllm

    for name, (accepted, fix) in UNSUPPORTED_OPTIONS.items():
        value, source = getattr(config, name, accepted), ""
        is_unset = accepted is None and value in (None, "", {}, [], False)
        variable, setting = LAUNCHED.get(name, ("", ""))
        if is_unset and os.environ.get(variable, "").lower() in ("1", "true"):
            value, is_unset = True, False
            source = f" ({variable}={os.environ[variable]}: accelerate launch sets it for {setting})"
        if value != accepted and not is_unset and not is_waiting(name):
            yield f"{name}={value!r}{source} is not supported by the multi-turn rollout. Fix: {fix}."
    yield from find_fsdp_problems(config)
    if unread := find_unread(config, TRL_NEEDS, is_waiting):
        yield unread
    yield from find_clashes(config, ROLLOUT_CLASHES)
    if plain_value(config, "servers.max_logprob_gap") is not None and not (config.use_vllm or has_generator):
        yield (
            f"{shown(config, 'servers.max_logprob_gap')} with use_vllm=False: the sampler is the very model that is "
            "trained, so nothing is synced. Set use_vllm=True, or remove servers.max_logprob_gap."
        )
    # Ranks that sample at their own pace cannot gather ZeRO-3 parameters layer by layer.
    plugin = getattr(config, "deepspeed_plugin", None)
    is_sharded = plugin is not None and plugin.zero_stage == 3 and config.world_size > 1
    if is_sharded and not (config.ds3_gather_for_generation or config.use_vllm or has_generator):
        yield (
            "ds3_gather_for_generation=False with DeepSpeed ZeRO-3: every forward pass would be a collective call, "
            "and ranks whose trajectories differ in length would wait for each other for ever. Set "
            "ds3_gather_for_generation=True, or use_vllm=True."
        )


# -------------------------------------------------------------------- the shape of a rollout
# TRL's settings say it in batches, of per_device_train_batch_size * processes rows:
#     prompts per rollout = rows * steps_per_generation / num_generations
#     updates per rollout = steps_per_generation / gradient_accumulation_steps * num_iterations
# `prompts_per_rollout` and `updates_per_rollout` say it in the terms of RAGEN (arXiv 2504.20073, section 4).


@dataclass(frozen=True, kw_only=True)
class RolloutShape:
    """The size of one rollout, over all processes, and of its update."""

    prompts_per_rollout: int
    responses_per_prompt: int
    """TRL's `num_generations`."""
    updates_per_rollout: float
    """Optimizer steps; not a whole number where a step takes its rows from two rollouts."""
    trajectories_per_update: int

    @classmethod
    def of(cls, args: MultiTurnConfig) -> RolloutShape:
        """The shape that a configuration has, once it is constructed."""
        rows = args.per_device_train_batch_size * args.world_size
        return cls(
            prompts_per_rollout=args.generation_batch_size // args.num_generations,
            responses_per_prompt=args.num_generations,
            updates_per_rollout=args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps,
            trajectories_per_update=rows * args.gradient_accumulation_steps,
        )

    def __str__(self) -> str:
        """For a reader."""
        return (
            f"{self.prompts_per_rollout} prompts x {self.responses_per_prompt} responses per rollout, "
            f"{self.updates_per_rollout:g} update(s) of {self.trajectories_per_update} trajectories"
        )


def num_processes() -> int:
    """Number of processes that train together, also before `TrainingArguments` has set them up."""
    if PartialState._shared_state:
        return PartialState().num_processes
    return get_int_from_env(["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"], 1)


def resolve_shape(args: MultiTurnConfig) -> None:
    """Derive TRL's settings from `prompts_per_rollout` and `updates_per_rollout`, before TRL reads them."""
    prompts, updates, iterations = args.prompts_per_rollout, args.updates_per_rollout, args.num_iterations
    size, responses = args.per_device_train_batch_size, args.num_generations
    if prompts is None and updates is None:
        return
    rows = size * num_processes()
    if prompts is not None:
        steps, rest = divmod(prompts * responses, rows)
        if rest:
            raise ValueError(
                f"prompts_per_rollout={prompts} with num_generations={responses} are {prompts * responses} "
                f"trajectories, which do not fill micro-batches of {rows} (per_device_train_batch_size={size} on "
                f"{rows // size} process(es)). Set prompts_per_rollout to a multiple of "
                f"{rows // math.gcd(rows, responses)}, or change per_device_train_batch_size."
            )
        _refuse_another(args, "generation_batch_size", prompts * responses, because="prompts_per_rollout")
        _refuse_another(args, "steps_per_generation", steps, because="prompts_per_rollout")
    elif args.steps_per_generation is not None:
        steps = args.steps_per_generation
    elif args.generation_batch_size is not None:
        steps = max(1, args.generation_batch_size // rows)  # TRL refuses a rest
    else:  # as many as the updates take
        steps = args.gradient_accumulation_steps * max(1, updates // iterations)
    if updates is not None:
        possible = [count * iterations for count in range(1, steps + 1) if steps % count == 0]
        if updates not in possible:
            raise ValueError(
                f"updates_per_rollout={updates}: a rollout of {steps} micro-batches (per_device_train_batch_size="
                f"{size}), passed over {iterations} times (num_iterations), does not divide into so many updates. Set "
                f"updates_per_rollout to one of {', '.join(map(str, possible))}, or lower "
                "per_device_train_batch_size."
            )
        accumulated = steps * iterations // updates
        if args.gradient_accumulation_steps != 1:  # 1 is the default, and cannot be told from not set
            _refuse_another(args, "gradient_accumulation_steps", accumulated, because="updates_per_rollout")
        args.gradient_accumulation_steps = accumulated
    if args.generation_batch_size is None:  # else TRL derives the same number of steps from it
        args.steps_per_generation = steps


def find_other_shape(args: MultiTurnConfig) -> Iterator[str]:
    """Where the shape is not the one that was asked for, once TRL has read its settings."""
    for name in ("prompts_per_rollout", "updates_per_rollout"):
        asked = getattr(args, name)
        if asked is not None and asked != getattr(shape := RolloutShape.of(args), name):
            yield (
                f"{name}={asked}: {args.world_size} process(es) train together, another number than the launcher "
                f"announced, so the rollout has another shape ({shape}). Start through accelerate launch or torchrun, "
                f"or remove {name} and set steps_per_generation and gradient_accumulation_steps."
            )


def _refuse_another(args: MultiTurnConfig, name: str, derived: int, *, because: str) -> None:
    given = getattr(args, name)
    if given is not None and given != derived:
        raise ValueError(
            f"{name}={given} beside {because}={getattr(args, because)}, from which {name} follows as {derived}. "
            f"Remove {name}, or remove {because}."
        )

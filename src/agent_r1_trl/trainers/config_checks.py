"""Checks of the training arguments.

`check_config` calls the others in order. Each raises a ValueError that names the flag, its value, the rule and the
cure; those called `settle_` also set the arguments that follow from others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agent_r1_trl.advantages.estimators import ESTIMATORS, Estimator
from agent_r1_trl.advantages.lookup import EstimatorName, estimator_names, find_estimator
from agent_r1_trl.filtering import RULES
from agent_r1_trl.generation.vllm.find_servers import check_urls
from agent_r1_trl.rollout.limits import check_share, check_whole_number
from agent_r1_trl.safe_text import check_rules
from agent_r1_trl.trainers.rollout_checks import Need, check_needs
from agent_r1_trl.trainers.row_checks import LOSS_UNITS, check_rows
from agent_r1_trl.update.importance import UNITS
from agent_r1_trl.update.layout import PACKED_LAYOUTS, REGROUPING_LAYOUTS, UPDATE_LAYOUTS

if TYPE_CHECKING:
    from agent_r1_trl.trainers.config import MultiTurnConfig

TRUNCATION_POLICIES = ("keep", "mask", "penalise")
RECORD_FORMATS = ("jsonl", "parquet", "none")
SCHEDULES = ("constant", "linear", "cosine")
LOSS_TYPES = ("bnpo", "cispo", "dapo", "dr_grpo", "grpo", "luspo", "sapo", "vespo")
"""Those of TRL, which itself finds an unknown one after the first rollout."""
_UNITS_OF_RATIOS = ("importance_sampling_unit", "importance_sampling_length_normalized")
OUR_NEEDS = (
    Need(("truncation_penalty",), "truncated_trajectories", ("penalise",)),
    Need(_UNITS_OF_RATIOS, "use_vllm", (True,)),
    Need(_UNITS_OF_RATIOS, "vllm_importance_sampling_correction", (True,)),
    Need(("generation_batch_rows",), "use_vllm", (False,)),
    Need(("pad_to_multiple_of",), "update_layout", ("padded",)),
    Need(("max_tokens_per_micro_batch",), "update_layout", PACKED_LAYOUTS),
    Need(("use_bias_correction_kl",), "kl_placement", ("loss",)),
    Need(("push_trajectories",), "record_trajectories", ("jsonl", "parquet")),
    Need(("filter_value", "filter_statistic", "filter_when", "filter_loss_scaling"), "filter_groups", RULES),
    Need(("curriculum_floor", "curriculum_rate"), "curriculum", (True,)),
)
"""Options that have no effect beside one of our own, or that are ours and have none beside one of TRL's."""


def check_config(config: MultiTurnConfig) -> None:
    """Check the fields that both trainers share, in the order in which mistakes are reported.

    Raises:
        ValueError: names the flag, its value, the rule and the cure.
    """
    config.check_limits(is_length_optional=True)
    check_whole_number("generation_batch_rows", config.generation_batch_rows)
    config.check_faults()
    config.check_stability()
    check_serving(config)
    check_overlap(config)
    settle_truncated_trajectories(config)
    settle_ddp(config)
    check_importance_sampling(config)
    check_choice(config, "record_trajectories", RECORD_FORMATS)
    check_choice(config, "loss_type", LOSS_TYPES)
    check_rules(config.secret_names, config.secret_patterns)
    settle_estimator(config)
    check_choice(config, "update_layout", UPDATE_LAYOUTS)
    check_micro_batch_tokens(config)
    settle_credit(config)
    check_kl(config)
    check_separate_advantages(config)
    check_truncation_penalty(config)
    check_eval_temperature(config)
    settle_normaliser(config)
    check_unread_options(config)
    check_needs(config, OUR_NEEDS)
    check_micro_batch_means(config)
    check_open_loss_mask(config)
    if config.loss_unit is not None:
        check_choice(config, "loss_unit", LOSS_UNITS)
    check_rows(config)


# -------------------------------------------------------------------- rollout


def check_eval_temperature(config: MultiTurnConfig) -> None:
    """In evaluation the temperature may be 0."""
    if config.eval_temperature is not None and not config.eval_temperature >= 0:
        raise ValueError(f"eval_temperature={config.eval_temperature} must be >= 0 (0 is greedy), or None.")


def check_serving(config: MultiTurnConfig) -> None:
    """Which vLLM engine, where, and how far its log-probabilities may be off."""
    if config.use_vllm:
        check_choice(config, "vllm_mode", ("colocate", "server"))
    check_choice(config, "vllm_weight_transfer", ("auto", "nccl", "sockets"))
    check_choice(config, "vllm_dtype", ("auto", "bfloat16", "float16", "float32"))
    if config.vllm_server_urls is not None:
        if not (config.use_vllm and config.vllm_mode == "server"):
            raise ValueError(
                f"vllm_server_urls={config.vllm_server_urls} with use_vllm={config.use_vllm} and "
                f"vllm_mode={config.vllm_mode!r}: nothing would speak to these servers. Set use_vllm=True and "
                "vllm_mode='server', or remove vllm_server_urls."
            )
        check_urls(config.vllm_server_urls)
    gap = config.max_sync_logprob_gap
    if gap is not None and (isinstance(gap, bool) or not isinstance(gap, int | float) or not gap > 0):
        raise ValueError(
            f"max_sync_logprob_gap={gap!r} must be > 0: float sums in another order differ a little even with "
            "equal weights. Remove it for the default, or set for example 0.05."
        )


def check_overlap(config: MultiTurnConfig) -> None:
    """A rollout during the update needs a sampler with its own weights, and a correction because they are older."""
    if not config.overlap_rollout:
        return
    cures = {
        "use_vllm": (True, "the sampler needs weights of its own. Set use_vllm=True"),
        "vllm_importance_sampling_correction": (True, "nothing would correct for the older weights. Set it True"),
        "vllm_enable_sleep_mode": (False, "the engine works during the update and cannot sleep. Set it False"),
    }
    for name, (accepted, cure) in cures.items():
        if getattr(config, name) != accepted:
            raise ValueError(f"overlap_rollout=True with {name}={getattr(config, name)}: {cure}.")


def check_importance_sampling(config: MultiTurnConfig) -> None:
    """The unit exists, and something depends on it."""
    if config.importance_sampling_unit is not None:
        check_choice(config, "importance_sampling_unit", UNITS)
    if not (config.use_vllm and config.vllm_importance_sampling_correction):
        return  # `OUR_NEEDS` says the rest
    unit = config.importance_sampling_unit or config.vllm_importance_sampling_mode.partition("_")[0]
    if config.importance_sampling_length_normalized and unit == "token":
        raise ValueError(
            "importance_sampling_length_normalized=True has no effect on the ratio of a single token. Set "
            "importance_sampling_unit to 'turn' or 'sequence', or remove importance_sampling_length_normalized."
        )
    if config.loss_type == "vespo" and config.importance_sampling_unit not in (None, "token"):
        raise ValueError(
            f"importance_sampling_unit={config.importance_sampling_unit!r} with loss_type='vespo', which multiplies "
            "the ratios of the tokens itself. Remove importance_sampling_unit, or set another loss_type."
        )


# -------------------------------------------------------------------- rewards and advantages


def settle_truncated_trajectories(config: MultiTurnConfig) -> None:
    """`mask_truncated_completions` is TRL's name for truncated_trajectories='mask'."""
    check_choice(config, "truncated_trajectories", TRUNCATION_POLICIES)
    if config.mask_truncated_completions and config.truncated_trajectories == "penalise":
        raise ValueError(
            "mask_truncated_completions=True contradicts truncated_trajectories='penalise': a masked trajectory "
            "is not trained on, so the penalty would have no effect. Remove one of the two."
        )
    if config.mask_truncated_completions:
        config.truncated_trajectories = "mask"


def check_truncation_penalty(config: MultiTurnConfig) -> None:
    """`truncation_penalty` must not be a reward."""
    if not math.isfinite(config.truncation_penalty) or config.truncation_penalty > 0:
        raise ValueError(
            f"truncation_penalty={config.truncation_penalty} must be finite and <= 0: it is added to the outcome of "
            "a truncated trajectory. Set a negative number such as -0.5."
        )


def settle_estimator(config: MultiTurnConfig) -> None:
    """The estimator fits the trainer and has the groups that it needs; a user's own is looked up once, here."""
    given: Any = config.advantage_estimator
    row = find_estimator(given, has_critic=config.has_critic)
    if row.name not in ESTIMATORS:
        config.advantage_estimator = EstimatorName.of(row, given if isinstance(given, str) else row.name)
    if row.needs_critic is not config.has_critic:
        other = "MultiTurnPPOTrainer (PPO)" if row.needs_critic else "MultiTurnGRPOTrainer (GRPO)"
        raise ValueError(
            f"advantage_estimator={row.name!r} is {'made with' if row.needs_critic else 'made without'} a "
            f"critic. Use {other} with its config, or one of "
            f"{', '.join(map(repr, estimator_names(needs_critic=config.has_critic)))} here."
        )
    if config.num_generations == 1 and row.needs_group:
        raise ValueError(
            f"num_generations=1 with advantage_estimator={row.name!r}, which compares the trajectories of a "
            "group. Set num_generations >= 2, or advantage_estimator to one of "
            f"{_names_where(config, lambda other: not other.needs_group)}."
        )
    if config.min_group_size is not None and config.min_group_size > config.num_generations:
        raise ValueError(
            f"min_group_size={config.min_group_size} with num_generations={config.num_generations}: no group could "
            "count. Set min_group_size to at most num_generations, or to None."
        )


def _names_where(config: MultiTurnConfig, is_meant: Callable[[Estimator], bool]) -> str:
    """The estimators of this trainer that are meant; those of the other one would be refused."""
    rows = (row for row in ESTIMATORS.values() if row.needs_critic is config.has_critic)
    return ", ".join(repr(row.name) for row in rows if is_meant(row))


def settle_credit(config: MultiTurnConfig) -> None:
    """Discounts and weights are in range; `gamma_turn=None` becomes the estimator's default."""
    if config.gamma_turn is None:
        config.gamma_turn = config.estimator.default_gamma_turn
    for factor in ("gamma", "gamma_turn"):
        check_share(factor, getattr(config, factor))
    for weight in ("process_reward_weight", "outcome_reward_weight", "step_weight"):
        check_finite(config, weight)
    check_choice(config, "process_reward_schedule", SCHEDULES)


def check_kl(config: MultiTurnConfig) -> None:
    """A KL term in the rewards needs a weight, and an estimator that reads token rewards."""
    check_choice(config, "kl_placement", ("loss", "reward"))
    if config.kl_placement == "reward" and config.beta == 0:
        raise ValueError(
            "kl_placement='reward' with beta=0.0 changes nothing. Set beta > 0 (0.001 is usual), or remove "
            "kl_placement."
        )
    row = config.estimator
    if config.kl_placement == "reward" and not row.reads_token_rewards:
        raise ValueError(
            f"kl_placement='reward' has no effect with advantage_estimator={row.name!r}, which reads no token "
            "rewards. Set kl_placement='loss', or advantage_estimator to one of "
            f"{_names_where(config, lambda other: other.reads_token_rewards)}; an estimator of your own that reads "
            "them says so in an Estimator(reads_token_rewards=True)."
        )


def check_separate_advantages(config: MultiTurnConfig) -> None:
    """A critic predicts the sum of process and outcome rewards, which therefore cannot be separated."""
    row = config.estimator
    if config.separate_process_advantages and row.needs_critic:
        raise ValueError(
            f"separate_process_advantages=True with advantage_estimator={row.name!r}: the critic's values belong to "
            "the sum of both. Set separate_process_advantages=False and weigh the rewards instead "
            "(process_reward_weight, outcome_reward_weight)."
        )


# -------------------------------------------------------------------- update


def settle_normaliser(config: MultiTurnConfig) -> None:
    """Set the loss type that belongs to the estimator; refuse what the estimator would ignore."""
    row = config.estimator
    if row.loss_type is not None:
        if config.loss_type not in (config.default_of("loss_type"), row.loss_type):
            raise ValueError(
                f"loss_type={config.loss_type!r} contradicts advantage_estimator={row.name!r}, whose loss has a "
                f"normaliser of its own. Remove loss_type or set loss_type={row.loss_type!r}."
            )
        config.loss_type = row.loss_type


def check_unread_options(config: MultiTurnConfig) -> None:
    """Refuse options of estimators that this one does not read; a user's own says itself which it `ignores`."""
    row = config.estimator
    is_ours = ESTIMATORS.get(row.name) is row
    same = {"gamma_turn": row.default_gamma_turn, "scale_rewards": _SCALE_OF.get(row.name) if is_ours else "none"}
    for name in [name for name in _ESTIMATOR_OPTIONS if name not in row.options] if is_ours else row.ignores:
        value = getattr(config, name, None)
        if value is None or value in (config.default_of(name), same.get(name)):
            continue
        readers = [
            repr(other.name)
            for other in ESTIMATORS.values()
            if name in other.options and other.needs_critic is config.has_critic
        ]
        cure = f", or set advantage_estimator={' or '.join(readers)}" if readers else ""
        raise ValueError(
            f"{name}={value!r} has no effect with advantage_estimator={row.name!r}, which does not read it. Remove "
            f"{name}{cure}."
        )


_ESTIMATOR_OPTIONS = ("gamma", "gamma_turn", "lam", "lam_turn", "step_weight", "scale_rewards")
_SCALE_OF = {
    **dict.fromkeys(("dr_grpo", "rloo", "gae", "bilevel_gae", "step_gae"), "none"),
    **dict.fromkeys(("reinforce_pp", "reinforce_pp_baseline"), "batch"),
}
"""The `scale_rewards` that says what an estimator does anyway."""


def check_micro_batch_tokens(config: MultiTurnConfig) -> None:
    """The passes of an optimizer step are dealt out over whole micro-steps of whole rollouts."""
    name, value = "max_tokens_per_micro_batch", config.max_tokens_per_micro_batch
    check_whole_number(name, value, is_optional=True)
    sizes = sorted((config.steps_per_generation, config.gradient_accumulation_steps))
    if value is not None and sizes[1] % sizes[0]:
        raise ValueError(
            f"{name}={value} with steps_per_generation={config.steps_per_generation} and gradient_accumulation_steps="
            f"{config.gradient_accumulation_steps}: neither is a multiple of the other, so that an optimizer step "
            "would hold a part of a rollout's rows. Set steps_per_generation to a multiple of "
            f"gradient_accumulation_steps, or remove {name}."
        )
    if value is not None and (optim := optimizer_in_backward(config)):
        raise ValueError(
            f"{name}={value} with optim={optim!r}, which updates each weight inside the backward pass: an optimizer "
            f"step may be several of them here. Set another optim, such as 'adamw_torch', or remove {name}."
        )


def optimizer_in_backward(config: MultiTurnConfig) -> str | None:
    """The optimizer, if it updates weights inside the backward pass, as LOMO and the layer-wise ones do."""
    name = str(getattr(config.optim, "value", config.optim))
    return name if name in ("lomo", "adalomo") or name.endswith("_layerwise") else None


def check_micro_batch_means(config: MultiTurnConfig) -> None:
    """Rows are not moved between micro-batches where TRL averages, or takes a quantile, inside each of them."""
    is_by_tokens = config.max_tokens_per_micro_batch is not None
    moves_rows = config.update_layout in REGROUPING_LAYOUTS and config.gradient_accumulation_steps > 1
    if not (is_by_tokens or moves_rows):
        return
    neutral = {"loss_type": config.loss_type != "bnpo", "top_entropy_quantile": config.top_entropy_quantile == 1.0}
    neutral |= {"entropy_coef": config.entropy_coef == 0.0, "use_adaptive_entropy": not config.use_adaptive_entropy}
    what = f"update_layout={config.update_layout!r}"
    cure = "Set update_layout='packed' or 'padded', which move none, or gradient_accumulation_steps=1."
    if is_by_tokens:
        what = f"max_tokens_per_micro_batch={config.max_tokens_per_micro_batch}"
        cure = "Remove max_tokens_per_micro_batch and set update_layout='packed', which moves none."
    for name, is_neutral in neutral.items():
        if not is_neutral:
            raise ValueError(
                f"{what} with {name}={getattr(config, name)!r}: this moves rows between micro-batches, and {name} "
                f"depends on which rows share one. {cure}"
            )


def check_open_loss_mask(config: MultiTurnConfig) -> None:
    """The engine has no log-probabilities of observation tokens, which TRL's off-policy mask would compare."""
    if not config.loss_mask and config.off_policy_mask_threshold is not None and config.use_vllm:
        raise ValueError(
            f"off_policy_mask_threshold={config.off_policy_mask_threshold} with loss_mask=False and use_vllm=True: "
            "the mask would compare log-probabilities of observation tokens, which the engine did not sample. Remove "
            "off_policy_mask_threshold, or set loss_mask=True."
        )


def settle_ddp(config: MultiTurnConfig) -> None:
    """With reentrant checkpointing, DDP must not search for unused parameters: it would take all of them for unused.

    transformers switches the search off for plain models, but not for peft models.
    """
    is_reentrant = config.gradient_checkpointing and (config.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if is_reentrant and config.ddp_find_unused_parameters is None:
        config.ddp_find_unused_parameters = False


# -------------------------------------------------------------------- single values


def check_choice(config: MultiTurnConfig, name: str, choices: tuple[str, ...]) -> None:
    """One of the listed values."""
    value = getattr(config, name)
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}. Set {name} to one of them.")


def check_finite(config: MultiTurnConfig, name: str) -> None:
    """A finite number >= 0."""
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r} must be finite and >= 0. Set {name} to a value in that range.")


def check_bool(config: MultiTurnConfig, name: str) -> None:
    """True or False; any other value would count as one of them in silence."""
    value = getattr(config, name)
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False. Set {name} to one of them.")

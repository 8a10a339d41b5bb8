"""Training arguments: TRL's `GRPOConfig` plus the fields of the multi-turn rollout.

Only our own fields live here, grouped by pipeline step; everything else is TRL's and keeps its meaning.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from trl import GRPOConfig

from agent_r1_trl.advantages.estimators import Estimator
from agent_r1_trl.advantages.lookup import estimator_names, find_estimator
from agent_r1_trl.rollout.limits import RolloutLimits, RolloutSettings
from agent_r1_trl.trainers.config_checks import check_config

UNSUPPORTED_OPTIONS: dict[str, tuple[Any, str]] = {
    "generation_kwargs": (None, "set temperature, top_p, top_k, min_p or repetition_penalty directly"),
    "cache_implementation": (None, "leave it unset: the rollout manages its own cache"),
    "use_transformers_continuous_batching": (False, "leave it off: the rollout batches requests itself"),
    "use_transformers_paged": (False, "leave it off: the rollout batches requests itself"),
    "vllm_structured_outputs_regex": (None, "leave it unset: tool calls are free text"),
    "multi_objective_aggregation": ("sum_then_normalize", "keep 'sum_then_normalize'"),
    "remove_unused_columns": (False, "set remove_unused_columns=False: environments read the other columns"),
    "vllm_tensor_parallel_size": (1, "keep 1, or start a server with --tensor-parallel-size and vllm_mode='server'"),
}
"""TRL options that the multi-turn path cannot honour: name -> (the only value accepted, the cure)."""


@dataclass
class MultiTurnConfig(RolloutSettings, GRPOConfig):
    """What both multi-turn trainers share. A plain `GRPOConfig` is accepted too: see `from_grpo_config`."""

    # ---- rollout (and the limits of `RolloutSettings`)
    max_completion_length: int | None = field(  # the default is TRL's
        default=512, metadata=RolloutSettings.__dataclass_fields__["max_completion_length"].metadata
    )
    thinking: str = field(
        default="keep",
        metadata={
            "help": "'keep': reasoning of earlier turns stays in the token stream. 'off': render the chat template "
            "with enable_thinking=False."
        },
    )
    eval_temperature: float | None = field(
        default=None, metadata={"help": "Temperature in evaluation; 0 is greedy. None: the training temperature."}
    )
    generation_batch_rows: int = field(
        default=64, metadata={"help": "Maximum number of requests per forward pass of the transformers generator."}
    )
    vllm_server_urls: list[str] | None = field(
        default=None,
        metadata={
            "help": "vLLM servers to sample from with vllm_mode='server', e.g. http://127.0.0.1:8000. None: TRL's "
            "`vllm_server_base_url`, or host and port."
        },
    )
    max_sync_logprob_gap: float | None = field(
        default=None,
        metadata={
            "help": "Mean absolute difference of log-probabilities between sampler and trainer that stops the run "
            "after a weight sync. None: 1e-3 in float32, else 0.05."
        },
    )
    overlap_rollout: bool = field(
        default=False,
        metadata={
            "help": "Generate the next rollout while the update trains on this one (needs use_vllm). Its weights are "
            "one update old, which the importance ratio corrects."
        },
    )

    # ---- rewards on tokens
    truncated_trajectories: str = field(
        default="keep",
        metadata={
            "help": "Trajectories that a limit ended: 'keep' scores them as they are, 'mask' takes them out of the "
            "loss, 'penalise' adds `truncation_penalty` to their outcome."
        },
    )
    truncation_penalty: float = field(
        default=-0.5, metadata={"help": "Added to the outcome with truncated_trajectories='penalise'; <= 0."}
    )

    process_reward_weight: float = field(
        default=1.0, metadata={"help": "Factor of the turn rewards in the advantages (records keep raw rewards)."}
    )
    outcome_reward_weight: float = field(
        default=1.0, metadata={"help": "Factor of the outcome reward in the advantages."}
    )
    process_reward_schedule: str = field(
        default="constant",
        metadata={"help": "How `process_reward_weight` moves over the run: 'constant', or 'linear' or 'cosine' to 0."},
    )
    normalize_process_rewards: bool = field(
        default=False,
        metadata={"help": "Divide each source of turn rewards by its standard deviation over the batch."},
    )
    turn_reward_weights: list[float] | None = field(
        default=None, metadata={"help": "One factor per function in `turn_reward_funcs`. None: 1 each."}
    )

    # ---- advantages and loss
    advantage_estimator: str = field(
        default="grpo",
        metadata={
            "help": f"GRPO trainer: {', '.join(estimator_names(needs_critic=False))}. PPO trainer: "
            f"{', '.join(estimator_names(needs_critic=True))}. Or the path of your own, my_module.my_estimator."
        },
    )
    separate_process_advantages: bool = field(
        default=False,
        metadata={
            "help": "Estimate the advantages of turn rewards and of the outcome apart, each normalised by itself, and "
            "add them with their weights."
        },
    )
    gamma: float = field(default=1.0, metadata={"help": "Discount per action token (reinforce_pp, gae)."})
    gamma_turn: float | None = field(
        default=None,
        metadata={"help": "Discount per turn (turn_grpo, gigpo, bilevel_gae). None: 0.95 for gigpo, else 0.99."},
    )
    step_weight: float = field(default=1.0, metadata={"help": "Weight of GiGPO's step advantages."})
    kl_placement: str = field(
        default="loss",
        metadata={"help": "Where the KL term of weight `beta` stands: 'loss' (k3) or 'reward' (k1, on every token)."},
    )
    loss_mask: bool = field(
        default=True, metadata={"help": "Keep observation tokens out of the policy loss (off: the paper's ablation)."}
    )
    advantage_mask: bool = field(
        default=True, metadata={"help": "Keep observation tokens out of advantages (off: the paper's ablation)."}
    )

    # ---- sampler and trainer (with vLLM)
    importance_sampling_unit: str | None = field(
        default=None,
        metadata={
            "help": "What shares one ratio of trainer's to sampler's probability: 'token', 'turn' or 'sequence'. "
            "None: as `vllm_importance_sampling_mode` says, whose truncate/mask and bounds hold in any case."
        },
    )
    importance_sampling_length_normalized: bool = field(
        default=False,
        metadata={"help": "The geometric mean of a turn's or sequence's ratios instead of their product."},
    )

    # ---- update
    update_layout: str = field(
        default="padded",
        metadata={
            "help": "How rows meet in a forward of the update: 'padded' as TRL does, 'grouped' by length with the "
            "padding cut off, 'packed' without padding, 'shared' packed with each prompt of a group computed once."
        },
    )

    # ---- recording
    record_trajectories: str = field(
        default="jsonl",
        metadata={"help": "'jsonl', 'parquet' or 'none': every trajectory to `output_dir`/trajectories."},
    )

    has_critic: ClassVar[bool] = False
    """Whether the trainer of these arguments has a critic."""

    @property
    def estimator(self) -> Estimator:
        """The estimator that `advantage_estimator` names."""
        return find_estimator(self.advantage_estimator, has_critic=self.has_critic)

    def __post_init__(self) -> None:
        values: dict[str, Any] = self.__dict__
        is_single = values["num_generations"] == 1
        if is_single:
            values["num_generations"] = _Single(1)  # TRL asks for groups, which some estimators do without
        super().__post_init__()
        if is_single:
            values["num_generations"] = 1
        self.check_multi_turn()

    def check_multi_turn(self) -> None:
        """Check our own fields.

        Raises:
            ValueError: names the flag, its value, the rule and the cure.
        """
        check_config(self)

    def rollout_limits(self, max_model_length: int | None = None) -> RolloutLimits:
        """These limits, with those that TRL's own arguments set.

        Args:
            max_model_length: positions of the model; None if it does not say.
        """
        lengths = [max_model_length, self.vllm_max_model_length if self.use_vllm else None]
        limits = super().rollout_limits(min((length for length in lengths if length is not None), default=None))
        if self.max_tool_calling_iterations is not None:
            limits.max_turns = min(limits.max_turns, self.max_tool_calling_iterations + 1)
        return limits

    @classmethod
    def from_grpo_config(cls, args: GRPOConfig) -> MultiTurnConfig:
        """A copy of `args` with our fields at their defaults (a `MultiTurnConfig` is returned as a copy)."""
        config = copy.copy(args)
        if isinstance(config, MultiTurnConfig):
            return config
        config.__class__ = cls
        for item in fields(cls):
            if not hasattr(config, item.name):
                setattr(config, item.name, item.default)
        config.check_multi_turn()
        return config

    def check_supported(self) -> None:
        """Refuse TRL options that the multi-turn path would ignore.

        Raises:
            ValueError: names the option, its value and the cure.
        """
        for name, (accepted, cure) in UNSUPPORTED_OPTIONS.items():
            value = getattr(self, name, accepted)
            if value != accepted and not (accepted is None and value in ({}, "")):
                raise ValueError(f"{name}={value!r} is not supported by the multi-turn rollout. Cure: {cure}.")


@dataclass
class MultiTurnGRPOConfig(MultiTurnConfig):
    """Arguments of `MultiTurnGRPOTrainer`.

    Example:
        >>> MultiTurnGRPOConfig(output_dir="out", max_turns=0, bf16=False, use_cpu=True)
        Traceback (most recent call last):
        ...
        ValueError: max_turns=0 must be a whole number >= 1. Set max_turns to a value in that range.
    """


class _Single(int):
    """The number 1 for TRL's argument check, which refuses groups of fewer than 2."""

    def __lt__(self, other: object) -> bool:
        return False

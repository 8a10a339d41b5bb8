"""Training arguments: TRL's `GRPOConfig` plus the fields of the multi-turn rollout.

Only our own fields live here, grouped by pipeline step; everything else is TRL's and keeps its meaning.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from trl import GRPOConfig

from agent_r1_trl.generation.vllm_server import check_urls
from agent_r1_trl.trainers.importance import UNITS

TRUNCATION_POLICIES = ("keep", "mask", "penalise")
RECORD_FORMATS = ("jsonl", "parquet", "none")
GRPO_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "turn_grpo", "gigpo")
"""Estimators that `MultiTurnGRPOTrainer` offers."""
PPO_ESTIMATORS = ("gae", "bilevel_gae")
"""Estimators that need a critic: `MultiTurnPPOTrainer`."""
UNGROUPED_ESTIMATORS = ("reinforce_pp", *PPO_ESTIMATORS)
"""Estimators that work with one trajectory per prompt."""
KL_REWARD_ESTIMATORS = ("reinforce_pp", "reinforce_pp_baseline", *PPO_ESTIMATORS)
"""Estimators that read token rewards, where a KL penalty can stand."""
UPDATE_LAYOUTS = ("padded", "grouped", "packed", "shared")
PACKED_LAYOUTS = ("packed", "shared")
SCHEDULES = ("constant", "linear", "cosine")

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
class MultiTurnConfig(GRPOConfig):
    """What both multi-turn trainers share. A plain `GRPOConfig` is accepted too: see `from_grpo_config`."""

    # ---- rollout
    max_turns: int = field(
        default=8, metadata={"help": "Assistant turns per trajectory; the last one's tool calls are still executed."}
    )
    max_tokens_per_turn: int | None = field(
        default=None,
        metadata={
            "help": "Tokens the model may sample in one turn. None: what is left of `max_completion_length`, the "
            "budget of the whole trajectory, tool text included."
        },
    )
    max_observation_tokens: int = field(
        default=1024, metadata={"help": "Tokens of observation text after one turn; longer text is cut with a note."}
    )
    max_invalid_calls: int = field(
        default=2,
        metadata={"help": "Unusable turns in a row (malformed or unknown calls) that are answered with feedback."},
    )
    max_concurrency: int = field(default=256, metadata={"help": "Trajectories in flight at once, per process."})
    rollout_timeout: float | None = field(
        default=None, metadata={"help": "Seconds after which a trajectory is stopped. None: no limit."}
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
        default=64, metadata={"help": "Most requests that one forward of the transformers back end serves."}
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
            "help": "GRPO trainer: 'grpo', 'dr_grpo', 'rloo', 'reinforce_pp', 'reinforce_pp_baseline', 'turn_grpo', "
            "'gigpo'. PPO trainer: 'gae', 'bilevel_gae'."
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

    estimators: ClassVar[tuple[str, ...]] = GRPO_ESTIMATORS

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
        _check_positive_int(self, "max_turns", "max_observation_tokens", "max_concurrency", "generation_batch_rows")
        if self.max_tokens_per_turn is not None:
            _check_positive_int(self, "max_tokens_per_turn")
        _check_positive_int(self, "max_invalid_calls", minimum=0)
        if self.max_completion_length is None or self.max_completion_length < 1:
            raise ValueError(
                f"max_completion_length={self.max_completion_length} must be at least 1: it is the token budget of "
                "the whole trajectory, tool text included. Set max_completion_length, for example 2048."
            )
        if self.rollout_timeout is not None and not (
            isinstance(self.rollout_timeout, int | float) and self.rollout_timeout > 0
        ):
            raise ValueError(f"rollout_timeout={self.rollout_timeout!r} must be seconds > 0, or None for no limit.")
        self._check_serving()
        self._check_overlap()
        _check_choice(self, "truncated_trajectories", TRUNCATION_POLICIES)
        self._honour_mask_truncated_completions()
        self._settle_ddp()
        self._check_importance_sampling()
        _check_choice(self, "record_trajectories", RECORD_FORMATS)
        _check_choice(self, "thinking", ("keep", "off"))
        self._check_update_layout()
        self._check_estimator()
        if not math.isfinite(self.truncation_penalty) or self.truncation_penalty > 0:
            raise ValueError(
                f"truncation_penalty={self.truncation_penalty} must be finite and <= 0: it is added to the outcome of "
                "a truncated trajectory. Set a negative number such as -0.5."
            )
        if self.eval_temperature is not None and not self.eval_temperature >= 0:
            raise ValueError(f"eval_temperature={self.eval_temperature} must be >= 0 (0 is greedy), or None.")
        if self.advantage_estimator == "dr_grpo":
            self._apply_dr_grpo()
        elif self.advantage_estimator == "rloo" and self.scale_rewards not in ("group", "none"):
            raise ValueError(
                f"scale_rewards={self.scale_rewards!r} has no meaning with advantage_estimator='rloo', which divides "
                "by nothing. Remove scale_rewards, or use advantage_estimator='grpo'."
            )

    def _check_importance_sampling(self) -> None:
        """Ratios need the sampler's own probabilities, not those of a distribution that was cut."""
        if self.importance_sampling_unit is not None:
            _check_choice(self, "importance_sampling_unit", UNITS)
        if not (self.use_vllm and self.vllm_importance_sampling_correction):
            return
        neutral = {"top_p": (1.0,), "top_k": (0, -1, None), "min_p": (None, 0.0), "repetition_penalty": (1.0,)}
        for name, accepted in neutral.items():
            value = getattr(self, name)
            if value not in accepted:
                raise ValueError(
                    f"{name}={value!r} with importance sampling: the engine samples from a cut distribution, the "
                    f"trainer scores the whole one, and the ratio of the two is meaningless. Remove {name}, or set "
                    "vllm_importance_sampling_correction=False."
                )

    def _check_serving(self) -> None:
        _check_choice(self, "vllm_mode", ("colocate", "server"))
        if self.vllm_server_urls is not None:
            if not (self.use_vllm and self.vllm_mode == "server"):
                raise ValueError(
                    f"vllm_server_urls={self.vllm_server_urls} with use_vllm={self.use_vllm} and "
                    f"vllm_mode={self.vllm_mode!r}: nothing would speak to these servers. Set use_vllm=True and "
                    "vllm_mode='server', or remove vllm_server_urls."
                )
            check_urls(self.vllm_server_urls)
        gap = self.max_sync_logprob_gap
        if gap is not None and (isinstance(gap, bool) or not isinstance(gap, int | float) or not gap > 0):
            raise ValueError(
                f"max_sync_logprob_gap={gap!r} must be > 0: float sums in another order differ a little even with "
                "equal weights. Remove it for the default, or set for example 0.05."
            )

    def _check_overlap(self) -> None:
        if not self.overlap_rollout:
            return
        cures = {
            "use_vllm": (True, "the sampler needs weights of its own. Set use_vllm=True"),
            "vllm_importance_sampling_correction": (True, "nothing would correct for the older weights. Set it True"),
            "vllm_enable_sleep_mode": (False, "the engine works during the update and cannot sleep. Set it False"),
        }
        for name, (accepted, cure) in cures.items():
            if getattr(self, name) != accepted:
                raise ValueError(f"overlap_rollout=True with {name}={getattr(self, name)}: {cure}.")

    def _check_estimator(self) -> None:
        """The estimator, its parameters, and what goes with it."""
        name = self.advantage_estimator
        if name not in (*GRPO_ESTIMATORS, *PPO_ESTIMATORS):
            _check_choice(self, "advantage_estimator", (*GRPO_ESTIMATORS, *PPO_ESTIMATORS))
        if name not in self.estimators:
            other = "MultiTurnPPOTrainer (PPO)" if name in PPO_ESTIMATORS else "MultiTurnGRPOTrainer (GRPO)"
            raise ValueError(
                f"advantage_estimator={name!r} is {'made with' if name in PPO_ESTIMATORS else 'made without'} a "
                f"critic. Use {other} with its config, or one of {', '.join(map(repr, self.estimators))} here."
            )
        if self.num_generations == 1 and name not in UNGROUPED_ESTIMATORS:
            raise ValueError(
                f"num_generations=1 with advantage_estimator={name!r}, which compares the trajectories of a "
                f"group. Set num_generations >= 2, or one of {', '.join(map(repr, UNGROUPED_ESTIMATORS))}."
            )
        if self.gamma_turn is None:
            self.gamma_turn = 0.95 if name == "gigpo" else 0.99
        for factor in ("gamma", "gamma_turn"):
            _check_share(self, factor)
        for weight in ("process_reward_weight", "outcome_reward_weight", "step_weight"):
            _check_finite(self, weight)
        _check_choice(self, "process_reward_schedule", SCHEDULES)
        _check_choice(self, "kl_placement", ("loss", "reward"))
        if self.kl_placement == "reward" and self.beta == 0:
            raise ValueError(
                "kl_placement='reward' with beta=0.0 changes nothing. Set beta > 0 (0.001 is usual), or remove "
                "kl_placement."
            )
        if self.kl_placement == "reward" and name not in KL_REWARD_ESTIMATORS:
            raise ValueError(
                f"kl_placement='reward' has no effect with advantage_estimator={name!r}, which reads no token "
                f"rewards. Set kl_placement='loss', or one of {', '.join(map(repr, KL_REWARD_ESTIMATORS))}."
            )
        if self.separate_process_advantages and name in PPO_ESTIMATORS:
            raise ValueError(
                f"separate_process_advantages=True with advantage_estimator={name!r}: the critic's values belong to "
                "the sum of both. Set separate_process_advantages=False and weigh the rewards instead "
                "(process_reward_weight, outcome_reward_weight)."
            )

    def _check_update_layout(self) -> None:
        _check_choice(self, "update_layout", UPDATE_LAYOUTS)
        if self.update_layout in PACKED_LAYOUTS and self.advantage_estimator in PPO_ESTIMATORS:
            raise ValueError(
                f"update_layout={self.update_layout!r} packs rows, and the critic reads padded ones. Set "
                "update_layout='grouped' or 'padded' for PPO."
            )

    def _settle_ddp(self) -> None:
        """With reentrant checkpointing, DDP must not look for unused parameters: it takes all of them for unused.

        transformers keeps that search off for plain models, but not for those of peft.
        """
        is_reentrant = self.gradient_checkpointing and (self.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        if is_reentrant and vars(self)["ddp_find_unused_parameters"] is None:
            self.ddp_find_unused_parameters = False

    def _honour_mask_truncated_completions(self) -> None:
        """TRL's spelling of truncated_trajectories='mask'."""
        if self.mask_truncated_completions and self.truncated_trajectories == "penalise":
            raise ValueError(
                "mask_truncated_completions=True contradicts truncated_trajectories='penalise': a masked trajectory "
                "feels no penalty. Remove one of the two."
            )
        if self.mask_truncated_completions:
            self.truncated_trajectories = "mask"

    def _apply_dr_grpo(self) -> None:
        """Dr. GRPO is R - group mean under a constant-length normaliser; another normaliser is refused."""
        default = next(item.default for item in fields(GRPOConfig) if item.name == "loss_type")
        given: str = vars(self)["loss_type"]
        if given not in (default, "dr_grpo"):
            raise ValueError(
                f"loss_type={given!r} contradicts advantage_estimator='dr_grpo', whose loss is divided by a "
                "constant length. Remove loss_type or set loss_type='dr_grpo'."
            )
        self.loss_type = "dr_grpo"

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


def _check_positive_int(config: MultiTurnConfig, *names: str, minimum: int = 1) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(
                f"{name}={value!r} must be a whole number >= {minimum}. Set {name} to a value in that range."
            )


def _check_choice(config: MultiTurnConfig, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}. Set {name} to one of them.")


def _check_share(config: MultiTurnConfig, name: str) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r} must be between 0 and 1. Set {name} to a value in that range.")


def _check_finite(config: MultiTurnConfig, name: str) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r} must be finite and >= 0. Set {name} to a value in that range.")


class _Single(int):
    """The number 1 for TRL's argument check, which refuses groups of fewer than 2."""

    def __lt__(self, other: object) -> bool:
        return False

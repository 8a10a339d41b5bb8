"""Training arguments: TRL's `GRPOConfig` plus the fields of the multi-turn rollout.

Only our own fields live here, grouped by pipeline step; everything else is TRL's and keeps its meaning.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, fields
from typing import Any

from trl import GRPOConfig

TRUNCATION_POLICIES = ("keep", "mask", "penalise")
RECORD_FORMATS = ("jsonl", "parquet", "none")
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo")
"""Estimators that `MultiTurnGRPOTrainer` offers; the advantage of a trajectory is broadcast over its action tokens."""

UNSUPPORTED_OPTIONS: dict[str, tuple[Any, str]] = {
    "generation_kwargs": (None, "set temperature, top_p, top_k, min_p or repetition_penalty directly"),
    "cache_implementation": (None, "leave it unset: the rollout manages its own cache"),
    "use_transformers_continuous_batching": (False, "leave it off: the rollout batches requests itself"),
    "use_transformers_paged": (False, "leave it off: the rollout batches requests itself"),
    "vllm_structured_outputs_regex": (None, "leave it unset: tool calls are free text"),
    "multi_objective_aggregation": ("sum_then_normalize", "keep 'sum_then_normalize'"),
    "remove_unused_columns": (False, "set remove_unused_columns=False: environments read the other columns"),
    "vllm_mode": ("colocate", "set vllm_mode='colocate' (in process)"),
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

    # ---- advantages and loss
    advantage_estimator: str = field(
        default="grpo",
        metadata={"help": "'grpo', 'dr_grpo' or 'rloo'."},
    )
    loss_mask: bool = field(
        default=True, metadata={"help": "Keep observation tokens out of the policy loss (off: the paper's ablation)."}
    )
    advantage_mask: bool = field(
        default=True, metadata={"help": "Keep observation tokens out of advantages (off: the paper's ablation)."}
    )

    # ---- recording
    record_trajectories: str = field(
        default="jsonl",
        metadata={"help": "'jsonl', 'parquet' or 'none': every trajectory to `output_dir`/trajectories."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
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
        _check_choice(self, "truncated_trajectories", TRUNCATION_POLICIES)
        self._honour_mask_truncated_completions()
        _check_choice(self, "record_trajectories", RECORD_FORMATS)
        _check_choice(self, "thinking", ("keep", "off"))
        _check_choice(self, "advantage_estimator", GROUP_ESTIMATORS)
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
            if name == "vllm_mode" and not self.use_vllm:
                continue
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

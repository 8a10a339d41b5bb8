"""Training arguments: TRL's `GRPOConfig` plus the fields of the multi-turn rollout.

Only our own fields live here, grouped by pipeline step; everything else is TRL's and keeps its meaning. TRL's parser
and its `ModelConfig` stand here as well, because only this package imports trl.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Self

import torch
import trl
from accelerate.utils import is_deepspeed_available
from trl import GRPOConfig, get_quantization_config

from agent_r1_trl.advantages.estimators import ESTIMATORS, Estimator, estimator_names, find_estimator
from agent_r1_trl.critic.attach import CRITIC_KINDS
from agent_r1_trl.features import keys_of
from agent_r1_trl.generation.base import SamplingParams
from agent_r1_trl.generation.vllm.settings import ServerSettings
from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.rollout.limits import RolloutLimits, RolloutSettings
from agent_r1_trl.safe_text import SECRETS_HELP, SecretMapping
from agent_r1_trl.settings import (
    Clash,
    Count,
    CountOr,
    CountOrZero,
    Flag,
    NotNegative,
    Number,
    OneOf,
    Rate,
    Share,
    SomeOf,
    Text,
    Whole,
    check_settings,
    check_value,
    default_of,
    find_clashes,
    plain,
    refuse,
    setting,
)
from agent_r1_trl.trainers.config_checks import (
    RolloutShape,
    check_config,
    check_fields,
    find_rollout_problems,
    resolve_shape,
)
from agent_r1_trl.trainers.inherited_settings import ROLLOUT_FIELDS
from agent_r1_trl.update.importance import UNITS
from agent_r1_trl.update.layout import AUTO, UPDATE_LAYOUTS

# TRL 1.16 and peft 0.21 use names that transformers 5.23 and 5.24 give up: nothing that a user could change.
_GIVEN_UP = r"`(is_)?gradient_checkpointing(_kwargs|_enable|_disable)?` is deprecated"
warnings.filterwarnings("ignore", _GIVEN_UP, FutureWarning)

__all__ = [
    "ModelConfig",
    "MultiTurnConfig",
    "MultiTurnGRPOConfig",
    "MultiTurnPPOConfig",
    "get_peft_config",
    "get_quantization_config",
]

AGENT_R1 = {
    "title": "Agent-R1: Training Powerful LLM Agents with End-to-End Reinforcement Learning",
    "id": "2511.14460",
    "citation": """\
@misc{cheng2025agentr1,
  title         = {{Agent-R1: Training Powerful LLM Agents with End-to-End Reinforcement Learning}},
  author        = {Cheng, Mingyue and Ouyang, Jie and Yu, Shuo and Yan, Ruiran and Luo, Yucong and Liu, Zirui and
                   Wang, Daoyu and Liu, Qi and Chen, Enhong},
  year          = {2025},
  eprint        = {2511.14460},
  archivePrefix = {arXiv},
}""",
}
"""The paper of both trainers, as TRL's `_paper`."""
AsMapping = dict[str, Any] | str | None
"""A group of settings, as a mapping or its JSON text."""
UNKNOWN_TO_TRL = ("max_turns", "max_invalid_calls", "max_observation_tokens")
"""Limits that do not exist in TRL; a plain `GRPOConfig` is not held to them."""


def _readers(option: str) -> str:
    return ", ".join(row.name for row in ESTIMATORS.values() if option in row.options)


def trl_default(name: str) -> Any:
    """TRL's default of one of its fields."""
    return GRPOConfig.__dataclass_fields__[name].default


class _UnsetText(str):
    """A default that can be told from the same value where a user wrote it; arguments hold plain values."""

    def __str__(self) -> str:
        return self  # argparse calls `str` of a default


class _UnsetNumber(float):
    """As `_UnsetText`, for a number."""


RATIO_SETTINGS = ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max")
TRL_RATIO_MODE, TRL_RATIO_LIMIT = map(trl_default, RATIO_SETTINGS)
"""How TRL takes the importance ratio of trainer to sampler, unless it is told otherwise."""
OLDER_WEIGHTS_RATIO_MODE = "token_truncate"
OLDER_WEIGHTS_RATIO_LIMIT = 2.0
"""The default where the sampler's weights may be older than the update's.

Small differences of many tokens add up: at .005 a token, 300 tokens have the ratio 4.5, and TRL's default, which drops
whole sequences above 3, drops long trajectories for what is no more than the last update.
"""


def resolve_importance_ratio(args: MultiTurnConfig) -> None:
    """Choose mode and limit of the ratio where the user did not, before TRL reads them; what the user wrote stands."""
    has_mode = not isinstance(args.vllm_importance_sampling_mode, _UnsetText)
    has_limit = not isinstance(args.vllm_importance_sampling_clip_max, _UnsetNumber)
    mode, limit = TRL_RATIO_MODE, TRL_RATIO_LIMIT
    if args.rollouts_ahead and not has_mode:  # a mode that was chosen keeps TRL's limit
        mode, limit = OLDER_WEIGHTS_RATIO_MODE, OLDER_WEIGHTS_RATIO_LIMIT
    if not has_mode:
        args.vllm_importance_sampling_mode = mode
    if not has_limit:
        args.vllm_importance_sampling_clip_max = limit


@dataclass
class MultiTurnConfig(RolloutSettings, GRPOConfig):
    """Settings of both multi-turn trainers. A plain `GRPOConfig` is accepted too: see `from_grpo_config`."""

    # ---- rollout (and the limits of `RolloutSettings`)
    max_completion_length: Count | None = setting(  # the default is TRL's
        512, RolloutSettings.__dataclass_fields__["max_completion_length"].metadata["help"]
    )
    chat_template: str | None = setting(
        None,
        "Chat template in place of the tokenizer's: its source, a .jinja file, or the name of one that TRL ships "
        "(qwen3_training).",
    )
    response_template: dict[str, Any] | str | None = setting(
        None,
        "Grammar that reads tool calls: the name of a family (mistral, glm, ...; see docs/model-families.md), a JSON "
        "file, or a transformers response_template. None: the template's own.",
    )
    eval_temperature: NotNegative | None = setting(
        None, "Temperature in evaluation; 0 is greedy. None: as in training."
    )
    generation_batch_rows: Count = setting(
        64, "Maximum number of requests per forward pass of transformers' generator."
    )
    vllm_dtype: Annotated[str, OneOf("auto", "bfloat16", "float16", "float32")] = setting(
        "auto",
        "Dtype of the vLLM engine in this process. 'auto': the one that the trainer computes with.",
    )
    servers: Annotated[AsMapping, ServerSettings] = setting(
        None,
        "vLLM servers to sample from (vllm_mode='server') and their time limits, such as {urls: "
        "[http://127.0.0.1:8000]}.",
    )
    rollouts_ahead: CountOrZero = setting(
        0,
        "Number of rollouts that may be in flight besides the one that is trained on next. They go on across weight "
        "syncs, and the importance ratio corrects for their age. 0: a rollout begins when the update before it ends.",
    )
    cut_turns: Flag = setting(
        False,
        "With rollouts_ahead, cut the turns that are being sampled when weights change, and go on with the new ones. "
        "Off: they end first.",
    )

    retry_failed: CountOrZero = setting(
        0,
        "Number of times that a lost trajectory is sampled again in its rollout, with the same seeds.",
    )
    min_group_size: Count | None = setting(
        None,
        "Smallest group, of trajectories that were sampled and scored, that counts. None: 2 where the estimator "
        "compares them, else 1.",
    )

    # ---- rewards on tokens
    truncated_trajectories: Annotated[str, OneOf("keep", "mask", "penalise")] = setting(
        "keep",
        "Trajectories that a limit ended: 'keep' trains on them, 'mask' takes them out of the loss, 'penalise' adds "
        "`truncation_penalty` to their outcome.",
    )
    truncation_penalty: Annotated[float, Number(maximum=0)] = setting(
        -0.5, "What truncated_trajectories='penalise' adds to the outcome; <= 0."
    )

    process_reward_weight: NotNegative = setting(1.0, "Weight of the turn rewards in the advantages.")
    outcome_reward_weight: NotNegative = setting(1.0, "Weight of the outcome reward in the advantages.")
    process_reward_schedule: Annotated[str, OneOf("constant", "linear", "cosine")] = setting(
        "constant", "Schedule of `process_reward_weight`: 'constant', or falling to 0 ('linear', 'cosine')."
    )
    normalize_process_rewards: Flag = setting(
        False, "Divide each source of turn rewards by its standard deviation over the batch."
    )
    turn_reward_weights: list[float] | None = setting(
        None, "One weight per function in `turn_reward_funcs`; or 1 each."
    )

    # ---- advantages and loss
    advantage_estimator: str = setting(
        "grpo",
        f"GRPO trainer: {', '.join(estimator_names(needs_critic=False))}. PPO trainer: "
        f"{', '.join(estimator_names(needs_critic=True))}. Or your own: a function, or its "
        "path, my_module.my_estimator.",
    )
    separate_process_advantages: Flag = setting(
        False,
        "Estimate the advantages of turn rewards and outcome separately, and add them with their weights.",
    )
    gamma: Share = setting(1.0, f"Discount per action token ({_readers('gamma')}).")
    gamma_turn: Share | None = setting(
        None, f"Discount per turn ({_readers('gamma_turn')}). None: 0.95 for gigpo, else 0.99."
    )
    step_weight: NotNegative = setting(1.0, "Weight of GiGPO's step advantages.")
    loss_term: str | None = setting(
        None,
        "Your own loss term, or its path, my_module.my_term (docs/extending.md).",
    )
    loss_unit: Annotated[str, OneOf("token", "turn", "trajectory")] | None = setting(
        None,
        "Unit of equal weight in the policy loss: 'token', 'turn' or 'trajectory'. None: as `loss_type` has it, a "
        "trajectory counting as one row.",
    )
    kl_placement: Annotated[str, OneOf("loss", "reward")] = setting(
        "loss", "Where the KL term of weight `beta` is added: to the 'loss' (k3) or to each token's 'reward' (k1)."
    )
    loss_mask: Flag = setting(
        True,
        "Keep observation tokens out of the policy loss. Off: only for the ablation of the Agent-R1 paper.",
    )
    advantage_mask: Flag = setting(
        True, "Keep observation tokens out of the advantages. Off: the ablation of the Agent-R1 paper."
    )

    # ---- sampler and trainer (with vLLM)
    vllm_importance_sampling_mode: str = setting(
        _UnsetText(TRL_RATIO_MODE),
        "Importance ratio of trainer to sampler, of each token or of the whole sequence, truncated or (mask) set to 0 "
        "where it is out of bounds: 'token_truncate' (the default with rollouts_ahead), 'token_mask', "
        "'sequence_truncate' or 'sequence_mask'.",
    )
    vllm_importance_sampling_clip_max: float | None = setting(
        _UnsetNumber(TRL_RATIO_LIMIT),
        "Largest importance ratio of trainer to sampler. None: no bound. The default with rollouts_ahead is 2.0, "
        "unless vllm_importance_sampling_mode is set.",
    )
    importance_sampling_unit: Annotated[str, OneOf(*UNITS)] | None = setting(
        None,
        "Unit that shares one importance ratio of trainer to sampler: 'token', 'turn' or 'sequence'. None: that of "
        "`vllm_importance_sampling_mode`.",
    )

    # ---- update
    update_layout: Annotated[str, OneOf(AUTO, *UPDATE_LAYOUTS)] = setting(
        AUTO,
        "Layout of rows in the update's forward passes: 'padded' as in TRL; 'grouped' by length; 'packed' without "
        "padding; 'shared': packed, common beginnings (a group's prompt) computed once; 'auto': on a CUDA GPU the "
        "last of these that model and settings allow (docs/performance.md).",
    )
    max_tokens_per_micro_batch: Annotated[int | str, CountOr(AUTO)] | None = setting(
        AUTO,
        "Maximum number of tokens of a micro-batch, for update_layout 'packed' and 'shared'. 'auto': with these "
        "layouts on a CUDA GPU as many as fit by formula. None: `per_device_train_batch_size` rows.",
    )
    disable_dropout: Flag = setting(
        True,
        "Switch off dropout and router jitter in the update, as the sampler has none.",
    )
    score_check: Annotated[str, OneOf("error", "warn", "off")] = setting(
        "error",
        "Response to log-probs of the first rollout that differ between the update and the model's own forward pass: "
        "'error' ends the run, 'warn' goes on, 'off' does not look.",
    )

    # ---- features (one mapping each; `features/NAME/settings.py` declares the keys; None: the defaults of the keys)
    sampling: AsMapping = setting(
        None, "Group filter, dynamic sampling and curriculum, such as {filter_groups: top_p}. None: all off."
    )
    failures: AsMapping = setting(
        None,
        "Limits for lost trajectories and for steps that are not finite, such as {max_share: 0.8}.",
    )
    outages: AsMapping = setting(None, "Limits for tools that are down, such as {max_wait: 600}.")
    journal: AsMapping = setting(
        True,
        "Write every turn to output_dir/journal, so that a killed and resumed run repeats only the turn in flight: "
        "true, false, or a mapping, such as {keep: 9}.",
    )
    push: AsMapping = setting(
        None, "What `push_to_hub` uploads besides the model, such as {trajectories: true}. None: no records."
    )
    echo: AsMapping = setting(
        None,
        "Watch for collapsing runs: true, or a mapping, such as {actions: [all]}, to act on them. None or false: off.",
    )

    progress: Annotated[str, OneOf("auto", "lines", "transformers", "none")] = setting(
        "auto",
        "Display of a training: 'auto': a block in a terminal, else a line a step; 'lines'; 'transformers': its bar "
        "and a dict of all metrics a step; 'none'.",
    )

    watch_by: Annotated[str, Text()] | None = setting(
        None,
        "Column of the rows, such as `kind`, whose values have their own metrics (`by/*`). A warning names a value "
        "that falls while the mean rises.",
    )

    # ---- rollout shaping
    prompts_per_rollout: Count | None = setting(
        None,
        "Prompts of one rollout, over all processes; `steps_per_generation` follows from it. None: as TRL's settings "
        "say.",
    )
    updates_per_rollout: Count | None = setting(
        None,
        "Optimizer steps on one rollout; `gradient_accumulation_steps` follows from it. None: as TRL's settings say.",
    )

    # ---- recording and resuming
    resume_without: Annotated[list[str], SomeOf("rollout", "data")] | None = setting(
        None,
        "What a resumed run does without: 'rollout' (the one in flight) begins anew, 'data' goes on at the same place "
        "in other rows or another order.",
    )
    record_trajectories: Annotated[str, OneOf("jsonl", "none")] = setting(
        "jsonl", "How trajectories are written to `output_dir`/trajectories: 'jsonl' or 'none'."
    )

    secrets: SecretMapping = setting(None, SECRETS_HELP)

    def __new__(cls, *args: object, **options: object) -> Self:
        """Refuse what is no setting, by the name of the one that is meant.

        Raises:
            TypeError: names both.
        """
        known = inspect.signature(cls.__init__).parameters  # of a user's own subclass, too
        for name in options if "kwargs" not in known else ():
            if name not in known:
                group, _, key = name.partition(".")
                hint = (
                    f" Write it as {group}={{{key!r}: {options[name]!r:.60}}}."
                    if name in keys_of(cls)
                    else f"{did_you_mean(name, [*known, *keys_of(cls)])} A key of a mapping is written as in "
                    "echo={'patience': 5}; docs/options.md lists all settings."
                )
                raise TypeError(f"{cls.__name__} has no setting {name!r}.{hint}")
        return super().__new__(cls)

    has_critic: ClassVar[bool] = False
    """Whether the trainer of these arguments has a critic."""

    @property
    def rollout_shape(self) -> RolloutShape:
        """Prompts, responses and updates per rollout, as they follow from all settings."""
        return RolloutShape.of(self)

    @property
    def estimator(self) -> Estimator:
        """The estimator that `advantage_estimator` names."""
        return find_estimator(self.advantage_estimator, has_critic=self.has_critic)

    def __post_init__(self) -> None:
        values: dict[str, Any] = self.__dict__
        if values["deepspeed"] and not is_deepspeed_available():  # transformers would fail obscurely
            raise ValueError(
                f"deepspeed={values['deepspeed']!r:.200}: DeepSpeed is not installed. pip install "
                "'agent-r1-trl[deepspeed]' (Linux only), or remove deepspeed."
            )
        if not torch.accelerator.is_available():
            if self.bf16 is None:
                values["bf16"] = False  # TRL's default is for GPUs; without one it would be refused
            values["dataloader_pin_memory"] = False  # nothing to copy to: PyTorch would warn of each data loader
        check_fields(self)  # before anything follows from them
        resolve_shape(self)
        resolve_importance_ratio(self)
        is_single = values["num_generations"] == 1
        if is_single:
            values["num_generations"] = _Single(1)  # TRL asks for groups, which some estimators do without
        super().__post_init__()
        if is_single:
            values["num_generations"] = 1
        check_config(self)

    def to_dict(self) -> dict[str, Any]:
        """The arguments as transformers writes them, mappings as mappings."""
        return {name: plain(value) for name, value in super().to_dict().items()}

    def sampling_params(self, *, is_training: bool) -> SamplingParams:
        """How tokens are drawn, in training or in evaluation."""
        temperature = self.temperature if is_training or self.eval_temperature is None else self.eval_temperature
        return SamplingParams(
            temperature=temperature,
            top_p=self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
        )

    def rollout_limits(self, max_model_length: int | None = None) -> RolloutLimits:
        """These limits, with those that TRL's own arguments set.

        Args:
            max_model_length: positions of the model; None if it does not say.
        """
        lengths = [max_model_length, self.vllm_max_model_length if self.use_vllm else None]
        limits = super().rollout_limits(min((length for length in lengths if length is not None), default=None))
        rounds = self.max_tool_calling_iterations
        if rounds is None:
            return limits
        return replace(limits, max_turns=min(limits.max_turns, rounds + 1), max_tool_calling_iterations=rounds)

    @classmethod
    def from_grpo_config(cls, args: GRPOConfig) -> MultiTurnConfig:
        """A copy of `args` with our fields at their defaults; a `MultiTurnConfig` is returned as it is, so that what
        callbacks change in it counts.

        TRL ends a trajectory for its tokens or for `max_tool_calling_iterations` alone. Limits that TRL does not know
        are therefore set to `max_completion_length`, where they change nothing: every turn has a token at least.

        Raises:
            TypeError: the arguments are those of another trainer; names the right class.
        """
        is_ours = isinstance(args, MultiTurnConfig)
        if not isinstance(args, GRPOConfig) or (is_ours and args.has_critic is not cls.has_critic):
            trainer = cls.__name__.replace("Config", "Trainer")
            raise TypeError(
                f"args={type(args).__name__} is not a configuration of {trainer}. Pass args={cls.__name__}(...) "
                "(or TRL's GRPOConfig)."
            )
        if isinstance(args, MultiTurnConfig):
            return args
        config: Any = copy.copy(args)
        config.__class__ = cls
        if isinstance(config.max_completion_length, int):
            vars(config).update(dict.fromkeys(UNKNOWN_TO_TRL, config.max_completion_length), rollout_timeout=None)
        for item in fields(cls):
            if not hasattr(config, item.name):
                setattr(config, item.name, item.default)
        check_config(config)
        return config

    @classmethod
    def default_of(cls, name: str) -> Any:
        """The default of a field."""
        return cls.__dataclass_fields__[name].default

    def check_supported(self, *, has_generator: bool = False) -> None:
        """Check what the rollout cannot do, once it is known whether there is a generator."""
        check_settings(self, ROLLOUT_FIELDS)
        refuse(find_rollout_problems(self, has_generator))


@dataclass
class MultiTurnGRPOConfig(MultiTurnConfig):
    """Arguments of `MultiTurnGRPOTrainer`.

    Examples:
        >>> MultiTurnGRPOConfig(output_dir="out", max_turns=0, bf16=False, use_cpu=True)
        Traceback (most recent call last):
        ...
        ValueError: max_turns=0 must be a whole number >= 1. Set max_turns to such a value.
    """


class _Single(int):
    """The number 1 for TRL's argument check, which refuses groups of fewer than 2."""

    def __lt__(self, other: object) -> bool:
        return False


@dataclass
class MultiTurnPPOConfig(MultiTurnConfig):
    """Arguments of `MultiTurnPPOTrainer`.

    Epochs over one rollout are `num_iterations`; its optimizer steps per epoch are `steps_per_generation` divided by
    `gradient_accumulation_steps`.

    Examples:
        >>> MultiTurnPPOConfig(output_dir="out", lam=1.5, bf16=False, use_cpu=True)
        Traceback (most recent call last):
        ...
        ValueError: lam=1.5 must be a finite number >= 0 and <= 1. Set lam to such a value.
    """

    has_critic: ClassVar[bool] = True

    num_generations: Annotated[int | None, Whole(1)] = setting(
        1, "Trajectories per prompt. The critic is the baseline: 1 is enough."
    )
    advantage_estimator: str = setting(
        "gae",
        "'gae' over action tokens, 'bilevel_gae' over turns, then tokens, 'step_gae' over turns, or the path of your "
        "own.",
    )
    lam: Share = setting(0.95, "GAE's lambda per action token.")
    lam_turn: Share = setting(0.95, "GAE's lambda per turn (bilevel_gae, step_gae).")
    whiten_advantages: Flag = setting(
        True,
        "Normalise the advantages to mean 0 and variance 1 over the action tokens of the whole batch (step_gae: over "
        "its turns).",
    )
    bootstrap_truncated: Flag = setting(
        False,
        "Use the critic's value, instead of 0, at the end of a trajectory that a limit ended.",
    )

    # ---- critic
    critic: Annotated[str, OneOf(*CRITIC_KINDS)] | None = setting(
        None,
        "'adapter' (a second LoRA adapter with a value head), 'head' (a value head on the policy) or 'model' (a "
        "backbone of its own). None: 'adapter' with LoRA, else 'model'.",
    )
    critic_learning_rate: Rate | None = setting(None, "Peak learning rate of the critic. None: that of the policy.")
    critic_warmup_steps: CountOrZero = setting(0, "Optimizer steps at the start in which only the critic learns.")
    critic_max_grad_norm: NotNegative | None = setting(
        None,
        "Limit of the critic's gradient norm, apart from the policy's. 0: not clipped. None: max_grad_norm. Refused "
        "with DeepSpeed, which clips one norm over both.",
    )
    value_loss_coef: NotNegative = setting(0.5, "Weight of the value loss.")
    cliprange_value: Annotated[float, Number(above=0, may_be_infinite=True)] = setting(
        0.2, "Clip range of the value loss."
    )


# -------------------------------------------------------------------- TRL's arguments of a training script


ADAPTER_SETTINGS = (
    *(item.name for item in fields(trl.ModelConfig) if item.name.startswith("lora_")),
    "use_rslora",
    "use_dora",
)
"""Settings of `ModelConfig` that describe an adapter. TRL reads them with `use_peft` alone."""
ADAPTER_RULES: dict[str, Any] = {
    "lora_r": Count,
    "lora_alpha": Count,  # 0 would multiply the adapter by 0
    "lora_dropout": Annotated[float, Number(minimum=0, below=1)],
    "lora_task_type": Annotated[str, OneOf("CAUSAL_LM")],
}
"""The rules of some of them, as annotations."""


QUANTISED = Clash(
    "load_in_4bit load_in_8bit use_peft",
    lambda c: c.load_in_4bit or c.load_in_8bit,
    "a quantised base is frozen, so nothing would be trained. Set use_peft=True as well.",
)


def adapter_problem(settings: Mapping[str, Any]) -> str:
    """The message about settings of an adapter, with their values, where none is trained; "" without such settings."""
    if not settings:
        return ""
    said = " ".join(f"{name}={value!r:.200}" for name, value in settings.items())
    names = ", ".join(settings)
    return (
        f"{said}: only an adapter (LoRA) reads this, and use_peft is not true, so all weights of the model would be "
        f"trained. Set use_peft: true to train an adapter, or remove {names}."
    )


@dataclass
class ModelConfig(trl.ModelConfig):
    """TRL's, with adapters that compute in the update what they compute in the rollout.

    Raises:
        ValueError: a setting of an adapter differs from its default and `use_peft` is False, or the weights are
            quantised without an adapter.
    """

    lora_dropout: float = field(
        default=0.0,
        metadata={
            "help": "LoRA dropout. It is off unless disable_dropout is false; then it is on in the update alone, so "
            "that the log-probs of a sampled token differ between rollout and update."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_peft:
            for name, rule in ADAPTER_RULES.items():
                check_value(name, getattr(self, name), rule)
            return
        values = {name: getattr(self, name) for name in ADAPTER_SETTINGS}
        changed = {name: value for name, value in values.items() if value != default_of(self, name)}
        refuse(filter(None, [adapter_problem(changed)]))
        refuse(find_clashes(self, (QUANTISED,)))


def get_peft_config(model_args: ModelConfig) -> Any:
    """TRL's function, with a fix for a single name in `lora_target_modules`.

    TRL turns a list of one name into text, and peft reads text as a regular expression that must match a module's
    whole path: `q_proj` would match none.
    """
    config = trl.get_peft_config(model_args)
    target = getattr(config, "target_modules", None)
    if isinstance(target, str) and target != "all-linear" and re.fullmatch(r"\w+", target):
        config.target_modules = {target}
    return config

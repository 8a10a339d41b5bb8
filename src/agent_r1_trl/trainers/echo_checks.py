"""Which of the guard's actions a run can take, read from its arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

from agent_r1_trl.rollout.limits import check_whole_number
from agent_r1_trl.trainers.echo_ladder import ACTIONS, ALL
from agent_r1_trl.update.layout import REGROUPING_LAYOUTS

EPSILON, EPSILON_HIGH = 0.2, 0.28
"""Lower and upper clip of the action `clip` (RAGEN, section 4.2; DAPO, arXiv 2503.14476)."""
_CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""TRL's loss types that clip the ratio to [1 - epsilon, 1 + epsilon_high]."""
_READ_BY = {
    "echo_max_roll_backs": ("roll_back",),
    "echo_rate_factor": ("learning_rate",),
    "echo_rate_steps": ("learning_rate",),
    "echo_entropy_coef": ("entropy",),
}
"""Option -> the actions that read it; the others are read by all."""


class Refusal(NamedTuple):
    """Why an action cannot be taken, and what would let it."""

    because: str
    """Goes on after the name of the action, and ends the sentence."""
    cure: str = ""
    """One sentence; empty if there is none."""


def check_echo_guard(config: Any) -> None:
    """Check the settings of the guard.

    Args:
        config: a `MultiTurnConfig`.

    Raises:
        ValueError: names the option, its value, the rule and the cure.
    """
    for name in ("echo_patience", "echo_max_roll_backs", "echo_rate_steps"):
        check_whole_number(name, getattr(config, name))
    for name, is_open in {"echo_rate_factor": True, "echo_entropy_coef": False}.items():
        value = getattr(config, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= 1 or (is_open and value == 1):
            raise ValueError(f"{name}={value!r} must be above 0 and {'below' if is_open else 'at most'} 1. Set it so.")
    names = config.echo_actions
    if names is None:
        _check_read(config, [])
        return
    is_list = isinstance(names, list | tuple)
    unknown = [name for name in names if name not in (*ACTIONS, ALL)] if is_list else [names]
    if not names or unknown or len(set(names)) < len(names) or (ALL in names and len(names) > 1):
        raise ValueError(
            f"echo_actions={names!r} must name some of {', '.join(ACTIONS)}, each once and in the order in which they "
            f"are to be taken, or [{ALL}] alone. Set it so, or remove echo_actions."
        )
    _check_read(config, names)
    if "stop" in names[:-1]:
        raise ValueError(f"echo_actions={names!r}: nothing comes after 'stop'. Put 'stop' last, or remove it.")
    refusals = {name: text for name in names if name != ALL and (text := refusal(name, config)) is not None}
    for name, text in refusals.items():
        cure = f"{text.cure} Or remove" if text.cure else "Remove"
        raise ValueError(f"echo_actions={names!r}: {name!r} {text.because} {cure} {name!r} from echo_actions.")


def _check_read(config: Any, names: list[str]) -> None:
    """Refuse an option that nothing reads."""
    for option in ("echo_dry_run", "echo_patience", *_READ_BY):
        value = getattr(config, option)
        if value == config.default_of(option):
            continue
        readers = _READ_BY.get(option)
        if not names or (readers is not None and not {ALL, *readers} & set(names)):
            cure = "Set echo_actions: [all]" if readers is None else f"Add {readers[0]!r} to echo_actions"
            raise ValueError(
                f"{option}={value!r} has no effect with echo_actions={config.echo_actions!r}. {cure}, or remove "
                f"{option}."
            )


def refusal(name: str, config: Any) -> Refusal | None:
    """Why a run with these arguments cannot take an action; None if it can.

    Args:
        name: one of `ACTIONS`.
        config: a `MultiTurnConfig`.
    """
    return {"filter": _filter, "clip": _clip, "entropy": _entropy, "roll_back": _roll_back}.get(name, _nothing)(config)


def clip_matters(config: Any) -> bool:
    """Whether the clipping of the loss can be widened, and would then let other gradients through."""
    per_rollout = config.steps_per_generation * config.num_iterations
    has_ratios = config.gradient_accumulation_steps % per_rollout != 0  # TRL's condition for other old log-probs
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    is_narrower = config.epsilon < EPSILON or high < EPSILON_HIGH
    is_clipped = config.loss_type in _CLIPPED_LOSSES and config.importance_sampling_level == "token"
    return is_clipped and has_ratios and is_narrower


def _nothing(config: Any) -> Refusal | None:
    return None


def _filter(config: Any) -> Refusal | None:
    if config.num_generations < 2:
        return Refusal(
            f"compares the trajectories of a group, and num_generations={config.num_generations}.",
            "Set num_generations to 2 or more.",
        )
    if config.fp16:
        return Refusal(
            "skips optimizer steps without signal, which fp16=True cannot.", "Set bf16: true and fp16: false."
        )
    rule, rounds = getattr(config, "filter_groups", None), getattr(config, "resample_rounds", 0)
    if rule is not None and rounds > 0:
        return Refusal(f"is on from the start (filter_groups={rule!r}, resample_rounds={rounds}).")
    return None


def _clip(config: Any) -> Refusal | None:
    if clip_matters(config) or config.beta != 0:
        return None
    return Refusal(
        f"would change nothing: beta={config.beta} means that there is no KL term, and the clip does not act (one "
        f"update per rollout, where every ratio is 1; a loss_type, here {config.loss_type!r}, or an "
        f"importance_sampling_level, here {config.importance_sampling_level!r}, with another clip; or one that is as "
        "wide already).",
        "Set num_iterations: 2 with loss_type: dapo, importance_sampling_level: token and epsilon: 0.2, without "
        "epsilon_high.",
    )


def _entropy(config: Any) -> Refusal | None:
    if config.use_adaptive_entropy:
        return Refusal("is TRL's task with use_adaptive_entropy=True.", "Set use_adaptive_entropy: false.")
    if config.entropy_coef >= config.echo_entropy_coef:
        return Refusal(
            f"would change nothing: entropy_coef={config.entropy_coef} is not below "
            f"echo_entropy_coef={config.echo_entropy_coef}.",
            "Lower entropy_coef.",
        )
    if config.max_tokens_per_micro_batch is not None:
        return Refusal(
            "averages inside micro-batches, between which "
            f"max_tokens_per_micro_batch={config.max_tokens_per_micro_batch} moves rows.",
            "Remove max_tokens_per_micro_batch and set update_layout: padded.",
        )
    if config.update_layout in REGROUPING_LAYOUTS and config.gradient_accumulation_steps > 1:
        return Refusal(
            f"averages inside micro-batches, between which update_layout={config.update_layout!r} moves rows.",
            "Set update_layout: padded.",
        )
    return None


def _roll_back(config: Any) -> Refusal | None:
    if config.save_strategy == "no":
        return Refusal(
            "needs checkpoints, and save_strategy='no' writes none.", "Set save_strategy: steps and save_steps."
        )
    if config.save_only_model:
        return Refusal(
            "needs whole checkpoints, and save_only_model=True leaves the optimizer out.",
            "Set save_only_model: false.",
        )
    if config.replay is not None:
        return Refusal("plays other rollouts, and replay takes them from a journal.", "Remove replay.")
    if config.metric_for_best_model is not None and config.save_total_limit == 1:  # load_best_model_at_end sets one
        return Refusal(
            "needs the last healthy checkpoint, and save_total_limit=1 with "
            f"metric_for_best_model={config.metric_for_best_model!r} deletes all but the best.",
            "Set save_total_limit: 2.",
        )
    return None

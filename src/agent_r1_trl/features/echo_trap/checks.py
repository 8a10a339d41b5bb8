"""Problems of the echo trap's settings, and the actions of the guard that a run can take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from agent_r1_trl.features.echo_trap.settings import ALL
from agent_r1_trl.features.echo_trap.verdict import Thresholds
from agent_r1_trl.settings import Clash, Need, plain_value
from agent_r1_trl.trainers.config_checks import CLIPPED_LOSSES

if TYPE_CHECKING:
    from agent_r1_trl.trainers.config import MultiTurnConfig

EPSILON, EPSILON_HIGH = 0.2, 0.28
"""Lower and upper clip of the action `clip` (RAGEN, section 4.2; DAPO, arXiv 2503.14476)."""
NEEDS = (
    Need("echo.dry_run echo.patience", {"echo.actions": None}),
    Need("echo.max_rollbacks", {"echo.actions": ("rollback", ALL)}),
    Need("echo.rate_factor echo.rate_steps", {"echo.actions": ("learning_rate", ALL)}),
)
CLASHES: tuple[Clash, ...] = ()


def resolve(config: Any) -> None:
    """Read thresholds, to find what is wrong with them.

    Raises:
        ValueError: `echo.thresholds` names no thresholds.
    """
    if config.echo is not None:
        Thresholds.read("echo.thresholds", config.echo.thresholds)


def clip_matters(config: MultiTurnConfig) -> bool:
    """Whether the clipping of the loss can be widened, and would then let other gradients through."""
    per_rollout = config.steps_per_generation * config.num_iterations
    has_ratios = config.gradient_accumulation_steps % per_rollout != 0  # TRL's condition for other old log-probs
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    is_narrower = config.epsilon < EPSILON or high < EPSILON_HIGH
    is_clipped = config.loss_type in CLIPPED_LOSSES and config.importance_sampling_level == "token"
    return is_clipped and has_ratios and is_narrower


_REFUSED = (  # action, whether a run cannot take it, why and what would let it
    (
        "filter",
        lambda c: c.num_generations < 2,
        "compares the trajectories of a group, and num_generations={c.num_generations}. Set num_generations to 2 or "
        "more.",
    ),
    (
        "filter",
        lambda c: c.fp16,
        "skips optimizer steps without signal, which fp16=True cannot. Set bf16: true and fp16: false.",
    ),
    (
        "clip",
        lambda c: c.beta == 0 and not clip_matters(c),
        "would change nothing: beta={c.beta} means that there is no KL term, and the clip does not act in this run. "
        "Set num_iterations: 2 with loss_type: dapo, importance_sampling_level: token and epsilon: 0.2, without "
        "epsilon_high.",
    ),
    (
        "rollback",
        lambda c: c.save_strategy == "no" or c.save_only_model,
        "needs whole checkpoints, and save_strategy={c.save_strategy!r} with save_only_model={c.save_only_model} "
        "writes none. Set save_strategy: steps, save_steps and save_only_model: false.",
    ),
    (
        "rollback",
        lambda c: plain_value(c, "journal.replay") is not None,
        "samples other rollouts, and journal.replay takes them from a journal. Remove journal.replay.",
    ),
)


def refusal(name: str, config: object) -> str | None:
    """Why a run with these arguments cannot take an action, and what would let it; None if it can."""
    texts = (text for action, holds, text in _REFUSED if action == name and holds(config))
    text = next(texts, None)
    return None if text is None else text.format(c=config)


def find_problems(config: Any) -> Iterator[str]:
    """The problem with `echo.actions`, in words; each name in it may stand there."""
    names = (config.echo and config.echo.actions) or []
    if ALL in names and len(names) > 1:
        yield f"echo.actions={names!r}: [{ALL}] stands for all actions. Set it alone, or remove it from echo.actions."
    if "stop" in names[:-1]:
        yield f"echo.actions={names!r}: nothing comes after 'stop'. Put 'stop' last, or remove it."
    for name in names:
        if (text := refusal(name, config)) is not None:
            yield f"echo.actions={names!r}: {name!r} {text} Or remove {name!r} from echo.actions."

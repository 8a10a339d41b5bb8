"""The budget of one trajectory, in tokens of the model.

The trainers' configurations and `agent-r1-trl eval` inherit `RolloutSettings`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

from agent_r1_trl.generation.base import SamplingParams
from agent_r1_trl.rollout.context_policies import SUMMARISE, ContextSettings
from agent_r1_trl.settings import (
    Clash,
    Count,
    CountOrZero,
    Need,
    Seconds,
    Whole,
    check_settings,
    find_clashes,
    find_unread,
    plain_value,
    refuse,
    setting,
)

MAX_CHARS_PER_TOKEN = 64
"""No token is that long."""

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    ContextMapping = ContextSettings  # once the settings are checked
else:
    ContextMapping = Annotated[dict[str, Any] | str | None, ContextSettings]
NEEDS = (
    Need("context.turns", {"context.policy": ("window", "drop_observations", SUMMARISE, "step")}),
    Need("context.tokens", {"context.policy": ("window", "drop_observations", SUMMARISE)}),
    Need("context.summary_tokens context.summary_prompt", {"context.policy": (SUMMARISE,)}),
)
CLASHES = (
    Clash(
        "context.policy context.turns",
        lambda c: c.context.policy in ("window", "drop_observations") and c.context.turns is None,
        "it is not said how many turns stay as they are. Set context.turns (4, for example), or set "
        "context.policy='keep'.",
    ),
    Clash(
        "context.policy context.summary_tokens",
        lambda c: c.context.policy == SUMMARISE and c.context.summary_tokens is None,
        "it is not said how long a summary may be. Set context.summary_tokens (256, for example).",
    ),
    Clash(
        "context.policy context.tokens context.turns",
        lambda c: c.context.policy == SUMMARISE and c.context.tokens is None and c.context.turns is None,
        "it is not said when a summary is written. Set context.tokens (3000, for example), or context.turns (10, for "
        "example).",
    ),
    Clash(
        "context.summary_tokens context.tokens max_completion_length",
        lambda c: (
            (c.context.summary_tokens or 0) >= min(c.context.tokens or math.inf, c.max_completion_length or math.inf)
        ),
        "a summary alone would reach one of these limits. Set them above {c.context.summary_tokens}, or lower "
        "context.summary_tokens.",
    ),
)
"""Checks across the limits."""
CLASHES_WITH_THE_MODEL = (
    Clash(
        "context.tokens max_model_length",
        lambda c: (c.context.tokens or 0) >= (c.max_model_length or math.inf),
        "that limit is never reached, because the model's context has no room for the next turn behind it. Set "
        "context.tokens well below max_model_length, or remove it.",
    ),
)


@dataclass(kw_only=True)
class RolloutSettings:
    """The limits that a user sets."""

    max_turns: Count = setting(
        8,
        "Maximum number of assistant turns per trajectory. Tool calls of the last turn still run.",
    )
    max_completion_length: Annotated[int | None, Whole(1)] = setting(
        2048,
        "Maximum number of tokens per trajectory after the prompt, tool results included.",
    )
    max_tokens_per_turn: Count | None = setting(
        None,
        "Maximum number of tokens sampled in one turn. None: what is left of `max_completion_length`.",
    )
    max_observation_tokens: Count = setting(
        1024,
        "Maximum number of tokens of observation text after one turn. Longer text is cut, with a note.",
    )
    context: ContextMapping = setting(
        None,
        "Policy for the messages that each turn reads, such as 'window', or a mapping, such as {policy: window, "
        "turns: 4}. None: 'keep', everything so far.",
    )
    max_invalid_calls: CountOrZero = setting(
        2,
        "How many unusable turns in a row (malformed or unknown calls) are answered with feedback. One more ends the "
        "trajectory.",
    )
    max_concurrency: Count = setting(256, "Maximum number of trajectories in flight at once, per process.")
    rollout_timeout: Seconds | None = setting(
        3600,
        "Seconds after which a trajectory is stopped, without its wait for a place and its scoring. None: no limit.",
    )
    reset_timeout: Seconds | None = setting(
        600, "Seconds that making and resetting an environment may take. None: no limit."
    )
    scoring_timeout: Seconds | None = setting(600, "Seconds that `outcome_reward` may take. None: no limit.")
    watchdog_interval: Seconds | None = setting(
        10,
        "Seconds without progress after which a warning says what the rollout waits for. None: no warnings.",
    )
    stall_timeout: Seconds | None = setting(
        600,
        "Seconds for which one call may hold up all trajectories (docs/rollout-settings.md). None: no limit.",
    )

    def check_limits(self) -> None:
        """Check these settings, and those of the class that inherits them."""
        check_settings(self)
        refuse(find_limit_problems(self))

    def rollout_limits(self, max_model_length: int | None = None) -> RolloutLimits:
        """These limits, with that of the model."""
        values = {item.name: getattr(self, item.name) for item in fields(RolloutSettings)}
        return RolloutLimits(**values, max_model_length=max_model_length)


@dataclass(kw_only=True)
class RolloutLimits(RolloutSettings):
    """The limits of a rollout; `replace` makes others."""

    max_model_length: Annotated[int, Whole(2)] | None = None
    """Maximum number of tokens of prompt and completion together. None: no limit of its own."""
    max_tool_calling_iterations: int | None = None
    """TRL's limit: how many turns of a trajectory may have their tool calls run. A turn with calls beyond it ends the
    trajectory. None: no limit of its own."""

    def __post_init__(self) -> None:
        self.check_limits()
        refuse(find_clashes(self, CLASHES_WITH_THE_MODEL))

    def within(self, max_model_length: int | None) -> RolloutLimits:
        """These limits for an engine that takes at most `max_model_length` tokens; None if it does not say."""
        if max_model_length is None or max_model_length >= (self.max_model_length or math.inf):
            return self
        return replace(self, max_model_length=max_model_length)

    def is_too_long(self, num_characters: int) -> bool:
        """Whether so many characters fit into no context of the model, which needs no tokenizer to see."""
        return self.max_model_length is not None and num_characters > MAX_CHARS_PER_TOKEN * self.max_model_length

    def room(self, num_prompt_tokens: int, num_completion_tokens: int) -> int:
        """Number of tokens that still fit into the trajectory; <= 0 when it is full."""
        assert self.max_completion_length is not None
        room = self.max_completion_length - num_completion_tokens
        if self.max_model_length is not None:
            room = min(room, self.max_model_length - num_prompt_tokens - num_completion_tokens)
        return room

    def turn_budget(self, num_prompt_tokens: int, num_completion_tokens: int) -> int:
        """Number of tokens that the next turn may sample; <= 0 when the trajectory is full."""
        room = self.room(num_prompt_tokens, num_completion_tokens)
        return room if self.max_tokens_per_turn is None else min(room, self.max_tokens_per_turn)


def find_limit_problems(limits: object) -> Iterator[str]:
    """Problems of limits that are valid one by one and contradict each other."""
    if unread := find_unread(limits, NEEDS):
        yield unread
    yield from find_clashes(limits, CLASHES)


def context_length(config: PretrainedConfig) -> int | None:
    """Number of positions of a model, as its configuration says; None if it does not."""
    length = getattr(config, "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 1 else None


TIMING = (
    "max_concurrency",
    "rollout_timeout",
    "reset_timeout",
    "scoring_timeout",
    "watchdog_interval",
    "stall_timeout",
)
"""Limits that decide how long a trajectory takes, and not what it is."""


def deciding_limits(limits: RolloutLimits) -> dict[str, Any]:
    """Name -> value of the others."""
    names = [item.name for item in fields(limits) if item.name not in (*TIMING, "context")]
    names += [f"context.{item.name}" for item in fields(ContextSettings)]
    return {name: plain_value(limits, name) for name in names}


def describe_sampling(params: SamplingParams, num_attempts: int, limits: RolloutSettings) -> str:
    """How an evaluation sampled, in words: the settings without which its figures cannot be compared.

    >>> describe_sampling(SamplingParams(temperature=0.0), 1, RolloutSettings(max_turns=4, max_completion_length=320))
    'greedy, 1 attempt per example, at most 4 turns and 320 tokens'
    """
    how = [f"sampled at temperature {params.temperature:g}" if params.temperature else "greedy"]
    for name, neutral in {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}.items():
        value = getattr(params, name)
        if value != neutral and (params.temperature or name == "repetition_penalty"):
            how.append(f"{name} {value:g}")
    how.append(f"{num_attempts} attempt{'s' if num_attempts != 1 else ''} per example")
    turns = f"at most {limits.max_turns} turn{'s' if limits.max_turns != 1 else ''}"
    if limits.max_completion_length is not None:
        turns += f" and {limits.max_completion_length} tokens"
    if limits.max_tokens_per_turn is not None:
        turns += f" ({limits.max_tokens_per_turn} in a turn)"
    return ", ".join([*how, turns])

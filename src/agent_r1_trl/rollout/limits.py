"""What one trajectory may spend. All lengths are tokens of the model.

`RolloutSettings` defines and checks every limit once; the trainers' configurations and `agent-r1-trl eval` inherit it.
"""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any

from agent_r1_trl.rollout.summary_settings import SUMMARISE, check_summaries

TIMES = ("rollout_timeout", "reset_timeout", "scoring_timeout", "watchdog_interval", "stall_timeout")
"""The limits that are seconds."""


COUNTING_POLICIES = ("window", "drop_observations", SUMMARISE)
"""Values of `context_policy` that read `context_turns` and `context_tokens`, and need one of them."""
READERS = {"context_turns": (*COUNTING_POLICIES, "step"), "context_tokens": COUNTING_POLICIES}
"""The values of `context_policy` that read each of these."""


@dataclass(kw_only=True)
class RolloutSettings:
    """The limits that a user sets."""

    max_turns: int = field(
        default=8,
        metadata={
            "help": "Maximum number of assistant turns per trajectory. Tool calls of the last turn are still executed "
            "and rewarded."
        },
    )
    max_completion_length: int | None = field(
        default=2048,
        metadata={
            "help": "Maximum number of tokens per trajectory after the prompt: everything that the model samples and "
            "everything that tools and the template add."
        },
    )
    max_tokens_per_turn: int | None = field(
        default=None,
        metadata={
            "help": "Maximum number of tokens that the model may sample in one turn. None: what is left of "
            "`max_completion_length`."
        },
    )
    max_observation_tokens: int = field(
        default=1024,
        metadata={
            "help": "Maximum number of tokens of observation text after one turn, whatever the number of its calls. "
            "Longer text is cut, with one note."
        },
    )
    context_policy: str = field(
        default="keep",
        metadata={
            "help": "What each turn is sampled after: 'keep' everything so far; 'window': the prompt and the last "
            "`context_turns` turns; 'drop_observations': of what answered the turns before those, only a note; "
            "'step': what the environment gives (info['next_context']), else as 'window', and every turn is a row of "
            "its own; 'summarise': the prompt and a summary that the model wrote; 'strip_thinking': without the "
            "reasoning that the published chat template drops. Or the path of your own, my_module.my_policy."
        },
    )
    context_turns: int | None = field(
        default=None,
        metadata={
            "help": "How many of the last turns `context_policy` leaves as they are (None for 'step': 1); with "
            "'summarise', after how many turns a summary is written."
        },
    )
    context_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Rewrite a context (`context_policy`) only where it would have more tokens than this. None: "
            "rewrite it before every turn ('summarise': as `context_turns` says)."
        },
    )
    summary_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Maximum number of tokens that the model may sample for a summary, thoughts included "
            "(context_policy='summarise')."
        },
    )
    summary_prompt: str | None = field(
        default=None,
        metadata={
            "help": "The user message that asks for a summary (context_policy='summarise'); {summary_tokens} in it "
            "stands for the number. None: one in plain English."
        },
    )
    max_invalid_calls: int = field(
        default=2,
        metadata={
            "help": "How many unusable turns in a row (malformed or unknown calls) are answered with feedback. One "
            "more ends the trajectory."
        },
    )
    max_concurrency: int = field(
        default=256, metadata={"help": "Maximum number of trajectories that are played at once, per process."}
    )
    rollout_timeout: float | None = field(
        default=3600,
        metadata={
            "help": "Seconds after which a trajectory is stopped, not counting its wait for a free place and its "
            "scoring. None: no limit."
        },
    )
    reset_timeout: float | None = field(
        default=600,
        metadata={"help": "Seconds that making and resetting an environment may take. None: no limit of its own."},
    )
    scoring_timeout: float | None = field(
        default=600, metadata={"help": "Seconds that `outcome_reward` may take. None: no limit."}
    )
    watchdog_interval: float | None = field(
        default=10,
        metadata={
            "help": "Seconds without any progress after which a warning names the trajectories, turns and tools that "
            "the rollout waits for; repeated as often. None: no warnings."
        },
    )
    stall_timeout: float | None = field(
        default=600,
        metadata={
            "help": "Seconds for which one call may hold up all trajectories: by blocking their event loop, which is "
            "then given up, or by keeping the interpreter's lock, which ends the process with exit code 1. None: no "
            "limit."
        },
    )

    def check_limits(self, *, is_length_optional: bool = False) -> None:
        """Check the limits.

        Args:
            is_length_optional: whether `max_completion_length` may be None, as where TRL generates.

        Raises:
            ValueError: names the limit, its value, the rule and the cure.
        """
        for name in ("max_turns", "max_observation_tokens", "max_concurrency"):
            check_whole_number(name, getattr(self, name))
        check_whole_number("max_completion_length", self.max_completion_length, is_optional=is_length_optional)
        check_whole_number("max_invalid_calls", self.max_invalid_calls, minimum=0)
        check_whole_number("max_tokens_per_turn", self.max_tokens_per_turn, is_optional=True)
        check_whole_number("summary_tokens", self.summary_tokens, is_optional=True)
        check_context(self)
        check_summaries(self)
        for name in TIMES:
            check_seconds(name, getattr(self, name))

    def rollout_limits(self, max_model_length: int | None = None) -> RolloutLimits:
        """These limits, with that of the model."""
        values = {item.name: getattr(self, item.name) for item in fields(RolloutSettings)}
        return RolloutLimits(**values, max_model_length=max_model_length)


@dataclass(kw_only=True)
class RolloutLimits(RolloutSettings):
    """The limits of a rollout, which cannot be changed any more.

    Raises:
        ValueError: names the limit, its value, the rule and the cure.
    """

    max_model_length: int | None = None
    """Maximum number of tokens of prompt and completion together. None: no limit of its own."""
    max_tool_calling_iterations: int | None = None
    """TRL's limit: how many turns of a trajectory may have their tool calls run. A turn with calls beyond it ends the
    trajectory. None: no limit of its own."""

    def __post_init__(self) -> None:
        self.check_limits()
        check_whole_number("max_model_length", self.max_model_length, minimum=2, is_optional=True)
        tokens, most = self.context_tokens, self.max_model_length
        if tokens is not None and most is not None and tokens >= most:
            raise ValueError(
                f"context_tokens={tokens} is never reached: the model's context holds {most} tokens, the next turn "
                f"included. Set context_tokens well below that, such as {max(1, most * 3 // 4)}, or remove it."
            )
        object.__setattr__(self, "_is_fixed", True)

    def __setattr__(self, name: str, value: Any) -> None:
        # By hand: a frozen dataclass cannot inherit from one that configurations inherit, too.
        if hasattr(self, "_is_fixed"):
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)

    def within(self, max_model_length: int | None) -> RolloutLimits:
        """These limits for an engine that takes at most `max_model_length` tokens; None if it does not say."""
        if max_model_length is None or max_model_length >= (self.max_model_length or math.inf):
            return self
        return replace(self, max_model_length=max_model_length)

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


def check_whole_number(name: str, value: Any, *, minimum: int = 1, is_optional: bool = False) -> None:
    """Refuse what is no whole number from `minimum` on.

    Raises:
        ValueError: names the value, the rule and the cure.
    """
    if value is None and is_optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        none = ", or None" if is_optional else ""
        raise ValueError(f"{name}={value!r} must be a whole number >= {minimum}{none}. Set {name} to such a value.")


def check_context(limits: RolloutSettings) -> None:
    """Refuse a policy without its settings, and settings without a policy that reads them.

    Raises:
        ValueError: names the option, the rule and the cure.
    """
    policy, turns, tokens = limits.context_policy, limits.context_turns, limits.context_tokens
    if not isinstance(policy, str) or not policy:
        raise ValueError(f"context_policy={policy!r} must be a name or a path. Set context_policy='keep' or 'window'.")
    check_whole_number("context_turns", turns, is_optional=True)
    check_whole_number("context_tokens", tokens, is_optional=True)
    if policy in COUNTING_POLICIES and policy != SUMMARISE and turns is None:
        raise ValueError(
            f"context_policy={policy!r} does not say how many turns stay as they are. Set context_turns (4, for "
            "example), or context_policy='keep'."
        )
    for name, value in (("context_turns", turns), ("context_tokens", tokens)):
        if value is not None and policy not in READERS[name]:
            raise ValueError(
                f"{name}={value} has no effect with context_policy={policy!r}. Remove {name}, or set context_policy "
                f"to {' or '.join(map(repr, READERS[name]))}."
            )


def check_seconds(name: str, value: Any) -> None:
    """Refuse what is neither a number of seconds above 0 nor None.

    Raises:
        ValueError: names the value, the rule and the cure.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(
            f"{name}={value!r} must be a number of seconds > 0. Set {name} to one, or to None for no limit."
        )


def check_share(name: str, value: Any) -> None:
    """Refuse what is no number from 0 to 1.

    Raises:
        ValueError: names the value, the rule and the cure.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r} must be between 0 and 1. Set {name} to a value in that range.")


def context_length(config: Any) -> int | None:
    """Number of positions of a model, as its configuration says; None if it does not."""
    length = getattr(config, "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 1 else None

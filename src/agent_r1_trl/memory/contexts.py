"""The rows of one trajectory, at most: how long, and how many, where a context policy rewrites contexts.

The bounds hold for two trajectories at once: one whose every turn is as long as the limits allow, and one that makes
`max_turns` turns of equal length. What the chat template adds around messages is left out.

Covered: keep, window, drop_observations, step (contexts as long as those of its window), summarise. Not covered: how
many rows strip_thinking and a function of one's own make (counted as one row of full length, `is_counted` False).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agent_r1_trl.rollout.limits import COUNTING_POLICIES, RolloutSettings
from agent_r1_trl.rollout.summary_settings import SUMMARISE

NOTE_TOKENS = 16
"""Of the note that stands for an observation that was left out."""
REQUEST_TOKENS = 128
"""Of the request for a summary."""


@dataclass(frozen=True, kw_only=True)
class RowBounds:
    """Of the rows of one trajectory."""

    opening: int
    """Maximum number of tokens that a row begins with and that none of its turns sampled."""
    completion: int
    """Maximum number of tokens of a row behind its opening."""
    tokens: int
    """Length of the longest row."""
    rows: int = 1
    """Number of rows."""
    total: int
    """Tokens of all rows together."""
    is_counted: bool = True
    """Whether the number of rows is known."""


def row_bounds(limits: RolloutSettings, prompt_tokens: int) -> RowBounds:
    """Find how long and how many the rows of a trajectory are at most.

    Args:
        limits: of the rollout; `max_completion_length` is a number.
        prompt_tokens: length of the longest prompt.

    >>> row_bounds(RolloutSettings(max_completion_length=900), prompt_tokens=100).tokens
    1000
    """
    most, policy = limits.max_completion_length, limits.context_policy
    assert most is not None
    whole = prompt_tokens + most
    one = RowBounds(opening=prompt_tokens, completion=most, tokens=whole, total=whole)
    if policy == "keep":
        return one
    if policy not in (*COUNTING_POLICIES, "step"):
        return replace(one, opening=whole, is_counted=False)
    equal = -(-most // limits.max_turns)
    longest = limits.max_tokens_per_turn or most
    turn, told = min(longest, equal), limits.max_observation_tokens
    cases = [
        _bounds(limits, prompt_tokens, most, longest, told),
        _bounds(limits, prompt_tokens, most, turn, min(told, equal - turn)),
    ]
    names = ("opening", "completion", "tokens", "rows", "total")
    return RowBounds(**{name: max(getattr(case, name) for case in cases) for name in names})


def _bounds(limits: RolloutSettings, start: int, most: int, turn: int, observation: int) -> RowBounds:
    """Of a trajectory of `most` tokens in equal turns of `turn`, each answered by `observation` tokens."""
    limit, kept, both = limits.context_tokens, limits.context_turns or 1, max(1, turn + observation)
    num_turns = max(1, min(limits.max_turns, -(-most // both)))
    end, whole = 0, start + most  # what may follow the last turn of a row; a context that is never rewritten
    if limits.context_policy == SUMMARISE:
        written = limits.summary_tokens or 0
        opening = start + written + both
        end = observation + REQUEST_TOKENS + written
        full = max(opening, min(start + written + (limits.context_turns or num_turns) * both, limit or start + most))
        first, per_row = (max(1, -(-(full - begun) // both)) for begun in (start, opening))
    else:
        whole = start + min(most, num_turns * both)
        window = opening = start + kept * both
        full = max(limit or 0, window)
        first = 1 if limits.context_policy == "step" else (full - start) // both + 1
        per_row = 1 if limit is None else (full - window) // both + 1
        if limits.context_policy == "drop_observations":  # of which notes stay, so that it fills up with every row
            opening += max(0, num_turns - kept) * (turn + min(observation, NOTE_TOKENS))
            full, per_row = max(full, opening), 1
    rows = 1 + max(0, -(-(num_turns - first) // per_row))
    tokens = min(whole, full + turn + end)
    return RowBounds(
        opening=min(whole, opening) if rows > 1 else start,
        completion=min(most, tokens - start),
        tokens=tokens,
        rows=rows,
        total=rows * tokens,
    )

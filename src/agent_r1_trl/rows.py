"""Training rows of a trajectory: a context, and the completions that were sampled after exactly these ids.

A trajectory lists its tokens in the order of time. As long as every context extends the one before it, they all stand
in one row. A turn whose context was rewritten opens another row, whose prompt is that context:

    turn 0 sampled  a b  after P                  rows          P  | a b
    turn 1 sampled  d e  after P', not P a b ...                P' | d e

    completion_ids = a b d e       segments = [Segment(start=2, row=1, prompt_ids=P')]

So every sampled token has mask 1 in exactly one row; in another row it can only stand in the prompt. A turn that comes
back to an earlier row (two conversations that take turns) continues it.

Covered here: plain lists. Not covered: tensors and batches (`update/row_map.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class Segment:
    """From here on, the tokens of a trajectory go on in another row than those before them."""

    start: int
    """Position in `completion_ids` of the segment's first token. Nothing before the first segment: that is row 0."""
    row: int
    """Index of the row that the tokens continue, or open if it is one more than the rows so far."""
    prompt_ids: list[int] | None = None
    """(P,) ids of the context that opens the row; None for a row that was opened before."""


@dataclass(kw_only=True)
class Row:
    """One training row; T is the number of its completion tokens."""

    prompt_ids: list[int]
    """(P,) the context; nothing in it is trained here."""
    completion_ids: list[int]
    """(T,)"""
    action_mask: list[int]
    """(T,) 1 iff the policy sampled the token after exactly the ids before it in this row."""
    turn_ids: list[int]
    """(T,) index of the trajectory's turn, -1 outside action tokens."""
    logprobs: list[float]
    """(T,) the sampler's log-probabilities; 0.0 where `action_mask` is 0."""
    spans: list[tuple[int, int]]
    """[start, end) of the trajectory's tokens that the completion consists of, in order."""


def split_rows(trajectory: Any) -> list[Row]:
    """The rows of a trajectory, in the order in which they were opened; at least one."""
    length = len(trajectory.completion_ids)
    starts = [0, *(segment.start for segment in trajectory.segments), length]
    prompts: list[list[int]] = [trajectory.prompt_ids]
    spans: list[list[tuple[int, int]]] = [[(0, starts[1])]]
    for segment, span in zip(trajectory.segments, itertools.pairwise(starts[1:]), strict=True):
        if segment.row == len(prompts):
            prompts.append(segment.prompt_ids or [])
            spans.append([])
        spans[segment.row].append(span)

    def take(name: str, parts: list[tuple[int, int]]) -> list[Any]:
        values = getattr(trajectory, name)
        return [value for start, end in parts for value in values[start:end]]

    names = ("completion_ids", "action_mask", "turn_ids", "logprobs")
    return [
        Row(prompt_ids=prompt, spans=parts, **{name: take(name, parts) for name in names})
        for prompt, parts in zip(prompts, spans, strict=True)
    ]


def check_segments(segments: Sequence[Segment], num_tokens: int) -> None:
    """Refuse segments that are no division of a trajectory's tokens into rows.

    Raises:
        ValueError: names the segment and the rule.
    """
    num_rows, last = 1, 0
    for index, segment in enumerate(segments):
        opens = segment.row == num_rows
        if not last <= segment.start <= num_tokens:
            raise ValueError(
                f"Trajectory.segments[{index}] starts at {segment.start} of {num_tokens} completion tokens, after one "
                f"that starts at {last}: segments stand in the order of time."
            )
        if not 0 <= segment.row <= num_rows or opens != bool(segment.prompt_ids):
            raise ValueError(
                f"Trajectory.segments[{index}] has row={segment.row} and "
                f"{len(segment.prompt_ids or [])} prompt_ids with {num_rows} rows before it: the segment that opens "
                f"row {num_rows} has the ids of its context, and one that continues a row has none."
            )
        num_rows, last = num_rows + opens, segment.start


def extended_row(rows: Sequence[tuple[list[int], list[int]]], context_ids: list[int]) -> int | None:
    """The row that a turn joins: the longest one with whose ids the turn's context begins; None for a row of its own.

    Args:
        rows: prompt and completion of each row so far, up to the last token that was sampled in it.
        context_ids: what the turn is sampled after.

    >>> extended_row([([1], [2]), ([1, 2], [3])], [1, 2, 3, 4]), extended_row([([1], [2])], [1, 3, 4])
    (1, None)
    """
    found, longest = None, -1
    for index, (prompt, rest) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(rest)
        # The last ids first: a row is as a rule no prefix, and comparing whole contexts is slow.
        if (
            longest < end <= len(context_ids)
            and (not rest or rest[-1] == context_ids[end - 1])
            and rest == context_ids[start:end]
            and prompt[-64:] == context_ids[max(0, start - 64) : start]
            and prompt == context_ids[:start]
        ):
            found, longest = index, end
    return found

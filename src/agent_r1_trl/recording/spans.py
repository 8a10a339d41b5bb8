"""Completion ids as readable text, divided by author.

A single id of a byte-level tokenizer may be a third of a character. So the ids are decoded together and the text is
divided afterwards: the text of a span is what its ids add to the decoded text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.trajectory import Author, Trajectory

UNKNOWN = "\ufffd"


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one author and one turn."""

    text: str
    author: Author
    turn_id: int
    """-1 for tokens that the policy did not sample."""
    start: int
    end: int


def decode_spans(trajectory: Trajectory, tokenizer: Any) -> tuple[str, list[Span]]:
    """Decode the prompt and the spans of the completion, in order.

    A character whose bytes belong to two spans is part of the later one; bytes that form no character become one
    U+FFFD.
    """
    num_prompt = len(trajectory.prompt_ids)
    ids = [*trajectory.prompt_ids, *trajectory.completion_ids]
    full = _decode(tokenizer, ids)
    bounds = _bounds(trajectory)
    cuts = _cut_positions(tokenizer, ids, [num_prompt, *(num_prompt + end for _, end in bounds)], full)
    first = cuts[0]
    if bounds:
        cuts[-1] = len(full)
    spans = []
    for (start, end), left, right in zip(bounds, cuts, cuts[1:], strict=False):
        text = _collapse(full[left : max(left, right)])
        spans.append(Span(text, trajectory.authors[start], trajectory.turn_ids[start], start, end))
    return _collapse(full[:first]), spans


def _bounds(trajectory: Trajectory) -> list[tuple[int, int]]:
    """[start, end) of each span."""
    keys = list(zip(trajectory.authors, trajectory.turn_ids, strict=True))
    starts = [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
    return list(zip(starts, [*starts[1:], len(keys)], strict=True)) if keys else []


def _cut_positions(tokenizer: Any, ids: list[int], ends: Sequence[int], full: str) -> list[int]:
    """`_cut_position` at each of the growing `ends`; every id is decoded a few times, however many ends there are."""
    cuts: list[int] = []
    start = 0
    for index, end in enumerate(ends):
        found = None
        if index:
            # Decoded from the end before last on: where a decoder looks at the ids before, these are there.
            before, after = (_decode(tokenizer, ids[start:stop]).rstrip(UNKNOWN) for stop in (ends[index - 1], end))
            added = after[len(before) :]
            if after.startswith(before) and full.startswith(added, cuts[-1]):
                found = cuts[-1] + len(added)
            start = ends[index - 1]
        cuts.append(_cut_position(tokenizer, ids[:end], full) if found is None else found)
    return cuts


def _cut_position(tokenizer: Any, ids: Sequence[int], full: str) -> int:
    """Length of the part of `full` that the first ids make up."""
    head = _decode(tokenizer, ids).rstrip(UNKNOWN)
    if full.startswith(head):
        return len(head)
    # Not a prefix, for example because the decoder cleans up spaces: take the longest common prefix.
    return next((i for i, (a, b) in enumerate(zip(head, full, strict=False)) if a != b), min(len(head), len(full)))


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    if not ids:
        return ""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _collapse(text: str) -> str:
    while UNKNOWN * 2 in text:
        text = text.replace(UNKNOWN * 2, UNKNOWN)
    return text

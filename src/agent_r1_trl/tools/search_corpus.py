"""Passages as corpora hold them: `text` with `id` and `title`, or Search-R1's `contents`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Row = tuple[str, str, str]
"""id, title, text"""


def split_contents(contents: str) -> tuple[str, str]:
    r"""Title and text of a passage in one string: the title is the first line, often in quotes.

    >>> split_contents('"Oslo"\nThe capital of Norway.')
    ('Oslo', 'The capital of Norway.')
    >>> split_contents("No title here.")
    ('', 'No title here.')
    """
    title, _, text = contents.partition("\n")
    if not text.strip():
        return "", contents
    title = title.strip()
    if len(title) > 1 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title, text


def join_contents(title: str, text: str) -> str:
    """A passage in one string; the inverse of `split_contents`."""
    return f'"{title}"\n{text}' if title else text


def read_jsonl(path: Path) -> Iterator[Any]:
    """The records of a JSONL file, one at a time."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:  # UnicodeDecodeError is one
                raise ValueError(f"{path}, line {number}: not valid JSON ({error}). Pass a JSONL file.") from error


def read_rows(records: Iterable[Any], source: str) -> Iterator[Row]:
    """Id, title and text of each record; the number of the record where it has no id."""
    number = -1
    for number, record in enumerate(records):
        columns = record if isinstance(record, dict) else {}
        text, title, identifier = columns.get("text"), columns.get("title"), columns.get("id")
        if text is None and isinstance(columns.get("contents"), str):
            title, text = split_contents(columns["contents"])
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"{source}, row {number}: must be a dict whose 'text' is a non-empty string, not {record!r:.200}. "
                "Rename the column that holds the passage to 'text', or to 'contents' if its first line is the title."
            )
        title, identifier = "" if title is None else str(title), str(number if identifier is None else identifier)
        yield _clean(identifier), _clean(title), _clean(text)
    if number < 0:
        raise ValueError(f"{source}: contains no passages.")


def _clean(text: str) -> str:
    """The text without what no database stores."""
    return text.encode("utf-8", errors="replace").decode("utf-8").replace("\x00", " ")

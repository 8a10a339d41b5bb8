"""Passages as corpora hold them: `text` with `id` and `title`, or Search-R1's `contents`."""

from __future__ import annotations


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

"""Secrets in files that are about to leave the machine: found by file and line, and never printed.

Four kinds: tokens in well-known forms (`secret_forms`), texts under names of secrets (`secret_names`), values of
environment variables with such a name, and the user's own patterns. `secret_files` says which files are read, and how.
Not covered: weights, a secret in another encoding, and token ids, which spell what the messages beside them say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from agent_r1_trl import safe_text
from agent_r1_trl.errors import RunError
from agent_r1_trl.features.hub.secret_files import FilePart, Leaf, file_parts
from agent_r1_trl.features.hub.secret_forms import find_forms
from agent_r1_trl.features.hub.secret_names import expected_under
from agent_r1_trl.features.hub.secret_values import is_placeholder, looks_generated
from agent_r1_trl.patterns import PatternTimeoutError

_ASSIGNED = re.compile(r"[:=>]{1,2}[ \t]{0,4}[\"'\\]{0,8}(?P<value>[A-Za-z0-9+/_\-.~]{10,400}={0,2})")
"""A value behind a sign, in text of any kind."""
_NAME_BEFORE = re.compile(r"(?:[\w.\-]{1,40} ){0,2}[\w.\-]{1,60}(?=[\"'\\\])]{0,8}[ \t]{0,4}\Z)")
_NAME_ROOTS = ("token", "key", "secret", "pass", "auth", "cred", "jwt", "bearer", "string")
"""One of these stands in every name of a secret."""
_SCHEME = re.compile(r"(?i:basic|bearer|token|apikey|api-key|digest)[ \t]+(?P<secret>\S{6,})\Z")
_CREDENTIAL = re.compile(r"(?i:password|passwd|pwd|key|secret|token|sig)[ \t]{0,4}=|://[^/\s]{0,300}@")
"""Parts that make a connection string secret."""


class SecretFoundError(RunError, ValueError):
    """Something that looks like a secret is in a file that was about to leave the machine; nothing was sent."""

    exit_code = 2


class SecretFinding(NamedTuple):
    """A place that looks like a secret."""

    line: int
    """From 1; the row of a Parquet file. 0 in a binary file, and in what a Parquet file says of itself."""
    kind: str


def check_files(files: Mapping[str, Path], *, allowed: Sequence[str] = (), fix: str) -> None:
    """Refuse files (by their names in the repository) in which something looks like a secret.

    `allowed` are patterns of names that are not searched, which the option `fix` takes.

    Raises:
        SecretFoundError: names the first places, and how to allow them.
    """
    searched = {name: path for name, path in files.items() if not any(fnmatch(name, one) for one in allowed)}
    found: list[str] = []
    places: list[str] = []
    for name, path in searched.items():
        findings = scan_file(path)
        if findings:
            found.append(name)
        unit = "row" if name.endswith(".parquet") else "line"
        for finding in findings:
            place = f"{name}, {unit} {finding.line}" if finding.line else name
            places.append(f"  {place}: {finding.kind}")
    if places:
        lines = ["Nothing was sent, because something looks like a secret:", *places[:10]]
        if len(places) > 10:
            lines.append(f"  and {len(places) - 10} more")
        lines.append(f"Remove it, and revoke the key if it was real. If it is not a secret: {fix} {' '.join(found)}")
        raise SecretFoundError("\n".join(lines))


def scan_file(path: Path) -> list[SecretFinding]:
    """Likely secrets in a file, whose name says what it is; at most one finding of a kind and line."""
    known = _known_values()
    found: dict[SecretFinding, None] = {}
    for part in file_parts(path):
        for line, kind in (*_forms_in(part), *_assigned_in(part), *_leaves_in(part), *_known_in(part, known)):
            found[SecretFinding(line, kind)] = None
    return sorted(found, key=lambda finding: finding.line)


def _forms_in(part: FilePart) -> Iterator[tuple[int, str]]:
    """Secrets that are told by their form."""
    for match in find_forms(part.text):
        if match.text not in part.source:  # else it has been found in the text of the file
            yield part.line_at(match.start, match.text), match.form.name


def _assigned_in(part: FilePart) -> Iterator[tuple[int, str]]:
    """Values that look generated behind a name and a sign: `api_key="..."` in code, prose or a message."""
    for match in _ASSIGNED.finditer(part.text):
        before = part.text[max(0, match.start() - 100) : match.start()]
        value = match["value"]
        if not any(root in before.lower() for root in _NAME_ROOTS) or not looks_generated(value):
            continue
        if (name := _name_at_end(before)) and not is_placeholder(value) and value not in part.source:
            yield part.line_at(match.start("value"), value), _under(name)


def _name_at_end(text: str) -> str:
    """The name of a secret that a text ends with, of up to three words (`AWS secret key`); "" if there is none."""
    match = _NAME_BEFORE.search(text)
    words = match[0].split(" ") if match else []
    names = (" ".join(words[-num:]) for num in range(1, len(words) + 1))
    return next((name for name in names if expected_under(name)), "")


def _leaves_in(part: FilePart) -> Iterator[tuple[int, str]]:
    """Texts under names of secrets in objects, tables and settings."""
    for leaf in part.leaves:
        if is_secret_leaf(leaf):
            yield part.line_of(leaf), _under(leaf.name)


def is_secret_leaf(leaf: Leaf) -> bool:
    """Whether a text under a name is a secret. Under names that mean other things as well it must look generated."""
    text = leaf.text.strip()
    if len(text) < safe_text.MIN_SECRET_LENGTH or is_placeholder(text):
        return False
    if "string" in leaf.name.lower():
        return _CREDENTIAL.search(text) is not None
    if expected_under(leaf.name) == "any" and not leaf.is_nested:
        return True
    if with_scheme := _SCHEME.match(text):  # of `Authorization`
        secret = with_scheme["secret"]
        return not is_placeholder(secret) and (looks_generated(secret) or not secret.isalpha())
    return len(text.split()) == 1 and looks_generated(text)


def _under(name: str) -> str:
    return f"a value under the name {safe_text.visible(name)!r}"


def _known_values() -> dict[str, str]:
    """Values that are known to be secrets, as they are and as JSON writes them, each with its name."""
    return {
        spelling: name
        for value, name in safe_text.rules().known_values().items()
        for spelling in (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
    }


def _known_in(part: FilePart, known: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Values of the environment and of rows, and what the user's own patterns match."""
    for value, name in known.items():
        position = part.text.find(value)
        while position >= 0:
            yield part.line_at(position, value), f"the value of {name}"
            position = part.text.find(value, position + len(value))
    if safe_text.rules().patterns:
        lines = [part.text] if part.is_row else part.text.splitlines(keepends=True)
        position = 0
        for line in lines:
            if kind := _own_pattern(line):
                yield part.line_at(position, line), kind
            position += len(line)


def _own_pattern(text: str) -> str:
    """Kind of a text that one of the user's patterns matches; "" if none does."""
    try:
        if any(pattern.search(text) for pattern in safe_text.rules().patterns):
            return "what a pattern of secrets.patterns matches"
    except PatternTimeoutError:
        return "a text on which a pattern of secrets.patterns takes too long"
    return ""

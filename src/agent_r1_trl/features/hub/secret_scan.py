"""Secrets in files that are about to leave the machine: found by file and line, and never printed.

Three kinds: what the rules of `safe_text` know (values of environment variables with a secret's name, values under
such a name, the user's own patterns), tokens in well-known forms (`TOKEN_FORMS`), and private keys.

Covered here: text in UTF-8, JSON, JSONL, YAML, Parquet, the header of safetensors, small binary files. Not covered:
weights, a secret in another encoding, and token ids, which spell what the messages beside them say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from agent_r1_trl import safe_text
from agent_r1_trl.errors import RunError

TOKEN_FORMS: dict[str, tuple[str, str]] = {
    "Hugging Face token": ("hf_ api_org_", r"\b(?:hf_|api_org_)[A-Za-z0-9]{30,}"),
    "API key (sk-...)": ("sk-", r"\bsk-(?=[A-Za-z_\-]*\d)[A-Za-z0-9][A-Za-z0-9_\-]{18,}"),
    "AWS access key": ("AKIA ASIA", r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "AWS secret key": ("aws AWS", r"(?i:aws_?secret_?(?:access_?)?key)\W{1,6}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"),
    "GitHub token": ("gh github_pat_", r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})"),
    "GitLab token": ("glpat-", r"\bglpat-[A-Za-z0-9_\-]{20,}"),
    "Google API key": ("AIza", r"\bAIza[0-9A-Za-z_\-]{35}"),
    "Slack token": ("xox", r"\bxox[abeprs]-[0-9A-Za-z\-]{10,}"),
    "Stripe key": ("k_live_", r"\b[sr]k_live_[0-9A-Za-z]{16,}"),
    "JSON web token": ("eyJ", r"\beyJ[A-Za-z0-9_\-]{10,}\.eyJ[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}"),
    "npm token": ("npm_ _authToken", r"\bnpm_[A-Za-z0-9]{30,}|_authToken\s*=\s*(?![$<{\[])[^\s]{8,}"),
    "PyPI token": ("pypi-", r"\bpypi-[A-Za-z0-9_\-]{16,}"),
    "bearer token": ("earer", r"(?i:authorization\W{1,6}bearer)\s+(?=\S*\d)[A-Za-z0-9._~+/\-]{16,}"),
    "password in a URL": ("://", r"\b[a-zA-Z][\w+.\-]*://[^\s/:@\"'<>]*:(?![$<{\[*])[^\s/:@\"'<>]{3,}@[\w\[]"),
    "password": (
        "assw ASSW assphrase ASSPHRASE",
        r"(?i:pass(?:word|wd|phrase))[\"']?\s*[:=]\s*[\"']?(?![$<{\[*])(?=[^\s\"']*[0-9!@#%^&])[^\s\"',;()]{6,}"
        r"|^\W*(?i:pass(?:word|wd|phrase))\s*[:=]\s*[\"']?(?!pass)[^\s\"',;()\[\]{}$<*]{8,}[\"']?\s*$",
    ),
    "private key": ("PRIVATE", r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"),
}
"""Kind -> (words of which one stands in every such token, regular expression)."""
WEIGHTS = (".gguf", ".pt", ".pth", ".bin", ".npz")
MAX_BINARY_BYTES = 16 * 2**20
"""Larger weights are not searched, but for the header of safetensors."""
TOKEN_FILES = ("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
"""Files whose names are those of tokens."""
SETTINGS = (".json", ".yaml", ".yml", ".env", ".ini", ".cfg", ".toml", ".properties", ".npmrc", ".pypirc", ".netrc")
"""Endings, or names, of files in whose lines names stand before values."""

_FORMS = {kind: (words.split(), re.compile(pattern)) for kind, (words, pattern) in TOKEN_FORMS.items()}
_PAIR = re.compile(r"""([\w.\-]+)["']?\s*[:=]\s*(?:"([^"]+)"|'([^']+)'|([^\s"'#{}\[\],][^"'#{}\[\],]*))""")
_SPECIAL_TOKEN = re.compile(
    r"(?<!auth)(?<!access)(?<!api)(?<!hf)(?<!hub)(?<!bearer)(?<!secret)[_\-]token$", re.IGNORECASE
)
"""A name of a tokenizer's token in `config.json` and its kin."""
_MASKED = re.compile(r"\[secret(?:: [^\]]*)?\]")


class SecretFoundError(RunError, ValueError):
    """Something that looks like a secret is in a file that was about to leave the machine; nothing was sent."""

    exit_code = 2


class SecretFinding(NamedTuple):
    """A place that looks like a secret."""

    line: int
    """From 1; the row of a Parquet file. 0 in a binary file."""
    kind: str


def check_files(files: Mapping[str, Path], *, allowed: Sequence[str] = (), fix: str) -> None:
    """Refuse files (by their names in the repository) in which something looks like a secret.

    `allowed` are patterns of names that are not searched, which the option `fix` takes.

    Raises:
        SecretFoundError: names the first places, and how to allow them.
    """
    searched = {name: path for name, path in files.items() if not any(fnmatch(name, one) for one in allowed)}
    found = {name: findings for name, path in searched.items() if (findings := scan_file(path))}
    places = [
        f"  {name}{f', {unit} {one.line}' if one.line else ''}: {one.kind}"
        for name, findings in found.items()
        for unit in ["row" if name.endswith(".parquet") else "line"]
        for one in findings
    ]
    if places:
        more = [f"  and {len(places) - 10} more"] if len(places) > 10 else []
        raise SecretFoundError(
            "\n".join(["Nothing was sent, because something looks like a secret:", *places[:10], *more])
            + f"\nTake it out, and make the key void if it was real. If it is none: {fix} {' '.join(found)}"
        )


def scan_file(path: Path) -> list[SecretFinding]:
    """What looks like a secret in a file, whose ending says what it is; at most one finding of a kind and line."""
    is_config, rules = path.name.endswith("config.json"), safe_text.rules()
    found: dict[SecretFinding, None] = {}
    for line, text, value in _pieces(path):
        kinds = list(_kinds(text))
        for secret, name in rules.values_in(_without_numbers(value)).items():
            if not _MASKED.fullmatch(secret.strip()) and not (is_config and _SPECIAL_TOKEN.search(name)):
                kinds.append(f"a value under the name {safe_text.visible(name)!r}")
        found |= dict.fromkeys(SecretFinding(line, kind) for kind in kinds)
    return list(found)


def _kinds(text: str) -> Iterator[str]:
    """Kinds of secrets in a text."""
    for kind, (words, pattern) in _FORMS.items():
        if any(word in text for word in words) and pattern.search(text):
            yield kind
    rules = safe_text.rules()
    for value, name in rules.known_values().items():
        if value in text or json.dumps(value)[1:-1] in text or json.dumps(value, ensure_ascii=False)[1:-1] in text:
            yield f"the value of {name}"
    if any(pattern.search(text) for pattern in rules.patterns):
        yield "what a pattern of secrets.patterns matches"


def _pieces(path: Path) -> Iterator[tuple[int, str, Any]]:
    """(line, text, what the text is as an object, or None) for every part of a file."""
    with path.open("rb") as file:
        beginning = file.read(8192)
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix == ".safetensors":
        with path.open("rb") as file:
            size = file.read(8)
            header = file.read(min(int.from_bytes(size, "little"), MAX_BINARY_BYTES))
        yield 0, (size + header).decode("utf-8", "replace"), None
    elif b"\0" in beginning:
        if path.suffix not in WEIGHTS or path.stat().st_size <= MAX_BINARY_BYTES:
            yield 0, path.read_bytes().decode("latin-1"), None
    else:
        has_names = (path.suffix or path.name) in SETTINGS and path.name not in TOKEN_FILES
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                pairs = {name: "".join(texts).strip() for name, *texts in _PAIR.findall(line) if has_names}
                value = {name: text for name, text in pairs.items() if not text.isdigit()}
                yield number, line, _parsed(line) if path.suffix == ".jsonl" else value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _parquet_rows(path: Path) -> Iterator[tuple[int, str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid:  # cut off, or none
        yield 0, path.read_bytes().decode("latin-1"), None
        return
    schema = file.schema_arrow
    columns = [field.name for field in schema if re.search("string|binary", str(field.type))]
    number = 0
    for batch in file.iter_batches(batch_size=64, columns=columns):
        for row in batch.to_pylist():
            number += 1
            yield number, "\n".join(_texts(row)), row


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str | bytes):
        yield value if isinstance(value, str) else value.decode("latin-1")
    elif isinstance(value, dict):
        yield from (text for item in value.items() for part in item for text in _texts(part))
    elif isinstance(value, list):
        yield from (text for item in value for text in _texts(item))


def _without_numbers(value: Any) -> Any:
    """A value without lists of numbers (token ids), which hold no text and are long; JSON in texts is read."""
    if isinstance(value, dict):
        return {name: _without_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        is_text = not all(isinstance(item, int | float) for item in value)
        return [_without_numbers(item) for item in value] if is_text else []
    if isinstance(value, str) and value[:1] in ("{", "["):
        inside = _parsed(value)
        return value if inside is None else _without_numbers(inside)
    return value

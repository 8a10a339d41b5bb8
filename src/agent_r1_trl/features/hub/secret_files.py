"""Files as parts of text: what stands in them, line by line, and which of it stands under which name.

Covered: text in UTF-8, UTF-16 and UTF-32; JSON, JSONL, YAML, TOML, CSV, settings by lines (`.env`, INI, netrc);
Parquet with its metadata; the header of safetensors; small binary files. JSON inside a text is read as well, and texts
that a format folds or escapes are unfolded. A broken document is searched by lines.
"""

from __future__ import annotations

import bisect
import csv
import functools
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from agent_r1_trl.features.hub.secret_names import expected_under

if TYPE_CHECKING:
    import yaml

WEIGHTS = (".gguf", ".pt", ".pth", ".bin", ".npz")
MAX_BINARY_BYTES = 16 * 2**20
"""Larger weights are not searched, but for the header of safetensors."""
MAX_DOCUMENT_BYTES = {
    ".json": 64 * 2**20,
    ".ipynb": 64 * 2**20,
    ".yaml": 4 * 2**20,
    ".yml": 4 * 2**20,
    ".toml": 2**16,
}
"""Larger documents are searched by lines. (The time of `tomllib` grows with the square of a dotted name.)"""
TOKEN_FILES = ("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
"""Files whose names are those of tokens."""
ROWS = (".jsonl", ".ndjson")
TABLES = {".csv": ",;\t", ".tsv": "\t"}
"""Ending -> what may separate columns."""
SETTINGS = (".env", ".ini", ".cfg", ".conf", ".properties", ".npmrc", ".pypirc", ".netrc", "_netrc")
"""Endings, or names, of files in whose lines names stand before values."""
BLOCK_BYTES = 2**20
"""Lines that are searched at once."""
MAX_DEPTH = 6
"""JSON in a text in JSON."""

_LINE_PAIR = re.compile(
    r"""^[ \t]*(?:(?:export|set|-)[ \t]+)?["']?(?P<name>[\w.\-]{1,100})["']?[ \t]*[:=][ \t]*"""
    r"""(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'"""
    r"""|(?P<plain>(?:[^\s"'][^\n]{0,2000})?(?:\n[ \t]+[^\s=:#][^\n=:]{0,2000})*))""",
    re.MULTILINE,
)
_INLINE_PAIR = re.compile(
    r"""(?<![\w.\-])(?P<name>[\w.\-]{1,100})["']?[ \t]{0,8}[:=][ \t]{0,8}"""
    r"""(?:"(?P<double>[^"\n]+)"|'(?P<single>[^'\n]+)'|(?P<plain>[^\s"'#{}\[\],][^"'#{}\[\],\n]{0,2000}))"""
)
_NETRC_PAIR = re.compile(r"(?<!\S)(?P<name>password)\s{1,20}(?P<plain>\S{1,500})")
_COMMENT = re.compile(r"\s[#;].*")
_WORD = re.compile(r"[^\s\\\"]{1,60}")


class Leaf(NamedTuple):
    """A text in an object."""

    name: str
    """The nearest key around it under which secrets are kept; "" if there is none."""
    text: str
    is_nested: bool = False
    """Whether another key stands between that name and the text."""
    line: int = 0
    """From 1, where the format tells."""


class _Lines:
    """Tells the line of a position in a text without counting from its beginning each time."""

    def __init__(self, text: str) -> None:
        self._ends = [match.start() for match in re.finditer("\n", text)]

    def before(self, position: int) -> int:
        """How many lines end before the position."""
        return bisect.bisect_left(self._ends, position)


@dataclass
class FilePart:
    """A part of a file."""

    text: str
    line: int
    """Line of its beginning, from 1; the row of a Parquet file. 0 where there are none."""
    leaves: Sequence[Leaf] = ()
    """Texts under names of secrets."""
    is_row: bool = False
    """Whether all of it is on that line."""
    source: str = ""
    """For texts that a document folds or escapes: the document."""
    _cursor: int = 0

    @functools.cached_property
    def _lines(self) -> _Lines:
        return _Lines(self.source or self.text)

    def line_at(self, position: int, text: str) -> int:
        """Where a text at a position of the part begins."""
        if self.source:
            return self._line_in_source("", text)
        return self.line if self.is_row else self.line + self._lines.before(position)

    def line_of(self, leaf: Leaf) -> int:
        """Where a text under a name begins."""
        return leaf.line or (self._line_in_source(leaf.name, leaf.text) if self.source else self.line)

    def _line_in_source(self, name: str, text: str) -> int:
        # Texts are asked for in their order, so that the search goes on where it ended.
        word = _WORD.search(text)
        found = self._find(name, word[0] if word else text, self._cursor)
        if found < 0:
            found = max(0, self._find(name, word[0] if word else text, 0))
        self._cursor = found
        return 1 + self._lines.before(found)

    def _find(self, name: str, word: str, start: int) -> int:
        """Where the word stands, close behind the name if that is possible."""
        position = self.source.find(name, start) if name else -1
        while position >= 0:
            found = self.source.find(word, position + len(name), position + len(name) + 200 + len(word))
            if found >= 0:
                return found
            position = self.source.find(name, position + 1)
        return self.source.find(word, start)


def file_parts(path: Path) -> Iterator[FilePart]:
    """Every part of a file that can hold a secret; its name says what it is."""
    with path.open("rb") as file:
        encoding = encoding_of(file.read(8192))
    if path.suffix == ".parquet":
        yield from _parquet_parts(path)
    elif path.suffix == ".safetensors":
        yield _safetensors_header(path)
    elif encoding is None or path.suffix in WEIGHTS:
        if path.suffix not in WEIGHTS or path.stat().st_size <= MAX_BINARY_BYTES:
            yield _bytes_as_text(path)
    elif path.suffix in ROWS:
        with path.open(encoding=encoding, errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    yield _row(_parsed(line), number, line)
    else:
        with path.open(encoding=encoding, errors="replace") as file:
            yield from _text_parts(file)
        yield from _named_parts(path, encoding)


def encoding_of(beginning: bytes) -> str | None:
    """The encoding of a file of text by its first bytes; None if it is binary.

    >>> encoding_of("password".encode("utf-16-le")), encoding_of(b"password"), encoding_of(bytes(20))
    ('utf-16-le', 'utf-8', None)
    """
    marks = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe\0\0": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
    for mark, encoding in marks.items():
        if beginning.startswith(mark):
            return encoding
    if b"\0" not in beginning:
        return "utf-8"
    # Letters of Latin scripts have a zero in every other byte.
    half = max(1, len(beginning) // 2)
    zeros_first = beginning[0::2].count(0) / half
    zeros_second = beginning[1::2].count(0) / half
    if min(zeros_first, zeros_second) < 0.05 and max(zeros_first, zeros_second) > 0.5:
        return "utf-16-be" if zeros_first > zeros_second else "utf-16-le"
    return None


# -------------------------------------------------------------------- text


def _text_parts(file: TextIO) -> Iterator[FilePart]:
    number = 1
    while lines := file.readlines(BLOCK_BYTES):
        yield FilePart("".join(lines), number)
        number += len(lines)


def _named_parts(path: Path, encoding: str) -> Iterator[FilePart]:
    """Texts under names in a document, a table or settings."""
    kind = path.suffix or path.name
    if path.name in TOKEN_FILES:
        return
    if kind in TABLES:
        yield from _table_rows(path, encoding)
    elif path.name.startswith(".env") or kind in SETTINGS:
        yield _pairs(_read(path, encoding), _NETRC_PAIR if "netrc" in kind else _LINE_PAIR)
    elif kind in MAX_DOCUMENT_BYTES:
        source = _read(path, encoding, MAX_DOCUMENT_BYTES[kind])
        part = _document(source, kind) if len(source) < MAX_DOCUMENT_BYTES[kind] else None
        yield part or _pairs(source, _LINE_PAIR if kind == ".toml" else _INLINE_PAIR)


def _read(path: Path, encoding: str, limit: int = 64 * 2**20) -> str:
    with path.open(encoding=encoding, errors="replace") as file:
        return file.read(limit)


def _document(source: str, kind: str) -> FilePart | None:
    """A JSON, YAML or TOML document; None if it is none."""
    try:
        if kind in (".yaml", ".yml"):
            leaves = list(_yaml_leaves(source))
        else:
            leaves = list(leaves_of(tomllib.loads(source) if kind == ".toml" else json.loads(source)))
    except (ValueError, RecursionError):
        return None
    return FilePart("\n".join(leaf.text for leaf in leaves), 1, [leaf for leaf in leaves if leaf.name], source=source)


def _pairs(source: str, pattern: re.Pattern[str]) -> FilePart:
    leaves, lines = [], _Lines(source)
    for match in pattern.finditer(source):
        groups = match.groupdict()
        quoted = groups.get("double") or groups.get("single")
        text = quoted or _COMMENT.sub("", groups["plain"] or "").strip()
        if expected_under(match["name"]) and not (
            text.isdigit() and not quoted and "pass" not in match["name"].lower()
        ):
            leaves.append(Leaf(match["name"], text, line=1 + lines.before(match.start("name"))))
    return FilePart("", 1, leaves)


def _table_rows(path: Path, encoding: str) -> Iterator[FilePart]:
    with path.open(encoding=encoding, errors="replace", newline="") as file:
        header = file.readline()
        separators = TABLES[path.suffix]
        separator = max(separators, key=header.count)
        file.seek(0)
        before = csv.field_size_limit(MAX_BINARY_BYTES)
        try:
            reader = csv.reader(file, delimiter=separator)
            columns, line = next(reader, []), reader.line_num
            for cells in reader:
                row = dict(zip(columns, cells, strict=False))
                yield _row(row, line + 1)
                line = reader.line_num
        except csv.Error:
            return  # the lines have been searched
        finally:
            csv.field_size_limit(before)


# -------------------------------------------------------------------- objects


def leaves_of(value: object) -> Iterator[Leaf]:
    """Every text in nested dicts and lists, keys included, in their order; JSON in a text is read as well."""
    pending: list[tuple[object, str, bool, int]] = [(value, "", False, 0)]
    while pending:
        item, name, is_nested, depth = pending.pop()
        if isinstance(item, bytes):
            item = item.decode("latin-1")
        if isinstance(item, str):
            yield Leaf(name, item, is_nested)
            inside = _parsed(item) if depth < MAX_DEPTH else None
            if inside is not None:
                pending.append((inside, name, is_nested, depth + 1))
        elif isinstance(item, dict):
            for key, inner in reversed(item.items()):
                own = str(key) if expected_under(str(key)) else ""
                pending.append((inner, own or name, bool(name) and not own, depth))
                if isinstance(key, str | bytes):
                    pending.append((key, "", False, MAX_DEPTH))
        elif isinstance(item, list | tuple) and not all(isinstance(one, int | float) for one in item):
            pending += [(inner, name, is_nested, depth) for inner in reversed(item)]


def _parsed(text: str) -> Any:
    """The object or list that a text is as JSON, or None."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _row(value: object, number: int, raw: str = "") -> FilePart:
    leaves = list(leaves_of(value))
    texts = [raw, *(leaf.text for leaf in leaves)]  # raw: numbers, and what a second key of the same name hides
    return FilePart("\n".join(texts), number, [leaf for leaf in leaves if leaf.name], is_row=True)


def _yaml_leaves(source: str) -> Iterator[Leaf]:
    """Texts of all documents of a file, with their lines.

    Nodes are read, not objects: tags such as `!vault` need no constructor, and an alias is not repeated.

    Raises:
        ValueError: it is no YAML.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        documents = [node for node in yaml.compose_all(source, Loader=loader) if node is not None]
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    seen: set[int] = set()
    pending = [(node, "", False) for node in reversed(documents)]
    while pending:
        node, name, is_nested = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            yield from _yaml_texts(node, name, is_nested)
        elif isinstance(node, yaml.MappingNode):
            for key, inner in reversed(node.value):
                text = key.value if isinstance(key, yaml.ScalarNode) else ""
                own = text if expected_under(text) else ""
                pending.append((inner, own or name, bool(name) and not own))
                pending.append((key, "", False))
        else:
            pending += [(inner, name, is_nested) for inner in reversed(node.value)]


def _yaml_texts(node: yaml.ScalarNode, name: str, is_nested: bool) -> Iterator[Leaf]:
    is_text = node.tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:bool")
    is_block = node.style in ("|", ">")  # begins on the line after its mark
    line = node.start_mark.line + 1 + is_block
    yield Leaf(name if is_text or "pass" in name.lower() else "", node.value, is_nested, line)
    for leaf in leaves_of(_parsed(node.value)):
        yield leaf._replace(name=leaf.name or name, line=line)


# -------------------------------------------------------------------- binary files


def _bytes_as_text(path: Path) -> FilePart:
    return FilePart(path.read_bytes().decode("latin-1"), 0, is_row=True)


def _safetensors_header(path: Path) -> FilePart:
    with path.open("rb") as file:
        size = file.read(8)
        header = file.read(min(int.from_bytes(size, "little"), MAX_BINARY_BYTES)).decode("utf-8", "replace")
    metadata = _parsed(header)
    metadata = metadata.get("__metadata__") if isinstance(metadata, dict) else None
    return _row(metadata, 0, size.decode("latin-1") + header)


def _parquet_parts(path: Path) -> Iterator[FilePart]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid:  # cut off, or none
        yield _bytes_as_text(path)
        return
    schema = file.schema_arrow
    metadata = [*_metadata(schema), *_metadata(file.metadata)]
    for field in schema:
        metadata += [{field.name: ""}, *_metadata(field)]
    yield _row(metadata, 0)
    columns = [field.name for field in schema if re.search("string|binary", str(field.type))]
    number = 0
    for batch in file.iter_batches(batch_size=64, columns=columns):
        for row in batch.to_pylist():
            number += 1
            yield _row(row, number)


class _HasMetadata(Protocol):
    """A schema, a field or a file of Arrow."""

    @property
    def metadata(self) -> dict[bytes, bytes] | None:
        """Names and texts that it carries."""


def _metadata(holder: _HasMetadata) -> Iterable[dict[str, str]]:
    """Names and texts that a schema, a field or a file carries."""
    for name, value in (holder.metadata or {}).items():
        if name != b"ARROW:schema":  # the schema once more, in base64
            yield {name.decode("latin-1"): value.decode("utf-8", "replace")}

"""Rows from a data file, a directory or the Hub, as they were written."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agent_r1_trl.errors import RunError
from agent_r1_trl.objects import did_you_mean

FILE_FORMATS = {".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
MAX_TAG_CHARS, MAX_TAGS = 40, 16
"""Bounds of what `short_tags` takes."""
_CSV_OPTIONS: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}
"""pandas, which reads CSV, would take answers such as NA, None and null for missing ones."""


class DataFileError(RunError, ValueError):
    """A data set cannot be read."""

    exit_code = 2


def load_rows(
    flag: str, name: str, *, config: str | None = None, split: str = "train", limit: int | None = None
) -> Any:
    """Load a `datasets.Dataset` from a file, a directory, or the Hub.

    Args:
        flag: the setting that holds the name, for errors.
        name: a .jsonl, .json, .csv or .parquet file, a directory, or a Hub id.
        config: configuration of a Hub data set.
        split: of a Hub data set or of a directory.
        limit: number of rows to keep, from the first; None: all.

    Raises:
        DataFileError: the data set cannot be found or read (with the line), or it is empty.
    """
    path, setting = Path(name), f"{flag}={name!r}"
    is_meant_here = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    kind = FILE_FORMATS.get(path.suffix.lower())
    if path.is_file() and kind is None:
        raise DataFileError(f"{setting}: must be a file of type {', '.join(FILE_FORMATS)}. Convert it to one of them.")
    if not path.is_file() and (kind is not None or (is_meant_here and not path.is_dir())):
        near = [str(item) for item in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataFileError(
            f"{setting}: there is no such file or directory (looked in {Path.cwd()}).{did_you_mean(name, near)} Pass "
            "the path of a data file or directory, relative to the current one, or a Hub id."
        )
    if kind == "jsonl":
        rows = _read_jsonl(setting, path)
    elif kind == "json" and (listed := _read_json(path)) is not None:
        rows = _as_table(setting, listed)
    elif kind is not None:
        # `datasets` takes a name for a pattern.
        options = {"data_files": glob.escape(name)} | (_CSV_OPTIONS if kind == "csv" else {})
        rows = _load_dataset(setting, kind, None, "train", **options) if path.stat().st_size else []
    else:
        rows = _load_dataset(setting, name, config, split)
    if not len(rows):
        raise DataFileError(f"{setting} has no rows. Pass a data set with at least one.")
    return rows.select(range(min(limit, len(rows)))) if limit is not None else rows


def _read_json(path: Path) -> list[dict[str, Any]] | None:
    """The rows of a JSON file that is a list or lines of objects; None for any other, which `datasets` reads.

    It would take texts such as "2026-01-02" for points in time.
    """
    try:
        written = path.read_bytes()
        is_list = written.lstrip().startswith(b"[")
        rows = json.loads(written) if is_list else [json.loads(line) for line in written.splitlines() if line.strip()]
    except (ValueError, OSError, RecursionError):
        return None
    return rows if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows) else None


def _read_jsonl(setting: str, path: Path) -> Any:
    rows: list[dict[str, Any]] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataFileError(f"{setting}: cannot be read ({error}). Pass a file that you may read.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"{type(row).__name__} found")
            rows.append(row)
        except ValueError as error:  # UnicodeDecodeError is one
            raise DataFileError(
                f"{setting}, line {number}: must be a JSON object in UTF-8, with the columns of the row ({error}). "
                "Correct the line."
            ) from error
    return _as_table(setting, rows)


def _as_table(setting: str, rows: list[dict[str, Any]]) -> Any:
    """The rows as a `datasets.Dataset` that gives them back as they are."""
    from datasets import Dataset

    columns = dict.fromkeys(name for row in rows for name in row)  # `datasets` would take those of the first row
    rows = [{name: row.get(name) for name in columns} for row in rows]
    try:  # dicts with different keys stay as they are, instead of all of them having all keys
        made = Dataset.from_list(rows, on_mixed_types="use_json")
    except Exception as error:  # arrow's errors share no base class
        raise DataFileError(f"{setting}: cannot be made a table ({error}). Give each column one type.") from error
    # Of several types in a column `datasets` keeps the JSON, and takes a text such as "4" for that of a number.
    for name in (name for name, feature in made.features.items() if "Json(" in repr(feature)):
        for number, (row, found) in enumerate(zip(rows, made[name], strict=True), start=1):
            if row[name] != found:
                raise DataFileError(
                    f"{setting}: the column {name!r} holds values of several types, so that {row[name]!r:.100} (row "
                    f"{number}) would be read as {found!r:.100}. Give each column one type."
                )
    return made


def _load_dataset(setting: str, name: str, config: str | None, split: str, **options: object) -> Any:
    from datasets import load_dataset, load_from_disk

    is_local = Path(name).is_dir()
    try:
        if is_local and any((Path(name) / item).exists() for item in ("state.json", "dataset_dict.json")):
            loaded = load_from_disk(name)
            return loaded[split] if isinstance(loaded, dict) else loaded
        if is_local:  # a part of the cache's key: beside a card `datasets` would take what it read of older files
            items = [Path(name), *Path(name).rglob("*")]
            options["description"] = str(max(item.lstat().st_mtime_ns for item in items))
        return load_dataset(name, config, split=split, **options)
    except Exception as error:  # a wrong name, no network, a broken file: of many types
        if "corresponds to no data" in str(error):  # of a file with a header alone, or `[]`
            return []
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {' '.join(str(cause).splitlines()[:1]).rstrip('.')}."
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" and not is_local else ""
        what = (
            f": cannot be read as {name}"
            if "data_files" in options
            else f", split {split!r}: cannot be loaded{offline}"
        )
        raise DataFileError(
            f"{setting}{what}. {reason} Pass a data file (text in UTF-8, a row for each example), a directory, or the "
            "id of a data set on the Hub, and one of its splits."
        ) from error


# ---------------------------------------------------------------- parts of the data


def tags_of(examples: Iterable[Mapping[str, Any]], column: str, *, flag: str = "by") -> list[str]:
    """The value of a column in each example as text, "(none)" where it has none; `a.b` is the key `b` of column `a`.

    Args:
        examples: rows.
        column: its name.
        flag: the setting that names it, for the error.

    Raises:
        ValueError: no example has such a column.

    >>> tags_of([{"level": 1}, {}, {"level": None}], "level")
    ['1', '(none)', '(none)']
    """
    rows = list(examples)
    if rows and all(_value_of(row, column) is None for row in rows):
        raise ValueError(
            f"{flag}={column!r}: no row has such a column (the first one has {', '.join(map(str, rows[0]))}). Name "
            "one of them; a dot leads into a column that holds a mapping."
        )
    return [tag_of(row, column) for row in rows]


def tag_of(example: Mapping[str, Any], column: str) -> str:
    """The value of a column in an example as text, "(none)" where it has none; see `tags_of`.

    >>> tag_of({"meta": {"level": 2}}, "meta.level"), tag_of({"a.b": "x"}, "a.b")
    ('2', 'x')
    """
    value = _value_of(example, column)
    return "(none)" if value is None else str(value)


def short_tags(example: Mapping[str, Any]) -> dict[str, str]:
    """The short values of an example's columns as texts, those of mappings by `a.b`; its id is none of them.

    >>> short_tags({"id": "q1", "kind": "price", "level": 2, "meta": {"split": "a"}, "prompt": "long" * 20})
    {'kind': 'price', 'level': '2', 'meta.split': 'a'}
    """
    found: dict[str, Any] = {}
    for name, value in example.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        elif name != "id":
            found[str(name)] = value
    texts = {name: str(value) for name, value in found.items() if isinstance(value, str | bool | int | float)}
    short = [(name, text) for name, text in texts.items() if len(text) <= MAX_TAG_CHARS and len(name) <= MAX_TAG_CHARS]
    return dict(short[:MAX_TAGS])


def _value_of(example: Mapping[str, Any], column: str) -> Any:
    value: Any = example
    for name in [column] if column in example else column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value

"""Records on disk: length, checksum, JSON. A file that was cut off anywhere is read up to the cut.

    <4 bytes: length of the payload> <4 bytes: its CRC-32> <payload: the JSON of one dict, or its zlib if it is long>

Lists with an entry per token are packed into base64, little-endian: four bytes for an id, eight for a log-probability,
or four where that is all of it, so that every number comes back bit for bit.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import struct
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from agent_r1_trl.safe_text import dump_json

logger = logging.getLogger(__name__)

Record = dict[str, Any]
VERSION = 2
"""Format of what the records say; a file of another one is not read."""

_HEADER = struct.Struct("<II")
_COMPRESSION = 1  # the fastest: ids and log-probabilities hold little that a higher level would find
_COMPRESSED_FROM = 2**13
"""Bytes of JSON. Compressing less takes longer than all else that is done for a record."""
_SHORT = "~"  # no character of base64
"""Stands before numbers of four bytes."""


def pack(record: Record) -> bytes:
    """A record as it stands in a file. What JSON cannot hold is converted, or written as its `repr`."""
    payload = dump(record).encode("ascii")
    if len(payload) >= _COMPRESSED_FROM:
        payload = zlib.compress(payload, _COMPRESSION)
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def read_file(path: Path) -> tuple[list[Record], int]:
    """The whole records of a file, in order, and the number of bytes that they take.

    Reading stops at the first record that is incomplete or whose checksum is wrong.
    """
    data = path.read_bytes()
    records = []
    start = 0
    while start + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, start)
        payload = data[start + _HEADER.size : start + _HEADER.size + length]
        if not length or len(payload) < length or zlib.crc32(payload) != checksum:
            break
        records.append(json.loads(payload if payload.startswith(b"{") else zlib.decompress(payload)))
        start += _HEADER.size + length
    return records, start


class Appender:
    """Appends records to a file, each with one system call.

    What was written survives the death of the process. It is not synced to the disk, so a machine that loses power may
    lose the last seconds. A full disk is reported once; what follows is not written, and nothing is raised.

    Args:
        path: of the file; its folder is made.
        size: number of bytes at the start of an existing file that are kept.
    """

    def __init__(self, path: Path, *, size: int = 0) -> None:
        self.path = path
        self.has_failed = False
        self._file: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Rows and tool arguments are in it: for the user's eyes alone.
            # Windows would write two bytes for each line feed without O_BINARY.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            self._file = os.open(path, flags, 0o600)
            os.ftruncate(self._file, size)
        except OSError as error:
            self._fail(error)

    def append(self, record: Record) -> None:
        """Write a record."""
        if self._file is None:
            return
        data = pack(record)
        try:
            written = os.write(self._file, data)
        except OSError as error:
            self._fail(error)
            return
        if written < len(data):  # the reader drops it; nothing may follow it
            self._fail(OSError(f"only {written} of {len(data)} bytes could be written"))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _fail(self, error: OSError) -> None:
        self.has_failed = True
        self.close()
        logger.warning(
            "The rollout journal %s cannot be written (%s). The run goes on without a journal: after a kill it will "
            "sample again what it has not trained on. Free space, or set journal=False.",
            self.path,
            error,
        )


dump = partial(dump_json, ensure_ascii=True)
"""Compact ASCII JSON (a lone surrogate, which a model can write, is escaped)."""


# ---------------------------------------------------------------- numbers


def pack_ids(ids: Sequence[int]) -> str:
    """Token ids, (N,), as text."""
    return _text(np.asarray(ids, "<i4"))


def unpack_ids(text: str) -> list[int]:
    """The inverse of `pack_ids`."""
    return np.frombuffer(base64.b64decode(text), "<i4").tolist()


def pack_floats(values: Sequence[float]) -> str:
    """Numbers, (N,), as text."""
    numbers = np.asarray(values, "<f8")
    with np.errstate(over="ignore"):
        short = numbers.astype("<f4")
    return _SHORT + _text(short) if (short == numbers).all() else _text(numbers)


def unpack_floats(text: str) -> list[float]:
    """The inverse of `pack_floats`."""
    data = base64.b64decode(text.removeprefix(_SHORT))
    return np.frombuffer(data, "<f4" if text.startswith(_SHORT) else "<f8").tolist()


def checksum_ids(ids: Sequence[int], before: int = 0) -> int:
    """CRC-32 of token ids, (N,), that follow ids with the checksum `before`."""
    return zlib.crc32(np.asarray(ids, "<i4").tobytes(), before)


def _text(numbers: np.ndarray) -> str:
    return base64.b64encode(numbers.tobytes()).decode("ascii")

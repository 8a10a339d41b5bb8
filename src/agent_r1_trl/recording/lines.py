"""Files of which each line is a JSON object (.jsonl): appended whole, read though a kill cut the last one off."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agent_r1_trl.safe_text import dump_json, shown_all

logger = logging.getLogger(__name__)

EVALUATION = "evaluation"
"""The folder in a run's `output_dir` into which its evaluation goes."""
FOLDER = "trajectories"
FIX = " Pass the output directory of a run."
"""The end of a message about a file that holds something else."""


def run_folder(path: str | os.PathLike[str]) -> Path:
    """The output directory of a run, from itself, its folder `trajectories`, or a file in one of them."""
    folder = Path(path).parent if Path(path).is_file() else Path(path)
    return folder.parent if folder.name == FOLDER else folder


def check_is_new(flag: str, folder: Path) -> None:
    """Refuse to write a directory where there is something.

    Raises:
        ValueError: it is a file, or a directory that is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{flag}={str(folder)!r} is not empty. Pass a directory that does not exist yet.")


def append_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Append lines whole or not at all; no more than one is in memory. A last line that a kill cut off goes."""
    with path.open("ab+", buffering=0) as file:
        size = _end_of_lines(file)
        file.truncate(size)
        try:
            for line in lines:
                rest = memoryview(line)
                while rest:
                    rest = rest[file.write(rest) :]
        except BaseException:
            file.truncate(size)
            raise


def _end_of_lines(file: io.FileIO) -> int:
    """Where the last whole line ends."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 65536)
        file.seek(start)
        place = file.read(end - start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        end = start
    return 0


def read_lines(path: Path, what: str, names: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file; a last line that was cut off by a kill is left out with a warning.

    Args:
        path: the file.
        what: an object is, for errors.
        names: keys that each must have.

    Raises:
        ValueError: a line is something else; the message names file and line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if not isinstance(row, dict) or any(name not in row for name in names):
                    raise ValueError(f"no object with {' and '.join(names)}" if names else "no object")
            except ValueError as error:
                if not line.endswith(b"\n"):
                    logger.warning("%s, line %d was cut off while it was written; left out.", path, number)
                    return
                raise ValueError(f"{path}, line {number}: not {what} ({error}).{FIX}") from error
            yield row


class LineWriter:
    """Appends objects to files; what a full disk does not take is lost, reported once, and the run goes on."""

    def __init__(self, what: str) -> None:
        self.what = what
        """Is written, in the plural, for the log."""
        self._is_failing = False

    def append(self, path: Path, items: Iterable[dict[str, Any]], *, is_text: bool = True) -> None:
        """Append a line for each; of what `is_text` secrets are masked, and control characters made visible."""

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            append_lines(path, (dump_json(shown_all(item) if is_text else item).encode() + b"\n" for item in items))

        self.attempt(path, write)

    def keep_until(self, path: Path, step: int) -> None:
        """Drop the lines of later steps, which the run repeats, and one that was cut off."""

        def rewrite() -> None:
            kept = [item for item in read_lines(path, "a line with its step", ("step",)) if item["step"] <= step]
            scratch = path.with_suffix(".new")
            scratch.write_bytes(b"".join(dump_json(item).encode() + b"\n" for item in kept))
            os.replace(scratch, path)

        if path.is_file():
            self.attempt(path, rewrite)

    def attempt(self, path: Path, function: Callable[[], Any]) -> None:
        """Call the function, which writes there."""
        try:
            function()
        except (OSError, ValueError) as error:
            if not self._is_failing:
                logger.error(
                    "%s could not be written to %s: %s. The run goes on without them. Free some space, and they are "
                    "written again. Reported once, until then.",
                    self.what,
                    path,
                    error,
                )
            self._is_failing = True
        else:
            self._is_failing = False

"""Checkpoint folders: written beside, listed in a manifest, renamed when whole, and checked before they are read.

    output_dir/_unfinished/checkpoint-6/   while the ranks write; what a killed save leaves is removed by the next run
    output_dir/checkpoint-6/               a whole checkpoint; `checkpoint_manifest.json` lists its files

A checkpoint without a manifest was written by TRL or by an earlier version. Of such a one it can only be checked that
the files that are there have an end, and that none of those that resuming needs is missing.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transformers.trainer_utils import sort_checkpoints

from agent_r1_trl.errors import RunError

logger = logging.getLogger(__name__)

UNFINISHED = "_unfinished"
"""Folder in `output_dir`; transformers uploads nothing whose name begins with `_`."""
MANIFEST = "checkpoint_manifest.json"
STATE = "trainer_state.json"

PARTS = {
    "optimizer": ("optimizer*", "scheduler.pt"),
    "rng": ("rng_state*.pth",),
    "rollout": ("rollout_state_rank*.pt",),
}
"""Names of the files, or of their folders, that hold each part of a run's state beside the weights."""
_WEIGHTS = ("*.safetensors", "*/adapter_model.*", "pytorch_model*", "adapter_model.bin", "global_step*", "rank*-of-*")
_CHECKSUM_BYTES = 32 * 2**20
"""The checksum of a file is that of its first and its last so many bytes: large files are not read twice."""


class CheckpointError(RunError, ValueError):
    """A run cannot be resumed as it was asked to; names the flag, the file and the cure."""

    exit_code = 2


class _BrokenError(Exception):
    """Names a file of a checkpoint and what is wrong with it."""


# -------------------------------------------------------------------- writing


def finish(folder: Path, target: Path, run: Mapping[str, Any]) -> None:
    """Make a checkpoint of a folder that every rank has written its files to.

    Files and manifest are on the disk before the folder gets its name, so that whatever has the name is whole.

    Args:
        folder: below `UNFINISHED`.
        target: `output_dir/checkpoint-N`; one that is there already is replaced.
        run: settings of the run, which `read_manifest` returns as "run".

    Raises:
        OSError: a file could not be written.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    for path in files:
        sync_to_disk(path)
    listed = {path.relative_to(folder).as_posix(): _measure(path) for path in files}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"version": 1, "run": run, "files": listed}, indent=1), encoding="utf-8")
    for path in (manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync_to_disk(path)
    if target.exists():
        os.rename(target, folder.parent / f"replaced-{target.name}")
    os.rename(folder, target)
    sync_to_disk(target.parent)
    shutil.rmtree(folder.parent, ignore_errors=True)


def clear_unfinished(output_dir: Path) -> None:
    """Remove what killed saves left; a folder that lacked nothing but its name becomes a checkpoint."""
    for folder in sorted((output_dir / UNFINISHED).glob("checkpoint-*")):
        target = output_dir / folder.name
        if not target.exists() and _is_as_listed(folder):
            os.rename(folder, target)
            logger.warning("The save of %s was interrupted at its very end; the checkpoint is whole.", target)
        else:
            logger.warning("The save of %s was interrupted; what it had written is removed.", target)
    shutil.rmtree(output_dir / UNFINISHED, ignore_errors=True)


def sync_to_disk(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk."""
    if os.name == "nt":
        if path.is_dir():
            return  # Windows opens no folders; its file system writes their names in order by itself
        descriptor = os.open(path, os.O_RDWR)  # a file that is only read cannot be flushed there
    else:
        descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _measure(path: Path) -> dict[str, int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        checksum = zlib.crc32(file.read(_CHECKSUM_BYTES))
        file.seek(max(file.tell(), size - _CHECKSUM_BYTES))
        return {"bytes": size, "crc32": zlib.crc32(file.read(_CHECKSUM_BYTES), checksum)}


# -------------------------------------------------------------------- choosing


def choose_checkpoint(
    value: str | os.PathLike | bool, output_dir: Path, *, without: Collection[str] = (), num_processes: int = 1
) -> Path:
    """The absolute path of the checkpoint that a run goes on from.

    Args:
        value: of `resume_from_checkpoint`: a path, or True for the newest whole checkpoint of `output_dir`.
        output_dir: of the run.
        without: keys of `PARTS` that may be missing or damaged.
        num_processes: of the run.

    Raises:
        CheckpointError: the checkpoint, or every one of them, is incomplete, damaged or missing.
    """
    if value is True:
        whole, passed_over = _newest_whole(output_dir.absolute(), without, num_processes)
        if whole is None:
            found = f"It has {'; '.join(passed_over)}" if passed_over else "It has no folder checkpoint-<step>"
            raise CheckpointError(
                f"resume_from_checkpoint=True: output_dir={str(output_dir)!r} has no whole checkpoint. {found}. Set "
                "resume_from_checkpoint to a whole checkpoint elsewhere, or remove it to start anew."
            )
        if passed_over:
            passed = "; ".join(passed_over)
            logger.warning("Resuming from %s, the newest whole checkpoint. Passed over: %s.", whole, passed)
        return whole
    folder = Path(str(value)).absolute()
    problem = problem_of(folder, without, num_processes)
    if problem is not None:
        places = (folder, folder.parent)  # the folder may be that of a run
        whole = next(filter(None, (_newest_whole(place, without, num_processes)[0] for place in places)), None)
        cure = (
            f"Set resume_from_checkpoint={str(whole)!r}, the newest whole one there."
            if whole is not None
            else "There is no whole one beside it: set resume_from_checkpoint to another, or remove it to start anew."
        )
        raise CheckpointError(f"resume_from_checkpoint={str(value)!r}: {problem}. {cure}")
    return folder


def problem_of(folder: Path, without: Collection[str] = (), num_processes: int = 1) -> str | None:
    """Why a run cannot go on from `folder`, naming the file; None if it can.

    Args:
        folder: a checkpoint.
        without: keys of `PARTS` that may be missing or damaged.
        num_processes: of the run.
    """
    accepted = tuple(pattern for part in without for pattern in PARTS.get(part, ()))
    try:
        if not folder.is_dir():
            raise _BrokenError("there is no such directory")
        state, manifest = _read_json(folder / STATE), read_manifest(folder)
        if not isinstance(state.get("global_step"), int):
            raise _BrokenError(f"{STATE} is damaged")
        if manifest is not None:
            _check_listed(folder, manifest, accepted)
        else:
            _check_structure(folder, accepted, num_processes)
        _check_parts(folder, without)
    except _BrokenError as error:
        return str(error)
    return None


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What `finish` wrote: "files" and "run"; None if the checkpoint has no manifest."""
    if not (folder / MANIFEST).exists():
        return None
    manifest = _read_json(folder / MANIFEST)
    if not all(isinstance(manifest.get(name), dict) for name in ("files", "run")):
        raise _BrokenError(f"{MANIFEST} is damaged")
    return manifest


def lacks_rollout(folder: Path) -> bool:
    """Whether the checkpoint holds no place in the data: then the next step begins with a new rollout."""
    return not _has(folder, PARTS["rollout"])


def _newest_whole(output_dir: Path, without: Collection[str], num_processes: int) -> tuple[Path | None, list[str]]:
    """The whole checkpoint of the highest step, and why those of higher steps were passed over."""
    steps = {int(path.name[11:]): path for path in output_dir.glob("checkpoint-*") if path.name[11:].isdecimal()}
    passed_over: list[str] = []
    for _, folder in sorted(steps.items(), reverse=True):
        problem = problem_of(folder, without, num_processes)
        if problem is None:
            return folder, passed_over
        passed_over.append(f"{folder.name}: {problem}")
    return None, passed_over


# -------------------------------------------------------------------- checks


def _is_as_listed(folder: Path) -> bool:
    try:
        manifest = read_manifest(folder)
        _check_listed(folder, manifest or {}, accepted=())
    except _BrokenError:
        return False
    return manifest is not None


def _check_listed(folder: Path, manifest: Mapping[str, Any], accepted: Collection[str]) -> None:
    """Compare every file with its line in the manifest."""
    for name, expected in manifest.get("files", {}).items():
        path = folder / name
        if _is_among(name, accepted):
            continue
        if not path.is_file():
            raise _BrokenError(f"{name} is missing")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise _BrokenError(f"{name} has {size:,} bytes instead of {expected['bytes']:,}")
        if _measure(path) != expected:
            raise _BrokenError(f"{name} is damaged (another checksum)")


def _check_structure(folder: Path, accepted: Collection[str], num_processes: int) -> None:
    """What can be checked without a manifest: weights are there, files have an end, no rank's file is missing."""
    if not _has(folder, _WEIGHTS):
        raise _BrokenError("model.safetensors (or another file of weights) is missing")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not _is_among(name, accepted):
            _check_end(path, name)
        if name.endswith(".index.json"):
            shards = set(_read_json(path)["weight_map"].values())
            for shard in sorted(shard for shard in shards if not (folder / shard).is_file()):
                raise _BrokenError(f"{shard} is missing")
    first, *others = [f"rng_state_{rank}.pth" for rank in range(num_processes)]
    for name in others:
        if (folder / first).is_file() and not (folder / name).is_file() and not _is_among(name, accepted):
            raise _BrokenError(f"{name} is missing")
    has_schedule = (folder / "scheduler.pt").is_file() or _is_among("scheduler.pt", accepted)
    if (folder / "optimizer.pt").is_file() and not has_schedule:
        raise _BrokenError("scheduler.pt is missing")


def _check_parts(folder: Path, without: Collection[str]) -> None:
    """Optimizer and random state are there, unless the run goes on without them."""
    has_optimizer = _has(folder, (*PARTS["optimizer"], "global_step*"))
    has = {"optimizer": has_optimizer, "rng": _has(folder, PARTS["rng"])}
    missing = [part for part in has if not has[part] and part not in without]
    if missing:
        wanted = ", ".join(sorted({*missing, *without}))
        raise _BrokenError(
            f"it holds no {' and no '.join(missing)} state (save_only_model=True saves none; resume_without: "
            f"[{wanted}] goes on with a new one)"
        )


def _check_end(path: Path, name: str) -> None:
    """Refuse a file whose format shows that it was cut off."""
    if path.suffix == ".json":
        _read_json(path)
    elif path.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(path):
        raise _BrokenError(f"{name} is damaged (cut off)")
    elif path.suffix == ".safetensors":
        with path.open("rb") as file:
            try:
                (length,) = struct.unpack("<Q", file.read(8))
                tensors = json.loads(file.read(length)) if length < path.stat().st_size else {}
                end = max(item["data_offsets"][1] for key, item in tensors.items() if key != "__metadata__")
            except (ValueError, struct.error):
                raise _BrokenError(f"{name} is damaged (cut off)") from None
        if path.stat().st_size != 8 + length + end:
            raise _BrokenError(f"{name} has {path.stat().st_size:,} bytes instead of {8 + length + end:,}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _BrokenError(f"{path.name} is missing") from None
    except ValueError:
        raise _BrokenError(f"{path.name} is damaged (no JSON)") from None
    return content if isinstance(content, dict) else {}


def _has(folder: Path, patterns: Collection[str]) -> bool:
    return any(True for pattern in patterns for _ in folder.glob(pattern))


def _is_among(name: str, patterns: Collection[str]) -> bool:
    """Whether the file, or the folder that it lies in, has a name of one of the patterns."""
    return any(fnmatch.fnmatch(name.partition("/")[0], pattern) for pattern in patterns)


def last_checkpoint(folder: Path, step: int) -> Path | None:
    """The newest checkpoint of a run that was written after at most `step` optimizer steps."""
    numbered = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _NUMBER.search(path.name))]
    return max([pair for pair in numbered if pair[0] <= step], default=(0, None))[1]


_NUMBER = re.compile(r"^checkpoint-(\d+)$")


def rotate_around(run_dir: Path, limit: int | None, kept: Collection[Path | str | None]) -> None:
    """Delete the oldest checkpoints above `limit`, none of those in `kept`, and not the newest.

    Args:
        run_dir: holds them.
        limit: None or 0 deletes none.
        kept: folders; they may be more than `limit`.
    """
    folders = [Path(path) for path in sort_checkpoints(str(run_dir), use_mtime=True)]
    num_extra = len(folders) - limit if limit else 0
    names = {Path(path).name for path in kept if path is not None}
    for folder in [path for path in folders[:-1] if path.name not in names][: max(0, num_extra)]:
        shutil.rmtree(folder, ignore_errors=True)

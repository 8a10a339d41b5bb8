"""The files of a run in its `output_dir`: checkpoints, the lock, the model at the end.

    output_dir/_run.lock                   held by the run that trains there
    output_dir/_unfinished/checkpoint-6/   while the ranks write; what a killed save leaves is removed by the next run
    output_dir/checkpoint-6/               a whole checkpoint; `checkpoint_manifest.json` lists its files

A checkpoint without a manifest was written by TRL: it is used as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.trainer_utils import sort_checkpoints

from agent_r1_trl.errors import RunError
from agent_r1_trl.generation import fsdp2

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

UNFINISHED = "_unfinished"
"""Folder in `output_dir`; transformers uploads nothing whose name begins with `_`."""
MANIFEST = "checkpoint_manifest.json"
STATE = "trainer_state.json"

PARTS = {
    "optimizer": ("optimizer*", "global_step*"),
    "rng": ("rng_state*.pth",),
    "rollout": ("rollout_state_rank*.pt",),
}
"""Names of the files, or of their folders, that hold each part of a run's state beside the weights."""


class CheckpointError(RunError, ValueError):
    """A run cannot be resumed as it was asked to; names the flag, the file and the fix."""

    exit_code = 2


# -------------------------------------------------------------------- writing


_WRITE_ERRORS = re.compile(r"PytorchStreamWriter|inline_container|iostream error|\(os error \d+\)")
"""In messages of torch's C++, and of Rust (safetensors, tokenizers), which raises a plain Exception."""


class SaveError(RunError):
    """A checkpoint or the model cannot be written; names the folder and the cause."""


@contextlib.contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Raise an error of the disk as a `SaveError`; whatever else is raised is a mistake in the code."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and not _WRITE_ERRORS.search(str(error)):
            raise
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        run_dir = folder.parent if folder.name.startswith("checkpoint-") else folder
        whole, _ = _newest_whole(run_dir)
        rest = "There is no earlier checkpoint. Free space there, and start the run again."
        if whole is not None:
            rest = f"{whole.name} is whole. Free space there, and resume from it (resume_from_checkpoint: true)."
        raise SaveError(f"{folder} cannot be written: {cause}{_free_space(run_dir)}. {rest}") from error


def _free_space(folder: Path) -> str:
    """In brackets, how much the disk of a folder has left: libraries seldom say that it is full."""
    try:
        return f" ({shutil.disk_usage(folder).free / 1e9:.2f} GB are free)"
    except OSError:
        return ""


def finish(folder: Path, target: Path, run: Mapping[str, Any]) -> None:
    """Make a checkpoint of a folder that every rank has written its files to.

    Files and manifest are on the disk before the folder gets its name, so that whatever has the name is whole.

    Args:
        folder: below `UNFINISHED`.
        target: `output_dir/checkpoint-N`; one that is there already is replaced.
        run: settings of the run, which `read_manifest` returns as "run".
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    for path in files:
        sync_to_disk(path)
    listed = {path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size} for path in files}
    manifest = folder / MANIFEST
    content = {"version": 1, "saved_at": time.time(), "run": run, "files": listed}
    manifest.write_text(json.dumps(content, indent=1), encoding="utf-8")
    for path in (manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync_to_disk(path)
    if target.exists():
        os.rename(target, folder.parent / f"replaced-{target.name}")
    os.rename(folder, target)
    sync_to_disk(target.parent)
    shutil.rmtree(folder.parent, ignore_errors=True)


def clear_unfinished(output_dir: Path) -> None:
    """Remove what killed saves left."""
    for folder in sorted((output_dir / UNFINISHED).glob("checkpoint-*")):
        logger.warning("The save of %s was interrupted; what it had written is removed.", output_dir / folder.name)
    shutil.rmtree(output_dir / UNFINISHED, ignore_errors=True)


def sync_to_disk(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders; its file system writes their names in order by itself
    # A file that is only read cannot be flushed on Windows.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -------------------------------------------------------------------- choosing


def choose_checkpoint(value: str | os.PathLike | bool, output_dir: Path) -> Path:
    """The absolute path of the checkpoint that a run goes on from.

    Args:
        value: of `resume_from_checkpoint`: a path, or True for the newest whole checkpoint of the newest run in
            `output_dir`.
        output_dir: of the run.

    Raises:
        CheckpointError: the checkpoint, or every one of them, is incomplete, damaged or missing.
    """
    if value is True:
        whole, passed_over = _newest_whole(output_dir.absolute())
        passed = "; ".join(passed_over)
        if whole is None:
            raise CheckpointError(
                f"resume_from_checkpoint=True: output_dir={str(output_dir)!r} has no whole checkpoint. It has "
                f"{passed or 'no folder checkpoint-<step>'}. Set resume_from_checkpoint to a whole checkpoint "
                "elsewhere, or remove it to start anew."
            )
        if passed:
            logger.warning("Resuming from %s, the newest whole checkpoint. Passed over: %s.", whole, passed)
        return whole
    folder = Path(str(value)).absolute()
    if problem := problem_of(folder):
        places = (folder, folder.parent)  # the folder may be that of a run
        whole = next(filter(None, (_newest_whole(place)[0] for place in places)), None)
        fix = (
            f"Set resume_from_checkpoint={str(whole)!r}, the newest whole one there."
            if whole is not None
            else "There is no whole one beside it: set resume_from_checkpoint to another, or remove it to start anew."
        )
        raise CheckpointError(f"resume_from_checkpoint={str(value)!r}: {problem}. {fix}")
    return folder


def problem_of(folder: Path) -> str | None:
    """Why a run cannot go on from `folder`, naming the file; None if it can."""
    return next(_find_problems(folder), None)


def _find_problems(folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        yield "there is no such directory"
    for path in (folder / STATE, folder / MANIFEST):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if path.name == STATE:
                yield f"{STATE} is missing"
        except ValueError:
            yield f"{path.name} is damaged (no JSON)"
    for name, expected in (read_manifest(folder) or {"files": {}})["files"].items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif (size := path.stat().st_size) != expected["bytes"]:
            yield f"{name} has {size:,} bytes instead of {expected['bytes']:,}"
    missing = [part for part in ("optimizer", "rng") if not has_part(folder, part)]
    if missing:
        yield (
            f"it holds no {' and no '.join(missing)} state (save_only_model=True saves none; a new run can begin with "
            "its weights, as model_name_or_path)"
        )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest that `finish` wrote: "files" and "run"; None if the checkpoint has no manifest."""
    path = folder / MANIFEST
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def has_part(folder: Path, part: str) -> bool:
    """Whether the checkpoint holds a file of this key of `PARTS`."""
    return any(True for pattern in PARTS[part] for _ in folder.glob(pattern))


def _numbered(output_dir: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run and their steps, the oldest first."""
    names = [(path.name.removeprefix("checkpoint-"), path) for path in output_dir.glob("checkpoint-*")]
    return sorted((int(step), path) for step, path in names if step.isdecimal())


def _newest_whole(output_dir: Path) -> tuple[Path | None, list[str]]:
    """The whole checkpoint of the highest step of the newest run that has one, and why others were passed over.

    The newest run is the one that has saved last. Checkpoints without a run's id, which TRL and older versions write,
    count as those of one run.
    """
    whole: list[tuple[int, Path]] = []
    problems: dict[int, str] = {}
    for step, folder in _numbered(output_dir):
        problem = problem_of(folder)
        if problem is None:
            whole.append((step, folder))
        else:
            problems[step] = f"{folder.name}: {problem}"
    if not whole:
        return None, [problems[step] for step in sorted(problems, reverse=True)]
    newest_run = run_id_of(max(whole, key=lambda pair: _saved_at(pair[1]))[1])
    step, folder = max(pair for pair in whole if run_id_of(pair[1]) == newest_run)
    others = {number: f"{path.name}: it is of an earlier run" for number, path in whole if number > step}
    above = {number: text for number, text in (problems | others).items() if number > step}
    return folder, [above[number] for number in sorted(above, reverse=True)]


def run_id_of(folder: Path) -> str | None:
    """The id of the run that wrote a checkpoint; None where it says nothing of one."""
    try:
        manifest = read_manifest(folder)
    except ValueError:  # damaged
        return None
    return None if manifest is None else manifest["run"].get("run_id")


def goes_on(folder: Path) -> str | None:
    """The id that a run has which goes on from a checkpoint; None if it needs a new one.

    From an earlier checkpoint than the run's last one, it is a run of its own: else the later ones, which it has left
    behind, would be taken for its newest.
    """
    run_id = run_id_of(folder)
    later = [path for _, path in _numbered(folder.parent) if run_id_of(path) == run_id]
    return run_id if later and later[-1] == folder else None


def _saved_at(folder: Path) -> float:
    """Seconds since 1970; where no manifest says so, when the state was written."""
    manifest = read_manifest(folder) or {}
    return manifest.get("saved_at") or (folder / STATE).stat().st_mtime


def last_checkpoint(folder: Path, step: int, run_id: str | None = None) -> Path | None:
    """The newest checkpoint that was written after at most `step` optimizer steps, by the run of this id if given.

    The checkpoint that a run was resumed from counts where it has no id.
    """
    for number, path in reversed(_numbered(folder)):
        if number <= step and (run_id is None or run_id_of(path) in (run_id, None)):
            return path
    return None


def rotate_around(run_dir: Path, limit: int | None, kept: Collection[Path | str | None]) -> None:
    """Delete the oldest checkpoints above `limit` (None or 0: none), but none in `kept`, nor the newest."""
    folders = [Path(path) for path in sort_checkpoints(str(run_dir), use_mtime=True)]
    num_extra = len(folders) - limit if limit else 0
    names = {Path(path).name for path in kept if path is not None}
    for folder in [path for path in folders[:-1] if path.name not in names][: max(0, num_extra)]:
        shutil.rmtree(folder, ignore_errors=True)


# -------------------------------------------------------------------- one run at a time


LOCK_FILE = "_run.lock"
"""Says who trains: process, host and start. The system frees the lock when the process ends, however it ends."""
EVALUATION_LOCK_FILE = "_eval.lock"
"""Lock of an evaluation, which may write to the directory of a run that goes on."""


class OutputInUseError(CheckpointError):
    """Another run writes to `output_dir`; when it has ended, the same command succeeds."""

    exit_code = 3


@contextlib.contextmanager
def output_lock(output_dir: Path, name: str = LOCK_FILE) -> Iterator[None]:
    """Hold the lock of a directory, which is made if it is not there. Where locks are unknown, a warning says so.

    A POSIX record lock, because it belongs to the process alone: what a tool forks does not keep it, and NFS knows it.

    Raises:
        OutputInUseError: another process holds it.
    """
    with contextlib.ExitStack() as stack:
        try:
            import fcntl

            output_dir.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((output_dir / name).open("ab", buffering=0))
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputInUseError(_who_holds(output_dir, name)) from None
        except (ImportError, OSError) as error:
            logger.warning(
                "output_dir=%s cannot be locked (%s). Make sure that no other run writes there.", output_dir, error
            )
        else:
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            _write(file, json.dumps(owner))
            stack.callback(_write, file, "")
        yield


RUN_FILES = ("trainer_state.json", "checkpoint-*", "trajectories/step_*", "*.safetensors", "training_args.bin")
"""Files that a run leaves in its `output_dir`, and an evaluation does not."""


def find_run(output_dir: Path) -> str | None:
    """The sign that the folder holds a run, such as its newest checkpoint; None if nothing does."""
    for pattern in RUN_FILES:
        paths = [path.relative_to(output_dir) for path in output_dir.glob(pattern)]
        if paths:
            return max(map(str, paths), key=lambda name: (len(name), name))  # checkpoint-10 is newer than checkpoint-8
    return None


def set_aside(output_dir: Path) -> Path | None:
    """Move the folder of a run to the first free one of `output_dir`.1, .2, ...; returns it, or None without a run.

    Raises:
        OutputInUseError: the run goes on.
        OSError: the folder cannot be moved.
    """
    if find_run(output_dir) is None:
        return None
    folder = output_dir.resolve()
    target = next(path for n in itertools.count(1) if not (path := Path(f"{folder}.{n}")).exists())
    with output_lock(folder):
        folder.rename(target)
    return target


def _write(file: IO[bytes], text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk: the lock holds without its text
        file.truncate(0)
        file.write(text.encode())


def _who_holds(output_dir: Path, name: str) -> str:
    try:
        owner = json.loads((output_dir / name).read_text(encoding="utf-8"))
        who = f"process {owner['pid']} on {owner['host']}, which has worked there since {owner['since']}"
        fix = f"Wait for it or end it (kill {owner['pid']}; a launcher that was killed leaves its workers)"
    except (OSError, ValueError):  # it has just begun or the disk is full
        who, fix = "another process", "Wait for it or end it"
    return f"output_dir={str(output_dir)!r} is in use by {who}. {fix}, or set another output_dir."


# -------------------------------------------------------------------- digests of weights


CHUNK = 2**22
"""Elements that are summed at once, so that the fingerprint needs no memory to speak of."""


def fingerprint(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of the trained parameters, of this process's part of them where they are sharded.

    The bits of each tensor are added up as whole numbers: exact in any order, at the speed of reading them.
    """
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    return _digest([name for name, _ in trained], _bit_sums([parameter for _, parameter in trained]))


def base_fingerprint(model: nn.Module, accelerator: Accelerator) -> str | None:
    """A digest of the frozen weights below an adapter, the same on any number of processes. All ranks must call it.

    Returns:
        None without an adapter: then a checkpoint holds all weights. Adapters count as none of the base: TRL's "ref"
        is a copy of the one that is trained.
    """
    marks = [f".{name}." for name in getattr(model, "peft_config", None) or ()]
    if not marks:
        return None
    fsdp2.reshard(model)
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    frozen = {name: value for name, value in frozen.items() if not any(mark in f"{name}." for mark in marks)}
    sums = _bit_sums(list(frozen.values()))
    if any(hasattr(value, "ds_tensor") or isinstance(value, DTensor) for value in frozen.values()):
        # The parts of the ranks add up.
        sums = accelerator.reduce(sums.to(accelerator.device), "sum")
    return _digest([*frozen], sums)


def _digest(names: list[str], sums: torch.Tensor) -> str:
    return hashlib.blake2b(json.dumps([names, sums.tolist()]).encode(), digest_size=8).hexdigest()


def _bit_sums(parameters: list[torch.Tensor]) -> torch.Tensor:
    """(N,) on the device of the first, so that one copy brings them to the host."""
    sums = [_bit_sum(own_part(parameter)) for parameter in parameters]
    return torch.stack([item.to(sums[0].device) for item in sums]) if sums else torch.zeros(0, dtype=torch.int64)


def _bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.contiguous().view(-1).view(whole)
    return torch.stack([chunk.sum(dtype=torch.int64) for chunk in bits.split(CHUNK)]).sum()


def own_part(parameter: Any) -> torch.Tensor:
    """The values of a parameter that lie on this rank."""
    if hasattr(parameter, "ds_tensor"):  # ZeRO-3; what fills up the last rank's part was never written
        rank = torch.distributed.get_rank(parameter.ds_process_group)
        size = parameter.ds_tensor.ds_numel
        return parameter.ds_tensor.detach().flatten()[: max(0, parameter.ds_numel - rank * size)]
    data = parameter.detach()
    return data.to_local() if hasattr(data, "to_local") else data  # FSDP2

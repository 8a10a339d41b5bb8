"""The model at the end of a run: written beside, then put in its place file by file.

`output_dir` holds checkpoints as well, so it cannot be renamed as a whole. A process that is killed meanwhile leaves
every file of `output_dir` as it was or as it shall be, and never a part of one.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from agent_r1_trl.errors import RunError
from agent_r1_trl.trainers.checkpoints import sync_to_disk
from agent_r1_trl.trainers.saving import write_errors_kept

FOLDER = "_unfinished_model"
"""In `output_dir`; transformers uploads nothing whose name begins with `_`."""
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


def save_final_model(trainer: Any, output_dir: str) -> str | None:
    """Save the trained model in `output_dir`. All ranks must call it.

    Returns:
        Why it could not be written, on all ranks alike; None if it was.

    Raises:
        RunError: a feature refuses to save it, as for weights that are not finite.
    """
    target, problems = Path(output_dir), list[str]()
    folder = target / FOLDER
    if trainer.accelerator.is_local_main_process:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed here
    trainer.accelerator.wait_for_everyone()
    try:
        with write_errors_kept(problems):
            trainer.save_model(str(folder), _internal_call=True)  # True: nothing is uploaded yet
    except RunError as error:
        raise type(error)(str(error).replace(str(folder), output_dir)) from None
    is_whole = not gather_object(problems)
    if trainer.accelerator.is_local_main_process:
        with write_errors_kept(problems):
            if is_whole and folder.is_dir():
                put_in_place(folder, target)
        shutil.rmtree(folder, ignore_errors=True)
    return next(iter(gather_object(problems)), None)


def put_in_place(folder: Path, target: Path) -> None:
    """Move everything in `folder` to `target`, where files of the same name are replaced in one step each.

    Raises:
        OSError: a file could not be written.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            sync_to_disk(path)
    # The index of shards comes after them: what it names is there.
    names = sorted((path.name for path in folder.iterdir()), key=lambda name: name.endswith(".index.json"))
    for name in names:
        if (folder / name).is_dir():
            _move_folder(folder / name, target / name)
        else:
            os.replace(folder / name, target / name)
    sync_to_disk(target)
    if any(_WEIGHTS.fullmatch(name) for name in names):  # else a shard of an earlier model could be loaded with these
        for path in target.iterdir():
            if _WEIGHTS.fullmatch(path.name) and path.name not in names:
                path.unlink()


def _move_folder(folder: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            _move_folder(path, target / path.name)
        else:
            os.replace(path, target / path.name)

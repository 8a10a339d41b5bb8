"""Going back to the last healthy checkpoint: which one that is, and how a run gets there.

A rollback is a resumption inside the process. The Trainer's loop is left and entered again with the checkpoint, so
that everything comes back that a resumed run gets back. What differs is written into the checkpoint first: a run that
is killed after that, and resumed, goes on as if it had not been killed.

    checkpoint-40/echo_guard.json                the guard's state and the verdict when it was saved
    checkpoint-40/echo_guard_rolled_back.json    the guard's state after a rollback to it; read in place of the other,
                                                 whose size stands in the checkpoint's manifest

transformers 5.17 names that this file touches: `neftune_noise_alpha` and `neftune_hook_handle` of the Trainer.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers.integrations.neftune import deactivate_neftune

from agent_r1_trl.features.echo_trap.escalation import HEALTHY
from agent_r1_trl.trainers.checkpoints import problem_of, sync_to_disk

logger = logging.getLogger(__name__)

GUARD = "echo_guard.json"
ROLLED_BACK = "echo_guard_rolled_back.json"


class Rollback(BaseException):
    """The Trainer's loop is left, to be entered again with a checkpoint; it never leaves `train`."""

    def __init__(self, folder: Path, micro_step: int) -> None:
        super().__init__(folder)
        self.folder, self.micro_step = folder, micro_step


# -------------------------------------------------------------------- the guard's file in a checkpoint


def write_guard(folder: Path, content: dict[str, Any], *, name: str = GUARD) -> None:
    """Write the guard's file, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}"
    temporary.write_text(json.dumps(content), encoding="utf-8")
    sync_to_disk(temporary)
    os.replace(temporary, folder / name)


def read_guard(folder: Path) -> dict[str, Any] | None:
    """What `write_guard` wrote last; None if the checkpoint holds nothing of a guard, or nothing readable."""
    path = folder / ROLLED_BACK if (folder / ROLLED_BACK).exists() else folder / GUARD
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "guard" in content else None


def _checkpoints_of(output_dir: Path, run: str) -> list[tuple[Path, dict[str, Any]]]:
    """The checkpoints of a run, the newest first; the folder may hold those of other runs."""
    found = [(path, read_guard(path)) for path in output_dir.glob("checkpoint-*") if path.name[11:].isdecimal()]
    own = [(path, content) for path, content in found if content is not None and content["guard"].get("run") == run]
    return sorted(own, key=lambda pair: _step(pair[0]), reverse=True)


def _step(folder: Path) -> int:
    return int(folder.name[11:])


def healthy_checkpoints(output_dir: Path, run: str) -> list[Path]:
    """The checkpoints of a run (its name in `GuardState`) whose verdict was healthy or converged, the newest first."""
    return [path for path, content in _checkpoints_of(output_dir, run) if content.get("verdict") in HEALTHY]


def last_healthy(output_dir: Path, run: str, *, until: int) -> Path | None:
    """The newest healthy checkpoint that is whole, with at most `until` optimizer steps behind it.

    What was saved later may hold a collapse that nobody had noticed.
    """
    for folder in healthy_checkpoints(output_dir, run):
        if _step(folder) > until:
            continue
        if (problem := problem_of(folder)) is None:
            return folder
        logger.warning("Passed over %s, which was healthy: %s.", folder, problem)
    return None


def candidates(output_dir: Path, run: str, *, until: int) -> list[Path]:
    """The checkpoints that rotation must leave: the one to go back to, and the one that will take its place."""
    healthy = healthy_checkpoints(output_dir, run)
    trusted, others = ([path for path in healthy if (_step(path) <= until) is old] for old in (True, False))
    return [*trusted[:1], *others[-1:]]


def delete_after(folder: Path, run: str) -> None:
    """Delete the checkpoints of a run behind the one that it goes back to; a resumed run must not take them."""
    behind = [path for path, _ in _checkpoints_of(folder.parent, run) if _step(path) > _step(folder)]
    for path in behind:  # the newest first
        shutil.rmtree(path, ignore_errors=True)
    if behind:
        logger.warning("Deleted %s: the run goes back behind them.", ", ".join(path.name for path in behind))


# -------------------------------------------------------------------- the run


def forget_after(trainer: Any, folder: Path, micro_step: int) -> None:
    """Drop what this process holds of the steps behind a checkpoint: rollouts, journal, metrics, recorded steps."""
    trainer.rollouts.end_run()
    trainer.features.call("go_back", _step(folder), micro_step)
    for values in (*trainer._metrics.values(), *trainer._logs.values()):
        values.clear()
    trainer.optimizer.zero_grad(set_to_none=True)


def run_with_rollbacks(trainer: Any, train: partial[Any]) -> Any:
    """`Trainer.train` (its first argument is the checkpoint), entered again whenever it is left with a `Rollback`."""
    call: Callable[[], Any] = train
    while True:
        try:
            return call()
        except Rollback as rollback:
            folder = rollback.folder
            forget_after(trainer, folder, rollback.micro_step)
        if trainer.neftune_noise_alpha is not None:
            deactivate_neftune(trainer.model, trainer.neftune_hook_handle, trainer.accelerator)
        trainer.args.resume_without = None  # it said what the run's first start did without
        call = partial(train.func, str(folder), *train.args[1:], **train.keywords)

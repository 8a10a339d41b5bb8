"""The reference of `sync_ref_model` in a checkpoint: it moves with the policy, and nothing else could restore it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from agent_r1_trl.critic.parts import gathered
from agent_r1_trl.trainers.checkpoints import CheckpointError

logger = logging.getLogger(__name__)

REFERENCE = "reference/model.safetensors"


def save_reference(folder: Path, trainer: Any) -> None:
    """Write the reference, if it moves. All ranks must call it.

    Args:
        folder: of the checkpoint.
        trainer: whose `args.should_save` says which ranks write.

    Raises:
        OSError: it cannot be written.
    """
    if trainer.ref_model is None or not trainer.args.sync_ref_model:
        return
    tensors = {}
    for name, parameter in _parameters(trainer):
        with gathered([parameter], modifier_rank=None):
            if trainer.args.should_save:
                tensors[name] = parameter.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if trainer.args.should_save:
        (folder / REFERENCE).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / REFERENCE)


def load_reference(folder: Path, trainer: Any) -> None:
    """Put the reference back to where it was, in place. All ranks must call it.

    Args:
        folder: of the checkpoint.
        trainer: of the run that goes on.

    Raises:
        CheckpointError: the file is one of another model.
    """
    path, moves = folder / REFERENCE, trainer.args.sync_ref_model
    if trainer.ref_model is None or not (moves or path.is_file()):
        return
    if not (moves and path.is_file()):
        if trainer.accelerator.is_main_process:
            logger.warning(
                "The reference of the KL term begins anew as the model that the run is started with: %s",
                f"sync_ref_model is true, and {path} is missing: the run did not move its reference, or it was saved "
                "by an earlier version, which did not keep it."
                if moves
                else f"{path} holds one that had moved, and sync_ref_model is false. Set it to true to go on.",
            )
        return
    with safe_open(path, "pt") as file:
        parameters = dict(_parameters(trainer))
        if parameters.keys() != set(file.keys()):
            raise CheckpointError(
                f"resume_from_checkpoint={str(folder)!r}: {REFERENCE} holds other parameters than the reference of "
                "this run. Start it with the model that it was started with, or with sync_ref_model: false."
            )
        for name, parameter in parameters.items():
            with torch.no_grad(), gathered([parameter]):
                parameter.copy_(file.get_tensor(name))


def _parameters(trainer: Any) -> Any:
    return trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters()

"""A LoRA adapter as the files that vLLM loads: written by the trainer, or kept by a server that was sent them."""

from __future__ import annotations

import base64
import copy
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agent_r1_trl.generation.weights import CRITIC_ADAPTER, gather_for

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_NAME = re.compile(r"[\w-]+-\d+")
"""Names made of a run and a sync; none of them leads out of a folder."""


def served_adapter(model: Any) -> str | None:
    """Name of the policy's adapter if vLLM can serve it next to the base weights, else None.

    vLLM serves plain LoRA on linear layers and embeddings: no DoRA or other variants, no biases, no whole modules
    trained with it.
    """
    active = model.active_adapters if hasattr(model, "peft_config") else []
    names = [name for name in active if name != CRITIC_ADAPTER]
    if len(names) != 1:
        return None
    config = model.peft_config[names[0]]
    is_plain = (
        getattr(config.peft_type, "value", config.peft_type) == "LORA"
        and config.bias == "none"
        and not any(
            getattr(config, option, None)
            for option in (
                "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "rank_pattern",
                "alpha_pattern", "target_parameters", "layer_replication",
            )
        )
        and not any(names[0] in getattr(module, "lora_variant", {}) for module in model.modules())
    )  # fmt: skip
    return names[0] if is_plain else None


def adapter_tensors(model: nn.Module, adapter: str) -> dict[str, torch.Tensor]:
    """Copies of the adapter's tensors under the names of a saved adapter, on the CPU.

    A collective call where parameters are sharded.
    """
    part, gather = f".{adapter}.", gather_for(model)
    tensors = {}
    for name, parameter in model.named_parameters():
        if "lora_" in name and part in name:
            with gather([parameter]):
                tensors[name.replace(part, ".")] = parameter.detach().cpu().clone().contiguous()
    return tensors


def write_adapter(model: Any, adapter: str, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = copy.copy(model.peft_config[adapter])
    config.inference_mode = True
    config.save_pretrained(str(folder))
    save_file(tensors, folder / ADAPTER_FILES[1])


def encoded_adapter(folder: Path) -> dict[str, str]:
    """Name -> content in base64 of the files that `write_adapter` wrote."""
    return {name: base64.b64encode((folder / name).read_bytes()).decode() for name in ADAPTER_FILES}


# -------------------------------------------------------------------- on a server's machine


def keep_adapter(name: str, files: dict[str, str], *, old: str | None = None) -> Path:
    """Keep an adapter's files in this machine's temporary folder, and remove those of the run's syncs before `old`.

    Workers that keep the same adapter do not disturb one another.

    Args:
        name: of the adapter.
        files: name -> content, in base64.
        old: name of the adapter that is still served.

    Returns:
        The folder, which belongs to this user alone.

    Raises:
        ValueError: a name is not that of an adapter or of one of its files.
        PermissionError: the place for adapters belongs to another user.
    """
    place = _place()
    target = place / _checked(name)
    draft = Path(tempfile.mkdtemp(dir=place))
    try:
        for file, content in files.items():
            if file not in ADAPTER_FILES:
                raise ValueError(f"{file!r} is no file of an adapter")
            (draft / file).write_bytes(base64.b64decode(content))
        draft.rename(target)
    except OSError:
        if not target.exists():  # else another worker of this machine was first
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    forget_adapters(name, but={name, old})
    return target


def forget_adapters(name: str, *, but: Iterable[str | None] = ()) -> None:
    """Remove the adapters that this machine keeps for the run of `name`, except those in `but`."""
    run = _checked(name).rpartition("-")[0]
    kept = set(but)
    for folder in _place().glob(f"{run}-*"):
        if folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def _place() -> Path:
    user = os.getuid()
    place = Path(tempfile.gettempdir()) / f"agent-r1-adapters-{user}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.is_symlink() or place.stat().st_uid != user:
        raise PermissionError(f"{place} belongs to another user. Remove it, or set TMPDIR to a folder of your own.")
    return place


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of an adapter")
    return name

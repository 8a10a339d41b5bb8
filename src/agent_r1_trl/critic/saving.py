"""The critic on disk: apart from the policy, which is saved as a plain model or a plain adapter."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agent_r1_trl.critic.parts import critic_parameters, gathered, is_critic_name

CRITIC_FILE = Path("critic") / "critic.safetensors"
"""Where a checkpoint keeps the critic. Not `adapter_model.safetensors`: resuming would then load only that folder."""


def wrap_save_pretrained(model: Any) -> None:
    """Make `save_pretrained` write the policy alone: whoever loads it finds a plain model or a plain adapter."""
    original = model.save_pretrained
    adapters = list(model.active_adapters) if hasattr(model, "peft_config") else None

    @functools.wraps(original)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        if adapters is not None:
            kwargs.setdefault("selected_adapters", adapters)
        state_dict = kwargs.get("state_dict")
        if state_dict is None and adapters is None:
            state_dict = model.state_dict()
        if state_dict is not None:
            kwargs["state_dict"] = {name: value for name, value in state_dict.items() if not is_critic_name(name)}
        return original(*args, **kwargs)

    model.save_pretrained = save_pretrained


def save_critic(model: nn.Module, folder: str | Path, *, is_main_process: bool = True) -> None:
    """Write the critic's weights below `folder`. Collective under ZeRO-3: call on every rank."""
    from safetensors.torch import save_file

    parameters = critic_parameters(model)
    with gathered(list(parameters.values())):
        if is_main_process:
            path = Path(folder) / CRITIC_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: value.detach().cpu().contiguous() for name, value in parameters.items()}, str(path))


def load_critic(model: nn.Module, folder: str | Path) -> None:
    """Load what `save_critic` wrote.

    Args:
        model: has a critic of the same kind and shape.
        folder: a checkpoint.

    Raises:
        ValueError: if the file is missing or belongs to another kind of critic.
    """
    from safetensors.torch import load_file

    path = Path(folder) / CRITIC_FILE
    if not path.exists():
        raise ValueError(
            f"The checkpoint {folder} has no {CRITIC_FILE}: it was not made by a PPO run. Set resume_from_checkpoint "
            "to a checkpoint of a PPO run, or start anew with that model as the policy."
        )
    saved, parameters = load_file(str(path)), critic_parameters(model)
    if set(saved) != set(parameters):
        raise ValueError(
            f"{path} holds another kind of critic ({len(saved)} tensors, this run's critic has {len(parameters)}). "
            "Resume with the same critic= and LoRA settings as the run that wrote it."
        )
    with gathered(list(parameters.values())), torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])

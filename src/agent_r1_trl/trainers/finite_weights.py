"""Whether a model's trained weights are finite, on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn


def nonfinite_problem(trainer: Any) -> str | None:
    """What is wrong with the weights of a trainer's model, in words; None if they are finite."""
    bad = nonfinite_weights(trainer.model)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:  # then all ranks save together
        bad = [name for names in gather_object([bad]) for name in names]
    return f"{len(bad)} tensors of the model hold NaN or infinity (first {bad[0]})" if bad else None


def nonfinite_weights(model: nn.Module) -> list[str]:
    """Names of the trainable parameters that hold NaN or infinity; of sharded ones this rank's part is looked at."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        return []
    device = named[0][1].device
    is_finite = torch.stack([torch.isfinite(_own_part(p)).all().to(device) for _, p in named]).tolist()
    return [name for (name, _), finite in zip(named, is_finite, strict=True) if not finite]


def _own_part(parameter: Any) -> torch.Tensor:
    """The values of a parameter that lie on this rank."""
    if hasattr(parameter, "ds_tensor"):  # ZeRO-3; what fills up the last rank's part was never written
        rank = torch.distributed.get_rank(parameter.ds_process_group)
        size = parameter.ds_tensor.ds_numel
        return parameter.ds_tensor.detach().flatten()[: max(0, parameter.ds_numel - rank * size)]
    data = parameter.detach()
    return data.to_local() if hasattr(data, "to_local") else data  # FSDP2

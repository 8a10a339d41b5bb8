"""Parameters that FSDP2 (`fully_shard`) keeps in parts on the ranks, made whole where a rank needs all of them.

A module under FSDP2 gathers its parameters in its forward pass and in the backward pass. Two things happen outside: a
rollout, in which every rank samples at its own pace, and reading or writing weights.

Covered here: gathering around a rollout and around a walk over modules; reading and writing single parameters. Not
covered: FSDP1, and meshes of more than one dimension (tensor or context parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:  # where it is may change between releases of PyTorch
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def has_parts(model: nn.Module) -> bool:
    """Whether this rank holds only parts of some parameters now."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def plain_class(module: nn.Module) -> type:
    """The class of a module, not the one that `fully_shard` puts in its place."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A whole copy of a tensor that is in parts; any other tensor as it is. All ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def write(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a whole value, the same on all ranks, into a parameter that may be in parts. All ranks must call it."""
    if isinstance(parameter, DTensor):
        value = value.to(parameter.device, parameter.dtype)
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)


def reshard(model: nn.Module) -> None:
    """Give up whole parameters that a forward pass without a backward pass has left, all of them copies."""
    for module in _groups(model):
        module.reshard()


@contextmanager
def gathered_module(module: nn.Module) -> Iterator[None]:
    """Parameters of a module's own group are whole; those of groups below it are not. All ranks must enter it.

    Behind it they are again as they were. Tensors that were read inside lose their memory then, so copy them.
    """
    group = _parameters_of(module) if isinstance(module, FSDPModule) else None
    if not isinstance(module, FSDPModule) or group is None or group.is_unsharded:
        yield
        return
    FSDPModule.unshard(module)
    try:
        yield
    finally:
        FSDPModule.reshard(module)


@contextmanager
def gathered_for_sampling(model: nn.Module) -> Iterator[None]:
    """All parameters are whole, and forward passes are no collective calls. All ranks must enter it.

    Each rank may then run as many passes as its trajectories need.
    """
    modules = _groups(model)
    groups = [_parameters_of(module) for module in modules]
    after_forward = [None if group is None else group.post_forward_mesh_info for group in groups]
    for module in modules:
        module.unshard()
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module, group, mesh in zip(modules, groups, after_forward, strict=True):
            # The outermost module keeps its parameters between forward and backward, as PyTorch wants it by default.
            if group is not None and module is not model:
                group.post_forward_mesh_info = mesh
            module.reshard()


def _groups(model: nn.Module) -> list[FSDPModule]:
    """The modules whose parameters are gathered together, the outermost one first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _parameters_of(module: FSDPModule) -> FSDPParamGroup | None:
    """The parameters that a module gathers; None if all of them belong to modules inside.

    PyTorch has no public way to ask whether they are whole, or what happens to them after a forward pass.
    """
    return module._get_fsdp_state()._fsdp_param_group

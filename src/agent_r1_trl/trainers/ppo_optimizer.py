"""The optimizer step of PPO: policy and critic have learning rates and gradient norms of their own.

Covered here: parameter groups by role, clipping, the policy that a critic's warm-up holds still, and what cannot be
combined with them. Not covered: the losses (`ppo.py`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from trl.trainer.callbacks import SyncRefModelCallback

from agent_r1_trl.critic import is_critic_name

_ENGINES = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


# -------------------------------------------------------------------- what cannot be combined


def check_optimizer_setup(args: Any, accelerator: Any, lr_scheduler: Any) -> None:
    """Refuse what would train the critic otherwise than the arguments say.

    Raises:
        ValueError: names the argument, the rule and the cure.
    """
    if lr_scheduler is not None:
        raise ValueError(
            "optimizers=(..., scheduler): the scheduler was made before the critic, so it has no rate for it. Pass "
            "optimizers=(optimizer, None) and set lr_scheduler_type; the critic is added to the optimizer."
        )
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is not None:
        check_deepspeed_config(plugin.deepspeed_config, args)
    if accelerator.distributed_type not in _ENGINES:
        return
    name = accelerator.distributed_type.value
    if args.critic_max_grad_norm is not None:
        raise ValueError(
            f"critic_max_grad_norm={args.critic_max_grad_norm} with {name}, which clips one norm over all parameters. "
            "Remove critic_max_grad_norm; max_grad_norm then limits policy and critic together."
        )
    if args.max_grad_norm > 0:
        warnings.warn(
            f"{name} clips one gradient norm over policy and critic together (max_grad_norm={args.max_grad_norm}), so "
            "a large gradient of the critic makes the policy's step smaller. max_grad_norm=0 switches clipping off.",
            stacklevel=2,
        )


def check_deepspeed_config(config: dict[str, Any], args: Any) -> None:
    """Refuse a DeepSpeed file that makes an optimizer or schedule of its own, where the critic's would differ.

    Args:
        config: the DeepSpeed configuration.
        args: of the trainer.

    Raises:
        ValueError: the critic has a learning rate or a warm-up, which DeepSpeed's optimizer or schedule would not see.
    """
    for section in ("optimizer", "scheduler"):
        if section not in config:
            continue
        for name, is_set in {
            "critic_learning_rate": args.critic_learning_rate is not None,
            "critic_warmup_steps": args.critic_warmup_steps > 0,
        }.items():
            if is_set:
                raise ValueError(
                    f"{name}={getattr(args, name)} with a DeepSpeed configuration that has {section!r}: DeepSpeed's "
                    f"own {section} treats all parameters alike. Remove {section!r} from the DeepSpeed configuration "
                    "and set learning_rate, weight_decay, optim and lr_scheduler_type in the training arguments."
                )


# -------------------------------------------------------------------- groups


def split_by_role(
    optimizer: torch.optim.Optimizer,
    critic: Iterable[nn.Parameter],
    learning_rate: float | None,
    *,
    has_schedule: bool,
) -> None:
    """Split every parameter group into policy and critic, and add what a user's own optimizer does not know.

    Args:
        optimizer: changed in place; each group gets a `role`.
        critic: the critic's parameters.
        learning_rate: of the critic; None for the groups' own.
        has_schedule: a scheduler holds one rate for each of the present groups.

    Raises:
        ValueError: the groups must change, and a scheduler came along.
    """
    own = {id(parameter): parameter for parameter in critic if parameter.requires_grad}
    before, groups = list(optimizer.param_groups), []
    for group in before:
        members = {"policy": [p for p in group["params"] if id(p) not in own], "critic": []}
        members["critic"] = [own.pop(id(p)) for p in group["params"] if id(p) in own]
        parts = [(role, parameters) for role, parameters in members.items() if parameters]
        groups += [{**group, "params": parameters, "role": role} for role, parameters in parts]
    if has_schedule and (own or len(groups) != len(before) or learning_rate is not None):
        raise ValueError(
            "trainer.lr_scheduler was set to a scheduler of your own, which has no rate for the critic. Set only "
            "trainer.optimizer (or optimizers=(optimizer, None)) and lr_scheduler_type."
        )
    optimizer.param_groups[:] = groups
    if own:
        optimizer.add_param_group({"params": list(own.values()), "role": "critic", "lr": before[0]["lr"]})
    for group in optimizer.param_groups:
        if group["role"] == "critic" and learning_rate is not None:
            group["lr"] = learning_rate


# -------------------------------------------------------------------- the step


def parameters_by_role(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Policy's and critic's parameters that have a gradient."""
    named = [(is_critic_name(name), p) for name, p in model.named_parameters() if p.grad is not None]
    return [p for is_critic, p in named if not is_critic], [p for is_critic, p in named if is_critic]


def clips_apart(accelerator: Any) -> bool:
    """Whether gradients are ours to clip, and not an engine's."""
    return accelerator.distributed_type not in _ENGINES


def clip_by_role(model: nn.Module, args: Any, accelerator: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip policy and critic, each by its own norm.

    Args:
        model: as accelerate wrapped it, with gradients.
        args: `max_grad_norm` and `critic_max_grad_norm`; 0 does not clip.
        accelerator: takes mixed precision's scale off the gradients, once for all of them.

    Returns:
        Norms before clipping, of policy and critic.
    """
    policy, critic = parameters_by_role(model)
    limit = args.max_grad_norm if args.critic_max_grad_norm is None else args.critic_max_grad_norm
    policy_norm = accelerator.clip_grad_norm_(policy, args.max_grad_norm or float("inf"))
    return policy_norm, nn.utils.clip_grad_norm_(critic, limit or float("inf"))


def drop_policy_gradients(model: nn.Module) -> None:
    """Leave the policy out of the next optimizer step: neither weight decay nor momentum moves it then."""
    for parameter in parameters_by_role(model)[0]:
        parameter.grad = None


@contextlib.contextmanager
def policy_rate_at_zero(optimizer: Any) -> Iterator[None]:
    """For DeepSpeed, which makes the optimizer step inside the backward pass, from gradients of its own."""
    groups = [group for group in optimizer.param_groups if group.get("role") == "policy"]
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


class SyncPolicyCallback(SyncRefModelCallback):
    """TRL's `sync_ref_model`, for a model that also holds a critic: the reference follows the policy alone."""

    @staticmethod
    def sync_target_model(model: Any, target_model: Any, alpha: float) -> None:
        """Move the reference towards the policy."""
        SyncRefModelCallback.sync_target_model(_PolicyParameters(model), target_model, alpha)


class _PolicyParameters:
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for name, parameter in self._model.named_parameters() if not is_critic_name(name))

"""The update of one rollout in other layouts and with other attention kernels: what each takes, measured.

The weights stay as they are: gradients are computed and thrown away.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_torch_flex_attn_available

from agent_r1_trl.critic import base_causal_lm
from agent_r1_trl.doctor.report import describe_error
from agent_r1_trl.update.layout import PACKED_LAYOUTS, UpdateLayout
from agent_r1_trl.update.packed_attention import PACKED_ATTENTION
from agent_r1_trl.update.rows import Inputs

_SHORT_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to compute the update."""

    settings: dict[str, Any]
    """Of a recipe: `update_layout` and `attn_implementation`."""
    seconds: float | None = None
    """Of one rollout's forward and backward passes; None if it cannot be run."""
    reason: str = ""
    """Why it cannot."""
    is_current: bool = False


def attention_kernels(device: str) -> list[str]:
    """The attention implementations that are installed and can train on this device."""
    found = ["sdpa"]
    if device == "cuda":
        found += ["flash_attention_2"] if is_flash_attn_2_available() else []
        found += ["flash_attention_3"] if is_flash_attn_3_available() else []
        found += ["flex_attention"] if is_torch_flex_attn_available() else []
    return found


def time_variants(
    trainer: Any,
    buffer: list[Inputs],
    *,
    layouts: Sequence[str],
    kernels: Sequence[str],
    repeats: int = 2,
) -> list[Variant]:
    """Time the update of one rollout, the current way first.

    Args:
        trainer: that has trained.
        buffer: the rollout's micro-batches before they were laid out.
        layouts: values of `update_layout` to try.
        kernels: values of `attn_implementation` to try.
        repeats: timed passes over the rollout, of which the fastest counts, after one that warms up; where a pass
            takes several seconds, one is enough.
    """
    models = _models(trainer)
    used = _attention_of(models[0])
    now = {"update_layout": trainer.layout.name, "attn_implementation": used}
    chosen = [now]
    for kernel in dict.fromkeys([used, *kernels]):
        for layout in layouts:
            settings = {"update_layout": layout, "attn_implementation": kernel}
            chosen += [settings] if settings not in chosen else []
    found = []
    for settings in chosen:
        try:
            with _prepared(trainer, models, settings):
                seconds = _run(trainer, buffer)
                if seconds < _SHORT_S:  # the first one warms up
                    seconds = min(_run(trainer, buffer) for _ in range(repeats))
            found.append(Variant(settings=settings, seconds=seconds, is_current=settings == now))
        except Exception as error:  # another kernel or layout may not fit this model: a finding, not a crash
            found.append(Variant(settings=settings, reason=describe_error(error), is_current=settings == now))
        trainer.model.zero_grad(set_to_none=True)
    return found


def _models(trainer: Any) -> list[Any]:
    """Policy, reference and critic, as far as they have attention of their own."""
    policy = base_causal_lm(trainer.accelerator.unwrap_model(trainer.model))
    others = [base_causal_lm(trainer.accelerator.unwrap_model(trainer.ref_model))] if trainer.ref_model else []
    critic = getattr(policy, "critic_backbone", None)
    return [policy, *others, *([critic] if critic is not None else [])]


def _attention_of(model: Any) -> str:
    name = str(model.config._attn_implementation)
    return "sdpa" if name == PACKED_ATTENTION else name


@contextmanager
def _prepared(trainer: Any, models: list[Any], settings: dict[str, Any]) -> Iterator[None]:
    before, layout = [model.config._attn_implementation for model in models], trainer.layout
    try:
        args = copy.copy(trainer.args)
        args.update_layout = settings["update_layout"]
        if args.update_layout not in PACKED_LAYOUTS:
            args.max_tokens_per_micro_batch = None
        args.check_multi_turn()
        other = UpdateLayout(args)
        for model in models:
            model.set_attn_implementation(settings["attn_implementation"])
        other.prepare(*models, has_router_loss=trainer.aux_loss_enabled)
        trainer.layout = other
        yield
    finally:
        trainer.layout = layout
        for model, name in zip(models, before, strict=True):
            model.config._attn_implementation = name


def _run(trainer: Any, buffer: list[Inputs]) -> float:
    """Seconds of all forward and backward passes of a rollout."""
    trainer.model.train()
    _wait(trainer)
    start = time.perf_counter()
    for inputs in trainer.layout.arrange([dict(one) for one in buffer], trainer.accelerator):
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model, trainer.layout.trim(inputs))
        trainer.accelerator.backward(loss)
    _wait(trainer)
    seconds = time.perf_counter() - start
    trainer.model.zero_grad(set_to_none=True)
    return seconds


def _wait(trainer: Any) -> None:
    if trainer.accelerator.device.type == "cuda":
        torch.cuda.synchronize()

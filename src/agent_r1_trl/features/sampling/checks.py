"""Problems of the settings of filter, dynamic sampling and curriculum, read with those of the trainer."""

from __future__ import annotations

from typing import Any

from agent_r1_trl.features.sampling.settings import DEFAULT_VALUES, RULES
from agent_r1_trl.objects import own_object
from agent_r1_trl.settings import Clash, Need

_FILTERING = ("filter", "all")
"""Actions of the echo guard that may switch filter and dynamic sampling on."""
NEEDS = (
    Need("sampling.filter_value", {"sampling.filter_groups": RULES}),
    Need("sampling.filter_when sampling.filter_loss_scaling", {"sampling.filter_groups": None}),
    Need("sampling.curriculum_floor sampling.curriculum_rate", {"sampling.curriculum": (True,)}),
    Need(
        "sampling.pass_reward",
        {"sampling.resample_rounds": None, "sampling.curriculum": (True,), "echo.actions": _FILTERING},
    ),
)
CLASHES = (
    Clash(
        "sampling.filter_value sampling.filter_groups",
        lambda c: c.sampling.filter_groups in {*RULES} - {*DEFAULT_VALUES} and c.sampling.filter_value is None,
        "this rule has no usual value. Set sampling.filter_value to a number above 0 and at most 1.",
    ),
    Clash(
        "sampling.filter_groups num_generations",
        lambda c: c.sampling.filter_groups in RULES and c.num_generations < 2,
        "a group of one has no spread, so nothing would ever be trained on. Set num_generations to 2 or more (4 to 16 "
        "is usual), or remove sampling.filter_groups.",
    ),
    Clash(
        "sampling.filter_groups fp16",
        lambda c: c.sampling.filter_groups is not None and c.fp16,
        "a step without signal cannot be skipped without halving the scale of the loss. Set bf16=True and fp16=False, "
        "or remove sampling.filter_groups.",
    ),
    Clash(
        "sampling.resample_rounds num_generations",
        lambda c: c.sampling.resample_rounds and c.num_generations < 2,
        "a group of one has no spread, so every group would be replaced. Set num_generations to 2 or more, or remove "
        "sampling.resample_rounds.",
    ),
)


def resolve(config: Any) -> None:
    """Find the user's own filter rule: an `OwnObject`, from a path or the object itself.

    Raises:
        ValueError: `filter_groups` names no rule, or what cannot be called.
    """
    given = config.sampling.filter_groups
    if given is not None and given not in RULES:
        form = "a function from returns of shape (G, n), NaN outside the baseline, to a bool tensor of shape (G,)"
        config.sampling.filter_groups = own_object("sampling.filter_groups", given, RULES, form)

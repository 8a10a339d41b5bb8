"""TRL's arguments of a training script: its parser, `ModelConfig`, and what is made of them.

They stand here because only this package imports trl.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import trl
from trl import TrlParser, get_quantization_config

__all__ = ["ModelConfig", "TrlParser", "get_peft_config", "get_quantization_config"]


@dataclass
class ModelConfig(trl.ModelConfig):
    """TRL's, with adapters that compute in the update what they compute in the rollout."""

    lora_dropout: float = field(
        default=0.0,
        metadata={
            "help": "LoRA dropout. It is on in the update and off in the rollout, so with more than 0 the log-probs "
            "of a sampled token differ between them."
        },
    )


def get_peft_config(model_args: ModelConfig) -> Any:
    """TRL's function, with a fix for a single name in `lora_target_modules`.

    TRL turns a list of one name into text, and peft reads text as a regular expression that must match a module's
    whole path: `q_proj` would match none.
    """
    config = trl.get_peft_config(model_args)
    target = getattr(config, "target_modules", None)
    if isinstance(target, str) and target != "all-linear" and re.fullmatch(r"\w+", target):
        config.target_modules = {target}
    return config

"""What a training script needs of TRL besides the trainer, so that only this package imports trl."""

from __future__ import annotations

import re
from typing import Any

import trl
from trl import ModelConfig, TrlParser, get_quantization_config

__all__ = ["ModelConfig", "TrlParser", "get_peft_config", "get_quantization_config"]


def get_peft_config(model_args: ModelConfig) -> Any:
    """TRL's, except that a lone name in `lora_target_modules` stays a name.

    TRL takes a list of one apart, and peft reads text as a regular expression that must match the whole path of a
    module: `q_proj` would match none.
    """
    config = trl.get_peft_config(model_args)
    target = getattr(config, "target_modules", None)
    if isinstance(target, str) and target != "all-linear" and re.fullmatch(r"\w+", target):
        config.target_modules = {target}
    return config

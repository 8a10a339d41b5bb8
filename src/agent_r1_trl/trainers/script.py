"""What a training script needs of TRL besides the trainer, so that only this package imports trl."""

from __future__ import annotations

from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

__all__ = ["ModelConfig", "TrlParser", "get_peft_config", "get_quantization_config"]

"""What a training script needs of TRL besides the trainer, so that only this package imports trl."""

from __future__ import annotations

from typing import Any

from trl import ModelConfig, TrlParser, get_kbit_device_map, get_peft_config, get_quantization_config

__all__ = ["ModelConfig", "TrlParser", "get_peft_config", "model_init_kwargs"]


def model_init_kwargs(model_args: ModelConfig) -> dict[str, Any]:
    """Arguments of `from_pretrained` as the model options say."""
    options: dict[str, Any] = {"revision": model_args.model_revision, "dtype": model_args.dtype}
    if model_args.attn_implementation is not None:
        options["attn_implementation"] = model_args.attn_implementation
    quantization = get_quantization_config(model_args)
    if quantization is not None:
        options |= {"quantization_config": quantization, "device_map": get_kbit_device_map()}
    return options

"""Rotary embeddings whose frequencies follow the longest row of a batch, fixed for a whole run.

Two kinds of RoPE scaling make what one row computes depend on the rows beside it in transformers:

- `longrope` (Phi-3, Phi-4-mini, Phi-MoE, MiniCPM3): short factors while the batch has no row of more than
  `original_max_position_embeddings` tokens, long factors from then on, for all of its rows. vLLM decides once, by
  `max_model_len`; so do we, by the maximum length of the run.
- `dynamic`: frequencies that grow with the longest row beyond `max_position_embeddings`. Up to that length they are
  the unscaled ones, and vLLM computes with these alone. So do we; longer rows are refused.

Inkling and Llama 4 scale queries by the number of their column, padding included, from `log_scaling_n_floor` and
`floor_scale` columns on. Nothing can be fixed there: longer rows are refused.

What is fixed belongs to the modules: the model's configuration stays as it is, and is saved so. Code of a model's own
repository (`trust_remote_code`) with another rotary module is not covered.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol, cast

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONGROPE = "longrope"
_FIXED = "fixed_rotary_choice"
"""Attribute of a module that is fixed: the name of the factors, or `unscaled`."""
_CONFIG = "config_of_the_model"
"""Attribute of a module with a configuration of its own: the one that it had before."""


def fix_rotary_embeddings(model: nn.Module, max_length: int | None, *, keeps_choice: bool = False) -> str | None:
    """Make every row compute with the same frequencies, whatever rows are beside it.

    Args:
        model: a transformers model, or a module around one.
        max_length: maximum number of tokens of a row, prompt included; None: no limit.
        keeps_choice: leave modules alone that were fixed before, by the trainer that the model belongs to, say.

    Returns:
        The choice: `long` or `short` factors, or `unscaled` frequencies; None for a model that needs none.

    Raises:
        ValueError: rows may be longer than unscaled frequencies or unscaled queries hold for.
    """
    _check_scaled_queries(model, max_length)
    choice = None
    for module in model.modules():
        kinds = _scalings(module)
        if not kinds:
            continue
        if not (keeps_choice and hasattr(module, _FIXED)):
            _fix(cast(_Rotary, module), kinds, max_length)
        choice = getattr(module, _FIXED)
    return choice


def longrope_switch(config: PreTrainedConfig) -> int | None:
    """The number of tokens above which a configuration with LongRoPE takes the long factors; None without LongRoPE."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    is_nested = any(isinstance(value, dict) for value in parameters.values())
    for scaling in parameters.values() if is_nested else [parameters]:
        if scaling and scaling.get("rope_type") == LONGROPE:
            return int(scaling["original_max_position_embeddings"])
    return None


def vllm_default_length(config: PreTrainedConfig) -> int | None:
    """The `max_model_len` that vLLM gives a model with LongRoPE if nobody sets it; None for other models."""
    if longrope_switch(config) is None:
        return None
    text = config.get_text_config()
    return int(getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings)


def check_engine_length(config: PreTrainedConfig, *, run_length: int | None, engine_length: int | None) -> None:
    """Refuse a vLLM engine or server that takes other factors of LongRoPE than the trainer.

    Args:
        config: of the policy.
        run_length: what `fix_rotary_embeddings` was given.
        engine_length: its `max_model_len`; None: it does not say.

    Raises:
        ValueError: one of the two lengths is above the switch, the other is not.
    """
    switch = longrope_switch(config)
    if switch is None or engine_length is None:
        return
    is_long = run_length is None or run_length > switch
    if (engine_length > switch) == is_long:
        return
    ours, its = ("long", "short") if is_long else ("short", "long")
    raise ValueError(
        f"vLLM runs with max_model_len={engine_length}, and so with the {its} factors of this model's LongRoPE (long "
        f"ones above {switch} tokens), while the trainer scores with the {ours} ones (maximum length {run_length}). "
        f"Set vllm_max_model_length={engine_length}, or start the server with another --max-model-len."
    )


def _check_scaled_queries(model: nn.Module, max_length: int | None) -> None:
    """Refuse rows in which a model scales queries by their column."""
    config: Any = getattr(model, "config", None)
    text: Any = None if config is None else config.get_text_config()
    name, longest = "log_scaling_n_floor", getattr(text, "log_scaling_n_floor", None)
    if longest is None and getattr(text, "attn_temperature_tuning", False):
        name, longest = "attn_temperature_tuning, floor_scale", text.floor_scale - 1
    if longest is None or (max_length is not None and max_length <= longest):
        return
    raise ValueError(
        f"{type(model).__name__} scales queries behind column {longest} ({name}) and counts padding as columns, so "
        f"what a row computes depends on the longest row beside it. Rows may have {max_length or 'any number of'} "
        "tokens. Set the maximum length (vllm_max_model_length, max_model_length of the limits, or "
        f"max_position_embeddings of the model) to at most {longest}."
    )


# -------------------------------------------------------------------- modules


class _Rotary(Protocol):
    """The common interface of transformers' rotary embeddings."""

    config: Any
    rope_type: Any
    """The kind of scaling, or one for each layer type."""

    def register_buffer(self, name: str, tensor: torch.Tensor, persistent: bool) -> None:
        """As `nn.Module` does."""


def _scalings(module: nn.Module) -> dict[str | None, str]:
    """Layer type -> kind of scaling, of those kinds that follow the longest row; None stands for all layers."""
    config = getattr(module, _CONFIG, None) or getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None)
    if not hasattr(module, "rope_type") or not parameters:
        return {}
    if isinstance(module.rope_type, dict):
        found = {layer_type: (parameters[layer_type] or {}).get("rope_type") for layer_type in module.rope_type}
    else:
        found = {None: parameters.get("rope_type")}
    return {
        layer: kind for layer, kind in found.items() if kind is not None and (kind == LONGROPE or "dynamic" in kind)
    }


def _fix(module: _Rotary, kinds: dict[str | None, str], max_length: int | None) -> None:
    if not hasattr(module, _CONFIG):
        setattr(module, _CONFIG, module.config)
        if isinstance(module.rope_type, dict):
            module.rope_type = dict(module.rope_type)
    model_config = getattr(module, _CONFIG)
    module.config = copy.deepcopy(model_config)
    for layer_type, kind in kinds.items():
        if kind == LONGROPE:
            choice = _fix_longrope(module, layer_type, max_length)
        else:
            choice = _fix_dynamic(module, layer_type, max_length)
        # transformers computes frequencies anew in each forward pass for the kinds that it knows by name.
        if layer_type is None:
            module.rope_type = "default"
        else:
            module.rope_type[layer_type] = "default"
        setattr(module, _FIXED, choice)


def _fix_longrope(module: _Rotary, layer_type: str | None, max_length: int | None) -> str:
    """Both factors become the chosen ones, in the module's own configuration, which Phi-MoE reads in each pass."""
    parameters = module.config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    is_long = max_length is None or max_length > parameters["original_max_position_embeddings"]
    choice = "long" if is_long else "short"
    for name in ("factor", "mscale"):
        if f"{choice}_{name}" in parameters:
            parameters[f"short_{name}"] = parameters[f"long_{name}"] = parameters[f"{choice}_{name}"]
    options = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, _ = ROPE_INIT_FUNCTIONS[LONGROPE](module.config, **options)
    _set_frequencies(module, layer_type, frequencies)
    return choice


def _fix_dynamic(module: _Rotary, layer_type: str | None, max_length: int | None) -> str:
    longest = module.config.max_position_embeddings
    if max_length is None or max_length > longest:
        raise ValueError(
            f"This model's RoPE is scaled dynamically (rope_type='dynamic'): above {longest} tokens, what a row "
            f"computes depends on the longest row beside it. Rows may have {max_length or 'any number of'}. Set the "
            f"maximum length (vllm_max_model_length, or max_model_length of the limits) to at most {longest}, or give "
            "the model another rope_type, such as 'yarn'."
        )
    prefix = "" if layer_type is None else f"{layer_type}_"
    _set_frequencies(module, layer_type, getattr(module, f"{prefix}original_inv_freq"))
    return "unscaled"


def _set_frequencies(module: _Rotary, layer_type: str | None, frequencies: torch.Tensor) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    device = getattr(module, f"{prefix}inv_freq").device
    module.register_buffer(f"{prefix}inv_freq", frequencies.to(device), False)

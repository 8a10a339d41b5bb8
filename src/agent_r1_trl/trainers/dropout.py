"""Dropout and router jitter, which a sampler does not have.

TRL's `disable_dropout` reaches modules of the class `nn.Dropout`. Many families hold a rate as a plain number and pass
it to an attention function or to `nn.functional.dropout`, some read it from their configuration in the forward pass,
and some routers of experts add noise in training mode. Adapters have rates by their own names (LoHa, LoKr), or modules
that are no `nn.Dropout` (BOFT, OFT), as libraries of layers do. `disable_noise` reaches these as well.
"""

from __future__ import annotations

import logging
import types
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

logger = logging.getLogger(__name__)


def noise_rates(model: nn.Module) -> dict[str, float]:
    """Sources of noise in a forward pass in training mode, by name: `lora_dropout.default`, `attention_dropout`, ...

    Rates that a module of dropout holds have the module's name, other numbers that of their attribute.
    """
    rates: dict[str, float] = {}
    for path, module in model.named_modules():
        if _is_pinned(module):
            continue
        of_module = module.p if isinstance(module, _DropoutNd) else _rate_of_noise_module(module)
        if of_module > 0:
            rates[".".join(path.split(".")[-2:]) if "lora" in path else path.rpartition(".")[2]] = of_module
        if not isinstance(module, _DropoutNd):
            rates |= _rates_of(module)
    for config in _configs(model):
        rates |= {name: rate for name, rate in _rates_of(config).items() if "jitter" not in name}
    return rates


def disable_noise(model: nn.Module) -> dict[str, float]:
    """Set every rate of dropout in the model and its configuration to 0, and keep routers with jitter in eval mode.

    The rates in the configuration are saved as 0 with the model; samplers never read them.

    Returns:
        The rates before, as `noise_rates` names them.
    """
    before = noise_rates(model)
    for module in list(model.modules()):
        if isinstance(module, _DropoutNd):
            module.p = 0.0
            continue
        if _rate_of_noise_module(module) > 0:
            _pin_to_eval_mode(module)
        for name in _rates_of(module):
            if "jitter" in name or isinstance(getattr(module, name), dict):
                # Not 0: Phi-MoE's routers read theirs in eval mode as well, as a tolerance, and a rate of 0 still
                # leaves out LoHa's part where the number drawn is exactly 0.
                _pin_to_eval_mode(module)
            else:
                setattr(module, name, 0.0)
    for config in _configs(model):
        for name in _rates_of(config):
            if "jitter" not in name:
                setattr(config, name, 0.0)
    return before


def report_noise(model: nn.Module, *, is_disabled: bool) -> None:
    """Disable what makes training passes random (`is_disabled`), or say that it is on; a log line if there is any."""
    if is_disabled:
        disable_noise(model)
        asked = {getattr(config, "lora_dropout", 0.0) for config in getattr(model, "peft_config", {}).values()}
        for rate in sorted(asked - {0.0, None}):
            logger.warning(
                "lora_dropout=%g is off, because the sampler has none. Set lora_dropout: 0.0, or disable_dropout: "
                "false to train with it.",
                rate,
            )
        return
    rates = noise_rates(model)
    if not rates:
        return
    listed = ", ".join(f"{name} {rate:g}" for name, rate in sorted(rates.items()))
    logger.warning(
        "The model has dropout (%s), which is on in the update and off in the rollout: the log-probs of a sampled "
        "token differ between them although the weights are the same. Set disable_dropout: true (lora_dropout: 0.0 if "
        "it is the adapter's).",
        listed,
    )


def _rates_of(holder: object) -> dict[str, float]:
    """Attributes of a module or configuration that are rates of dropout or widths of jitter, above 0.

    peft keeps a dictionary of rates by the adapter's name; the largest one counts.
    """
    found = {}
    for name, value in vars(holder).items():
        if not ("drop" in name or "jitter" in name):
            continue
        numbers = value.values() if isinstance(value, dict) else [value]
        rates = [number for number in numbers if _is_rate(number)]
        if rates:
            found[name] = max(rates)
    return found


def _is_rate(value: object) -> bool:
    return isinstance(value, float) and 0.0 < value <= 1.0


_NOISE_CLASSES = ("dropout", "droppath", "drop_path", "stochasticdepth")
"""Parts of the names, in lower case, of classes that drop something in training mode."""


def _rate_of_noise_module(module: nn.Module) -> float:
    """The rate of a module that drops something and is no `nn.Dropout`; 0.0 for any other module."""
    name = type(module).__name__.lower()
    if isinstance(module, _DropoutNd) or not any(part in name for part in _NOISE_CLASSES):
        return 0.0
    rates = (getattr(module, attribute, None) for attribute in ("p", "prob", "rate"))
    return max((rate for rate in rates if isinstance(rate, float) and _is_rate(rate)), default=0.0)


def _configs(model: nn.Module) -> list[Any]:
    """The configurations that modules of the model read, once each."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "get_text_config"):
            configs[id(config)] = config
            text = config.get_text_config()
            configs[id(text)] = text
    return list(configs.values())


def _stay_in_eval_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    """`nn.Module.train` of a pinned module."""
    return nn.Module.train(module, False)


def _pin_to_eval_mode(module: nn.Module) -> None:
    """Keep a module and what is in it in eval mode, whatever the Trainer calls."""
    module.train = types.MethodType(_stay_in_eval_mode, module)  # type: ignore[method-assign]
    module.train(False)


def _is_pinned(module: nn.Module) -> bool:
    return getattr(vars(module).get("train"), "__func__", None) is _stay_in_eval_mode

"""The trainers and their arguments, imported on first use."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_r1_trl.trainers.config import MultiTurnConfig, MultiTurnGRPOConfig, MultiTurnPPOConfig
    from agent_r1_trl.trainers.multi_turn import MultiTurnGRPOTrainer, MultiTurnTrainer
    from agent_r1_trl.trainers.ppo import MultiTurnPPOTrainer

_MODULE_OF = {
    "MultiTurnConfig": "config",
    "MultiTurnGRPOConfig": "config",
    "MultiTurnGRPOTrainer": "multi_turn",
    "MultiTurnPPOConfig": "config",
    "MultiTurnPPOTrainer": "ppo",
    "MultiTurnTrainer": "multi_turn",
}
__all__ = [
    "MultiTurnConfig",
    "MultiTurnGRPOConfig",
    "MultiTurnGRPOTrainer",
    "MultiTurnPPOConfig",
    "MultiTurnPPOTrainer",
    "MultiTurnTrainer",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    release = importlib.import_module(f"{__name__}.trl_release")
    loaded = {f"{__name__}.{module}" for module in (_MODULE_OF[name], "multi_turn")} & set(sys.modules)
    if not loaded:  # else its base is TRL's, whatever has been put in its place since
        release.refuse_replaced()
    if name.endswith("Trainer"):  # before the imports that another release of TRL may lack
        release.check_trl()
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)

"""Multi-turn, tool-using agents trained with reinforcement learning, on top of TRL.

prompt -> environment reset -> rollout (policy <-> tools) -> Trajectory -> rewards on tokens -> filter
       -> batch -> advantages -> loss -> step -> sync weights -> next rollout

Every name below is imported on first use, so that `import agent_r1_trl` costs milliseconds and an environment or tool
server never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_r1_trl.environments import Environment, SearchQAEnv, StepResult, ToolEnv
    from agent_r1_trl.evaluation import EvaluationResult, evaluate
    from agent_r1_trl.features.doctor.environment import check_env
    from agent_r1_trl.features.sandbox import PythonTool, SandboxLimits, ShellTool
    from agent_r1_trl.tools import InfrastructureError, Tool, tool
    from agent_r1_trl.trainers import (
        MultiTurnGRPOConfig,
        MultiTurnGRPOTrainer,
        MultiTurnPPOConfig,
        MultiTurnPPOTrainer,
        MultiTurnTrainer,
    )
    from agent_r1_trl.trainers.callbacks import RolloutCallback
    from agent_r1_trl.trajectory import Author, StopReason, ToolCall, ToolErrorKind, ToolResult, Trajectory, Turn

__version__ = "0.1.0"

__all__ = [
    "Author",
    "Environment",
    "EvaluationResult",
    "InfrastructureError",
    "MultiTurnGRPOConfig",
    "MultiTurnGRPOTrainer",
    "MultiTurnPPOConfig",
    "MultiTurnPPOTrainer",
    "MultiTurnTrainer",
    "PythonTool",
    "RolloutCallback",
    "SandboxLimits",
    "SearchQAEnv",
    "ShellTool",
    "StepResult",
    "StopReason",
    "Tool",
    "ToolCall",
    "ToolEnv",
    "ToolErrorKind",
    "ToolResult",
    "Trajectory",
    "Turn",
    "__version__",
    "check_env",
    "evaluate",
    "tool",
]

_NAMES = {
    "trajectory": ("Author", "StopReason", "ToolCall", "ToolErrorKind", "ToolResult", "Trajectory", "Turn"),
    "environments": ("Environment", "SearchQAEnv", "StepResult", "ToolEnv"),
    "evaluation": ("EvaluationResult", "evaluate"),
    "tools": ("InfrastructureError", "Tool", "tool"),
    "trainers": (
        "MultiTurnGRPOConfig",
        "MultiTurnGRPOTrainer",
        "MultiTurnPPOConfig",
        "MultiTurnPPOTrainer",
        "MultiTurnTrainer",
    ),
    "features.sandbox": ("PythonTool", "SandboxLimits", "ShellTool"),
    "trainers.callbacks": ("RolloutCallback",),
    "features.doctor": ("check_env",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

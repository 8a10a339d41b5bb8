"""Evaluation: the same rollout as in training, with metrics and confidence intervals.

Importing it loads nothing heavy: comparing two results needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_r1_trl.evaluation.agent import Agent as Agent
    from agent_r1_trl.evaluation.agent import load_agent as load_agent
    from agent_r1_trl.evaluation.agent import open_agent as open_agent
    from agent_r1_trl.evaluation.evaluator import evaluate as evaluate
    from agent_r1_trl.evaluation.evaluator import evaluate_model as evaluate_model
    from agent_r1_trl.evaluation.result import EvaluationResult as EvaluationResult
    from agent_r1_trl.evaluation.result import bootstrap_intervals as bootstrap_intervals
    from agent_r1_trl.evaluation.result import difference as difference
    from agent_r1_trl.evaluation.table import EvaluationTable as EvaluationTable
    from agent_r1_trl.evaluation.table import TableRow as TableRow

_MODULE_OF = {
    "Agent": "agent",
    "EvaluationResult": "result",
    "EvaluationTable": "table",
    "TableRow": "table",
    "bootstrap_intervals": "result",
    "difference": "result",
    "evaluate": "evaluator",
    "evaluate_model": "evaluator",
    "load_agent": "agent",
    "open_agent": "agent",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)

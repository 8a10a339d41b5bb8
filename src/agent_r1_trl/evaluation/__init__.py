"""Evaluation: the same rollout as in training, with metrics and confidence intervals."""

from agent_r1_trl.evaluation.agent import Agent, load_agent, open_agent
from agent_r1_trl.evaluation.evaluator import evaluate, evaluate_model
from agent_r1_trl.evaluation.result import EvaluationResult, bootstrap_intervals, difference
from agent_r1_trl.evaluation.table import EvaluationTable, TableRow

__all__ = [
    "Agent",
    "EvaluationResult",
    "EvaluationTable",
    "TableRow",
    "bootstrap_intervals",
    "difference",
    "evaluate",
    "evaluate_model",
    "load_agent",
    "open_agent",
]

"""Evaluation: the same rollout as in training, with metrics and confidence intervals."""

from agent_r1_trl.evaluation.evaluator import evaluate, evaluate_model
from agent_r1_trl.evaluation.loading import load_agent
from agent_r1_trl.evaluation.result import EvaluationResult, bootstrap_intervals, difference

__all__ = ["EvaluationResult", "bootstrap_intervals", "difference", "evaluate", "evaluate_model", "load_agent"]

"""Estimators that are named by their path."""

from agent_r1_trl.advantages.estimators import Credit, Estimator


def one(inputs):
    """Advantage 1 for everybody."""
    return Credit(advantages=inputs.mask.float())


ROW = Estimator(name="naive", compute=one)

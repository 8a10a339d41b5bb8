"""The linter `check_env` and its `Finding`."""

from agent_r1_trl.doctor.environment.linter import check_env
from agent_r1_trl.doctor.environment.report import Finding

__all__ = ["Finding", "check_env"]

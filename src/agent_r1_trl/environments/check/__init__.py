"""The linter `check_env` and its `Finding`."""

from agent_r1_trl.environments.check.linter import check_env
from agent_r1_trl.environments.check.report import Finding

__all__ = ["Finding", "check_env"]

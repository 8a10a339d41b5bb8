"""`check_env`: a linter for environments and their tools."""

from agent_r1_trl.doctor.environment.check import check_env
from agent_r1_trl.doctor.report import Finding

__all__ = ["Finding", "check_env"]

"""The doctor: checks a model, its template, tools and an environment before money is spent.

It runs the same code as a rollout, on scripts.

    from agent_r1_trl.features.doctor import render, run_doctor

    findings = run_doctor("Qwen/Qwen3-0.6B", env=MyEnv, examples=dataset)
    rich.print(render(findings))

`check_env` checks an environment alone; importing it loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent_r1_trl.features.doctor.environment import check_env
from agent_r1_trl.features.doctor.report import Finding, has_errors, render

if TYPE_CHECKING:
    from agent_r1_trl.features.doctor.checks import run_doctor

__all__ = ["Finding", "check_env", "has_errors", "render", "run_doctor"]


def __getattr__(name: str) -> Any:
    if name != "run_doctor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agent_r1_trl.features.doctor.checks import run_doctor

    return run_doctor

"""The doctor: checks a model, its template, tools and an environment before money is spent.

Not part of the data flow: it runs the same code as a rollout, on scripts.

    from agent_r1_trl.doctor import render, run_doctor

    checks = run_doctor("Qwen/Qwen3-0.6B", env=MyEnv, examples=dataset)
    rich.print(render(checks))
"""

from agent_r1_trl.doctor.report import Check, has_errors, render
from agent_r1_trl.doctor.run import run_doctor

__all__ = ["Check", "has_errors", "render", "run_doctor"]

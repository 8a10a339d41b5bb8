"""check_env: a linter for environments and their tools, to run before money is spent.

It plays short episodes with good, bad and odd assistant messages and reports what would break training, teach the
wrong thing, or leak from one trajectory into another.

    for finding in check_env(MyEnv, dataset):
        print(finding.level, finding.message, finding.cure)
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Iterable
from typing import Any

from agent_r1_trl.doctor.environment.caller import Caller
from agent_r1_trl.doctor.environment.construction import Stopped, Trial, check_construction, check_methods
from agent_r1_trl.doctor.environment.episodes import check_close, check_reset, check_steps
from agent_r1_trl.doctor.environment.outcome import check_outcome
from agent_r1_trl.doctor.environment.script import DEFAULT_EXAMPLE
from agent_r1_trl.doctor.environment.state import check_shared_state
from agent_r1_trl.doctor.environment.tools import check_tools, list_tools
from agent_r1_trl.doctor.report import Finding
from agent_r1_trl.environments.rows import warn_of_added_keys


def check_env(
    env_or_factory: Any,
    examples: Iterable[dict[str, Any]] | None = None,
    *,
    num_episodes: int = 3,
    timeout_s: float = 10.0,
) -> list[Finding]:
    """Check an environment by playing in it.

    Args:
        env_or_factory: an environment class, a function that makes an environment, or an instance (then shared state
            cannot be checked); also a class for TRL's `environment_factory`.
        examples: rows of the data set; if None, one made-up question.
        num_episodes: maximum number of rows to play.
        timeout_s: seconds that a method may take before it counts as hanging.

    Returns:
        Warnings and errors in the order of the checks; an empty list if nothing is wrong. A check that could not look,
        because an earlier one found an error, has none.

    Raises:
        ValueError: `examples` holds no rows, or an argument is out of range.
    """
    findings = examine_env(env_or_factory, examples, num_episodes=num_episodes, timeout_s=timeout_s)
    return [finding for finding in findings if finding.level != "ok"]


def examine_env(
    env_or_factory: Any,
    examples: Iterable[dict[str, Any]] | None = None,
    *,
    num_episodes: int = 3,
    timeout_s: float = 10.0,
) -> list[Finding]:
    """As `check_env`, with one finding of level "ok" from every check that looked and found nothing."""
    if isinstance(num_episodes, bool) or not isinstance(num_episodes, int) or num_episodes < 1:
        raise ValueError(f"num_episodes={num_episodes!r}: must be an integer >= 1.")
    if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s={timeout_s!r}: must be a number of seconds > 0.")
    rows = _read_examples(examples, num_episodes)
    warn_of_added_keys(examples, "examples")
    trial = Trial(rows=rows, are_made_up=examples is None, caller=Caller(timeout_s))
    try:
        with contextlib.suppress(Stopped):
            _run_checks(trial, env_or_factory)
    finally:
        trial.caller.close()
    return trial.report.findings


def _read_examples(examples: Any, num_episodes: int) -> list[dict[str, Any]]:
    if examples is None:
        return [copy.deepcopy(DEFAULT_EXAMPLE)]
    if isinstance(examples, (dict, str)) or not hasattr(examples, "__iter__"):
        raise ValueError(f"examples={examples!r:.100}: must be a list of rows (dicts) or a data set.")
    rows = list(itertools.islice(examples, num_episodes))
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"examples={rows!r:.100}: must hold at least one row, and every row must be a dict.")
    return rows


def _run_checks(trial: Trial, given: Any) -> None:
    """Run the checks, the cheap ones first, and leave out those that need something that failed."""
    report = trial.report
    env = check_construction(trial, given)
    with contextlib.suppress(Exception):  # tools that exist only after reset; `check_reset` looks at them
        trial.tools = check_tools(report, getattr(env, "tools", None) or ())
    check_methods(trial, env)
    if report.has_errors("construction", "tools", "methods"):
        return
    check_reset(trial)
    if report.has_errors("reset", "tools") or not trial.rows:
        return
    check_steps(trial)
    report.ok("tools", list_tools(trial.tools))
    if not report.has_errors("step"):
        check_outcome(trial)
        if not trial.is_instance:
            check_shared_state(trial)
    check_close(trial)

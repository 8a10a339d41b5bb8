"""check_env: a linter for environments and their tools, to run before money is spent.

Not part of the data flow: it plays short episodes with good, bad and odd assistant messages and reports what would
break training, teach the wrong thing, or leak from one trajectory into another.

    for finding in check_env(MyEnv, dataset):
        print(finding.level, finding.message, finding.cure)
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable
from typing import Any

from agent_r1_trl.doctor.environment.caller import SafeCaller
from agent_r1_trl.doctor.environment.construction import check_construction, check_methods
from agent_r1_trl.doctor.environment.context import Context
from agent_r1_trl.doctor.environment.episodes import check_env_tools, check_reset, check_steps
from agent_r1_trl.doctor.environment.outcome import check_outcome
from agent_r1_trl.doctor.environment.report import Finding
from agent_r1_trl.doctor.environment.script import DEFAULT_EXAMPLE
from agent_r1_trl.doctor.environment.state import check_close, check_shared_state


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
            cannot be checked as well); also a class for TRL's `environment_factory`.
        examples: rows of the data set; one made-up question where None.
        num_episodes: how many of the rows are played.
        timeout_s: seconds any one method may take before it counts as hanging.

    Returns:
        Findings in the order of the checks; a check that found nothing has one line of level "ok".

    Raises:
        ValueError: `examples` holds no rows, or an argument is out of range.
    """
    if isinstance(num_episodes, bool) or not isinstance(num_episodes, int) or num_episodes < 1:
        raise ValueError(f"num_episodes={num_episodes!r}: must be an integer >= 1.")
    if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s={timeout_s!r}: must be a number of seconds > 0.")
    rows = _read_examples(examples, num_episodes)
    caller = SafeCaller(timeout_s)
    context = Context(given=env_or_factory, rows=rows, are_made_up=examples is None, caller=caller)
    try:
        _run(context)
    finally:
        caller.close()
    return context.report.findings


def _read_examples(examples: Any, num_episodes: int) -> list[dict[str, Any]]:
    if examples is None:
        return [copy.deepcopy(DEFAULT_EXAMPLE)]
    if isinstance(examples, (dict, str)) or not hasattr(examples, "__iter__"):
        raise ValueError(f"examples={examples!r:.100}: must be a list of rows (dicts) or a data set.")
    rows = list(itertools.islice(examples, num_episodes))
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"examples={rows!r:.100}: must hold at least one row, and every row must be a dict.")
    return rows


def _run(context: Context) -> None:
    """All checks, the cheap ones first; those that need what failed are left out."""
    report = context.report
    with report.section("construction", "Every trajectory gets an instance of its own."):
        env = check_construction(context)
    if env is None:
        return
    with report.section("methods", "All methods are there and take the right arguments."):
        check_methods(context, env)
    if report.has_errors():
        return
    with report.section("tools", "The tools have schemas that a model can read, and answer."):
        check_env_tools(context, env)
        with report.section("reset", "reset gives the same valid prompt for the same example."):
            check_reset(context)
        if report.has_errors("reset"):
            return
        with report.section("step", "step survives good, bad and odd messages and keeps its contract."):
            check_steps(context)
    with report.section("outcome", "outcome_reward scores finished, cut and empty trajectories."):
        check_outcome(context)
    if not context.is_instance:
        with report.section("state", "Two instances share no state."):
            check_shared_state(context)
    with report.section("close", "close can be called at any time."):
        check_close(context)

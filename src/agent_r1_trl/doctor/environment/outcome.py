"""Is every trajectory scored, and not answering worth no more than answering wrong?

Not part of the data flow: a linter's step.
"""

from __future__ import annotations

from typing import Any

from agent_r1_trl.doctor.environment.context import Context
from agent_r1_trl.doctor.environment.contracts import checked_step, describe_not_json
from agent_r1_trl.doctor.environment.episodes import Played
from agent_r1_trl.doctor.environment.script import (
    NONSENSE,
    answer_message,
    bad_messages,
    call_message,
    make_trajectory,
    sample_call,
)
from agent_r1_trl.environments.reward_values import is_bool, read_outcome
from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.environments.trl_adapters import TRLEnvAdapter
from agent_r1_trl.trajectory import Message, StopReason, Trajectory

GOLD_COLUMNS = ("answer", "answers", "golden_answers", "gold", "solution")


def check_outcome(context: Context) -> None:
    """Finished, cut and empty trajectories of every row; and what pays better."""
    if context.report.has_errors("reset", "step"):
        return
    for row in context.rows:
        fresh = context.fresh(row)
        if fresh is None or getattr(fresh[0], "outcome_reward", None) is None:
            return
        calls = [call_message(sample_call(tool)) for tool in context.usable_tools[:1]]
        bad = [bad_messages(context.usable_tools)["an unknown tool"]]
        wrong = _outcome(context, row, [answer_message(NONSENSE)], StopReason.DONE, "a wrong answer", twice=True)
        _outcome(context, row, [answer_message(None)], StopReason.DONE, "an answer without content")
        _outcome(context, row, [], StopReason.MAX_COMPLETION_LENGTH, "an empty trajectory (no turn at all)")
        _outcome(context, row, bad, StopReason.INVALID_CALLS, "a trajectory of invalid calls")
        cut = _outcome(context, row, calls or bad, StopReason.MAX_TURNS, "a trajectory cut at the turn limit")
        ended = [*(calls or bad), answer_message(NONSENSE)]  # the same calls: only answering makes the difference
        late_wrong = _outcome(context, row, ended, StopReason.DONE, "a wrong answer after calls")
        if late_wrong is not None and cut is not None and cut > late_wrong:
            context.report.warning(
                "outcome",
                f"Never answering earns {cut:g}, a wrong answer {late_wrong:g}: the policy will learn not to answer.",
                "Score a missing answer like a wrong one, or lower.",
            )
        if wrong is not None:
            _check_gold(context, row, wrong)


def _check_gold(context: Context, row: dict[str, Any], wrong: float) -> None:
    env = context.new()
    if env is None or isinstance(env, TRLEnvAdapter):  # its score comes from what was done, not from the answer
        return
    column = next((name for name in GOLD_COLUMNS if row.get(name)), None)
    gold = row[column] if column else None
    gold = gold[0] if isinstance(gold, (list, tuple)) else gold
    if context.are_made_up or gold is None or context.report.has_errors("outcome"):
        return
    forms = (f"{gold}", f"<answer>{gold}</answer>", f"\\boxed{{{gold}}}", f"#### {gold}")
    scores = [_outcome(context, row, [answer_message(text)], StopReason.DONE, "the right answer") for text in forms]
    known = [score for score in scores if score is not None]
    own = not isinstance(env, ToolEnv) or type(env).outcome_reward is not ToolEnv.outcome_reward
    if own and known and max(known) <= wrong:
        context.report.warning(
            "outcome",
            f"The answer from the column {column!r} ({str(gold)[:60]!r}) earns {max(known):g}, nonsense {wrong:g}.",
            "See that outcome_reward reads the right column and the answer's form (plain text and <answer> were "
            "tried). Fine if the task is not solved by what the final text says.",
        )


def _outcome(
    context: Context,
    row: dict[str, Any],
    messages: list[Message],
    stop_reason: StopReason,
    what: str,
    *,
    twice: bool = False,
) -> float | None:
    fresh = context.fresh(row)
    if fresh is None:
        return None
    env, prompt = fresh
    played: Played = []
    for message in messages:
        step = checked_step(context, env, message, what)
        if step is None:
            return None
        played.append((message, list(step[0]), float(step[1])))
    trajectory = make_trajectory(prompt, played, stop_reason)
    score = _read_outcome(context, env, trajectory, what)
    if twice and score is not None and _read_outcome(context, env, trajectory, what) != score:
        context.report.warning(
            "outcome", "outcome_reward scores the same trajectory differently each time.", "Make it deterministic."
        )
    return score


def _read_outcome(context: Context, env: Any, trajectory: Trajectory, what: str) -> float | None:
    scored = context.caller.call(env.outcome_reward, trajectory)
    context.check_blocking("outcome", scored.blocked_s)
    if scored.failure:
        context.report.error(
            "outcome",
            f"outcome_reward {scored.failure} on {what} ({trajectory.stop_reason.value}).",
            "Every trajectory is scored, also cut ones: use trajectory.final_text, which is '' where there is none.",
        )
        return None
    try:
        value = read_outcome(scored.value, "outcome_reward")
    except ValueError as error:
        context.report.error("outcome", f"On {what}: {error}", "Return a finite float, or (float, parts).")
        return None
    if is_bool(scored.value):
        context.report.warning(
            "outcome",
            "outcome_reward returns True or False, which counts as 1 and 0 here.",
            "Return a float; in a ToolEnv booleans mean success_reward and failure_reward.",
        )
        value = float(bool(scored.value))
    problem = describe_not_json(trajectory.info)
    if problem:
        context.report.error(
            "outcome",
            f"outcome_reward put into trajectory.info what is not JSON ({problem}).",
            "Use plain values only.",
        )
    return value[0] if isinstance(value, tuple) else value

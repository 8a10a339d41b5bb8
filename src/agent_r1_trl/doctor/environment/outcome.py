"""Is every trajectory scored, and does not answering earn no more than answering wrong?"""

from __future__ import annotations

from typing import Any

from agent_r1_trl.doctor.environment.construction import Stopped, Trial
from agent_r1_trl.doctor.environment.episodes import play
from agent_r1_trl.doctor.environment.script import NONSENSE, answer_message, broken_calls, call_message, sample_call
from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.environments.trl_adapters import TRLEnvAdapter
from agent_r1_trl.tools import Tool
from agent_r1_trl.trajectory import Message, StopReason

GOLD_COLUMNS = ("answer", "answers", "golden_answers", "gold", "solution")


def check_outcome(trial: Trial) -> None:
    """Finished, cut and empty trajectories of every row, and what pays better."""
    env, report = trial.new(), trial.report
    if getattr(env, "outcome_reward", None) is None:
        return
    _check_payment(trial, env)
    # A TRL class scores what was done, a ToolEnv without an outcome_reward of its own nothing.
    reads_answer = getattr(type(env), "outcome_reward", None) not in (
        TRLEnvAdapter.outcome_reward,
        ToolEnv.outcome_reward,
    )
    for row in trial.rows:
        cases = _cases(trial.tools_for(row))
        scores = {what: _score(trial, row, what, *case) for what, case in cases.items()}
        wrong = scores["a wrong answer"]
        if wrong is not None and _score(trial, row, "a wrong answer", *cases["a wrong answer"]) != wrong:
            message = "outcome_reward scores the same trajectory differently each time."
            report.warning("outcome", message, "Make it deterministic.")
        # The same calls in both: only answering makes the difference.
        cut, answered = scores["a trajectory cut at the turn limit"], scores["a wrong answer after calls"]
        if cut is not None and answered is not None and cut > answered:
            message = f"Never answering earns {cut:g}, a wrong answer {answered:g}: the policy learns not to answer."
            report.warning("outcome", message, "Score a missing answer like a wrong one, or lower.")
        if wrong is not None and reads_answer and not trial.are_made_up:
            _check_right_answer(trial, row, wrong)
    report.ok("outcome", "outcome_reward scores finished, cut and empty trajectories.")


def _check_payment(trial: Trial, env: Any) -> None:
    """Whether a `ToolEnv` with tools leaves both rewards at their defaults."""
    if not isinstance(env, ToolEnv) or not env.has_reward or env.tool_call_reward <= 0 or not trial.tools:
        return
    cls = type(env)
    if cls.outcome_reward is ToolEnv.outcome_reward and cls.process_reward is ToolEnv.process_reward:
        trial.report.warning(
            "outcome",
            f"{cls.__name__} defines neither outcome_reward nor process_reward: it pays for calls, whatever the "
            "answer.",
            "Define outcome_reward(self, trajectory), or set tool_call_reward = 0 and pass reward_funcs.",
        )


def _check_right_answer(trial: Trial, row: dict[str, Any], wrong: float) -> None:
    column = next((name for name in GOLD_COLUMNS if row.get(name)), None)
    if column is None or trial.report.has_errors("outcome"):
        return
    gold = row[column][0] if isinstance(row[column], (list, tuple)) else row[column]
    forms = (f"{gold}", f"<answer>{gold}</answer>", f"\\boxed{{{gold}}}", f"#### {gold}")
    scores = [_score(trial, row, "the right answer", [answer_message(text)], StopReason.DONE) for text in forms]
    best = max((score for score in scores if score is not None), default=None)
    if best is not None and best <= wrong:
        trial.report.warning(
            "outcome",
            f"The answer from the column {column!r} ({str(gold)[:60]!r}) earns {best:g}, nonsense {wrong:g}.",
            "See that outcome_reward reads the right column and the answer's form (plain text, <answer>, \\boxed and "
            "#### were tried). Fine if the task is not solved by what the final text says.",
        )


def _cases(tools: list[Tool]) -> dict[str, tuple[list[Message], StopReason]]:
    """Messages to play before the trajectory is scored, and how it ends, by what they are."""
    invalid = [broken_calls(tools)["an unknown tool"]]
    calls = [call_message(sample_call(tool)) for tool in tools[:1]] or invalid
    nonsense = answer_message(NONSENSE)
    return {
        "a wrong answer": ([nonsense], StopReason.DONE),
        "an answer without content": ([answer_message(None)], StopReason.DONE),
        "an empty trajectory (no turn at all)": ([], StopReason.MAX_COMPLETION_LENGTH),
        "a trajectory of invalid calls": (invalid, StopReason.INVALID_CALLS),
        "a trajectory cut at the turn limit": (calls, StopReason.MAX_TURNS),
        "a wrong answer after calls": ([*calls, nonsense], StopReason.DONE),
    }


def _score(
    trial: Trial, row: dict[str, Any], what: str, messages: list[Message], stop_reason: StopReason
) -> float | None:
    """Play these messages in a fresh environment and let it score the trajectory; None if it cannot."""
    played = play(trial, row, what, messages)
    if played is None:
        raise Stopped
    scored = trial.call("outcome", played.session, played.trajectory(stop_reason))
    if scored.failure:
        message = f"On {what} ({stop_reason.value}): {scored.failure}."
        cure = (
            "Return a finite float, or (float, parts). Every trajectory is scored, also cut ones: use "
            "trajectory.final_text, which is '' where there is none."
        )
        trial.report.error("outcome", message, cure)
        return None
    return scored.value[0]

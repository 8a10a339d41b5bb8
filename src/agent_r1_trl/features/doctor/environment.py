"""check_env: a linter for environments and their tools, to run before money is spent.

It runs short episodes with good, bad and odd assistant messages and reports what would break training, teach the
wrong thing, or leak from one trajectory into another. Importing it loads neither torch nor transformers.

    for finding in check_env(MyEnv, dataset):
        print(finding.level, finding.message, finding.fix)
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from agent_r1_trl.environments.factory import made_and_closed
from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.environments.trl_adapters import TRLEnvAdapter
from agent_r1_trl.features.doctor.agents import examine_agent, is_agent
from agent_r1_trl.features.doctor.episodes import (
    DESCRIBE,
    Caller,
    EnvEpisode,
    EnvTrial,
    Stopped,
    bad_messages,
    check_tools,
    make_env,
)
from agent_r1_trl.features.doctor.messages import (
    NONSENSE,
    broken_calls,
    call_tools,
    odd_messages,
    sample_call,
    say_text,
    valid_messages,
)
from agent_r1_trl.features.doctor.report import Finding, Report, describe_error, has_errors
from agent_r1_trl.rewards import check_golds
from agent_r1_trl.settings import Count, Seconds, check_value
from agent_r1_trl.tools import Tool, shared_pool
from agent_r1_trl.tools.pool import OwnThread
from agent_r1_trl.trajectory import Message, StopReason, ToolErrorKind

NUM_EPISODES, TIMEOUT_S = 3, 10.0
MAX_STEPS = 16
"""Answers and calls after which an episode that has not ended counts as endless."""
GOLD_COLUMNS = ("answer", "answers", "golden_answers", "gold", "solution")
DEFAULT_EXAMPLE = {
    "prompt": [{"role": "user", "content": "What is the capital of Norway?"}],
    "question": "What is the capital of Norway?",
    "answer": "Oslo",
}
# Objects of these modules count by identity: what they hold is machinery, not the state of an episode.
_OPAQUE_MODULES = {*sys.stdlib_module_names, "agent_r1_trl"}


def check_env(
    env_or_factory: object,
    examples: Iterable[dict[str, Any]] | None = None,
    *,
    num_episodes: int = NUM_EPISODES,
    timeout_s: float = TIMEOUT_S,
) -> list[Finding]:
    """Check an environment by acting in it.

    Args:
        env_or_factory: an environment class or a function that makes an environment; also a class for TRL's
            `environment_factory`. An agent (`AgentEnv`) acts against a script.
        examples: rows of the data set; if None, one made-up question.
        num_episodes: maximum number of rows to try.
        timeout_s: seconds that a method may take before it counts as hanging, and an agent's whole run six times.

    Returns:
        Warnings and errors in the order of the checks; an empty list if nothing is wrong. An error of construction,
        reset or step ends the checks, since the later ones need what failed.

    Raises:
        ValueError: `examples` holds no rows, or an argument is out of range.
    """
    findings = examine_env(env_or_factory, examples, num_episodes=num_episodes, timeout_s=timeout_s)
    return [finding for finding in findings if finding.level not in ("ok", "skipped")]


def examine_env(
    env_or_factory: object,
    examples: Iterable[dict[str, Any]] | None = None,
    *,
    num_episodes: int = NUM_EPISODES,
    timeout_s: float = TIMEOUT_S,
) -> list[Finding]:
    """As `check_env`, with one finding of level "ok" or "skipped" from every check that found nothing."""
    import transformers.utils  # noqa: F401 - schemas of tools need it, and `reset` would wait for it

    check_value("num_episodes", num_episodes, Count)
    check_value("timeout_s", timeout_s, Seconds)
    given: Any = [copy.deepcopy(DEFAULT_EXAMPLE)] if examples is None else examples
    is_one_row = isinstance(given, (dict, str)) or not hasattr(given, "__iter__")
    rows: list[Any] = [] if is_one_row else list(itertools.islice(given, num_episodes))
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(
            f"examples={examples!r:.100}: must be a data set or a list with at least one row, and every row a dict."
        )
    make = functools.partial(make_env, env_or_factory)
    if is_agent(make, timeout_s):
        examine_agent(report := Report(), make, rows, timeout_s=timeout_s)
        return report.findings
    trial = EnvTrial(rows=rows, caller=Caller(timeout_s), make=make)
    are_made_up = examples is None
    with contextlib.suppress(Stopped), contextlib.closing(trial.caller), contextlib.closing(trial):
        # The cheap checks come first.
        _check_construction(trial)
        _check_reset(trial, are_made_up)
        _check_steps(trial)
        _check_shared_state(trial)
        _check_outcome(trial, are_made_up)
    return trial.report.findings


# ---------------------------------------------------------------- construction and reset


def _check_construction(trial: EnvTrial) -> None:
    report = trial.report

    def are_one() -> bool:
        with made_and_closed(trial.make) as first, made_and_closed(trial.make) as second:
            return first is second

    made = trial.caller.call("making the environment", shared_pool(8).run(are_one, thread=OwnThread()))
    if made.failure:
        fix = (
            "Pass a class or function that works without arguments, e.g. functools.partial(MyEnv, argument=...). "
            "TRL's classes need reset(self, **row), and type hints and docstrings on their tools."
        )
        trial.stop("construction", f"No environment could be made: {made.failure}.", fix)
    if made.value:
        text = "The factory returns the same object every time: all trajectories would act in one environment."
        trial.stop("construction", text, "Return a new instance from it, or pass the class itself.")
    report.ok("construction", "Every trajectory gets an instance of its own.")


def _check_reset(trial: EnvTrial, are_made_up: bool) -> None:
    """The prompt of every row: its form, and that two instances agree on it; and the tools that it leaves."""
    report = trial.report
    for row in trial.rows:
        session, reset = trial.start(row)
        try:
            trial.tools_of_row[id(row)] = check_tools(report, getattr(session.env, "tools", None) or ())
        except Exception as error:  # no list, a property that raises, or a name in it that is no method
            report.error(
                "tools", f"{describe_error(error, 500)}.", f"Set tools = [function, ...] on the class. {DESCRIBE}"
            )
        if has_errors(finding for finding in report.findings if finding.check == "tools"):
            raise Stopped
        if reset.failure and are_made_up:
            text = f"{reset.failure}, on a made-up example ({', '.join(DEFAULT_EXAMPLE)}); nothing was tried."
            trial.stop("reset", text, "Pass rows of your data set: check_env(env, examples).", level="warning")
        if reset.failure:
            trial.stop("reset", f"{reset.failure}.", "It must turn a row of the data set into messages.")
        prompt = reset.value[0]
        if problem := bad_messages(prompt):
            fix = "Return a non-empty list of messages: [{'role': 'user', 'content': 'text'}]."
            trial.stop("reset", f"reset returned {problem}.", fix)
        if trial.fresh(row)[1] != prompt:
            text = "Two instances give different prompts for the same example: a group could not be compared."
            fix = (
                "Draw from random.Random(example['seed']) in reset, or from the reset_seed that a method "
                "seed(self, *, reset_seed, dynamics_seed) is given."
            )
            trial.stop("reset", text, fix)
    report.ok("reset", f"reset gives the same valid prompt for the same example ({len(trial.rows)} rows).")


# ---------------------------------------------------------------- episodes


def _check_steps(trial: EnvTrial) -> None:
    """Every row with valid calls, broken calls and odd messages, each in a fresh environment."""
    report, has_ended = trial.report, False
    for row in trial.rows:
        tools = trial.tools_of_row[id(row)]
        left = valid_messages(tools)
        while left:  # an episode may end before every tool was called: the next one goes on there
            episode = trial.run(row, "a valid call or a plain answer", left)
            has_ended |= episode.steps[-1].done
            for result in (item for step in episode.steps for item in step.info.get("tool_results") or ()):
                if getattr(result, "error", None) is ToolErrorKind.INVALID_ARGUMENTS:
                    report.skip("tools", f"Tool {result.call.name!r}: no arguments that fit its schema were found.")
            left = left[len(episode.steps) :]
        has_ended = has_ended or _goes_on_to_the_end(trial, episode, tools)
        for what, message in broken_calls(tools).items():
            step = trial.step(trial.fresh(row)[0], message, what)
            if step.done:
                text = f"{what[:1].upper()}{what[1:]} ends the episode: the policy gets no chance to repair it."
                report.warning("step", text, "Return an observation that says how to call, and done=False.")
            if step.reward > 0:
                text = f"{what[:1].upper()}{what[1:]} earns {step.reward:g}."
                report.warning("step", text, "Pay failing calls 0 or less.")
        for what, message in odd_messages(tools).items():
            trial.step(trial.fresh(row)[0], message, what)
    if not has_ended:
        text = f"No episode ended within {MAX_STEPS} calls and answers: if none ever does, all run into limits."
        report.warning("step", text, "Return done=True from step when the task is over.")
    report.ok("step", "step survives good, bad and odd messages and keeps its contract.")
    tools = list({found.name: found for tools in trial.tools_of_row.values() for found in tools}.values())
    in_order = ", ".join(found.name for found in tools if found.sequential)
    beside = f" Calls of one turn run one after another (sequential=False lifts that): {in_order}." if in_order else ""
    names = ", ".join(found.name for found in tools)
    report.ok("tools", f"Described, and called once: {names}.{beside}" if tools else "No tools.")


def _goes_on_to_the_end(trial: EnvTrial, episode: EnvEpisode, tools: Sequence[Tool]) -> bool:
    """Whether the episode ends if the model goes on answering and calling: after some user turns, or guesses."""
    *calls, answer = valid_messages(tools)
    turns = [answer]
    if calls:
        turns = [message for call in calls for message in (answer, call)]
    for message in itertools.islice(itertools.cycle(turns), MAX_STEPS):
        if trial.step(episode.session, message, "a valid call or a plain answer").done:
            return True
    return False


# ---------------------------------------------------------------- the outcome


def _check_outcome(trial: EnvTrial, are_made_up: bool) -> None:
    """Finished, cut and empty trajectories of every row: is each scored, and does not answering earn no more?"""
    report, env = trial.report, trial.fresh(trial.rows[0])[0].env
    own = getattr(type(env), "outcome_reward", None)
    is_tried = False
    is_wrong = False
    if not hasattr(env, "outcome_reward"):
        text = f"{type(env).__name__} has no outcome_reward: finished trajectories earn nothing from it."
        report.warning("outcome", text, "Define outcome_reward(self, trajectory), or pass reward_funcs.")
        return
    pays_for_calls = isinstance(env, ToolEnv) and env.has_reward and env.tool_call_reward > 0
    if own is ToolEnv.outcome_reward:  # always 0
        if pays_for_calls and any(trial.tools_of_row.values()) and type(env).process_reward is ToolEnv.process_reward:
            text = f"{type(env).__name__} defines neither outcome_reward nor process_reward: it pays for calls alone."
            fix = "Define outcome_reward(self, trajectory), or set tool_call_reward = 0 and pass reward_funcs."
            report.warning("outcome", text, fix)
        report.skip("outcome", "It has no outcome_reward of its own; reward functions are not called here.")
        return
    if pays_for_calls:
        cap, span = env.max_process_reward, env.success_reward - env.failure_reward
        if cap is None or cap > span:
            text = f"max_process_reward={cap}: calling tools can earn more than solving the task ({span:g})."
            report.warning("outcome", text, f"Set max_process_reward to at most {span:g}.")
    for row in trial.rows:
        cases = _outcome_cases(trial.tools_of_row[id(row)])
        scores = {what: _score(trial, row, what, *case) for what, case in cases.items()}
        wrong = scores["a wrong answer"]
        if _score(trial, row, "a wrong answer", *cases["a wrong answer"]) != wrong:
            text = "outcome_reward scores the same trajectory differently each time."
            report.warning("outcome", text, "Make it deterministic.")
        # The same calls in both: only answering makes the difference.
        cut = scores["a trajectory cut at the turn limit"]
        answered = scores["a wrong answer after calls"]
        if cut > answered:
            text = f"Never answering earns {cut:g}, a wrong answer {answered:g}: the policy learns not to answer."
            report.warning("outcome", text, "Score a missing answer like a wrong one, or lower.")
        found = _find_gold(row)
        # A TRL class scores what was done.
        if found is None or is_wrong or are_made_up or own is TRLEnvAdapter.outcome_reward:
            continue
        is_tried, (column, gold) = True, found
        forms = (f"{gold}", f"<answer>{gold}</answer>", f"\\boxed{{{gold}}}", f"#### {gold}")
        best = max(_score(trial, row, "the right answer", [say_text(text)], StopReason.DONE) for text in forms)
        if is_wrong := best <= wrong:
            text = f"The answer from the column {column!r} ({gold[:60]!r}) earns {best:g}, nonsense {wrong:g}."
            fix = (
                "See that outcome_reward reads the right column and the answer's form (plain text, <answer>, \\boxed "
                "and #### were tried). Fine if the task is not solved by what the final text says."
            )
            report.warning("outcome", text, fix)
    right = "the right answer earns more than nonsense" if is_tried else "what a right answer earns was not tried"
    report.ok("outcome", f"outcome_reward scores finished, cut and empty trajectories; {right}.")


def _find_gold(row: dict[str, Any]) -> tuple[str, str] | None:
    """The first column with a gold answer that is a text or a number, and that answer; None without one."""
    for name in GOLD_COLUMNS:
        with contextlib.suppress(ValueError):
            if gold := check_golds(row.get(name))[0]:
                return name, gold
    return None


def _outcome_cases(tools: list[Tool]) -> dict[str, tuple[list[Message], StopReason]]:
    """Messages to take before the trajectory is scored, and how it ends, by what they are."""
    invalid, nonsense = [broken_calls(tools)["an unknown tool"]], say_text(NONSENSE)
    calls = [call_tools(sample_call(tool)) for tool in tools[:1]] or invalid
    return {
        "a wrong answer": ([nonsense], StopReason.DONE),
        "an answer without content": ([say_text(None)], StopReason.DONE),
        "an empty trajectory (no turn at all)": ([], StopReason.MAX_COMPLETION_LENGTH),
        "a trajectory of invalid calls": (invalid, StopReason.INVALID_CALLS),
        "a trajectory cut at the turn limit": (calls, StopReason.MAX_TURNS),
        "a wrong answer after calls": ([*calls, nonsense], StopReason.DONE),
    }


def _score(trial: EnvTrial, row: dict[str, Any], what: str, messages: list[Message], reason: StopReason) -> float:
    """Run these messages in a fresh environment and let it score the trajectory."""
    episode = trial.run(row, what, messages)
    scored = trial.call("outcome", episode.session, episode.trajectory(reason))
    if scored.failure:
        fix = "Return a finite float, or (float, parts), also for a truncated trajectory, whose final_text may be ''."
        trial.stop("outcome", f"On {what} ({reason.value}): {scored.failure}.", fix)
    score: float = scored.value[0]
    return score


# ---------------------------------------------------------------- shared state


def _check_shared_state(trial: EnvTrial) -> None:
    """Whether an episode in one instance changes another, the class, or an object whose methods are tools."""
    row, report = trial.rows[0], trial.report
    bystander = trial.fresh(row)[0].env
    before = _snapshot(bystander)
    trial.run(row, "a valid call or a plain answer", valid_messages(trial.tools_of_row[id(row)]))
    after = _snapshot(bystander)
    changed = sorted(name for name in before if before[name] != after.get(name, before[name]))
    if attributes := [name for name in changed if " of the tool " not in name]:
        text = f"An episode in one instance changed {', '.join(attributes)} of another: all trajectories share it."
        fix = "Create it in reset or __init__ (self.name = []), copy what comes from outside; call a cache *_cache."
        report.error("state", text, fix)
    if owners := [name for name in changed if " of the tool " in name]:
        text = (
            f"An episode in one instance changed the {', '.join(owners)}: all trajectories share it, or its class's."
        )
        fix = "Unless that is meant, make one in each __init__ and list its methods: self.tools = [self.board.move]."
        report.warning("state", text, fix)
    report.ok("state", "An episode in one instance changed no attribute of another, of its class or of its tools.")


_CONTAINERS = (dict, list, set, collections.deque)


def _snapshot(env: object) -> dict[str, str]:
    """The attributes of an environment, its class and its bases (this package's excepted), and its tools' objects."""
    instance = env.environment if isinstance(env, TRLEnvAdapter) else env
    found = dict(getattr(instance, "__dict__", {}))
    for base in type(instance).__mro__:
        if base is not object and not base.__module__.startswith("agent_r1_trl."):
            found |= {f"{base.__name__}.{name}": value for name, value in vars(base).items()}
    found = {name: item for name, item in found.items() if not name.rpartition(".")[2].startswith("__")}
    for item in getattr(env, "tools", None) or ():
        owner = getattr(item, "owner", None) if isinstance(item, Tool) else None
        if owner is None or owner is env or owner is instance:
            continue
        shared = [owner]
        for base in type(owner).__mro__:
            shared += [value for value in vars(base).values() if isinstance(value, _CONTAINERS)]
        found[f"{type(owner).__name__} of the tool {item.name!r}"] = shared
    return {name: _freeze(item) for name, item in found.items() if "cache" not in name.lower()}


def _freeze(value: object, depth: int = 0, seen: frozenset[int] = frozenset()) -> str:
    """Text that changes when the value's plain content changes; opaque things count by identity."""
    opaque = f"<{type(value).__name__} {id(value)}>"
    if id(value) in seen or depth > 6:
        return opaque
    try:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, bytearray)):
            return repr(value)
        if hasattr(value, "tobytes") and hasattr(value, "shape"):  # an array
            return f"array {value.shape} {hash(value.tobytes())}"
        if isinstance(value, (set, frozenset)):
            parts: Any = sorted(value, key=repr)
        elif isinstance(value, (list, tuple, collections.deque)):
            parts = value
        elif isinstance(value, dict):
            parts = [part for item in value.items() for part in item]
        elif hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in _OPAQUE_MODULES:
            parts = [part for item in vars(value).items() for part in item]
        else:
            return opaque
        frozen = [_freeze(part, depth + 1, seen | {id(value)}) for part in list(parts)[:2000]]
        return f"{type(value).__name__} {len(parts)}: {', '.join(frozen)}"
    except Exception:  # a container that another thread is changing, an integer too long to print
        return opaque

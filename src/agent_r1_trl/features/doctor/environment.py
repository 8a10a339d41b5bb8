"""check_env: a linter for environments and their tools, to run before money is spent.

It plays short episodes with good, bad and odd assistant messages and reports what would break training, teach the
wrong thing, or leak from one trajectory into another. It loads neither torch nor transformers.

    for finding in check_env(MyEnv, dataset):
        print(finding.level, finding.message, finding.cure)
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import inspect
import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.environments.trl_adapters import TRLEnvAdapter
from agent_r1_trl.features.doctor.episodes import (
    DESCRIBE,
    Caller,
    EnvEpisode,
    EnvTrial,
    Stopped,
    bad_messages,
    check_tools,
    list_tools,
    make_env,
)
from agent_r1_trl.features.doctor.report import Finding, describe_error
from agent_r1_trl.settings import Count, Seconds, check_value
from agent_r1_trl.tools import Tool, ToolSchemaError, shared_pool
from agent_r1_trl.tools.threads import OwnThread
from agent_r1_trl.trajectory import Message, StopReason

MAX_ANSWERS = 8
"""Answers after which an episode that has not ended counts as endless."""
GOLD_COLUMNS = ("answer", "answers", "golden_answers", "gold", "solution")
DEFAULT_EXAMPLE = {
    "prompt": [{"role": "user", "content": "What is the capital of Norway?"}],
    "question": "What is the capital of Norway?",
    "answer": "Oslo",
}
NONSENSE = "zxqv wrong answer zxqv"
_METHODS = {
    "reset": "(self, example)",
    "step": "(self, message)",
    "close": "(self)",
    "outcome_reward": "(self, trajectory)",
    "process_reward": "(self, call, result)",
    "next_user_message": "(self, message)",
}
_TEXTS = {"expression": "1 + 1", "query": "capital of Norway", "url": "https://example.org", "code": "print(1)"}
# Objects of these modules count by identity: what they hold is machinery, not the state of an episode.
_OPAQUE_MODULES = {*sys.stdlib_module_names, "agent_r1_trl"}


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
    check_value("num_episodes", num_episodes, Count)
    check_value("timeout_s", timeout_s, Seconds)
    rows: Any = [copy.deepcopy(DEFAULT_EXAMPLE)] if examples is None else examples
    if isinstance(rows, (dict, str)) or not hasattr(rows, "__iter__"):
        raise ValueError(f"examples={examples!r:.100}: must be a list of rows (dicts) or a data set.")
    rows = list(itertools.islice(rows, num_episodes))
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"examples={rows!r:.100}: must hold at least one row, and every row must be a dict.")
    trial = EnvTrial(rows=rows, are_made_up=examples is None, caller=Caller(timeout_s))
    report = trial.report
    # The cheap checks come first; those that need something that failed are left out.
    with contextlib.suppress(Stopped), contextlib.closing(trial.caller):
        env = _check_construction(trial, env_or_factory)
        with contextlib.suppress(Exception):  # tools that exist only after reset; `_check_reset` looks at them
            trial.tools = check_tools(report, getattr(env, "tools", None) or ())
        _check_methods(trial, env)
        if not report.has_errors("construction", "tools", "methods"):
            _check_reset(trial)
        if trial.rows and not report.has_errors("construction", "tools", "methods", "reset"):
            _check_steps(trial)
            report.ok("tools", list_tools(trial.tools))
            if not report.has_errors("step"):
                _check_outcome(trial)
                if not trial.is_instance:
                    _check_shared_state(trial)
            _check_close(trial)
    return report.findings


# ---------------------------------------------------------------- construction and methods


def _check_construction(trial: EnvTrial, given: Any) -> Any:
    """Make an environment from what the user passed, and find out how to make more of them."""
    report = trial.report
    if not (isinstance(given, dict) or callable(given) or hasattr(given, "reset")):
        message = f"{type(given).__name__} is neither an environment nor a function that makes one."
        report.error("construction", message, "Pass the environment's class.")
        raise Stopped
    if hasattr(given, "reset") and not inspect.isclass(given):
        trial.is_instance = True
        text = "An instance was given: whether trajectories share state could not be checked."
        report.warning("construction", text, "Pass the class, or a function that makes an instance.")
    trial.make = functools.partial(make_env, given)
    env = trial.new()
    if trial.new() is env:
        text = "The factory returns the same object every time: all trajectories would act in one environment."
        report.error("construction", text, "Return a new instance from it, or pass the class itself.")
    report.ok("construction", "Every trajectory gets an instance of its own.")
    return env


def _check_methods(trial: EnvTrial, env: Any) -> None:
    """The protocol's methods and their arguments, and the settings of a `ToolEnv`."""
    report, cls, name = trial.report, type(env), type(env).__name__
    for method, form in _METHODS.items():
        if hasattr(env, method) or method in ("reset", "step"):
            try:
                inspect.signature(getattr(env, method, None)).bind(*[None] * form.count(","))  # type: ignore[arg-type]
            except TypeError:
                cure = f"Define {method}{form}, or subclass agent_r1_trl.ToolEnv, which has it."
                report.error("methods", f"{name} has no method {method}{form}.", cure)
    if getattr(env, "outcome_reward", None) is None:
        text = f"{name} has no outcome_reward: finished trajectories earn nothing from it."
        report.warning("methods", text, "Define outcome_reward(self, trajectory), or pass reward_funcs.")
    if isinstance(env, ToolEnv):
        try:
            env._check_settings()
        except ValueError as error:
            report.error("methods", str(error), "Set it to a value in that range.")
            return
        cap, span = env.max_process_reward, env.success_reward - env.failure_reward
        pays_for_calls = env.has_reward and env.tool_call_reward > 0
        if pays_for_calls and cls.outcome_reward is not ToolEnv.outcome_reward and (cap is None or cap > span):
            text = f"{name}.max_process_reward={cap}: calling tools can earn more than solving the task ({span:g})."
            report.warning("methods", text, f"Set max_process_reward to at most {span:g}.")
        if env.tool_error_reward > 0:
            text = f"{name}.tool_error_reward={env.tool_error_reward}: failing calls are rewarded."
            report.warning("methods", text, "Set it to 0 or below.")
    report.ok("methods", "All methods are there and take the right arguments.")


# ---------------------------------------------------------------- what is played


def _answer(text: str | None) -> Message:
    return {"role": "assistant", "content": text}


def _calls(*calls: tuple[Any, Any]) -> Message:
    """An assistant message with these (name, arguments) calls, as the rollout's parser makes it."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    made = [{"type": "function", "id": f"check_{i}", "function": function} for i, function in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _valid_messages(tools: Sequence[Tool]) -> list[Message]:
    """One valid call of each tool, all of them in one message, and a wrong answer."""
    calls = [_sample_call(found) for found in tools]
    return [*map(_calls, calls), *([_calls(*calls)] if len(calls) > 1 else []), _answer(NONSENSE)]


def _broken_calls(tools: Sequence[Tool]) -> dict[str, Message]:
    """Broken calls as real models write them, by what is wrong with them."""
    name = tools[0].name if tools else "search"
    cut_off = {**_answer('<tool_call>{"name": "sea'), "malformed_tool_call": "the call ends in the middle"}
    return {
        "an unknown tool": _calls(("no_such_tool", {})),
        "arguments the tool does not have": _calls((name, {"no_such_argument": 1})),
        "arguments that are a list": _calls((name, [1, 2])),
        "arguments that are no JSON": _calls((name, '{"query": "un')),
        "a call that is a number": {**_answer(""), "tool_calls": [5]},
        "a call without a name": {**_answer(""), "tool_calls": [{"function": {}}]},
        "a call cut off half way": cut_off,
    }


def _odd_messages(tools: Sequence[Tool]) -> dict[str, Message]:
    """Other unusual messages that `step` must survive, by what they are."""
    return {
        "a call without arguments": _calls((tools[0].name if tools else "search", None)),
        "an empty answer": _answer(""),
        "an answer without content (None)": _answer(None),
        "an answer of odd characters": _answer("\u0000\u202e\U0001f600 e\u0301 <|im_end|> </answer> {{ x }}"),
    }


def _sample_call(tool: Tool) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call that the tool's schema allows."""
    return tool.name, _sample({"type": "object", **tool.schema["function"]["parameters"]})


def _sample(schema: Any, name: str = "") -> Any:
    """A value that a JSON schema allows; for free text, one that suits an argument of this name."""
    schema = schema if isinstance(schema, dict) else {}
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples", "anyOf", "oneOf"):
        if schema.get(key):
            return schema[key][0] if key in ("enum", "examples") else _sample(schema[key][0], name)
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties: dict[str, Any] = schema.get("properties") or {}
        return {key: _sample(properties.get(key), key) for key in schema.get("required", properties)}
    if kind == "array":
        return [_sample(item) for item in schema.get("prefixItems") or [schema.get("items")]]
    least = max(1, schema.get("minimum", 1), schema.get("exclusiveMinimum", 0) + 1)
    values = {"integer": int(least), "number": float(least), "boolean": True, "null": None}
    return values.get(kind, _TEXTS.get(name, "test"))


# ---------------------------------------------------------------- episodes


def _check_reset(trial: EnvTrial) -> None:
    """The prompt of every row: its form, and that two instances agree on it; and the tools that it leaves."""
    report = trial.report
    for row in trial.rows:
        session, reset = trial.start(row)
        try:
            found = check_tools(report, getattr(session.env, "tools", None) or ())
        except Exception as error:  # a property, or a name in the list that is no method
            cure = DESCRIBE if isinstance(error, ToolSchemaError) else "Set tools = [function, ...] on the class."
            report.error("tools", f"{describe_error(error, 500)}.", cure)
            return
        trial.tools_of_row[id(row)] = found
        names = {tool.name for tool in trial.tools}
        trial.tools += [tool for tool in found if tool.name not in names]
        if report.has_errors("tools"):
            return
        if reset.failure and trial.are_made_up:
            text = f"{reset.failure}, on a made-up example ({', '.join(DEFAULT_EXAMPLE)}); nothing was played."
            report.warning("reset", text, "Pass rows of your data set: check_env(env, examples).")
            trial.rows = []
            return
        if reset.failure:
            report.error("reset", f"{reset.failure}.", "It must turn a row of the data set into messages.")
            return
        prompt = reset.value[0]
        if problem := bad_messages(prompt) if prompt else "an empty prompt":
            cure = "Return a non-empty list of messages: [{'role': 'user', 'content': 'text'}]."
            report.error("reset", f"reset returned {problem}.", cure)
            return
        if prompt[-1]["role"] == "assistant":
            text = "The prompt ends with an assistant message, but it is the model's turn."
            report.warning("reset", text, "End it with role 'user'.")
        if trial.fresh(row)[1] != prompt:
            text = "Two instances give different prompts for the same example: a group could not be compared."
            cure = (
                "Draw from random.Random(example['seed']) in reset, or from the reset_seed that a method "
                "seed(self, *, reset_seed, dynamics_seed) is given."
            )
            report.error("reset", text, cure)
    report.ok("reset", "reset gives the same valid prompt for the same example.")


def _check_steps(trial: EnvTrial) -> None:
    """Every row with valid calls, broken calls and odd messages, each in a fresh environment."""
    report, has_ended = trial.report, False
    for row in trial.rows:
        played = trial.play(row, "a valid call or a plain answer", _valid_messages(trial.tools_for(row)))
        has_ended |= played is not None and (played.steps[-1].done or _answers_to_the_end(trial, played))
        for what, message in _broken_calls(trial.tools_for(row)).items():
            step = trial.step(trial.fresh(row)[0], message, what)
            if step is not None and step.done:
                text = f"{what[:1].upper()}{what[1:]} ends the episode: the policy gets no chance to repair it."
                report.warning("step", text, "Return an observation that says how to call, and done=False.")
            if step is not None and step.reward > 0:
                text = f"{what[:1].upper()}{what[1:]} earns {step.reward:g}."
                report.warning("step", text, "Pay failing calls 0 or less.")
        for what, message in _odd_messages(trial.tools_for(row)).items():
            trial.step(trial.fresh(row)[0], message, what)
        if report.has_errors("step"):
            return
    if not has_ended:
        text = "No episode ended, neither after tool calls nor after an answer: all trajectories will run into limits."
        report.warning("step", text, "Return done=True from step when the task is over.")
    report.ok("step", "step survives good, bad and odd messages and keeps its contract.")


def _answers_to_the_end(trial: EnvTrial, played: EnvEpisode) -> bool:
    """Whether the episode ends if the model goes on answering: there may be several user turns."""
    for _ in range(MAX_ANSWERS):
        step = trial.step(played.session, _answer(NONSENSE), "a plain answer")
        if step is None or step.done:
            return step is not None
    return False


def _check_close(trial: EnvTrial) -> None:
    """Before reset has run, and after it."""

    async def close(env: Any, thread: OwnThread) -> None:
        is_async = inspect.iscoroutinefunction(env.close)
        closed = env.close() if is_async else await thread.run(env.close, pool=shared_pool(8))
        if inspect.isawaitable(closed):
            await closed

    thread, session = OwnThread(), trial.fresh(trial.rows[0])[0]
    made = (("before reset had run", trial.new(thread), thread), ("after reset", session.env, session.thread))
    for when, env, own in made if hasattr(session.env, "close") else ():
        if failure := trial.caller.call("close", close(env, own)).failure:
            cure = "Set what close uses in __init__, or use getattr(self, name, None): a failed reset is closed, too."
            trial.report.error("close", f"close, called {when}, failed: {failure}.", cure)
    trial.report.ok("close", "close works before and after reset.")


# ---------------------------------------------------------------- the outcome


def _check_outcome(trial: EnvTrial) -> None:
    """Finished, cut and empty trajectories of every row: is each scored, and does not answering earn no more?"""
    env, report = trial.new(), trial.report
    if getattr(env, "outcome_reward", None) is None:
        return
    cls, own = type(env), getattr(type(env), "outcome_reward", None)
    pays_for_calls = isinstance(env, ToolEnv) and env.has_reward and env.tool_call_reward > 0 and bool(trial.tools)
    if pays_for_calls and own is ToolEnv.outcome_reward and cls.process_reward is ToolEnv.process_reward:
        text = f"{cls.__name__} defines neither outcome_reward nor process_reward: it pays for calls, not for answers."
        cure = "Define outcome_reward(self, trajectory), or set tool_call_reward = 0 and pass reward_funcs."
        report.warning("outcome", text, cure)
    for row in trial.rows:
        cases = _outcome_cases(trial.tools_for(row))
        scores = {what: _score(trial, row, what, *case) for what, case in cases.items()}
        wrong = scores["a wrong answer"]
        if wrong is not None and _score(trial, row, "a wrong answer", *cases["a wrong answer"]) != wrong:
            text = "outcome_reward scores the same trajectory differently each time."
            report.warning("outcome", text, "Make it deterministic.")
        # The same calls in both: only answering makes the difference.
        cut, answered = scores["a trajectory cut at the turn limit"], scores["a wrong answer after calls"]
        if cut is not None and answered is not None and cut > answered:
            text = f"Never answering earns {cut:g}, a wrong answer {answered:g}: the policy learns not to answer."
            report.warning("outcome", text, "Score a missing answer like a wrong one, or lower.")
        # A TRL class scores what was done, a ToolEnv without an outcome_reward of its own nothing.
        reads_answer = own not in (TRLEnvAdapter.outcome_reward, ToolEnv.outcome_reward)
        column = next((name for name in GOLD_COLUMNS if row.get(name)), None)
        if wrong is None or column is None or not reads_answer or trial.are_made_up or report.has_errors("outcome"):
            continue
        gold = row[column][0] if isinstance(row[column], (list, tuple)) else row[column]
        forms = (f"{gold}", f"<answer>{gold}</answer>", f"\\boxed{{{gold}}}", f"#### {gold}")
        found = [_score(trial, row, "the right answer", [_answer(text)], StopReason.DONE) for text in forms]
        best = max((score for score in found if score is not None), default=None)
        if best is not None and best <= wrong:
            text = f"The answer from the column {column!r} ({str(gold)[:60]!r}) earns {best:g}, nonsense {wrong:g}."
            cure = (
                "See that outcome_reward reads the right column and the answer's form (plain text, <answer>, \\boxed "
                "and #### were tried). Fine if the task is not solved by what the final text says."
            )
            report.warning("outcome", text, cure)
    report.ok("outcome", "outcome_reward scores finished, cut and empty trajectories.")


def _outcome_cases(tools: list[Tool]) -> dict[str, tuple[list[Message], StopReason]]:
    """Messages to play before the trajectory is scored, and how it ends, by what they are."""
    invalid, nonsense = [_broken_calls(tools)["an unknown tool"]], _answer(NONSENSE)
    calls = [_calls(_sample_call(tool)) for tool in tools[:1]] or invalid
    return {
        "a wrong answer": ([nonsense], StopReason.DONE),
        "an answer without content": ([_answer(None)], StopReason.DONE),
        "an empty trajectory (no turn at all)": ([], StopReason.MAX_COMPLETION_LENGTH),
        "a trajectory of invalid calls": (invalid, StopReason.INVALID_CALLS),
        "a trajectory cut at the turn limit": (calls, StopReason.MAX_TURNS),
        "a wrong answer after calls": ([*calls, nonsense], StopReason.DONE),
    }


def _score(
    trial: EnvTrial, row: dict[str, Any], what: str, messages: list[Message], stop_reason: StopReason
) -> float | None:
    """Play these messages in a fresh environment and let it score the trajectory; None if it cannot."""
    played = trial.play(row, what, messages)
    if played is None:
        raise Stopped
    scored = trial.call("outcome", played.session, played.trajectory(stop_reason))
    if scored.failure:
        cure = "Return a finite float, or (float, parts), also for a truncated trajectory, whose final_text may be ''."
        trial.report.error("outcome", f"On {what} ({stop_reason.value}): {scored.failure}.", cure)
        return None
    return scored.value[0]


# ---------------------------------------------------------------- shared state


def _check_shared_state(trial: EnvTrial) -> None:
    """Whether an episode in one instance changes another, the class, or an object whose methods are tools."""
    row, report = trial.rows[0], trial.report
    bystander = trial.fresh(row)[0].env
    listed = [item for item in getattr(bystander, "tools", None) or () if isinstance(item, Tool)]
    env = bystander.environment if isinstance(bystander, TRLEnvAdapter) else bystander
    owners = {
        f"{type(item.owner).__name__} of the tool {item.name!r}": item.owner
        for item in listed
        if item.owner not in (None, bystander, env)
    }
    before, held = _snapshot(env), {name: _held_by(owner) for name, owner in owners.items()}
    if trial.play(row, "a valid call or a plain answer", _valid_messages(trial.tools_for(row))) is None:
        return
    after = _snapshot(env)
    if changed := sorted(name for name in before if before[name] != after.get(name, before[name])):
        text = f"An episode in one instance changed {', '.join(changed)} of another: all trajectories share it."
        cure = "Create it in reset or __init__ (self.name = []), copy what comes from outside; call a cache *_cache."
        report.error("state", text, cure)
    if changed := sorted(name for name, owner in owners.items() if held[name] != _held_by(owner)):
        text = (
            f"An episode in one instance changed the {', '.join(changed)}: all trajectories share it, or its class's."
        )
        cure = "Unless that is meant, make one in each __init__ and list its methods: self.tools = [self.board.move]."
        report.warning("state", text, cure)
    report.ok("state", "Two instances share no state.")


def _held_by(owner: Any) -> str:
    """The content of an object, and of the containers of its class, which all its instances share."""
    found = [pair for base in type(owner).__mro__ for pair in vars(base).items()]
    held = [item for name, item in found if not name.startswith("_") and "cache" not in name.lower()]
    return _freeze(owner) + _freeze([item for item in held if isinstance(item, (dict, list, set, collections.deque))])


def _snapshot(instance: Any) -> dict[str, str]:
    """The attributes of an instance, its class and its bases (this package's excepted), as text."""
    found = dict(getattr(instance, "__dict__", {}))
    for base in type(instance).__mro__:
        if base is not object and not base.__module__.startswith("agent_r1_trl."):
            found |= {f"{base.__name__}.{name}": value for name, value in vars(base).items()}
    return {name: _freeze(item) for name, item in found.items() if "__" not in name and "cache" not in name.lower()}


def _freeze(value: Any, depth: int = 0, seen: frozenset[int] = frozenset()) -> str:
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

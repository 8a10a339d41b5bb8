"""Who is charged for a failed call: every kind of failure, every error of a tool, every place that takes a reward.

`ToolResult.is_charged` decides, and the default is: not the policy. A new kind, or a new place that names the penalty,
fails here until it has a row in the tables below and a test that plays it.
"""

import ast
import asyncio
import dataclasses
import itertools
import json
import os
import re
import socket
import subprocess
import time
import types
from pathlib import Path
from xml.etree import ElementTree

import aiohttp
import httpx
import pydantic
import pytest
from langchain_core.tools import ToolException

import agent_r1_trl
from agent_r1_trl import StopReason, Tool, ToolEnv, check_env
from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.environments import FunctionToolsEnv, SearchQAEnv, TRLEnvAdapter
from agent_r1_trl.evaluation.baselines import OneAnswerEnv
from agent_r1_trl.features.doors import OpenEnv
from agent_r1_trl.features.sandbox import PythonTool, SandboxLimits
from agent_r1_trl.rollout.draft import record_step
from agent_r1_trl.testing import call, calls, chat_of, make_tokenizer, say
from agent_r1_trl.tools import (
    InfrastructureError,
    ReportedError,
    ToolCall,
    ToolErrorKind,
    ToolExecutor,
    ToolFault,
    ToolResult,
    calculator,
)
from agent_r1_trl.tools.faults import HandledError, ServerError
from agent_r1_trl.trainers.metrics import rollout_metrics, trajectory_record
from agent_r1_trl.trajectory import Turn
from tests.environments.helpers import finished, message
from tests.features.doors.agents import TOOLS, ask, checked
from tests.features.doors.agents import roll_out as roll_out_agent
from tests.features.games.test_games import counter
from tests.rollout.helpers import roll_out

SRC = Path(agent_r1_trl.__file__).parent
PENALTY = -0.1
TOLD = "tea ("
"""What the model writes, where nothing depends on it."""
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


def look(failure, **settings):
    """A tool that raises an error, or fails as a function of its text does."""

    def fail(text):
        if isinstance(failure, BaseException):
            raise failure
        return failure(text)

    schema = {"name": "look", "description": "Look.", "parameters": TEXT}
    return Tool(fail, schema=schema, **{"attempts": 1, "timeout_s": 0.2} | settings)


def stepped(env, *pairs, **said):
    """The step of an environment that has just begun, after a message with these calls."""
    env.reset({"prompt": "go"})
    return asyncio.run(env.step(message(*pairs, **said)))


def result_of(failure, text=TOLD, **settings):
    (result,) = asyncio.run(
        ToolExecutor([look(failure, **settings)]).execute([ToolCall(name="look", arguments={"text": text})])
    )
    return result


# -------------------------------------------------------------------- kinds


async def hangs(text):
    await asyncio.sleep(5)


KINDS = {
    ToolErrorKind.MALFORMED: (True, {"malformed_tool_call": "no JSON"}, None),
    ToolErrorKind.UNKNOWN_TOOL: (True, {}, ("nope", {})),
    ToolErrorKind.INVALID_ARGUMENTS: (True, {}, ("look", {"text": 5})),
    ToolErrorKind.TOO_MANY: (True, {}, ("look", {"text": "a"})),
    ToolErrorKind.EXCEPTION: (False, {}, ("look", {"text": "a"})),
    ToolErrorKind.TIMEOUT: (False, {}, ("look", {"text": "a"})),
    ToolErrorKind.INFRASTRUCTURE: (False, {}, ("look", {"text": "a"})),
}
"""Of each kind: whether the policy is charged where nobody says more, and what it says to fail so."""


@pytest.mark.parametrize("kind", ToolErrorKind)
def test_each_kind_of_failure_is_charged_as_the_table_says(kind):
    is_charged, said, pair = KINDS[kind]
    failure = {ToolErrorKind.INFRASTRUCTURE: InfrastructureError("gone"), ToolErrorKind.EXCEPTION: RuntimeError("bug")}
    tool = look(failure.get(kind) or (hangs if kind is ToolErrorKind.TIMEOUT else str))
    if kind is ToolErrorKind.TIMEOUT:
        tool = Tool(hangs, schema=tool.schema, name="look", timeout_s=0.05)
    env = ToolEnv(tools=[tool], max_calls_per_turn=1, tool_call_reward=0.0)
    pairs = [("look", {"text": "b"}), pair] if kind is ToolErrorKind.TOO_MANY else [pair] * (pair is not None)
    step = stepped(env, *pairs, **said)
    result = step.info["tool_results"][-1]
    assert (result.error, result.is_charged) == (kind, is_charged)
    assert (
        step.reward == pytest.approx(PENALTY * is_charged)
        and ("tool_error" in step.info["reward_parts"]) == is_charged
    )
    assert step.info["is_invalid"] == (result.is_refused and kind is not ToolErrorKind.TOO_MANY)


def test_a_kind_without_a_row_is_not_charged_and_every_kind_has_one():
    assert set(KINDS) == set(ToolErrorKind)
    assert not ToolResult(call=ToolCall(name="x", arguments={}), content="", error="of a later release").is_charged
    assert ToolResult(call=ToolCall(name="x", arguments={}), content="").fault is None


def test_a_tool_whose_own_schema_is_broken_fails_by_itself_whatever_the_model_writes():
    def broken(x: int = "one"):
        """Look."""

    for arguments in ({"x": 1}, {"y": 2}, "{", []):
        (result,) = asyncio.run(ToolExecutor([broken]).execute([ToolCall(name="broken", arguments=arguments)]))
        assert result.is_infrastructure_failure and not result.is_charged, arguments


# -------------------------------------------------------------------- errors of a tool


def named(name, *args, base=Exception, **attributes):
    """An error of a library that need not be installed."""
    return type(name, (base,), attributes)(*args)


class Unshown:
    def __str__(self):
        raise ValueError("cannot be shown")


def chained(error, cause):
    error.__cause__ = cause
    return error


class Reply(pydantic.BaseModel):
    number: int


@dataclasses.dataclass
class Checked:
    text: str

    def __post_init__(self):
        self.text.no_such_method()


@dataclasses.dataclass
class Strict:
    text: str

    def __post_init__(self):
        if self.text != "tea":
            raise KeyError(self.text)


def defined_by_the_model(text):
    names = {}
    exec("def solve(x):\n    return x.size", names)
    return names["solve"](5)


CHARGED = {
    "reported": ReportedError("no"),
    "handled": HandledError("no such city"),
    "handled, of a cause": chained(HandledError("no such city"), RuntimeError("x")),
    "LangChain's": ToolException("no such city"),
    "ValueError": ValueError("x"),
    "KeyError": KeyError("x"),
    "IndexError": IndexError("x"),
    "ZeroDivisionError": ZeroDivisionError(),
    "AssertionError": AssertionError(),
    "SyntaxError": lambda text: ast.parse("1 +"),
    "RecursionError": RecursionError(),
    "regular expression": lambda text: re.compile(text),
    "JSON of the arguments": lambda text: json.loads(text),
    "a file that they name": lambda text: Path(f"/no/such/{text}.txt").read_text(),
    "no file, in words": FileNotFoundError(f"there is no note {TOLD}"),
    "404": named("HTTPError", "x", response=types.SimpleNamespace(status_code=404)),
    "NameError of evaluated code": lambda text: eval("undefined_name"),
    "TypeError of evaluated code": lambda text: eval("len(5)"),
    "AttributeError of evaluated code": lambda text: exec("(1).x", {}),
    "pydantic, of the arguments": lambda text: Reply.model_validate({"number": text}),
    "group of ValueErrors": ExceptionGroup("x", [ValueError(), KeyError()]),
}
UNCHARGED = {
    "of another class": named("ToolError", "no such city"),
    "that cannot be shown": RuntimeError(Unshown()),
    "Exception": Exception("x"),
    "RuntimeError": RuntimeError("x"),
    "TypeError": TypeError("x"),
    "AttributeError": AttributeError("x"),
    "NameError": NameError("x"),
    "ImportError": ImportError("x"),
    "NotImplementedError": NotImplementedError(),
    "MemoryError": MemoryError(),
    "SystemExit": SystemExit(1),
    "StopIteration": lambda text: next(iter(())),
    "OSError": OSError(28, "No space left on device"),
    "ConnectionError": ConnectionRefusedError(),
    "TimeoutError": TimeoutError(),
    "a program that took too long": subprocess.TimeoutExpired("python", 3),
    "gaierror": socket.gaierror(-2, "unknown"),
    "ValueError after a lost connection": chained(ValueError("no such city"), ConnectionResetError()),
    "500": named("HTTPError", "x", response=types.SimpleNamespace(status_code=500)),
    "401": named("HTTPError", "x", response=types.SimpleNamespace(status_code=401)),
    "JSON of a server": lambda text: json.loads("<html>"),
    "JSON of an empty answer": lambda text: json.loads(""),
    "XML of a server": lambda text: ElementTree.fromstring("<a"),
    "bytes of a server": lambda text: b"\xff".decode(),
    "pydantic, of an empty answer": lambda text: Reply.model_validate({}),
    "pydantic, of a null": lambda text: Reply.model_validate({"number": None}),
    "pydantic, of an answer": lambda text: Reply.model_validate({"number": "many", "unit": "?"}),
    "an index that is missing": lambda text: Path("/data/index.bin").read_text(),
    "a key that is not set": lambda text: os.environ["NO_SUCH_KEY"],
    "a function of a dataclass": lambda text: Checked(text),
    "handled, of a lost connection": chained(HandledError("no answer"), ConnectionResetError()),
    "a server's": ServerError("Internal error"),
    "group with a RuntimeError": ExceptionGroup("x", [ValueError(), RuntimeError()]),
}


@pytest.mark.parametrize("name", [*CHARGED, *UNCHARGED])
def test_an_undeclared_error_is_charged_by_pythons_convention_alone(name):
    failure, is_charged = (CHARGED | UNCHARGED)[name], name in CHARGED
    step = stepped(ToolEnv(tools=[look(failure)]), ("look", {"text": TOLD}))
    (result,) = step.info["tool_results"]
    assert (result.error, result.is_charged) == (ToolErrorKind.EXCEPTION, is_charged)
    assert step.info["reward_parts"] == ({"tool_error": PENALTY} if is_charged else {})
    assert step.reward == (PENALTY if is_charged else 0.0) and not step.done and not step.info["is_invalid"]
    if not isinstance(failure, HandledError | ReportedError):
        assert "'look' failed: " in step.observations[0]["content"], "the model reads it all the same"
    assert result_of(failure, user_errors=()).is_charged == isinstance(failure, ReportedError)


def test_declared_errors_are_charged_and_no_others():
    for declared, failure, is_charged in (
        ((KeyError,), KeyError("x"), True), ((KeyError,), ValueError("x"), False), (RuntimeError, RuntimeError(), 1),
        ((), ValueError("x"), False), ((), ReportedError("x"), True), ((Exception,), TypeError(), True),
        ((KeyError,), chained(HandledError("x"), KeyError()), True), ((KeyError,), HandledError("x"), False),
        ((ConnectionError,), ConnectionResetError(), True), ((KeyError,), lambda text: eval("undefined"), False),
    ):  # fmt: skip
        assert result_of(failure, user_errors=declared).is_charged == is_charged, (declared, failure)


@pytest.mark.parametrize(("backend", "kind"), [(False, ToolErrorKind.TIMEOUT), (True, ToolErrorKind.INFRASTRUCTURE)])
def test_a_call_that_takes_too_long_is_charged_if_the_tool_declares_it(backend, kind):
    settings = {"schema": look(str).schema, "timeout_s": 0.05, "backend": backend, "attempts": 1}
    for declared, expected in ((None, (kind, False)), ((TimeoutError,), (ToolErrorKind.TIMEOUT, True))):
        tool = Tool(hangs, name="look", user_errors=declared, **settings)
        (result,) = asyncio.run(ToolExecutor([tool]).execute([ToolCall(name="look", arguments={"text": "a"})]))
        assert (result.error, result.is_charged) == expected


def test_functions_that_the_model_defined_are_its_own():
    (result,) = asyncio.run(
        ToolExecutor([look(defined_by_the_model)]).execute(
            [ToolCall(name="look", arguments={"text": "def solve(x):\n    return x.size"})]
        )
    )
    assert result.is_charged and not result_of(defined_by_the_model).is_charged


def test_a_bug_in_a_validator_is_no_wrong_argument():
    def good(x: Strict):
        """Look."""

    def bad(x: Checked):
        """Look."""

    asked = [ToolCall(name=name, arguments={"x": {"text": "milk"}}) for name in ("good", "bad")]
    refused, failed = asyncio.run(ToolExecutor([good, bad]).execute(asked))
    assert (refused.error, refused.is_charged) == (ToolErrorKind.INVALID_ARGUMENTS, True)
    assert (failed.error, failed.is_charged) == (ToolErrorKind.EXCEPTION, False) and "no_such_method" in failed.content


def test_what_the_tools_here_refuse_is_declared():
    assert calculator.user_errors == (ValueError,)
    for cls, charged in ((ValueError, True), (KeyError, False)):
        assert result_of(cls("x"), user_errors=calculator.user_errors).is_charged == charged


# -------------------------------------------------------------------- event loops and clients


def on_another_loop(start):
    """A function of an async tool, of something that another event loop has made and closed."""
    loop = asyncio.new_event_loop()
    made = loop.run_until_complete(start())
    loop.close()
    return made


async def held_lock():
    lock = asyncio.Lock()
    await lock.acquire()
    waiting = asyncio.ensure_future(lock.acquire())  # the first who waits binds it to the loop
    await asyncio.sleep(0)
    waiting.cancel()
    return lock


async def made_future():
    return asyncio.get_running_loop().create_future()


async def closed_session():
    session = aiohttp.ClientSession()
    await session.close()
    return session


def async_tool(name):
    lock, future, session = on_another_loop(held_lock), on_another_loop(made_future), on_another_loop(closed_session)
    client = httpx.Client()
    client.close()

    async def fail(text):
        if name == "lock":
            await lock.acquire()
        if name == "future":
            await future
        if name == "aiohttp":
            await session.get("http://localhost:1")
        if name == "httpx":
            client.get("http://localhost:1")
        if name == "run":
            asyncio.run(asyncio.sleep(0))
        if name == "closed loop":
            future.get_loop().call_soon(print)

    return Tool(fail, schema=look(str).schema, name="look", attempts=1)


@pytest.mark.parametrize("name", ["lock", "future", "aiohttp", "httpx", "run", "closed loop"])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_errors_of_event_loops_and_closed_clients_are_the_infrastructures(name):
    step = stepped(ToolEnv(tools=[async_tool(name)]), ("look", {"text": "a"}))
    (result,) = step.info["tool_results"]
    assert result.is_infrastructure_failure, result.content
    assert step.reward == 0.0 and step.info["reward_parts"] == {}


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Event loop is closed"),
        RuntimeError("Task <Task pending coro=<f()>> got Future <Future pending> attached to a different loop"),
        RuntimeError("<asyncio.locks.Lock object at 0x7f [locked]> is bound to a different event loop"),
        RuntimeError("read() called while another coroutine is already waiting for incoming data"),
        RuntimeError("Session is closed"),
        ValueError("The future belongs to a different loop than the one specified as the loop argument"),
        ValueError("I/O operation on closed file."),
        named("InterfaceError", "cannot perform operation: another operation is in progress"),
        named("InterfaceError", "cannot perform operation: connection is closed"),
        named("InterfaceError", "pool is closing"),
        named("InterfaceError", "connection already closed"),
        named("InterfaceError", "cannot call PreparedStatement.fetch(): the underlying connection is closed"),
        named("OperationalError", "sending query failed: another command is already in progress"),
        ValueError("no active connection"),
        named("OperationalError", "the connection is closed"),
        named("ProgrammingError", "Cannot operate on a closed database."),
        named("ConnectionError", "Connection closed by server."),
        named("ClosedResourceError"),
        chained(KeyError("no such row"), RuntimeError("Event loop is closed")),
    ],
    ids=repr,
)  # fmt: skip
def test_texts_of_event_loops_and_clients_of_other_libraries_are_known(error):
    for settings in ({}, {"user_errors": (KeyError, ValueError)}):
        assert result_of(error, **settings).is_infrastructure_failure
    text = str(error.args[0]) if error.args else ""
    if text and error.__cause__ is None:
        assert not result_of(error, text=f"I say: {text}").is_infrastructure_failure, "a text that the model wrote"


def test_what_the_model_may_have_closed_is_no_failure_of_the_infrastructure():
    for error, is_charged in (
        (RuntimeError("The session is closed, open another."), False),
        (ValueError("closed"), 1),
    ):
        result = result_of(error)
        assert not result.is_infrastructure_failure and result.is_charged == is_charged


def test_an_endless_loop_of_the_models_code_is_the_models():
    tool = PythonTool("limits", limits=SandboxLimits(timeout_s=0.3))
    call = ToolCall(name="python", arguments={"code": "while True: pass"})
    (result,) = asyncio.run(ToolExecutor([tool]).execute([call]))
    tool.close()
    assert (result.error, result.is_charged) == (ToolErrorKind.EXCEPTION, True) and "Timeout" in result.content


# -------------------------------------------------------------------- patterns

SLOW, UNREADABLE = "^(a|aa)+$", r"(?<=a+)\cX["
"""Patterns that take for ever on `EVIL`, and that Python cannot read; ones that decide are below."""
EVIL = "a" * 60 + "!"
A_TO_C = "^[a-c]+$"
IS_INT = {"type": "integer"}


def undecided(pattern):
    """Of each keyword that can refuse an argument by a pattern: the schema of the arguments, and the arguments."""
    of_text = {"text": EVIL}
    return {
        "pattern": ({"properties": {"text": {"pattern": pattern}}}, of_text),
        "items": ({"properties": {"text": {"items": {"pattern": pattern}}}}, {"text": [EVIL, EVIL]}),
        "not": ({"properties": {"text": {"not": {"pattern": pattern}}}}, of_text),
        "not not": ({"properties": {"text": {"not": {"not": {"pattern": pattern}}}}}, of_text),
        "anyOf": ({"properties": {"text": {"anyOf": [{"pattern": pattern}, IS_INT]}}}, of_text),
        "oneOf": ({"properties": {"text": {"oneOf": [{"pattern": pattern}, {"pattern": A_TO_C}]}}}, of_text),
        "oneOf, second": ({"properties": {"text": {"oneOf": [{"type": "string"}, {"pattern": pattern}]}}}, of_text),
        "if": ({"properties": {"text": {"if": {"pattern": pattern}, "then": {"maxLength": 3}}}}, of_text),
        "else": ({"properties": {"text": {"if": {"pattern": pattern}, "else": {"maxLength": 3}}}}, of_text),
        "contains": (
            {"properties": {"text": {"contains": {"pattern": pattern}, "maxContains": 0, "minContains": 0}}},
            {"text": [EVIL]},
        ),
        "propertyNames": ({"propertyNames": {"pattern": pattern}, "additionalProperties": True}, {EVIL: 1}),
        "patternProperties": ({"patternProperties": {pattern: IS_INT}}, {EVIL: "x"}),
        "additionalProperties": ({"patternProperties": {pattern: True}, "additionalProperties": IS_INT}, {EVIL: "x"}),
        "unevaluatedProperties": (
            {"allOf": [{"patternProperties": {pattern: True}}], "unevaluatedProperties": False},
            {EVIL: "x"},
        ),
        "disallow": (
            {
                "$schema": "http://json-schema.org/draft-03/schema#",
                "properties": {"text": {"disallow": [{"pattern": pattern}]}},
            },
            of_text,
        ),
    }


def charged_for(parameters, arguments):
    tool = Tool(
        lambda **given: "found",
        schema={"name": "look", "description": "Look.", "parameters": {"type": "object", **parameters}},
    )
    (result,) = asyncio.run(ToolExecutor([tool]).execute([ToolCall(name="look", arguments=arguments)]))
    assert result.is_charged == result.is_error, result.content
    return result.is_charged


@pytest.mark.parametrize("pattern", [SLOW, UNREADABLE], ids=["slow", "unreadable"])
@pytest.mark.parametrize("keyword", undecided(""))
def test_what_a_pattern_of_a_schema_cannot_decide_is_left_to_the_tool(keyword, pattern):
    began = time.process_time()
    assert not charged_for(*undecided(pattern)[keyword])
    assert time.process_time() - began < 5


def test_what_a_pattern_of_a_schema_does_decide_is_charged_beside_one_that_does_not():
    keywords = [name for name in undecided("") if name != "unevaluatedProperties"]
    pairs = itertools.product(keywords, ("^b", "^a"))
    found = {(name, pattern) for name, pattern in pairs if charged_for(*undecided(pattern)[name])}
    assert found == {
        ("pattern", "^b"), ("items", "^b"), ("not", "^a"), ("not not", "^b"), ("anyOf", "^b"), ("oneOf", "^b"),
        ("oneOf, second", "^a"), ("if", "^a"), ("else", "^b"), ("contains", "^a"), ("propertyNames", "^b"),
        ("patternProperties", "^a"), ("patternProperties", "^b"), ("additionalProperties", "^b"), ("disallow", "^a"),
    }  # fmt: skip
    both = {"properties": {"text": {"allOf": [{"not": {"pattern": SLOW}}, {"maxLength": 3}]}}}
    assert charged_for(both, {"text": EVIL})


def test_a_pattern_of_a_schema_that_takes_too_long_is_named_once_and_tried_once_for_each_call(caplog):
    parameters = {"properties": {"texts": {"items": {"pattern": f"{SLOW}|{SLOW}"}}}}
    began = time.process_time()
    for _ in range(2):
        assert not charged_for(parameters, {"texts": [EVIL] * 100})
    assert time.process_time() - began < 5
    (warning,) = [record.message for record in caplog.records]
    assert "Tool 'look'" in warning and SLOW in warning and "not charged" in warning


def slow_chat():
    """A chat whose grammar stops on `EVIL` in a call."""
    calls_of = {"repeats": True, "content": "json", "open_pattern": r"<tool_call>((?!.*END)(a|aa)+$)?"}
    fields = {"tool_calls": {**calls_of, "close": "</tool_call>"}}
    grammar = {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": fields}
    return ChatFormat(make_tokenizer("qwen2_5"), response_template=grammar)


def written(chat, text):
    return chat.encoder.encode(f"{text}<|im_end|>")


def test_a_turn_on_which_the_grammar_stops_is_no_malformed_call(monkeypatch):
    monkeypatch.setattr("agent_r1_trl.patterns.LIMIT_S", 0.1)
    chat, limits = slow_chat(), {"max_turns": 3, "max_invalid_calls": 0, "max_completion_length": 4000}
    unread, _ = roll_out([written(chat, f"<tool_call>{EVIL}</tool_call>")], chat=chat, limits=limits)
    assert unread.stop_reason is StopReason.GENERATION_ERROR and unread.stop_reason.is_infrastructure_failure
    assert "response_template" in unread.error and "(a|aa)+" in unread.error
    assert unread.process_reward == 0.0 and not any(turn.is_invalid for turn in unread.turns)
    malformed, _ = roll_out([written(chat, "<tool_call>!</tool_call>")], chat=chat, limits=limits)
    assert malformed.stop_reason is StopReason.INVALID_CALLS and malformed.process_reward == PENALTY


async def agent_that_cuts(door, example):
    """It stops at a word, so that its turn is read again."""
    await ask(door, example["prompt"], stop=["stop"])
    return 1.0


@pytest.mark.parametrize("text", [f"<tool_call>{EVIL}</tool_call>", f"<tool_call>{EVIL}stop END"])
def test_a_turn_of_an_agent_on_which_the_grammar_stops_is_no_malformed_call(text, monkeypatch):
    monkeypatch.setattr("agent_r1_trl.patterns.LIMIT_S", 0.1)
    chat = slow_chat()
    trajectory, _ = roll_out_agent(agent_that_cuts, [written(chat, text)], chat=chat, max_completion_length=4000)
    assert trajectory.stop_reason is StopReason.GENERATION_ERROR and "response_template" in trajectory.error
    assert not any(turn.is_invalid for turn in trajectory.turns)


# -------------------------------------------------------------------- places

BY_FAULT = [(KeyError("no such word"), True), (RuntimeError("a bug"), False)]
"""An error of a tool, and whether the policy is charged for it."""


class OfTRL:
    failure: BaseException

    def reset(self, **row): ...

    def look(self, text: str) -> str:
        """Look.

        Args:
            text: A text.
        """
        raise self.failure


FORMS = {
    "ToolEnv": lambda failure: ToolEnv(tools=[look(failure)]),
    "FunctionToolsEnv": lambda failure: FunctionToolsEnv([look(failure)], tool_error_reward=PENALTY),
    "TRLEnvAdapter": lambda failure: TRLEnvAdapter(
        type("Own", (OfTRL,), {"failure": failure}), tool_error_reward=PENALTY
    ),
}


@pytest.mark.parametrize(("failure", "is_charged"), BY_FAULT)
@pytest.mark.parametrize("form", FORMS)
def test_environments_of_every_form_charge_alike(form, failure, is_charged):
    step = stepped(FORMS[form](failure), ("look", {"text": "a"}), ("nope", {}))
    assert step.reward == pytest.approx(PENALTY * (1 + is_charged)) and not step.info["is_invalid"]
    assert len(step.observations) == 2


@pytest.mark.parametrize(("failure", "is_charged"), BY_FAULT)
def test_a_game_takes_a_tools_failure_for_no_idle_turn(failure, is_charged):
    env = counter(action_format="tool", tools=[look(failure)], max_idle_turns=1)
    step = asyncio.run(env.step(message(("look", {"text": "a"}))))
    assert (step.reward, step.info["is_invalid"], step.done) == (PENALTY * is_charged, is_charged, is_charged)
    assert (env.num_idle_turns, env.num_invalid_turns) == (is_charged, is_charged)


def test_a_bug_of_a_game_is_not_charged_and_unknown_actions_are():
    env = counter(action_format="tool")
    env.act = types.MethodType(lambda self, action: {}["no such level"], env)
    broken = asyncio.run(env.step(message(("play", {"actions": ["More"]}))))
    assert (broken.reward, broken.info["is_invalid"], env.num_idle_turns) == (0.0, False, 0)
    unknown = asyncio.run(env.step(message(("play", {"actions": ["Jump"]}))))
    assert unknown.reward == env.invalid_action_reward and unknown.info["is_invalid"]


@pytest.mark.parametrize(("code", "is_charged"), [("VALIDATION_ERROR", True), ("EXECUTION_ERROR", False)])
def test_an_action_that_an_openenv_server_refuses_is_charged_and_one_in_which_it_fails_is_not(code, is_charged):
    async def ask(kind, data):
        return {"type": "error", "data": {"code": code, "message": "no"}}

    env = OpenEnv("http://localhost:1", tool_error_reward=PENALTY)
    env._session = types.SimpleNamespace(ask=ask, is_done=False, unread_reward=0.0)
    env.tools = [Tool(env._act, schema={"name": "look", "parameters": TEXT})]
    step = asyncio.run(env.step(message(("look", {"text": "a"}))))
    assert step.reward == PENALTY * is_charged and step.observations[0]["content"] == "Error: no"


class Nowhere:
    def search(self, query, k=3):
        return []


@pytest.mark.parametrize("failure", [ValueError("no"), TypeError("a bug"), None])
def test_the_form_of_an_answer_is_that_of_the_calls_whatever_the_tools_did(failure):
    env = SearchQAEnv(Nowhere(), outcome="composite", tools=[look(failure or str)])
    env.reset({"question": "?", "answer": "Oslo"})
    said = message(("look", {"text": "a"}) if failure else ("nope", {}))
    step = asyncio.run(env.step(said))
    turn = Turn(start=0, end=0, message=said)
    record_step(turn, step.reward, step.info, env_s=0.0)
    trajectory = finished("<answer>Oslo</answer>")
    trajectory.turns.insert(0, turn)
    assert env.outcome_reward(trajectory)[1]["format"] == (0.0 if failure else -0.5)


@pytest.mark.parametrize(("failure", "is_charged"), BY_FAULT)
def test_only_turns_in_which_nothing_could_be_run_end_a_trajectory(failure, is_charged):
    class Env(ToolEnv):
        tools = (look(failure),)

    limits = {"max_turns": 4, "max_invalid_calls": 1}
    failing, _ = roll_out([call("look", text="a")] * 4, env=Env, limits=limits)
    assert failing.stop_reason is StopReason.MAX_TURNS and not any(turn.is_invalid for turn in failing.turns)
    assert failing.process_reward == pytest.approx(4 * PENALTY * is_charged)
    refused, _ = roll_out([call("nope", text="a")] * 4, env=Env, limits=limits)
    assert refused.stop_reason is StopReason.INVALID_CALLS and len(refused.turns) == 2


def test_a_turn_of_which_nobody_says_anything_is_invalid_if_its_call_could_not_be_read():
    for said, is_invalid in ((say(), False), (message(malformed_tool_call="no JSON"), True)):
        turn = Turn(start=0, end=0, message=said)
        record_step(turn, 0.0, {}, env_s=0.0)
        assert turn.is_invalid == is_invalid


async def agent_without_a_server(door, example):
    """It calls once, and answers what it was asked for by itself."""
    said = await ask(door, example["prompt"], tools=TOOLS)
    answers = [
        {"role": "tool", "tool_call_id": item["id"], "content": "Error: the server is down"}
        for item in said.get("tool_calls", ())
    ]
    await ask(door, [*example["prompt"], said, *answers] if answers else example["prompt"], tools=TOOLS)
    return 1.0


def test_an_agent_is_charged_for_what_the_model_wrote_and_for_nothing_that_its_tools_answer():
    turns = [calls(("nope", {}), ("add", {"a": 2, "b": 3})), say("five")]
    trajectory, _ = checked(agent_without_a_server, turns, max_completion_length=4000)
    unknown, known = trajectory.tool_results
    assert (unknown.error, unknown.is_charged) == (ToolErrorKind.UNKNOWN_TOOL, True)
    assert not known.is_error and not known.is_charged
    tokenizer, stop = chat_of("qwen2_5").tokenizer, chat_of("qwen2_5").encode_reply(say())[-1]
    unreadable = [*tokenizer("<tool_call>{")["input_ids"], stop]
    trajectory, _ = checked(agent_without_a_server, [unreadable, say("five")], max_completion_length=4000)
    assert [turn.is_invalid for turn in trajectory.turns] == [True, False]


def test_a_baseline_without_tools_pays_nothing_for_calls():
    step = asyncio.run(OneAnswerEnv(ToolEnv()).step(message(("look", {"text": "a"}))))
    assert step.reward == 0.0 and step.info["is_invalid"]


def test_what_is_not_charged_is_counted_as_the_tools():
    def metrics_of(failure):
        trajectory, _ = roll_out([call("look", text="a"), say()], env=lambda: ToolEnv(tools=[look(failure)]))
        return rollout_metrics([trajectory_record(trajectory)], num_generations=1), trajectory.tool_results[0]

    for failure, is_charged in BY_FAULT:
        metrics, result = metrics_of(failure)
        assert (metrics["tools/call_error_share"], metrics["tools/uncharged_share"]) == (1.0, not is_charged)
        assert result.error_label == ("exception" if is_charged else "exception, not charged")


def test_results_of_the_record_keep_whose_fault_they_were():
    result = result_of(TypeError("bug"), user_errors=(KeyError,))
    written = dataclasses.asdict(result)
    assert ToolResult.from_dict(json.loads(json.dumps(written))) == result
    older = {name: value for name, value in written.items() if name != "judged_fault"} | {"is_models_mistake": False}
    assert ToolResult.from_dict(older).fault is ToolFault.UNKNOWN


def test_check_env_names_errors_that_are_not_charged():
    class Env(ToolEnv):
        def outcome_reward(self, trajectory):
            return 0.0

    class Declared(Env):
        tools = (look(named("CityError", "no such city"), user_errors=(Exception,)),)

    class Undeclared(Env):
        tools = (look(named("CityError", "no such city")),)

    told = {
        cls: [item for item in check_env(cls, [{"prompt": "?"}]) if "CityError" in item.message]
        for cls in (Declared, Undeclared)
    }
    assert told[Declared] == [] and "not charged" in told[Undeclared][0].message
    assert "user_errors=(CityError,)" in told[Undeclared][0].fix


# -------------------------------------------------------------------- nobody else charges

PENALTIES = {
    "tool_error_reward",
    "invalid_action_reward",
    "tool_error",
    "invalid_action",
    "is_invalid",
    "max_invalid_calls",
}
"""Names with which a place can take something from the policy for a call."""
PLACES = {
    "environments/tool_env.py:ToolEnv": "the settings themselves",
    "environments/tool_env.py:ToolEnv.step": test_each_kind_of_failure_is_charged_as_the_table_says,
    "environments/tool_env.py:ToolEnv._reward_calls": test_an_undeclared_error_is_charged_by_pythons_convention_alone,
    "environments/trl_adapters.py:FunctionToolsEnv": test_environments_of_every_form_charge_alike,
    "environments/trl_adapters.py:TRLEnvAdapter": test_environments_of_every_form_charge_alike,
    "environments/trl_adapters.py:SingleTurnEnv": "it has no tools",
    "environments/factory.py:_pays_calls": "it asks whether there is such a reward",
    "environments/search_qa.py:SearchQAEnv.outcome_reward": (
        test_the_form_of_an_answer_is_that_of_the_calls_whatever_the_tools_did
    ),
    "evaluation/baselines.py:OneAnswerEnv.step": test_a_baseline_without_tools_pays_nothing_for_calls,
    "features/doors/openenv.py:OpenEnv": (
        test_an_action_that_an_openenv_server_refuses_is_charged_and_one_in_which_it_fails_is_not
    ),
    "features/doors/gym.py:TextArenaEnv.act": "a move that the game does not allow, which is no failed call",
    "features/games/base.py:GameEnv": "the setting itself",
    "features/games/base.py:GameEnv.play": test_a_bug_of_a_game_is_not_charged_and_unknown_actions_are,
    "features/games/base.py:GameEnv.step": test_a_game_takes_a_tools_failure_for_no_idle_turn,
    "rollout/draft.py:record_step": test_a_turn_of_which_nobody_says_anything_is_invalid_if_its_call_could_not_be_read,
    "rollout/loop.py:take_step": test_only_turns_in_which_nothing_could_be_run_end_a_trajectory,
    "rollout/limits.py:RolloutSettings": "the setting itself",
    "trajectory.py:Turn": "the field itself",
    **dict.fromkeys(
        [
            "cli/view.py:", "features/inspector/pack.py:flags_of", "features/inspector/pack.py:_turn",
            "recording/atif.py:", "recording/terminal.py:_turn_rule", "trainers/metrics.py:trajectory_record",
        ],
        "it shows or counts",
    ),
    **dict.fromkeys(["features/hub/card.py:", "features/serve/session.py:", "trainers/config.py:"], "its name"),
}  # fmt: skip
TIMEOUTS = {
    "patterns.py:TimedPattern._run": "it raises",
    "patterns.py:warn_once": "it tells",
    "chat/parsing.py:TurnParser.parse": test_a_turn_on_which_the_grammar_stops_is_no_malformed_call,
    "chat/parsing.py:TurnParser._read_call": test_a_turn_on_which_the_grammar_stops_is_no_malformed_call,
    "chat/format.py:ChatFormat.parse": test_a_turn_of_an_agent_on_which_the_grammar_stops_is_no_malformed_call,
    **dict.fromkeys(
        [
            "tools/json_schema.py:_check_pattern", "tools/json_schema.py:_check_pattern_properties",
            "tools/json_schema.py:_check_additional",
        ],
        test_what_a_pattern_of_a_schema_cannot_decide_is_left_to_the_tool,
    ),
    **dict.fromkeys(
        [
            "safe_text.py:SecretRules.is_secret", "safe_text.py:SecretRules.masker.mask",
            "features/hub/secret_scan.py:_own_pattern",
        ],
        "it looks for secrets, in what is written down",
    ),
}  # fmt: skip
"""Code that meets a pattern which took too long, and the test that shows it charge nobody."""
KIND_READERS = {
    "__init__.py:", "tools/__init__.py:",  # exports
    "tool_results.py:", "tool_results.py:ToolResult", "tool_results.py:ToolResult.from_dict",
    "tool_results.py:ToolResult.fault", "tool_results.py:ToolResult.is_infrastructure_failure",  # where it is decided
    "environments/tool_env.py:ToolEnv.step", "features/doors/agent/session.py:AgentSession._note_results",  # made
    "tools/executor.py:ToolExecutor._check", "tools/executor.py:ToolExecutor._attempt", "tools/executor.py:_CallError",
    "tools/executor.py:_failed_call", "tools/executor.py:ToolExecutor._advise",
    "features/doctor/environment.py:_check_steps", "features/doctor/episodes.py:EnvTrial.step",  # advice to the author
    "features/doctor/episodes.py:_check_result",
}  # fmt: skip
"""Code that names a kind of failure. A list of kinds elsewhere would be a second place that decides."""


def uses_of(names):
    """`file:function` of everything in the package that has one of these names, or a text equal to it."""
    found = set()

    def walk(node, path, inside):
        for child in ast.iter_child_nodes(node):
            words = {getattr(child, name, None) for name in ("id", "attr", "arg", "value")}
            if any(isinstance(word, str) and word in names for word in words):
                found.add(f"{path}:{'.'.join(inside)}")
            is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            walk(child, path, [*inside, child.name] if is_scope else inside)

    for path in SRC.rglob("*.py"):
        if any(name in (source := path.read_text(encoding="utf-8")) for name in names):
            walk(ast.parse(source), path.relative_to(SRC).as_posix(), [])
    return found


def test_every_place_that_charges_a_call_is_listed_with_the_test_that_plays_it():
    assert uses_of(PENALTIES) == set(PLACES)
    assert uses_of({"ToolErrorKind"}) == KIND_READERS
    assert uses_of({"PatternTimeoutError", "fits_pattern"}) == set(TIMEOUTS)

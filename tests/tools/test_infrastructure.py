"""Failures of the infrastructure behind a tool: declared, recognised, repeated, and never charged to the model."""

import asyncio
import http.client
import io
import json
import socket
import ssl
import subprocess
import types
import urllib.error
from pathlib import Path

import aiohttp
import httpx
import pytest
import requests
import urllib3

from agent_r1_trl import InfrastructureError, StopReason, Tool, ToolEnv, tool
from agent_r1_trl.environments import FunctionToolsEnv, RewardError, TRLEnvAdapter
from agent_r1_trl.testing import AddEnv, calls, say
from agent_r1_trl.tools import ToolCall, ToolErrorKind, ToolExecutor, ToolFault, as_tool
from agent_r1_trl.tools.faults import is_lost_connection
from tests.rollout.helpers import roll_out

SCHEMA = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}


def run(item, **settings):
    (result,) = asyncio.run(ToolExecutor([item], **settings).execute([ToolCall(name="look", arguments={})]))
    return result


def failing(*errors, then="found", **settings):
    """A tool that raises these errors in turn and then answers; its calls are counted in `made.calls`."""
    calls = []

    def look():
        calls.append(1)
        if len(calls) <= len(errors):
            raise errors[len(calls) - 1]
        return then

    made = Tool(look, schema=SCHEMA, retry_wait_s=0.01, **settings)
    made.calls = calls
    return made


def grpc_error(code):
    error = type("RpcError", (Exception,), {"code": lambda self: types.SimpleNamespace(name=code)})()
    return error


def with_status(error_class, status):
    response = requests.Response()
    response.status_code = status
    if error_class is requests.HTTPError:
        return requests.HTTPError("refused", response=response)
    if error_class is urllib.error.HTTPError:
        return urllib.error.HTTPError("http://x", status, "refused", {}, io.BytesIO())
    if error_class is aiohttp.ClientResponseError:
        return aiohttp.ClientResponseError(None, (), status=status)
    request = httpx.Request("GET", "http://x")
    return httpx.HTTPStatusError("refused", request=request, response=httpx.Response(status, request=request))


LOST = [
    ConnectionRefusedError("refused"), TimeoutError(), socket.gaierror(-2, "unknown"), OSError(113, "no route"),
    ssl.SSLError("handshake"), http.client.RemoteDisconnected(), http.client.IncompleteRead(b""),
    urllib.error.URLError(ConnectionRefusedError()), requests.ConnectionError(), requests.ReadTimeout(),
    requests.exceptions.ChunkedEncodingError(), httpx.ConnectError("x"), httpx.ReadTimeout("x"),
    httpx.RemoteProtocolError("x"), aiohttp.ServerDisconnectedError(), aiohttp.ClientPayloadError(),
    aiohttp.ServerTimeoutError(), urllib3.exceptions.ProtocolError("Connection aborted", ConnectionResetError()),
    grpc_error("UNAVAILABLE"),
]  # fmt: skip
CLIENTS = [requests.HTTPError, urllib.error.HTTPError, aiohttp.ClientResponseError, httpx.HTTPStatusError]
LOST += [with_status(client, status) for client in CLIENTS for status in (429, 502, 503, 504)]
OTHERS = [
    ValueError("x"), KeyError("x"), FileNotFoundError(2, "no such file"), urllib.error.URLError("unknown type"),
    httpx.UnsupportedProtocol("x"), httpx.InvalidURL("x"), requests.exceptions.MissingSchema("x"),
    aiohttp.InvalidURL("x"), subprocess.TimeoutExpired("python", 3), grpc_error("INVALID_ARGUMENT"),
    json.JSONDecodeError("x", "", 0),
]  # fmt: skip
OTHERS += [with_status(client, status) for client in CLIENTS for status in (400, 404, 500)]


@pytest.mark.parametrize("error", LOST, ids=repr)
def test_a_lost_connection_of_a_tool_with_a_backend_is_the_infrastructures_fault(error):
    result = run(failing(error, backend=True, attempts=1))
    assert (result.error, result.is_infrastructure_failure) == (ToolErrorKind.INFRASTRUCTURE, True)
    plain = run(failing(error))
    assert (plain.error, plain.fault) == (ToolErrorKind.EXCEPTION, ToolFault.TOOL), "not declared, but suspect"


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_of_such_a_tool_are_read_by_the_model(error):
    assert not is_lost_connection(error)
    assert run(failing(error, backend=True)).error is ToolErrorKind.EXCEPTION


@pytest.mark.parametrize(
    ("status", "is_charged"), [(400, True), (404, True), (401, False), (408, False), (500, False)]
)
@pytest.mark.parametrize("client", [requests.HTTPError, urllib.error.HTTPError])
def test_a_refused_request_may_be_the_models_mistake(client, status, is_charged):
    assert run(failing(with_status(client, status))).is_charged is is_charged


@pytest.mark.parametrize(
    ("path", "is_charged"), [("/data/index.bin", False), ("/data/notes.txt", True), ("/data/b/two.txt", True)]
)
def test_a_missing_file_is_no_mistake_of_a_model_that_did_not_name_it(path, is_charged):
    def look(name: str, others: list):
        """Look."""
        Path(path).read_text()

    call = ToolCall(name="look", arguments={"name": "notes.txt", "others": [{"path": "a/b/two.txt"}, None, ""]})
    (result,) = asyncio.run(ToolExecutor([look]).execute([call]))
    assert (result.error, result.is_charged) == (ToolErrorKind.EXCEPTION, is_charged)


def test_the_error_counts_wherever_it_stands_in_the_chain():
    def wrapped():
        try:
            raise requests.ConnectionError("refused")
        except requests.ConnectionError:
            raise ValueError("no such city")  # noqa: B904 (the cause is implicit here)

    def grouped():
        raise ExceptionGroup("two", [ValueError(), InfrastructureError("gone")])

    assert run(Tool(wrapped, schema=SCHEMA, backend=True, attempts=1)).is_infrastructure_failure
    assert run(Tool(grouped, schema=SCHEMA, attempts=1)).is_infrastructure_failure


def test_a_call_is_repeated_and_its_attempts_are_counted():
    lost = InfrastructureError("gone")
    good = run(failing(lost, lost))
    assert (good.content, good.attempts, good.error) == ("found", 3, None)
    bad = failing(lost, lost, lost)
    result = run(bad)
    assert (len(bad.calls), result.attempts, result.cause) == (3, 3, "'look' failed: InfrastructureError: gone")
    for settings in ({"attempts": 1}, {"sequential": True}):
        once = failing(lost, **settings)
        assert (run(once).attempts, len(once.calls)) == (1, 1)
    assert run(failing(ValueError("x"))).attempts == 1, "the model's mistakes are not repeated"


def test_a_call_that_was_given_up_is_not_repeated_because_it_may_still_run():
    calls = []

    async def look():
        calls.append(1)
        await asyncio.sleep(5)

    result = run(Tool(look, schema=SCHEMA, backend=True, timeout_s=0.05))
    assert (result.error, len(calls)) == (ToolErrorKind.INFRASTRUCTURE, 1)
    assert run(Tool(look, schema=SCHEMA, timeout_s=0.05)).error is ToolErrorKind.TIMEOUT


def test_declared_user_errors_are_the_models_mistakes_whatever_their_kind():
    result = run(failing(ConnectionRefusedError("no such host"), backend=True, user_errors=(ConnectionError,)))
    assert (result.error, result.fault) == (ToolErrorKind.EXCEPTION, ToolFault.MODEL)
    with pytest.raises(ValueError, match="user_errors="):
        Tool(lambda: 1, schema=SCHEMA, user_errors=("KeyError",))
    with pytest.raises(ValueError, match="attempts=0"):
        Tool(lambda: 1, schema=SCHEMA, attempts=0)


def test_functions_classes_and_tools_of_other_libraries_declare_a_backend():
    def look() -> str:
        """Look."""
        raise ConnectionResetError

    assert not as_tool(look).backend
    look.backend = True
    assert as_tool(look).backend and run(look).is_infrastructure_failure

    class Game:
        backend = True

        def reset(self, **row): ...

        def look(self) -> str:
            """Look."""
            raise ConnectionResetError

    (method,) = TRLEnvAdapter(Game).tools
    assert method.backend and run(method).is_infrastructure_failure

    class Own(ToolEnv):
        backend = True

        @tool
        def look(self) -> str:
            """Look."""
            raise ConnectionResetError

    assert run(Own().tools[0]).is_infrastructure_failure

    class Smol:
        name, description, inputs = "look", "Look.", {}

        def forward(self): ...

        def __call__(self, **arguments):
            raise ConnectionResetError

    assert run(tool(backend=True, attempts=1)(Smol())).is_infrastructure_failure
    assert run(Smol()).error is ToolErrorKind.EXCEPTION


# -------------------------------------------------------------------- trajectories


def look() -> str:
    """Look."""
    raise InfrastructureError("the index is down")


look_once = tool(attempts=1)(look)


class TrlGame:
    def reset(self, **row): ...

    def look(self) -> str:
        """Look."""
        raise InfrastructureError("the index is down")

    def get_reward(self):
        return 1.0


class OwnStep(AddEnv):
    def step(self, message):
        raise RuntimeError("step failed") from InfrastructureError("the index is down")


FORMS = {
    "tool": lambda: type("Env", (AddEnv,), {"tools": (look_once,)})(),
    "functions": lambda: FunctionToolsEnv([look_once]),
    "trl": lambda: TRLEnvAdapter(TrlGame),
    "step": OwnStep,
}


@pytest.mark.parametrize("form", FORMS)
def test_such_a_trajectory_leaves_baseline_and_loss_and_names_tool_and_cause(form):
    trajectory, _ = roll_out([calls(("look", {})), say()], env=FORMS[form])
    assert trajectory.stop_reason is StopReason.TOOL_FAILURE
    assert not trajectory.in_baseline and trajectory.total_reward == 0.0
    assert ("look" in trajectory.error or form == "step") and len(trajectory.turns) == 1
    if form != "step":
        assert trajectory.error == "tool 'look' failed: InfrastructureError: the index is down (attempts: 1)"


def test_a_judge_that_is_down_is_no_bug_of_its_author():
    class Judged(AddEnv):
        def outcome_reward(self, trajectory):
            raise InfrastructureError("the judge is down")

    trajectory, _ = roll_out([say()], env=Judged)
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR and "judge is down" in trajectory.error

    class Bug(AddEnv):
        def outcome_reward(self, trajectory):
            raise OSError("a bug")

    with pytest.raises(RewardError, match=r"raised OSError: a bug \(.*Correct the method"):
        roll_out([say()], env=Bug)

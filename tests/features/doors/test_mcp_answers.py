"""`MCPToolset` and servers that answer what MCP does not know: nobody is charged, and the session goes on."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from agent_r1_trl.features.doors import MCPToolset
from agent_r1_trl.tools import ToolCall, ToolErrorKind, ToolExecutor

ODD = [sys.executable, str(Path(__file__).with_name("mcp_odd_server.py"))]


def odd(*raw, **answer):
    """What a server writes: lines as they are, and an answer."""
    lines = [json.dumps({"jsonrpc": "2.0", "id": "ID"} | answer).replace('"ID"', "ID")] if answer else []
    return "say", {"raw": "\n".join([*raw, *lines])}


def execute(toolset, pair):
    name, arguments = pair
    return asyncio.run(ToolExecutor(toolset).execute([ToolCall(name=name, arguments=arguments)]))


def failed(text):
    return odd(result={"content": [{"type": "text", "text": text}], "isError": True})


NOT_THE_MODELS = {
    "no content": odd(result={}),
    "content that is no list": odd(result={"content": "sunny"}),
    "a text that is null": odd(result={"content": [{"type": "text", "text": None}]}),
    "a question back": odd(result={"resultType": "input_required", "inputRequests": {}}),
    "no such method": odd(error={"code": -32601, "message": "Method not found"}),
    "no JSON": odd(error={"code": -32700, "message": "Parse error"}),
    "an error of its own": odd(error={"code": -32001, "message": "the database is locked"}),
    "a page to be opened": odd(error={"code": -32042, "message": "URL elicitation required"}),
    "its own output": failed("MCP error -32602: Output validation error: Tool say has an output schema"),
    "its own output, in Python": failed("Output validation error: 'n' is a required property"),
    "a crash in words": failed("MCP error -32603: Internal error"),
}
THE_MODELS = {
    "wrong arguments": odd(error={"code": -32602, "message": "Invalid params: no such city"}),
    "wrong arguments, in words": failed("MCP error -32602: Input validation error: no such city"),
    "a failure": failed("no such city"),
}


@pytest.fixture(scope="module")
def odd_server():
    return MCPToolset(ODD, timeout_s=20, attempts=1)


@pytest.mark.parametrize("kind", [*NOT_THE_MODELS, *THE_MODELS])
def test_of_a_servers_failures_only_those_about_the_arguments_are_charged(odd_server, kind):
    (result,) = execute(odd_server, (NOT_THE_MODELS | THE_MODELS)[kind])
    assert result.error is ToolErrorKind.EXCEPTION and result.is_charged == (kind in THE_MODELS), result.content
    assert len(result.content) < 200, "not a page of pydantic's"


def test_a_log_on_a_servers_output_ends_nothing(odd_server, caplog):
    caplog.set_level("CRITICAL", logger="mcp")
    answer = {"content": [{"type": "text", "text": "sunny"}]}
    for line in ("Starting ...", "", "{", "\x1b[31mred", "\xff\xfe\x00"):
        (result,) = execute(odd_server, odd(line, result=answer))
        assert (result.content, result.error) == ("sunny", None), repr(line)

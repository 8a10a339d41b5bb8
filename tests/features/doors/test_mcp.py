"""`MCPToolset`: the tools of a server of MCP in this process; test_mcp_processes.py has servers of their own."""

import asyncio
import functools
import json
import sys
from typing import Annotated

import pytest
from mcp import MCPError
from mcp.server import MCPServer, Server
from mcp.types import (
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ListToolsResult,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from mcp.types import Tool as McpTool
from pydantic import BaseModel, Field

from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.features.doctor.environment import check_env
from agent_r1_trl.features.doors import MCPToolset
from agent_r1_trl.testing import call, calls, say
from agent_r1_trl.tools import InfrastructureError, ToolCall, ToolErrorKind, ToolExecutor, ToolSchemaError
from tests.features.doors.test_mcp_processes import say_in_turn
from tests.rollout.helpers import roll_out
from tests.trainers.helpers import make_trainer


class Place(BaseModel):
    name: str


class Trip(BaseModel):
    start: Place
    end: Place | None = None


class Node(BaseModel):
    children: list["Node"] = []


def make_server():
    server, seen = MCPServer("office"), []

    @server.tool()
    def add(a: Annotated[int, Field(description="One.")], b: Annotated[int, Field(description="Two.")]) -> int:
        """Add two numbers."""
        return a + b

    @server.tool(name="office/note")
    def note(text: str) -> str:
        """Keep a text."""
        seen.append(text)
        return f"{len(seen)} notes"

    @server.tool()
    def book(trip: Trip) -> str:
        """Book a trip."""
        return trip.start.name

    @server.tool(structured_output=False)
    def show(kind: str) -> CallToolResult:
        """Show something."""
        link = ResourceLink(type="resource_link", uri="file:///a.txt", name="a")
        text = TextResourceContents(uri="file:///b.txt", text="inside")
        content = {
            "mixed": [
                TextContent(type="text", text="a picture"),
                ImageContent(type="image", data="AAAA" * 1000, mime_type="image/png"),
                link,
                EmbeddedResource(type="resource", resource=text),
            ],
            "nothing": [],
            "drawing": [
                TextContent(type="text", text=""),
                ImageContent(type="image", data="A", mime_type="image/gif"),
            ],
            "failure": [],
        }[kind]
        return CallToolResult(content=content, is_error=kind == "failure")

    @server.tool()
    async def wait(seconds: float) -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return "waited"

    return server


SERVER = make_server()


@functools.cache
def office():
    return MCPToolset(SERVER, timeout_s=20)


def execute(tools, *pairs, **options):
    made = [ToolCall(name=name, arguments=arguments) for name, arguments in pairs]
    return asyncio.run(ToolExecutor(tools, **options).execute(made))


def test_the_tools_of_a_server_have_its_schemas_without_references():
    tools = {item.name: item for item in office()}
    assert list(tools) == ["add", "office_note", "book", "show", "wait"]
    assert tools["add"].signature == "add(a: integer, b: integer)" and tools["add"].description == "Add two numbers."
    book = json.dumps(tools["book"].schema)
    assert "$ref" not in book and tools["book"].schema["function"]["parameters"]["properties"]["trip"]["properties"]
    default = tools["book"].schema["function"]["parameters"]["properties"]["trip"]["properties"]["end"]["default"]
    assert default is None


def test_calls_return_what_the_server_says_and_its_refusals_are_errors_of_the_call():
    trip = {"start": {"name": "Oslo"}, "end": None}
    good, booked, wrong = execute(
        office(), ("add", {"a": 2, "b": 3}), ("book", {"trip": trip}), ("add", {"a": "x", "b": 3})
    )
    assert (good.content, booked.content) == ("5", "Oslo")
    assert wrong.error is ToolErrorKind.INVALID_ARGUMENTS and wrong.attempts == 0
    (failed,) = execute(office(), ("show", {"kind": "unknown"}))
    assert failed.error is ToolErrorKind.EXCEPTION and failed.attempts == 1 and "show" in failed.content


def test_what_is_no_text_is_named_and_a_result_without_content_has_a_text():
    mixed, nothing = execute(office(), ("show", {"kind": "mixed"}), ("show", {"kind": "nothing"}))
    assert mixed.content == "a picture\n[image/png, 3,000 bytes]\n[resource_link: file:///a.txt]\ninside"
    assert nothing.content == "(no output)"


def test_an_empty_text_beside_an_image_is_read_as_it_is_and_a_failure_without_a_word_is_named():
    drawing, failure = execute(office(), ("show", {"kind": "drawing"}), ("show", {"kind": "failure"}))
    assert drawing.content == "\n[image/gif, 1 characters]" and drawing.error is None
    assert failure.content == "Error: the tool failed, and did not say why." and failure.error


def test_a_call_has_a_limit_of_its_own_and_leaves_the_session_as_it_was():
    toolset = MCPToolset(SERVER, timeout_s=0.3)
    slow, fast = execute(toolset, ("wait", {"seconds": 5}), ("wait", {"seconds": 0}))
    assert slow.error is ToolErrorKind.TIMEOUT and "'wait' took longer than 0.3 s and was given up" in slow.content
    assert slow.attempts == 1 and fast.content == "waited"
    declared = MCPToolset(SERVER, timeout_s=0.3, backend=True)
    (slow,) = execute(declared, ("wait", {"seconds": 5}))
    assert slow.error is ToolErrorKind.INFRASTRUCTURE and slow.attempts == 1  # it may still be running


def test_a_cancelled_call_leaves_the_session_as_it_was():
    async def cancel():
        executor = ToolExecutor(office())
        waiting = asyncio.create_task(executor.execute([ToolCall(name="wait", arguments={"seconds": 60})]))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.wait({waiting})
        return await executor.execute([ToolCall(name="add", arguments={"a": 1, "b": 1})])

    assert [item.content for item in asyncio.run(cancel())] == ["2"]


def test_an_error_of_a_servers_own_with_the_code_of_a_lost_connection_is_no_lost_connection():
    server, seen = MCPServer("paid", log_level="ERROR"), []

    @server.tool()
    def ask() -> str:
        """Ask."""
        seen.append(1)
        raise MCPError(code=-32000, message="Rate limit exceeded")

    @server.tool()
    def crash() -> str:
        """Crash."""
        raise MCPError(code=-32603, message="Internal error")

    (refused,) = execute(MCPToolset(server, session="trajectory"), ("ask", {}))
    assert refused.error is ToolErrorKind.EXCEPTION and refused.content == "'ask' failed: Rate limit exceeded"
    assert len(seen) == 1 and not refused.is_charged
    (crashed,) = execute(MCPToolset(server, session="trajectory"), ("crash", {}))
    assert crashed.error is ToolErrorKind.EXCEPTION and not crashed.is_charged, "the server's own failure"


def test_tools_are_chosen_by_name_or_pattern_and_have_a_prefix():
    toolset = MCPToolset(SERVER, include=["add", "office/*"], exclude=["add"], prefix="my_", max_result_chars=2)
    assert [item.name for item in toolset] == ["my_office_note"] and toolset[0].max_result_chars == 2
    assert execute(toolset, ("my_office_note", {"text": "a"}))[0].error is None


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (
            {"include": "ad"},
            ValueError,
            r"MCPToolset\(office\): include='ad'.*\['ad'\] fits none of \['add', 'office/note'",
        ),
        ({"exclude": "*"}, ValueError, "nothing is left"),
        ({"session": "own"}, ValueError, "session='own'.*shared.*trajectory"),
        ({"timeout_s": 0}, ValueError, "timeout_s=0"),
        ({"server": {"command": "x", "arg": []}}, ValueError, "server={'command': 'x', 'arg': .*must be a URL"),
        ({"server": 7}, ValueError, "server=7: must be"),
        ({"server": {"type": "sse", "url": "http://x"}}, ValueError, "must be a URL"),
        (
            {"server": ["no-such-command"]},
            InfrastructureError,
            r"no-such-command cannot be reached \(connect_timeout_s=60\): FileNotFoundErr",
        ),
        (
            {"server": "http://127.0.0.1:9/mcp"},
            InfrastructureError,
            "127.0.0.1:9/mcp cannot be reached .*: ConnectError",
        ),
    ],
    ids=repr,
)
def test_what_cannot_be_is_refused_with_the_fix(arguments, kind, words):
    with pytest.raises(kind, match=words):
        MCPToolset(**{"server": SERVER} | arguments)


def test_a_command_that_ends_at_once_says_what_it_wrote():
    script = "import sys; sys.exit('API_KEY is not set')"
    with pytest.raises(InfrastructureError, match=r"cannot be reached .*: .*it wrote: API_KEY is not set"):
        MCPToolset([sys.executable, "-c", script])


def test_all_tools_that_no_prompt_can_show_are_named_in_one_message_with_the_way_out():
    server = MCPServer("tree")

    @server.tool()
    def walk(node: Node) -> str:
        """Walk."""

    @server.tool()
    def sit() -> str:
        """Sit."""

    @server.tool()
    def climb(node: Node) -> str:
        """Climb."""

    with pytest.raises(ToolSchemaError) as caught:
        MCPToolset(server)
    assert "2 of 3 tools cannot be shown" in str(caught.value) and "exclude=['walk', 'climb']" in str(caught.value)
    assert str(caught.value).count("refers to itself") == 2
    assert [item.name for item in MCPToolset(server, exclude=["walk", "climb"])] == ["sit"]


PUBLISHED = {
    "attach": {
        "input": {"type": "object", "anyOf": [{"properties": {"content": {}}}, {"properties": {"url": {}}}]},
        "result": {"content": [{"type": "text", "text": "attached"}]},
    },
    "price-of": {
        "input": {
            "type": "object",
            "properties": {"price": {"type": "number"}, "insurance": {"$ref": "#/properties/price"}},
        },
        "output": {"type": "object", "properties": {"total": {"type": "number"}}, "required": ["total"]},
        "result": {"content": [{"type": "text", "text": "7 crowns"}], "structuredContent": {"total": "seven"}},
    },
    "no-structure": {
        "output": {"type": "object", "properties": {"total": {"type": "number"}}},
        "result": {"content": [{"type": "text", "text": "text alone"}]},
    },
    "dead": {
        "output": {"$ref": "#/$defs/gone", "type": "object"},
        "result": {"content": [], "structuredContent": {"name": "Zürich"}},
    },
    "only-structure": {
        "result": {"content": [{"type": "text", "text": ""}], "structuredContent": {"name": "Zürich"}},
    },
    "failing": {"result": {"content": [], "structuredContent": {"reason": "no Zürich"}, "isError": True}},
    "embedded": {
        "result": {
            "content": [{"type": "resource", "resource": {"uri": "file:///a", "text": "gone"}}], "isError": True,
        },
    },
}  # fmt: skip
"""What servers publish and answer, by the tool's name."""


def published_server():
    """Its schemas and results go out as they stand here."""

    async def list_tools(context, params):
        tools = []
        for name, item in PUBLISHED.items():
            schemas = {"inputSchema": item.get("input", {"type": "object"}), "outputSchema": item.get("output")}
            tools.append(McpTool.model_validate({"name": name, "description": "Do it.", **schemas}))
        return ListToolsResult(tools=tools)

    async def call_tool(context, params):
        return CallToolResult.model_validate(PUBLISHED[params.name]["result"])

    return Server("published", on_list_tools=list_tools, on_call_tool=call_tool)


def test_a_server_that_breaks_its_own_promises_is_read_as_it_is_and_nobody_is_charged(caplog):
    toolset = MCPToolset(published_server(), timeout_s=20)
    calls_made = [
        ("attach", {"url": "file:///a"}), ("price-of", {"insurance": 2.5}), ("no-structure", {}), ("dead", {}),
        ("only-structure", {}), ("price-of", {"insurance": "much"}), ("failing", {}), ("embedded", {}),
    ]  # fmt: skip
    *good, refused, failing, embedded = execute(toolset, *calls_made)
    assert [result.content for result in good] == [
        "attached", "7 crowns", "text alone", '{"name": "Zürich"}', '{"name": "Zürich"}',
    ]  # fmt: skip
    assert not any(result.error for result in good)
    assert refused.error is ToolErrorKind.INVALID_ARGUMENTS
    assert failing.content == '{"reason": "no Zürich"}' and embedded.content == "gone"
    assert caplog.text.count("'price-of': its result does not fit its own outputSchema") == 1


def test_tools_are_renamed_by_a_mapping_or_a_function():
    server = published_server()
    mapped = MCPToolset(server, names={"price-of": "price"}, include=["price-of", "dead"])
    assert [item.name for item in mapped] == ["price", "dead"]
    assert execute(mapped, ("price", {"price": 1}))[0].content == "7 crowns"
    renamed = MCPToolset(server, names=lambda name: name.replace("-", "_"), prefix="my_", include="*-*")
    assert [item.name for item in renamed] == ["my_price_of", "my_no_structure", "my_only_structure"]
    with pytest.raises(ValueError, match=r"names=.*\['prize'\] fits none of"):
        MCPToolset(server, names={"prize": "price"})
    with pytest.raises(ToolSchemaError, match="two are called 'same'"):
        MCPToolset(server, names=lambda name: "same")


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ImportError, match=r"pip install 'agent-r1-trl\[mcp\]'"):
        MCPToolset("http://127.0.0.1:9/mcp")


class OwnNotes(ToolEnv):
    """Every trajectory has a server."""

    tools = MCPToolset(make_server, session="trajectory")


def test_trajectories_share_a_session_or_have_one_with_a_server_each():
    turn = calls(("office_note", {"text": "a"}), ("office_note", {"text": "b"}))
    trajectories = say_in_turn(OwnNotes, [turn, turn, say()].__getitem__, 2)
    expected = [f"{number} notes" for number in (1, 2, 3, 4)]
    assert [[item.content for item in one.tool_results] for one in trajectories] == [expected, expected]


def test_a_trajectory_that_is_out_of_time_leaves_the_shared_session_to_the_others():
    class Waiting(ToolEnv):
        tools = MCPToolset(SERVER, timeout_s=60)

    late, _ = roll_out([call("wait", seconds=60), say()], env=Waiting, limits={"rollout_timeout": 1.0})
    assert late.stop_reason.value == "timeout"
    done, _ = roll_out([call("add", a=1, b=1), say()], env=Waiting)
    assert [item.content for item in done.tool_results] == ["2"] and done.stop_reason.value == "done"


class Office(ToolEnv):
    """The answer is right if it is as long as the sum."""

    tools = MCPToolset(SERVER, include="add")
    tool_call_reward = tool_error_reward = 0.0

    def outcome_reward(self, trajectory):
        return str(len(trajectory.final_text)) in {item.content for item in trajectory.tool_results}


def some_turns(rng, turn):
    return call("add", a=rng.randrange(1, 3), b=1) if turn < 1 else say("x" * rng.randrange(2, 4))


def test_an_environment_of_a_server_passes_check_env_and_trains(tmp_path):
    assert check_env(Office, [{"prompt": "How much?"}], timeout_s=60.0) == []
    run = make_trainer(tmp_path, env=Office, script=some_turns, max_steps=2, max_completion_length=400)
    run.train()
    rewards = [entry["reward"] for entry in run.state.log_history if "reward" in entry]
    assert len(rewards) == 2 and -1 < rewards[0] < 1
    assert {item.content for one in run.last_trajectories for item in one.tool_results} == {"2", "3"}

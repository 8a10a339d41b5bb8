"""Tools of other libraries behave as ours, their failures included."""

import asyncio
import functools
import time
import types
from typing import Annotated, Any, ClassVar

import agents
import langchain_core.tools
import pydantic
import pydantic_ai
import pytest
import smolagents
from langchain_core.runnables import RunnableConfig
from langgraph.prebuilt import InjectedState, InjectedStore, ToolRuntime
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.resolve import Resolve
from mcp.types import CallToolResult, ImageContent, TextContent

from agent_r1_trl import InfrastructureError, ToolEnv
from agent_r1_trl.environments import FunctionToolsEnv
from agent_r1_trl.tools import Tool, ToolCall, ToolExecutor, ToolSchemaError, as_tool, tool


class Arguments(pydantic.BaseModel):
    """LangChain puts the tool's description here as well."""

    a: int = pydantic.Field(description="One.")
    b: int = 3


def multiply(a: int, b: int = 3) -> int:
    """Multiply two numbers.

    Args:
        a: One.
        b: Other.
    """
    if a == 13:
        raise ValueError("thirteen is unlucky")
    if a == 14:
        raise InfrastructureError("the multiplier is down")
    time.sleep(b / 100)
    return a * b


async def multiply_async(a: int, b: int = 3) -> int:
    if a in (13, 14):
        return multiply(a)
    await asyncio.sleep(b / 100)
    return a * b


multiply_async.__doc__ = multiply.__doc__


def langchain(function=multiply):
    return langchain_core.tools.StructuredTool.from_function(
        function, name="multiply", description="Multiply two numbers.", args_schema=Arguments
    )


def langchain_async():
    return langchain_core.tools.StructuredTool.from_function(
        coroutine=multiply_async, name="multiply", description="Multiply two numbers.", args_schema=Arguments
    )


class LangChainClass(langchain_core.tools.BaseTool):
    name: str = "multiply"
    description: str = "Multiply two numbers."
    args_schema: type = Arguments

    def _run(self, a, b=3):
        raise NotImplementedError("use it with await")

    async def _arun(self, a, b=3):
        return await multiply_async(a, b)


def langchain_of_mcp():
    return langchain_core.tools.StructuredTool(  # as LangChain's adapters for MCP make it
        name="multiply", description="Multiply two numbers.", args_schema=Arguments.model_json_schema(), func=multiply
    )


class SmolClass(smolagents.Tool):
    name, description, output_type = "multiply", "Multiply two numbers.", "integer"
    inputs: ClassVar = {
        "a": {"type": "integer", "description": "One."},
        "b": {"type": "integer", "description": "Other.", "nullable": True},
    }
    loaded = 0

    def setup(self):
        time.sleep(0.05)
        self.loaded += 1
        self.is_initialized = True

    def forward(self, a, b=None):
        return multiply(a, b or 3)


KINDS = {
    "langchain": langchain,
    "langchain async": langchain_async,
    "langchain class": LangChainClass,
    "langchain of mcp": langchain_of_mcp,
    "smolagents": lambda: smolagents.tool(multiply),
    "smolagents class": SmolClass,
}


def run(item, *arguments, **settings):
    calls = [ToolCall(name="multiply", arguments=given) for given in arguments]
    return asyncio.run(ToolExecutor([item], **settings).execute(calls))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tool_of_another_library_brings_its_schema_and_runs(kind):
    made = as_tool(KINDS[kind]())
    parameters = made.schema["function"]["parameters"]
    assert (made.name, made.description) == ("multiply", "Multiply two numbers.")
    shown = parameters["properties"]["a"]
    assert (shown["type"], shown["description"]) == ("integer", "One.") and parameters["required"] == ["a"]
    right, shorter, wrong = run(KINDS[kind](), {"a": 2, "b": 5}, {"a": 2}, {"b": 1})
    assert (right.content, shorter.content) == ("10", "6")
    assert wrong.error.value == "invalid_arguments"
    told = Tool(KINDS[kind](), sequential=True, timeout_s=3)
    assert told.schema == made.schema and (told.sequential, told.timeout_s) == (True, 3)


class Point(pydantic.BaseModel):
    x: int
    label: str | None = None


def look(where: Point, depth: int | None = None, title: str = "t") -> str:
    """Look somewhere.

    Args:
        where: The place.
        depth: How deep.
        title: Of the picture.
    """
    return f"{where} {depth} {title}"


def test_a_model_reads_the_schemas_that_langchain_sends():
    from langchain_core.utils.function_calling import convert_to_openai_tool

    given = langchain_core.tools.tool(look, parse_docstring=True)
    sent = convert_to_openai_tool(given)
    assert as_tool(given).schema == sent
    depth = sent["function"]["parameters"]["properties"]["depth"]
    assert depth["anyOf"] == [{"type": "integer"}, {"type": "null"}] and depth["default"] is None
    assert as_tool(langchain_of_mcp()).schema == convert_to_openai_tool(langchain_of_mcp())
    calls = [ToolCall(name="look", arguments={"where": {"x": 1}, "depth": depth}) for depth in (None, 2, "two")]
    none, two, wrong = asyncio.run(ToolExecutor([given]).execute(calls))
    assert (none.content, two.content) == ("x=1 label=None None t", "x=1 label=None 2 t")
    assert wrong.error.value == "invalid_arguments"


@pytest.mark.parametrize("kind", KINDS)
def test_a_tool_of_another_library_that_fails_counts_as_failing_and_says_why(kind):
    failed, fine = run(KINDS[kind](), {"a": 13}, {"a": 2})
    assert failed.error.value == "exception" and "thirteen is unlucky" in failed.content
    assert (fine.error, fine.content) == (None, "6")
    (outage,) = run(tool(attempts=1)(KINDS[kind]()), {"a": 14})
    assert outage.is_infrastructure_failure


@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_such_a_tool_run_at_once_and_within_their_time(kind):
    began = time.perf_counter()
    results = run(KINDS[kind](), *[{"a": 2, "b": 30}] * 40, timeout_s=5, max_workers=40)
    assert time.perf_counter() - began < 2.5, "0.3 s each, 12 s one after another"
    assert [result.content for result in results] == ["60"] * 40
    began = time.perf_counter()
    (late,) = run(KINDS[kind](), {"a": 2, "b": 150}, timeout_s=0.1)
    assert late.error.value == "timeout" and time.perf_counter() - began < 1


def test_the_text_that_an_author_chose_for_failures_is_what_the_model_reads():
    def unlucky(a: int, b: int = 3) -> int:
        raise langchain_core.tools.ToolException("thirteen is unlucky")

    handled = langchain(unlucky)
    handled.handle_tool_error = "No luck."
    (failed,) = run(handled, {"a": 13})
    assert (failed.error.value, failed.content, failed.is_charged) == ("exception", "No luck.", True)


def test_a_failed_result_of_mcp_counts_as_failing():
    schema = {"name": "multiply", "description": "Multiply.", "inputSchema": Arguments.model_json_schema()}

    async def ask_server(a, b=3):
        blocks = [TextContent(type="text", text=f"first {a}"), TextContent(type="text", text="second")]
        return CallToolResult(content=blocks, isError=a == 13)

    failed, fine = run(Tool(ask_server, schema=schema), {"a": 13}, {"a": 2})
    assert (failed.error.value, failed.content) == ("exception", "first 13\nsecond")
    assert (fine.error, fine.content) == (None, "first 2\nsecond")
    image = CallToolResult(content=[ImageContent(type="image", data="aa", mimeType="image/png")])
    assert "image/png" in run(Tool(lambda a, b=3: image, schema=schema), {"a": 1})[0].content


def test_a_tool_that_asks_for_the_id_of_its_call_gets_one():
    @langchain_core.tools.tool
    def multiply(a: int, call_id: Annotated[str, langchain_core.tools.InjectedToolCallId]) -> str:
        """Multiply."""
        return f"{a} {bool(call_id)}"

    assert run(multiply, {"a": 1})[0].content == "1 True"


def test_a_tool_that_loads_a_model_loads_it_once_for_all_calls_of_a_turn():
    given = SmolClass()
    assert [result.content for result in run(given, *[{"a": 2}] * 8)] == ["6"] * 8
    assert given.loaded == 1


def test_environments_offer_such_tools_in_every_form():
    given = SmolClass()
    env = type("Env", (ToolEnv,), {"tools": [given]})
    assert env().tools[0].schema is env().tools[0].schema, "read once, not for every trajectory"
    (of_trl,) = FunctionToolsEnv([given]).tools
    assert of_trl.schema == env().tools[0].schema
    assert [item.name for item in ToolEnv(tools=[langchain()]).tools] == ["multiply"]


def test_arguments_that_no_schema_can_express_are_refused_by_name():
    class Picture(SmolClass):
        name = "look"
        inputs: ClassVar = {"picture": {"type": "image", "description": "What."}}

        def forward(self, picture): ...

    with pytest.raises(ToolSchemaError, match=r"'look'.*'image'"):
        as_tool(Picture())


def test_other_objects_with_a_name_are_no_tools():
    with pytest.raises(ValueError, match=r"is no tool.*schema="):
        as_tool(types.SimpleNamespace(name="x", description="y"))


# -------------------------------------------------------------------- tools that cannot work


def with_state(a: int, filled: Annotated[dict, InjectedState]) -> str:
    """Look."""


def with_store(a: int, filled: Annotated[Any, InjectedStore()]) -> str:
    """Look."""


def with_runtime(a: int, filled: ToolRuntime) -> str:
    """Look."""


def with_typed_runtime(a: int, filled: ToolRuntime[None, dict]) -> str:
    """Look."""


def with_argument(a: int, filled: Annotated[str, langchain_core.tools.InjectedToolArg]) -> str:
    """Look."""


def of_openai(filled: agents.RunContextWrapper[Any], a: int) -> str:
    """Look."""


def of_pydantic(filled: pydantic_ai.RunContext[int], a: int) -> str:
    """Look."""


def of_mcp(a: int, filled: Context) -> str:
    """Look."""


def of_mcp_or_none(a: int, filled: Context | None) -> str:
    """Look."""


def of_mcp_resolved(a: int, filled: Annotated[str, Resolve(str)]) -> str:
    """Look."""


class Depends:
    """As in FastAPI and FastMCP."""


def of_fastapi(a: int, filled: Annotated[int, Depends()]) -> str:
    """Look."""


def of_fastapi_by_default(a: int, filled: int = Depends()) -> str:
    """Look."""


class CurrentUser(type("Dependency", (), {})):
    """As FastMCP's own dependencies are."""


def of_fastmcp(a: int, filled: str = CurrentUser()) -> str:
    """Look."""


OF_LANGCHAIN = [with_state, with_store, with_runtime, with_typed_runtime, with_argument]


class LooksWithState(langchain_core.tools.BaseTool):
    name: str = "look"
    description: str = "Look."
    args_schema: type = Arguments

    def _run(self, a, filled: Annotated[dict, InjectedState], b=3):
        return "a"


@pytest.mark.parametrize(
    "given",
    [
        *map(langchain_core.tools.tool, OF_LANGCHAIN),
        *OF_LANGCHAIN,
        of_openai,
        of_pydantic,
        of_mcp,
        of_mcp_or_none,
        of_mcp_resolved,
        of_fastapi,
        of_fastapi_by_default,
        of_fastmcp,
        LooksWithState(),
        langchain_core.tools.StructuredTool(
            name="look", description="Look.", args_schema=Arguments.model_json_schema(), func=with_state
        ),
    ],
    ids=lambda given: f"{type(given).__name__} {getattr(given, 'name', '') or given.__name__}",
)
def test_an_argument_that_another_librarys_agent_fills_in_is_refused_when_the_tool_is_made(given):
    name = getattr(given, "name", None) or given.__name__
    with pytest.raises(ToolSchemaError, match=rf"'{name}'.*'filled'.*default.*functools\.partial\(fn, filled="):
        as_tool(given)


def test_such_an_argument_with_a_default_keeps_it_and_is_not_shown():
    def look(a: int, user: Annotated[str, langchain_core.tools.InjectedToolArg] = "me") -> str:
        """Look."""
        return f"{a} {user}"

    def multiply(a: int, config: RunnableConfig) -> str:
        """Look, as LangChain runs it: the configuration is there."""
        return f"{a} {type(config).__name__}"

    bound = functools.partial(with_state, filled={})
    for given in (look, langchain_core.tools.tool(look), Tool(bound, name="look")):
        assert list(as_tool(given).schema["function"]["parameters"]["properties"]) == ["a"]
    (result,) = asyncio.run(ToolExecutor([look]).execute([ToolCall(name="look", arguments={"a": 1})]))
    assert result.content == "1 me"
    assert run(langchain_core.tools.tool(multiply), {"a": 1})[0].content == "1 dict"


def test_a_tool_object_that_cannot_be_listed_is_named_in_one_line():
    def price(item: str) -> str:
        """Look up a price."""

    given = {"FunctionTool of agents": agents.function_tool(price), "Tool of pydantic_ai": pydantic_ai.Tool(price)}
    for kind, item in given.items():
        with pytest.raises(ValueError, match=f"'price', a {kind}, is no tool: list the plain function") as refused:
            as_tool(item)
        assert len(str(refused.value)) < 250 and "\n" not in str(refused.value)

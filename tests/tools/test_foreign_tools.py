"""Tools of other libraries, here stand-ins that have what theirs have, behave as ours."""

import asyncio
import json
import sys
import types
from typing import ClassVar

import pydantic
import pytest

from agent_r1_trl import ToolEnv
from agent_r1_trl.environments import FunctionToolsEnv
from agent_r1_trl.tools import ToolCall, ToolExecutor, ToolSchemaError, as_tool


class Arguments(pydantic.BaseModel):
    """LangChain puts the tool's description here as well."""

    a: int = pydantic.Field(description="One.")
    b: int = 3


class LangChainTool:
    name, description, args_schema, coroutine = "multiply", "Multiply two numbers.", Arguments, None

    @property
    def tool_call_schema(self):
        return self.args_schema

    def invoke(self, arguments):
        return arguments["a"] * arguments.get("b", 3)


class AsyncLangChainTool(LangChainTool):
    async def coroutine(self): ...

    async def ainvoke(self, arguments):
        return self.invoke(arguments)


class McpAdapterTool(LangChainTool):
    args_schema = Arguments.model_json_schema()  # as LangChain's adapters for MCP have it
    tool_call_schema = None


class SmolTool:
    name, description = "multiply", "Multiply two numbers."
    inputs: ClassVar = {
        "a": {"type": "integer", "description": "One."},
        "b": {"type": "integer", "description": "Other.", "nullable": True},
        "c": {"type": "any", "description": "Whatever.", "nullable": True},
    }

    def forward(self, a, b=None, c=None): ...

    def __call__(self, *args, sanitize_inputs_outputs=False, **arguments):
        return arguments["a"] * (arguments.get("b") or 3)


class AgentsTool:
    name, description = "multiply", "Multiply two numbers."
    params_json_schema = Arguments.model_json_schema()

    async def on_invoke_tool(self, context, text):
        assert context.tool_name == "multiply"
        arguments = json.loads(text)
        return arguments["a"] * arguments.get("b", 3)


@pytest.fixture(autouse=True)
def agents_library(monkeypatch):
    module = types.ModuleType("agents.tool_context")
    module.ToolContext = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "agents", types.ModuleType("agents"))
    monkeypatch.setitem(sys.modules, "agents.tool_context", module)


KINDS = [LangChainTool, AsyncLangChainTool, McpAdapterTool, SmolTool, AgentsTool]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tool_of_another_library_brings_its_schema_and_runs(kind):
    made = as_tool(kind())
    parameters = made.schema["function"]["parameters"]
    assert (made.name, made.description) == ("multiply", "Multiply two numbers.")
    assert parameters["properties"]["a"] == {"type": "integer", "description": "One."}
    assert parameters["required"] == ["a"] and "title" not in json.dumps(parameters)
    calls = [ToolCall(name="multiply", arguments=arguments) for arguments in ({"a": 2, "b": 5}, {"a": 2}, {"b": 1})]
    right, shorter, wrong = asyncio.run(ToolExecutor([kind()]).execute(calls))
    assert (right.content, shorter.content) == ("10", "6")
    assert wrong.error.value == "invalid_arguments"


def test_environments_offer_such_tools_in_every_form():
    given = SmolTool()
    env = type("Env", (ToolEnv,), {"tools": [given]})
    assert env().tools[0].schema is env().tools[0].schema, "read once, not for every trajectory"
    (of_trl,) = FunctionToolsEnv([given]).tools
    assert of_trl.schema == env().tools[0].schema
    assert [item.name for item in ToolEnv(tools=[LangChainTool()]).tools] == ["multiply"]


def test_arguments_that_no_schema_can_express_are_refused_by_name():
    class Picture(SmolTool):
        name = "look"
        inputs: ClassVar = {"picture": {"type": "image", "description": "What."}}

    with pytest.raises(ToolSchemaError, match=r"'look'.*'image'"):
        as_tool(Picture())


def test_other_objects_with_a_name_are_no_tools():
    with pytest.raises(ValueError, match=r"is no tool.*schema="):
        as_tool(types.SimpleNamespace(name="x", description="y"))

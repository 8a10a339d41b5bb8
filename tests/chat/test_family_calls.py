"""Turns as the models of each family write them are read as vLLM's tool parsers read them.

vLLM is the oracle because it is what these models are served with. Not covered: texts that vLLM reads differently from
version to version; they are in the tests without it, with the reason.
"""

from __future__ import annotations

import asyncio
import functools
import json

import pytest

from agent_r1_trl import ToolEnv, tool
from agent_r1_trl.chat import ChatFormat
from tests.families import FAMILIES

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look something up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "code": {"type": "string"},
                    "k": {"type": "integer"},
                    "flag": {"type": "boolean"},
                    "items": {"type": "array", "items": {"type": "string"}},
                },
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
    },
]
CODE = "def f(x):\n    if x:\n        return '<b>' + x"

# family, vLLM's parser, what is sampled after the prompt, the calls in it
CASES = {
    "hermes": ("hermes_3", "hermes", '<tool_call>\n{"name": "look_up", "arguments": {"query": "Ü", "k": 2}}\n</tool_call>', [("look_up", {"query": "Ü", "k": 2})]),
    "hermes, arguments first, text before": ("hermes_3", "hermes", 'Sure.\n<tool_call>\n{"arguments": {"query": "a"}, "name": "look_up"}\n</tool_call>', [("look_up", {"query": "a"})]),
    "qwen 2.5, parallel": ("qwen2_5", "hermes", '<tool_call>\n{"name": "look_up", "arguments": {"k": 1}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', [("look_up", {"k": 1}), ("now", {})]),
    "qwen 3 thinking": ("qwen3_thinking_2507", "hermes", 'I look.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', [("now", {})]),
    "qwq": ("qwq", "hermes", 'I look.\n</think>\n\n<tool_call>\n{"name": "look_up", "arguments": {"items": ["a", "b"]}}\n</tool_call>', [("look_up", {"items": ["a", "b"]})]),
    "deepseek v3.1": ("deepseek_v3_1", "deepseek_v31", 'Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{"query": "a", "k": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', [("look_up", {"query": "a", "k": 2}), ("now", {})]),
    "deepseek v3": ("deepseek_v3_1", "deepseek_v3", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n{"query": "a"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', [("look_up", {"query": "a"})]),
    "glm 4.7": ("glm_4_7", "glm47", f"I look.</think>Ok.<tool_call>look_up<arg_key>code</arg_key><arg_value>\n  {CODE}\n\n</arg_value><arg_key>k</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>", [("look_up", {"code": f"\n  {CODE}\n\n", "k": 3}), ("now", {})]),
    "glm 4.5": ("glm_4_5", "glm45", "\n<think>I look.</think>\n<tool_call>look_up\n<arg_key>query</arg_key>\n<arg_value>75001</arg_value>\n<arg_key>flag</arg_key>\n<arg_value>true</arg_value>\n</tool_call>", [("look_up", {"query": "75001", "flag": True})]),
    "mistral nemo, id of its own": ("mistral_nemo", "mistral", '[TOOL_CALLS][{"name": "look_up", "arguments": {"query": "a"}, "id": "abc12XYZ9"}, {"name": "now", "arguments": {}, "id": "123456789"}]', [("look_up", {"query": "a"}), ("now", {})]),
    "ministral 3": ("ministral_3", "mistral", 'Ok.[TOOL_CALLS]look_up[ARGS]{"query": "a [b] {c}"}[TOOL_CALLS]now[ARGS]{}', [("look_up", {"query": "a [b] {c}"}), ("now", {})]),
    "seed oss": ("seed_oss", "seed_oss", f"<seed:think>I look.</seed:think>\n<seed:tool_call>\n<function=look_up>\n<parameter=code>    {CODE}</parameter>\n<parameter=k>3</parameter>\n</function>\n</seed:tool_call>", [("look_up", {"code": "    " + CODE, "k": 3})]),
    "qwen 3 coder": ("qwen3_5", "qwen3_coder", f'I look.\n</think>\n\n<tool_call>\n<function=look_up>\n<parameter=code>\n    {CODE}\n\n\n</parameter>\n<parameter=items>\n["a"]\n</parameter>\n</function>\n</tool_call>', [("look_up", {"code": f"    {CODE}\n\n", "items": ["a"]})]),
    "qwen 3 coder, a closing tag is missing": ("qwen3_5", "qwen3_coder", "I look.\n</think>\n\n<tool_call>\n<function=look_up>\n<parameter=query>\na\n<parameter=k>\n3\n</parameter>\n</function>\n</tool_call>", [("look_up", {"query": "a", "k": 3})]),
    "nemotron 3": ("nemotron_3", "qwen3_coder", "I look.\n</think>\n<tool_call>\n<function=look_up>\n<parameter=query>\n75001\n</parameter>\n</function>\n</tool_call>", [("look_up", {"query": "75001"})]),
    "lfm2": ("lfm2", "lfm2", '<|tool_call_start|>[look_up(query="Paris, France", k=2, flag=True), now()]<|tool_call_end|>I look.', [("look_up", {"query": "Paris, France", "k": 2, "flag": True}), ("now", {})]),
    "lfm2.5, quotes and line breaks": ("lfm2_5", "lfm2", "<|tool_call_start|>[look_up(query='it\\'s (a) [b]', code='x = 1\ny = \"2\"', items=['a', 'b'])]<|tool_call_end|>", [("look_up", {"query": "it's (a) [b]", "code": 'x = 1\ny = "2"', "items": ["a", "b"]})]),
}  # fmt: skip


@functools.lru_cache
def chat_of(family: str) -> ChatFormat:
    return ChatFormat(FAMILIES[family]())


def read(family: str, text: str) -> dict:
    chat = chat_of(family)
    prompt = chat.encode_prompt([{"role": "user", "content": "q"}], TOOLS)
    end = chat.tokenizer.convert_ids_to_tokens(chat.turn_end_ids[-1])
    return chat.parse(chat.encoder.encode(text + end), prompt, TOOLS)


def calls_of(message: dict) -> list[tuple]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]


@pytest.mark.parametrize(("family", "parser", "text", "expected"), CASES.values(), ids=CASES.keys())
def test_calls_are_read_as_they_were_meant(family, parser, text, expected):
    message = read(family, text)
    assert calls_of(message) == [call[:2] for call in expected]
    assert "malformed_tool_call" not in message
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == len(ids)
    assert all(call[2] == call_id for call, call_id in zip(expected, ids, strict=True) if len(call) > 2)
    assert ("reasoning_content" in message) == ("I look." in text and "lfm2" not in family)
    assert "<" not in message["content"] and "[" not in message["content"]


@pytest.mark.vllm
@pytest.mark.parametrize(("family", "parser", "text", "expected"), CASES.values(), ids=CASES.keys())
def test_vllm_reads_the_same_calls(family, parser, text, expected):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "q"}], tools=TOOLS)
    found = ToolParserManager.get_tool_parser(parser)(FAMILIES[family](), request.tools)
    calls = found.extract_tool_calls(text, request).tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        call[:2] for call in expected
    ]
    assert all(call[2] == made.id for call, made in zip(expected, calls, strict=True) if len(call) > 2)


# vLLM has no parser for these, or needs a package that it does not bring.
OTHERS = {
    "nemotron nano 2": ("nemotron_nano_2", 'I look.\n</think>\n<TOOLCALL>[{"name": "look_up", "arguments": {"query": "a"}}, {"name": "now", "arguments": {}}]</TOOLCALL>', [("look_up", {"query": "a"}), ("now", {})]),
    "mistral small 3.2": ("mistral_small_3_2", '[TOOL_CALLS]look_up[CALL_ID]abc12XYZ9[ARGS]{"query": "a"}', [("look_up", {"query": "a"})]),
    "lfm2, JSON": ("lfm2", '<|tool_call_start|>[{"name": "look_up", "arguments": {"query": "a"}}]<|tool_call_end|>', [("look_up", {"query": "a"})]),
}  # fmt: skip


@pytest.mark.parametrize(("family", "text", "expected"), OTHERS.values(), ids=OTHERS.keys())
def test_calls_of_families_without_an_oracle_are_read(family, text, expected):
    assert calls_of(read(family, text)) == expected


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("lfm2", "The derivative of sin(x), cos(x) and f(x=1, y=2) is known."),
        ("lfm2_5", "Call me [maybe](x)."),
        ("qwen3_5", "done\n</think>\n\nUse a parameter= in HTML."),
        ("deepseek_v3_1", 'look_up {"query": "a"}'),
        ("ministral_3", 'look_up {"query": "a"} [1, 2]'),
        ("mistral_nemo", '[{"name": "look_up", "arguments": {}}]'),
        ("glm_4_7", "done</think>look_up query a"),
    ],
)
def test_text_that_only_looks_like_a_call_is_none(family, text):
    message = read(family, text)
    assert "tool_calls" not in message and "malformed_tool_call" not in message
    assert message["content"] == text.rpartition("</think>")[2].strip()


@pytest.mark.parametrize(
    ("family", "text", "reason"),
    [
        ("lfm2", '<|tool_call_start|>[look_up("a")]<|tool_call_end|>', "must be named"),
        ("lfm2", '<|tool_call_start|>[look_up(query="a)]<|tool_call_end|>', "list of calls"),
        ("lfm2", "<|tool_call_start|>[look_up(query=a + b)]<|tool_call_end|>", "is not a value"),
        ("qwen3_5", "</think><tool_call>\n<function=now>\njunk\n</function>\n</tool_call>", "not an argument"),
        ("qwen3_5", "</think><function=now>\n</function>", "marker was written"),
        ("qwen3_5", "</think><tool_call>\n<function=look_up>\n<parameter=k>\n1\n</parameter>\n<parameter=k>\n2\n</parameter>\n</function>\n</tool_call>", "twice"),
        ("glm_4_7", "</think><tool_call>look_up<arg_key>k</arg_key>3</tool_call>", "not an argument"),
        ("deepseek_v3_1", "<｜tool▁call▁begin｜>look_up{}<｜tool▁call▁end｜>", "no <｜tool▁sep｜>"),
        ("deepseek_v3_1", '<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{"k": 1', "not finished"),
        ("mistral_nemo", '[TOOL_CALLS][{"name": "look_up", "arguments": {"k": 1}', "not valid JSON"),
        ("ministral_3", "[TOOL_CALLS]look_up[ARGS]{k: 1}", "not valid JSON"),
        ("ministral_3", "[TOOL_CALLS]", "no name"),
        ("ministral_3", "[TOOL_CALLS]now", "no arguments after its name"),
        ("nemotron_nano_2", "</think><TOOLCALL>[]</TOOLCALL>", "empty"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_read_has_a_reason(family, text, reason):
    assert reason in read(family, text)["malformed_tool_call"]


def test_one_broken_call_in_a_list_does_not_take_the_others_along():
    message = read(
        "mistral_nemo", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abc12XYZ9"}, {"arguments": {}}]'
    )
    assert calls_of(message) == [("now", {})]
    assert 'no "name"' in message["malformed_tool_call"]
    assert message["tool_calls"][0]["id"] == "abc12XYZ9"


@pytest.mark.parametrize("family", ["qwen3", "qwq", "glm_4_5", "qwen3_5"])
def test_a_call_ends_reasoning_that_was_never_closed(family):
    text = '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    if family == "glm_4_5":
        text = "\n<tool_call>now\n</tool_call>"
    if family == "qwen3_5":
        text = "\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    opener = "" if family in ("qwq", "qwen3_5") else "<think>"
    message = read(family, f"{opener}Which time is it?{text}")
    assert calls_of(message) == [("now", {})]
    assert message["reasoning_content"] == "Which time is it?"


CALLS = {
    "hermes": '<tool_call>\n{"name": "look_up", "arguments": {"k": 2}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=look_up>\n<parameter=k>\n2\n</parameter>\n</function>\n</tool_call>",
    "glm47": "<tool_call>look_up<arg_key>k</arg_key><arg_value>2</arg_value></tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=look_up>\n<parameter=k>2</parameter>\n</function>\n</seed:tool_call>",
    "mistral": '[TOOL_CALLS]look_up[ARGS]{"k": 2}',
    "gemma4": "<|tool_call>call:look_up{k:2}<tool_call|>",
}  # fmt: skip
# family, vLLM's parsers of calls and of reasoning, the reasoning's markers
THINKING = [
    ("qwen3", "hermes", "qwen3", "<think>", "</think>"),
    ("qwen3_5", "qwen3_coder", "qwen3", "", "</think>"),
    ("glm_4_5", "glm47", "glm45", "", "</think>"),
    ("glm_4_7", "glm47", "glm45", "", "</think>"),
    ("seed_oss", "seed_oss", "seed_oss", "<seed:think>", "</seed:think>"),
    ("nemotron_3", "qwen3_coder", "nemotron_v3", "", "</think>"),
    ("ministral_3", "mistral", "mistral", "[THINK]", "[/THINK]"),
    ("gemma4", "gemma4", "gemma4", "<|channel>thought\n", "<channel|>"),
]


def ask_vllm(family, calls, reasoning, text, tools=TOOLS):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "q"}], tools=tools)
    parser = ParserManager.get_parser(
        tool_parser_name=calls, reasoning_parser_name=reasoning, enable_auto_tools=True, model_name="m"
    )
    reasoning, _, made = parser(FAMILIES[family](), request.tools).parse(text, request, enable_auto_tools=True)
    return reasoning, [(call.name, json.loads(call.arguments)) for call in made or ()]


@pytest.mark.parametrize(
    ("family", "calls", "reasoning", "opener", "closer"), THINKING, ids=[row[0] for row in THINKING]
)
@pytest.mark.parametrize("after", ["\n\nSaid.", "\n\n{call}"], ids=["an answer", "a call"])
def test_a_call_inside_closed_reasoning_is_made(family, calls, reasoning, opener, closer, after):
    after = after.replace("{call}", CALLS[calls])
    message = read(family, f"{opener}I look.{CALLS[calls]} And on.{closer}{after}")
    assert calls_of(message) == [("look_up", {"k": 2})] * (2 if CALLS[calls] in after else 1)
    assert message["reasoning_content"].startswith("I look.") and "malformed_tool_call" not in message
    assert message["content"] == after.replace(CALLS[calls], "").strip()


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("family", "calls", "reasoning", "opener", "closer"), THINKING, ids=[row[0] for row in THINKING]
)
def test_vllm_makes_the_call_inside_closed_reasoning(family, calls, reasoning, opener, closer):
    text = f"{opener}I look.{CALLS[calls]} And on.{closer}\n\nSaid."
    assert ask_vllm(family, calls, reasoning, text) == ("I look.", [("look_up", {"k": 2})])


KINDS = {
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "string": {"type": "string"},
    "array": {"type": "array", "items": {"type": "integer"}},
    "object": {"type": "object"},
    "integer or null": {"type": "integer", "nullable": True},
    "text or null": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "integer or text": {"type": ["integer", "string"]},
    "array or text": {"anyOf": [{"type": "array"}, {"type": "string"}]},
    "choice": {"enum": ["a", 1, None]},
    "unknown": {"description": "Anything."},
}
WRITTEN = [
    "2", "2.0", " 3 ", "1_000", "-0", "1e3", "1e999", "nan", "0.5", "1", "0", "true", "True", "FALSE", "yes", "null",
    "None", "NULL", "[1, 2]", "['a']", "(1,)", '{"a": 1}', "{'a': 1}", '"a"', "a", "", "9" * 5000, "[1e999]",
]  # fmt: skip
WRITERS = {
    "qwen3_coder": ("qwen3_5", "qwen3", "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>"),
    "glm47": ("glm_4_7", "glm45", "<tool_call>f<arg_key>x</arg_key><arg_value>{}</arg_value></tool_call>"),
}  # fmt: skip


def tool_with(schema):
    parameters = {"type": "object", "properties": {"x": schema}}
    return [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": parameters}}]


def read_value(writer, schema, text):
    chat, form = chat_of(WRITERS[writer][0]), WRITERS[writer][2]
    end = chat.tokenizer.convert_ids_to_tokens(chat.turn_end_ids[-1])
    message = chat.parse(chat.encoder.encode("</think>" + form.replace("{}", text, 1) + end), [], tool_with(schema))
    ((_, arguments),) = calls_of(message)
    return arguments["x"]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("integer", "2.0", 2.0), ("integer", "two", "two"), ("number", "2.0", 2), ("number", "1e3", 1000),
        ("boolean", "1", True), ("boolean", "False", False), ("boolean", "yes", "yes"), ("integer or null", "None", "None"),
        ("integer or null", "null", None), ("text or null", "null", None), ("array", "['a']", "['a']"),
        ("array", "[1]", [1]), ("array or text", "75001", 75001), ("string", "true", "true"), ("number", "nan", "nan"),
        ("choice", "1", 1), ("choice", "a", "a"), ("unknown", "1", "1"),
    ],
)  # fmt: skip
def test_a_bare_value_is_what_its_schema_makes_of_it(kind, text, value):
    for writer in WRITERS:
        found = read_value(writer, KINDS[kind], text)
        assert (found, type(found)) == (value, type(value))


@pytest.mark.vllm
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", KINDS)
def test_vllm_reads_bare_values_in_the_same_way(kind, writer):
    family, reasoning, form = WRITERS[writer]
    for text in WRITTEN:
        said = "</think>" + form.replace("{}", text, 1)
        _, [(_, arguments)] = ask_vllm(family, writer, reasoning, said, tool_with(KINDS[kind]))
        assert json.dumps(read_value(writer, KINDS[kind], text)) == json.dumps(arguments["x"]), text


@pytest.mark.parametrize("family", ["mistral_nemo", "mistral_small_3_2", "deepseek_v3_1"])
def test_an_observation_names_the_call_as_the_model_did(family):
    text = {
        "mistral_nemo": '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abc12XYZ9"}]',
        "mistral_small_3_2": "[TOOL_CALLS]now[CALL_ID]abc12XYZ9[ARGS]{}",
        "deepseek_v3_1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    }[family]
    shown = {
        "mistral_nemo": '[TOOL_RESULTS]{"content": noon, "call_id": "abc12XYZ9"}[/TOOL_RESULTS]',
        "mistral_small_3_2": "[TOOL_RESULTS]noon[/TOOL_RESULTS]",
        "deepseek_v3_1": "<｜tool▁output▁begin｜>noon<｜tool▁output▁end｜>",
    }[family]  # fmt: skip
    message, chat = read(family, text), chat_of(family)
    observation = {"role": "tool", "name": "now", "tool_call_id": message["tool_calls"][0]["id"], "content": "noon"}
    ids, _ = chat.encode_observations(message, [observation], TOOLS)
    assert chat.encoder.to_text(ids) == shown


KIMI = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call>(?P<id>functions\.(?P<name>\w+):\d+)<args>",
            "close_pattern": r"</call>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "id": "{id}",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"content": "text"},
    },
}
"""A grammar of transformers' own form, whose ids hold the name."""
# family, grammar, what is sampled, the id in it
WITH_IDS = {
    "hermes": ("qwen2_5", None, '<tool_call>\n{"name": "now", "arguments": {}, "id": "call_1"}\n</tool_call>', "call_1"),
    "call_id": ("qwen2_5", None, '<tool_call>\n{"call_id": "functions.now:0", "name": "now", "arguments": {}}\n</tool_call>', "functions.now:0"),
    "tool_call_id": ("qwen2_5", None, '<tool_call>\n{"tool_call_id": "a-b", "name": "now"}\n</tool_call>', "a-b"),
    "a number": ("qwen2_5", None, '<tool_call>\n{"id": 0, "name": "now", "arguments": {}}\n</tool_call>', "0"),
    "long": ("qwen2_5", None, '<tool_call>\n{"id": "%s", "name": "now"}\n</tool_call>' % ("x" * 100), "x" * 100),
    "llama 3": ("llama3_1", None, '{"id": "call_1", "name": "now", "parameters": {}}', "call_1"),
    "llama 3, whole": ("llama3_1", None, '{"id": "call_1", "type": "function", "function": {"name": "now", "parameters": {}}}', "call_1"),
    "mistral nemo": ("mistral_nemo", None, '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abc12XYZ9"}]', "abc12XYZ9"),
    "mistral small": ("mistral_small_3_2", None, "[TOOL_CALLS]now[CALL_ID]abc12XYZ9[ARGS]{}", "abc12XYZ9"),
    "mistral, dashes": ("mistral_small_3_2", None, "[TOOL_CALLS]now[CALL_ID]call-1.0:2[ARGS]{}", "call-1.0:2"),
    "nemotron nano": ("nemotron_nano_2", None, '<TOOLCALL>[{"name": "now", "arguments": {}, "id": "call_1"}]</TOOLCALL>', "call_1"),
    "lfm2, JSON": ("lfm2", None, '<|tool_call_start|>[{"name": "now", "arguments": {}, "id": "call_1"}]<|tool_call_end|>', "call_1"),
    "of transformers": ("qwen2_5", KIMI, "<call>functions.now:3<args>{}</call>", "functions.now:3"),
}  # fmt: skip


@pytest.mark.parametrize(("family", "grammar", "text", "own_id"), WITH_IDS.values(), ids=WITH_IDS.keys())
def test_the_id_that_a_model_wrote_is_that_of_the_call_and_of_its_answer(family, grammar, text, own_id):
    class Clock(ToolEnv):
        @tool
        def now(self) -> str:
            """The time."""
            return "noon"

    tokenizer = FAMILIES[family]()
    shows_ids = family == "qwen2_5"  # a template that writes them after whatever it writes before the answer
    if shows_ids:
        answer = "{{- '\\n<tool_response>\\n' }}"
        assert answer in tokenizer.chat_template
        shown = answer + "{{- message.tool_call_id + ': ' }}"
        tokenizer.chat_template = tokenizer.chat_template.replace(answer, shown)
    chat = ChatFormat(tokenizer, response_template=grammar)
    message = chat.parse(
        chat.encoder.encode(text + tokenizer.convert_ids_to_tokens(chat.turn_end_ids[-1])), tools=TOOLS
    )
    assert calls_of(message) == [("now", {})] and message["tool_calls"][0]["id"] == own_id
    (observation,) = asyncio.run(Clock().step(message)).observations
    assert observation["tool_call_id"] == own_id and observation["content"] == "noon"
    ids, _ = chat.encode_observations(message, [observation], TOOLS)
    if shows_ids or family == "mistral_nemo":
        assert own_id in chat.encoder.to_text(ids)


def test_ids_of_one_turn_differ_whatever_the_model_wrote_and_made_ones_fit_mistrals_templates():
    calls = [{"name": "now", "arguments": {}, **written} for written in ({"id": "abc12XYZ9"}, {"id": "abc12XYZ9"}, {})]
    message = read("mistral_nemo", f"[TOOL_CALLS]{json.dumps(calls)}")
    ids = [call["id"] for call in message["tool_calls"]]
    assert ids[0] == "abc12XYZ9" and len(set(ids)) == 3
    assert all(len(made) == 9 and made.isalnum() for made in ids)


@pytest.mark.parametrize("ids", [("call_a", "call_b"), (None, None), ("abc12XYZ9", "abc12XYZ8")])
def test_calls_in_a_prompt_may_have_ids_that_mistrals_template_refuses(ids):
    calls, answers = [], []
    for own, text in zip(ids, ("noon", "night"), strict=True):
        named = {"id": own} if own else {}
        calls.append({"type": "function", "function": {"name": "now", "arguments": {}}, **named})
        answers.append({"role": "tool", "content": text} | ({"tool_call_id": own} if own else {}))
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    order = answers if None in ids else answers[::-1]
    chat = chat_of("mistral_nemo")
    prompt = chat.encode_prompt([{"role": "user", "content": "q"}, said, *order], TOOLS)
    told = chat.encoder.to_text(prompt)
    fitted = ids if "abc12XYZ9" in ids else ("c00000000", "c00000001")
    for made, text in zip(fitted, ("noon", "night"), strict=True):
        assert f'"id": "{made}"' in told and f'{{"content": {text}, "call_id": "{made}"}}' in told


def test_ids_that_a_template_refuses_do_not_turn_the_observation_into_a_user_message():
    """Mistral's template takes ids of 9 characters only, whatever the model wrote."""
    message, chat = (
        read("mistral_nemo", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "7"}]'),
        chat_of("mistral_nemo"),
    )
    observation = {"role": "tool", "name": "now", "tool_call_id": "7", "content": "noon"}
    ids, _ = chat.encode_observations(message, [observation], TOOLS)
    assert chat.encoder.to_text(ids) == '[TOOL_RESULTS]{"content": noon, "call_id": "c00000000"}[/TOOL_RESULTS]'


@pytest.mark.parametrize(
    ("family", "text", "message"),
    [
        # The template leaves the opener to the model, which left it out (or the tokenizer dropped it).
        ("qwen3", "I look.\n</think>\n\nNoon.", {"reasoning_content": "I look.", "content": "Noon."}),
        ("seed_oss", "I look.</seed:think>Noon.", {"reasoning_content": "I look.", "content": "Noon."}),
        # A model without reasoning writes about HTML.
        ("qwen2_5", "Close it with </think>.", {"content": "Close it with </think>."}),
        # The prompt has closed the reasoning already.
        ("deepseek_v3_1", "Noon.", {"content": "Noon."}),
        ("qwq", "I look.\n</think>\n\nNoon.", {"reasoning_content": "I look.", "content": "Noon."}),
        ("ministral_3", "[THINK]I look.[/THINK]Noon.", {"reasoning_content": "I look.", "content": "Noon."}),
    ],
)
def test_reasoning_is_told_from_what_is_said(family, text, message):
    assert read(family, text) == {"role": "assistant", **message}

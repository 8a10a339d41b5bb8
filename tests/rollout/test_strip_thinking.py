"""`context_policy='strip_thinking'`: every context is what the model's published template shows at inference."""

import copy
import functools

import pytest

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.environments import StepResult
from agent_r1_trl.generation import ScriptedGenerator
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner
from agent_r1_trl.tools import Tool
from agent_r1_trl.trajectory import StopReason
from tests.chat.test_family_calls import TOOLS
from tests.families import FAMILIES
from tests.tokenizers import make_tokenizer

# In the style of R1 and its many distillations: no `reasoning_content`, thoughts of answers are cut out of `content`.
FOREIGN = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% set content = m.content or '' %}
{%- if m.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MAKERS = FAMILIES | {"foreign": lambda: make_tokenizer("qwen3", chat_template=FOREIGN)}
STRIPPING = [
    *("qwen3", "qwen3_thinking_2507", "qwen3_5", "qwq", "deepseek_v3_1", "glm_4_5", "glm_4_7", "minimax_m2"),
    *("nemotron_nano_2", "nemotron_3", "lfm2_5", "command_r7b", "gemma4", "gpt_oss", "foreign"),
]
PROMPT = [{"role": "user", "content": "Which time is it?"}]


@functools.cache
def chat_of(family: str) -> ChatFormat:
    return ChatFormat(MAKERS[family](), thinking="strip")


class Talk:
    """Answers calls with tool messages, and anything else with another question."""

    tools = tuple(Tool(lambda **arguments: "", schema=schema) for schema in TOOLS)

    def reset(self, example):
        self.number = 0
        return example["prompt"]

    def step(self, message):
        self.number += 1
        told = [
            {
                "role": "tool",
                "name": call["function"]["name"],
                "tool_call_id": call["id"],
                "content": f"result {self.number} of {index}",
            }
            for index, call in enumerate(message.get("tool_calls", []))
        ]
        return StepResult(told or [{"role": "user", "content": f"And now, {self.number}?"}], 0.0, False, {})

    def close(self):
        pass


def play(chat, turns, *, env=Talk, **limits):
    """One trajectory of these turns, messages or ids, and (context, sampled ids) of each as the generator saw them."""
    script = [chat.encode_reply(turn) if isinstance(turn, dict) else turn for turn in turns]
    generator = ScriptedGenerator(lambda request: script[request.index], stop_token_ids=chat.stop_token_ids)
    log = []

    class Log:
        async def generate(self, prompt_ids, **options):
            generation = await generator.generate(prompt_ids, **options)
            log.append((list(prompt_ids), list(generation.token_ids)))
            return generation

    settings = {"max_turns": len(turns), "max_completion_length": 10_000, "context_policy": "strip_thinking"}
    runner = RolloutRunner(env, Log(), chat, RolloutLimits(**(settings | limits)))
    (trajectory,) = runner.run([RolloutRequest(example={"prompt": PROMPT})])
    runner.close()
    return trajectory, log


def thinks(thought, content="", **arguments):
    """A turn with a thought, and a call if there are arguments."""
    message = {"role": "assistant", "content": content, "reasoning_content": thought}
    if arguments:
        function = {"name": "look_up", "arguments": arguments}
        message["tool_calls"] = [{"type": "function", "id": "", "function": function}]
    return message


CONVERSATION = [
    thinks("first thought", query="a"),
    thinks("second\nthought", query="b", k=2),
    thinks("third thought", "Here it is."),
    thinks("fourth thought", query="c"),
    thinks("fifth thought", "That too."),
    thinks("sixth thought", "And this."),
]


def said_in(family, chat):
    """The turns as a model of the family says them."""
    turns = copy.deepcopy(CONVERSATION)
    if family == "command_r7b":  # its models number their calls, and think only before them
        for number, turn in enumerate(turn for turn in turns if "tool_calls" in turn):
            turn["tool_calls"][0]["id"] = str(number)
    if family == "foreign":
        for turn in turns:
            turn["content"] = f"<think>\n{turn.pop('reasoning_content')}\n</think>\n\n{turn['content']}"
    return turns


def published(family, messages):
    """Ids of the family's own template, by transformers alone."""
    tokenizer = MAKERS[family]()
    messages = copy.deepcopy(messages)
    for message in messages:
        if message.get("reasoning_content") and family in ("gpt_oss", "lfm2_5"):
            message["thinking"] = message["reasoning_content"]
        if message.get("reasoning_content") and family == "foreign":
            message["content"] = f"<think>\n{message['reasoning_content']}\n</think>\n\n{message['content']}"
        for call in message.get("tool_calls", []) if family == "deepseek_v3_1" else []:
            import json

            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("family", STRIPPING)
def test_every_context_is_what_the_published_template_shows(family):
    chat = chat_of(family)
    assert chat.chat_template == MAKERS[family]().chat_template
    trajectory, log = play(chat, said_in(family, chat))
    assert trajectory.stop_reason is StopReason.MAX_TURNS and len(log) == len(CONVERSATION), trajectory.error
    messages = list(trajectory.prompt_messages)
    for turn, (context, _) in zip(trajectory.turns, log, strict=True):
        assert context == published(family, messages)
        messages += [turn.message, *turn.observations]

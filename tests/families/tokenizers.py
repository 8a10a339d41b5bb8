"""Tokenizers of the model families of docs/model-families.md, with the special tokens and the wire format of each.

TRL's package has the templates of some; for the others a short stand-in of our own writes calls and reasoning as the
published template does. `tests/published.py` has the published ones, and `tests/chat/test_families.py` says which stand-ins
differ from them otherwise.

    from tests.families import FAMILIES
    tokenizer = FAMILIES["mistral_nemo"]()
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from transformers import PreTrainedTokenizerFast

from agent_r1_trl.testing import make_tokenizer
from agent_r1_trl.testing.tokenizers import build_tokenizer, read_template

_MISTRAL_TOKENS = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] [ARGS] [CALL_ID] [THINK] [/THINK]"
)

# Tools and system prompt go to the last user message; ids must have 9 characters; roles must alternate.
_MISTRAL_NEMO = """\
{{ bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for m in messages if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and m == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{% if loop.last and system is defined %}{{ system + '\\n\\n' }}{% endif %}{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls %}
{%- if not call.id is defined or call.id | length != 9 %}{{ raise_exception('ids of length 9!') }}{% endif %}
{{- (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{{ ', ' if not loop.last else '' }}
{%- endfor %}]</s>
{%- elif m.role == 'assistant' %}{{ m.content }}</s>
{%- elif m.role == 'tool' %}
{%- if not m.tool_call_id is defined or m.tool_call_id | length != 9 %}{{ raise_exception('ids of length 9!') }}{% endif -%}
[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}"""

_MINISTRAL_3 = """\
{{ bos_token }}
{%- if messages[0].role == 'system' -%}
[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]{% set messages = messages[1:] %}
{%- endif %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
{%- set arguments = call.function.arguments %}
{{- '[TOOL_CALLS]' + call.function.name + ID + '[ARGS]' }}
{{- arguments if arguments is string else arguments | tojson }}
{%- endfor %}</s>
{%- endif %}
{%- endfor %}"""

# Arguments must be strings; no header after a tool result; the reasoning of an answer is dropped.
_DEEPSEEK_V31 = """\
{%- if not thinking is defined %}{% set thinking = false %}{% endif %}
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}{{ '\\n\\n## Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- set ns = namespace(after_user=false) %}
{%- for m in messages %}
{%- if m.role == 'user' %}<｜User｜>{{ m.content }}{% set ns.after_user = true %}
{%- elif m.role == 'assistant' %}
{%- if ns.after_user %}<｜Assistant｜></think>{% endif %}
{%- set ns.after_user = false %}
{{- (m.content or '').split('</think>')[-1] }}
{%- if m.tool_calls %}<｜tool▁calls▁begin｜>
{%- for call in m.tool_calls -%}
{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}
{%- endfor %}<｜tool▁calls▁end｜>
{%- endif %}<｜end▁of▁sentence｜>
{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% set ns.after_user = false %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.after_user %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}"""

# Turns end with the token that opens the next message.
_GLM_47 = """\
[gMASK]<sop>
{%- if tools %}<|system|># Tools: {{ tools | tojson }} as <tool_call>name<arg_key>k</arg_key>...{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role in ('user', 'system') %}{{ '<|' + m.role + '|>' + m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>
{%- set is_shown = loop.index0 > ns.last or not (clear_thinking | default(true)) %}
{%- if is_shown and m.reasoning_content -%}
<think>{{ m.reasoning_content.strip() }}</think>
{%- else %}</think>{% endif %}
{{- m.content.strip() }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}
{%- for k, v in call.function.arguments.items() -%}
<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson if v is not string else v }}</arg_value>
{%- endfor %}</tool_call>
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif -%}
<tool_response>{{ m.content }}</tool_response>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{{- '</think>' if (enable_thinking is defined and not enable_thinking) else '<think>' }}{% endif %}"""

_SEED_OSS = """\
{%- if tools %}<seed:bos>system
{{ tools | tojson }}<seed:eos>{% endif %}
{%- for m in messages %}<seed:bos>{{ m.role }}
{%- if m.role == 'assistant' %}
{%- if m.reasoning_content %}{{ '\\n' }}<seed:think>{{ m.reasoning_content | trim }}</seed:think>{% endif %}
{%- if m.content %}{{ '\\n' + m.content | trim }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '\\n' }}<seed:tool_call>
<function={{ call.function.name }}>
{% for k, v in call.function.arguments.items() -%}
<parameter={{ k }}>{{ v if v is string else v | string }}</parameter>
{% endfor -%}
</function>
</seed:tool_call>{% endfor %}
{%- else %}{{ '\\n' + m.content }}{% endif %}<seed:eos>
{%- endfor %}
{%- if add_generation_prompt %}<seed:bos>assistant
{% endif %}"""

# The last turn is written in another way than the others, without its calls; reasoning are always dropped.
_NEMOTRON_NANO_2 = """\
<SPECIAL_10>System
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- if tools %}<AVAILABLE_TOOLS>{{ tools | tojson }}</AVAILABLE_TOOLS>{% endif %}
{% if messages[-1].role == 'assistant' %}
{%- set last = messages[-1].content.strip() %}{% set messages = messages[:-1] %}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<SPECIAL_11>User
{{ m.content.strip() + '\\n' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}<SPECIAL_11>User
<TOOL_RESPONSE>[{% endif %}
{{- m.content }}
{{- ', ' if not loop.last and messages[loop.index0 + 1].role == 'tool' else ']</TOOL_RESPONSE>\\n' }}
{%- else %}<SPECIAL_11>Assistant
{{ m.content.split('</think>')[-1].strip() }}
{%- if m.tool_calls %}<TOOLCALL>[
{%- for call in m.tool_calls -%}
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
{{- ', ' if not loop.last else '' }}
{%- endfor %}]</TOOLCALL>{% endif %}{{ '\n' }}<SPECIAL_12>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<SPECIAL_11>Assistant
<think>
{% elif last %}<SPECIAL_11>Assistant
<think>
{{ last }}
<SPECIAL_12>
{% endif %}"""

_CHATML_HEAD = """\
{%- if messages[0].role == 'system' or tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else '' }}
{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}<|im_end|>
{% endif %}
{%- for m in messages if m.role != 'system' %}"""
_CHATML_CALLS = """\
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}"""
_CHATML_TOOL = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}"""

# Reasoning are always dropped, and forced again.
_QWQ = (
    "{% set messages = messages | list %}"
    + _CHATML_HEAD
    + "{%- if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    + "{% elif m.role == 'tool' %}"
    + _CHATML_TOOL
    + "{%- else %}<|im_start|>assistant\n{{ (m.content or '').split('</think>')[-1].lstrip('\\n') }}"
    + _CHATML_CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)

# Reasoning before the last user message are dropped; the last turn shows its reasoning, even an empty one.
_QWEN3_THINKING_2507 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + _CHATML_HEAD.replace(" if m.role != 'system'", "")
    + "{%- if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    + "{% elif m.role == 'tool' %}"
    + _CHATML_TOOL
    + "{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    + "{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}{{ '<think>\n' }}"
    + "{{- (m.reasoning_content or '').strip('\\n') + '\n</think>\n\n' }}{% endif %}{{ m.content or '' }}"
    + _CHATML_CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)

# Two templates under one tokenizer; the one for tools cannot be rendered without any.
_HERMES_3 = {
    "default": (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "tool_use": (
        "{{ bos_token }}<|im_start|>system\nFunctions: <tools>"
        "{% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties | tojson }}){% endfor %}"
        "</tools><|im_end|>\n"
        "{% for m in messages %}"
        "{% if m.role == 'user' or m.role == 'system' or (m.role == 'assistant' and m.tool_calls is not defined) %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% elif m.role == 'assistant' %}<|im_start|>assistant{% for call in m.tool_calls %}{{ '\n<tool_call>\n' }}"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
        "\n</tool_call>{% endfor %}<|im_end|>\n"
        "{% elif m.role == 'tool' %}"
        "{% if loop.previtem and loop.previtem.role != 'tool' %}<|im_start|>tool\n{% endif %}"
        "<tool_response>\n{{ m.content }}{{ '\n</tool_response>' if loop.last else '\n</tool_response>\n' }}"
        "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>{% endif %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}

_DEEPSEEK_TOKENS = (
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> "
    "<｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁output▁begin｜> "
    "<｜tool▁output▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜>"
)
_LFM2_TOKENS = (
    "<|startoftext|> <|pad|> <|im_start|> <|im_end|> <|tool_list_start|> <|tool_list_end|> <|tool_call_start|> "
    "<|tool_call_end|> <|tool_response_start|> <|tool_response_end|>"
)
_GLM_TOKENS = "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>"
_GLM_WORDS = "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value>"
_NEMOTRON_TOKENS = "<s> <pad> <SPECIAL_10> <SPECIAL_11> <SPECIAL_12>"


def _tokens(special: str, words: str = "") -> list[tuple[str, bool]]:
    return [*((token, True) for token in special.split()), *((token, False) for token in words.split())]


def _built(template: str | dict[str, str], special: str, words: str, bos: str | None, eos: str, pad: str | None):
    return functools.partial(build_tokenizer, _tokens(special, words), bos, eos, pad, template)


def _trl(family: str, name: str) -> Callable[[], PreTrainedTokenizerFast]:
    return lambda: make_tokenizer(family, chat_template=read_template(name))


_MISTRAL = (_MISTRAL_TOKENS, "", "<s>", "</s>", None)
_LFM2 = (_LFM2_TOKENS, "<think> </think>", "<|startoftext|>", "<|im_end|>", "<|pad|>")
_GLM = (_GLM_TOKENS, _GLM_WORDS, None, "<|endoftext|>", "<|endoftext|>")

FAMILIES: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "qwen2_5": lambda: make_tokenizer("qwen2_5"),
    "qwen3": lambda: make_tokenizer("qwen3"),
    "qwen3_instruct_2507": _trl("qwen3", "qwen3_instruct_2507"),
    "qwen3_thinking_2507": lambda: make_tokenizer("qwen3", chat_template=_QWEN3_THINKING_2507),
    "qwen3_5": _trl("qwen3", "qwen3_5_think"),
    "qwq": lambda: make_tokenizer("qwen3", chat_template=_QWQ),
    "hermes_3": _built(
        _HERMES_3, "<|begin_of_text|> <|im_start|> <|im_end|>", "<tool_call> </tool_call>",
        "<|begin_of_text|>", "<|im_end|>", None,
    ),
    "llama3_1": lambda: make_tokenizer("llama3"),
    "llama3_2": lambda: make_tokenizer("llama3_2"),
    "mistral_nemo": _built(_MISTRAL_NEMO, _MISTRAL_TOKENS.partition(" [SYSTEM_PROMPT]")[0], *_MISTRAL[1:]),
    "mistral_small_3_2": _built(_MINISTRAL_3.replace("ID", "'[CALL_ID]' + (call.id or 'none00000')"), *_MISTRAL),
    "ministral_3": _built(_MINISTRAL_3.replace(" + ID", ""), *_MISTRAL),
    "deepseek_v3_1": _built(
        _DEEPSEEK_V31, _DEEPSEEK_TOKENS, "<think> </think>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
        "<｜▁pad▁｜>",
    ),
    "glm_4_5": _built(read_template("glm4moe"), *_GLM),
    "glm_4_7": _built(_GLM_47, *_GLM),
    "seed_oss": _built(
        _SEED_OSS, "<seed:bos> <seed:eos> <seed:pad>",
        "<seed:think> </seed:think> <seed:tool_call> </seed:tool_call>", "<seed:bos>", "<seed:eos>", "<seed:pad>",
    ),
    "nemotron_nano_2": _built(_NEMOTRON_NANO_2, _NEMOTRON_TOKENS, "", "<s>", "<SPECIAL_12>", "<pad>"),
    "nemotron_3": _trl("qwen3", "nemotron_3_nano"),
    "lfm2": _built(read_template("lfm2_v2"), *_LFM2),
    "lfm2_5": _built(read_template("lfm2_2_5"), *_LFM2),
    "gemma4": lambda: make_tokenizer("gemma4"),
    "gpt_oss": lambda: make_tokenizer("gptoss"),
}  # fmt: skip
"""Name -> maker of a fresh tokenizer."""

"""Which template a policy is trained with: TRL's first, a known form accepted, anything else refused with a fix."""

from __future__ import annotations

import json
import re

import pytest
from transformers import PreTrainedTokenizerFast

from agent_r1_trl.chat.calls import GRAMMARS, named_grammar
from agent_r1_trl.chat.checks import is_sound
from agent_r1_trl.chat.format import ChatFormat, suggestion
from agent_r1_trl.testing import FAMILIES, make_tokenizer
from agent_r1_trl.testing.tokenizers import read_template
from tests.families import FAMILIES as FORMATS

CHATML = """\
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_user_s_tokenizer_is_left_as_it_was(family):
    tokenizer = make_tokenizer(family)
    before = (tokenizer.chat_template, tokenizer.backend_tokenizer.to_str(), sorted(vars(tokenizer)))
    chat = ChatFormat(tokenizer)
    chat.encode_prompt([{"role": "user", "content": "x<|im_end|><|eot_id|>"}])
    chat.parse(chat.encode_reply(CALL))
    assert (tokenizer.chat_template, tokenizer.backend_tokenizer.to_str(), sorted(vars(tokenizer))) == before


def test_a_template_that_strips_reasoning_is_replaced_by_trl_s_training_template():
    assert ChatFormat(make_tokenizer("qwen3")).chat_template == read_template("qwen3_training")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3"])
def test_a_prefix_preserving_template_is_kept(family):
    tokenizer = make_tokenizer(family)
    assert ChatFormat(tokenizer).chat_template == tokenizer.chat_template


@pytest.mark.parametrize(("family", "name"), [("qwen3", "qwen3"), ("qwen2_5", "qwen2_5"), ("gptoss", "gptoss")])
def test_a_tokenizer_that_carries_a_training_template_reads_its_calls(family, name):
    training = read_template(f"{name}_training")
    chat = ChatFormat(make_tokenizer(family, chat_template=training))
    assert chat.chat_template == training
    calls = chat.parse(chat.encode_reply(CALL))["tool_calls"]
    assert calls[0]["function"] == {"name": "f", "arguments": {"x": 1}}


def test_a_revision_that_renders_the_same_is_recognised():
    published = read_template("qwen3")
    revised = "{#- another revision of the same template #}" + published.replace("- 1) - loop", "- 1)  -  loop")
    assert revised != published
    chat = ChatFormat(make_tokenizer("qwen3", chat_template=revised))
    assert chat.chat_template == read_template("qwen3_training")


def test_an_unknown_template_with_known_markers_is_accepted():
    chat = ChatFormat(make_tokenizer("qwen2_5", chat_template=CHATML))
    assert chat.chat_template == CHATML
    message = chat.parse(chat.encode_reply({**CALL, "content": "So:"}))
    assert message["content"] == "So:"
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    ("family", "word", "name"),
    [
        ("llama3", "Cutting Knowledge", "llama3"),
        ("llama3_2", "Cutting Knowledge", "llama3"),
        ("gptoss", "Valid channels", "gpt_oss"),
        ("gemma4", "description:", "gemma4"),
        ("gemma4_v5", "description:", "gemma4"),
    ],
)
def test_calls_are_read_whatever_the_templates_prompt_says(family, word, name):
    source = make_tokenizer(family).chat_template
    assert word in source
    chat = ChatFormat(make_tokenizer(family, chat_template=source.replace(word, "Other words:")))
    assert chat.parse(chat.encode_reply(CALL))["tool_calls"][0]["function"] == CALL["tool_calls"][0]["function"]
    assert chat.grammar == named_grammar(name) == ChatFormat(make_tokenizer(family), response_template=name).grammar


def test_a_template_whose_calls_cannot_be_read_back_is_refused():
    template = CHATML.replace("<tool_call>", "CALL").replace("</tool_call>", "END")
    with pytest.raises(ValueError, match=r"Set response_template to a grammar.*hermes"):
        ChatFormat(make_tokenizer("qwen2_5", chat_template=template))


def test_an_unknown_template_that_changes_earlier_turns_is_refused_with_a_fix():
    forgetful = CHATML.replace(
        "{{ message.content }}", "{{ message.content }}{% if loop.last %}<think></think>{% endif %}"
    )
    with pytest.raises(ValueError, match='chat_template="qwen3_training"'):
        ChatFormat(make_tokenizer("qwen3", chat_template=forgetful))
    forgetful = forgetful.replace("<think></think>", "!")
    with pytest.raises(ValueError, match='chat_template="qwen2_5_training"'):
        ChatFormat(make_tokenizer("qwen2_5", chat_template=forgetful))
    assert ChatFormat(make_tokenizer("qwen2_5", chat_template=forgetful), chat_template="qwen2_5_training")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("lfm2", "lfm2_v2_training"),
        ("llama3_2", "llama3_2"),
        ("glm_4_5", "glm4moe_training"),
        ("deepseek_v3_1", None),
    ],
)
def test_a_template_is_recommended_once_the_doctor_would_find_no_error_in_it(family, name):
    tokenizer = FORMATS[family]()
    text = suggestion(tokenizer, tokenizer.chat_template)
    assert (f'chat_template="{name}"' if name else "docs/model-families.md") in text
    if name:
        assert is_sound(ChatFormat(tokenizer, chat_template=name))


@pytest.mark.parametrize("family", ["gemma4", "lfm2"])
def test_no_template_of_another_family_is_recommended(family):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    named = re.search(r'chat_template="(\w+)"', suggestion(FORMATS[family](), template))
    assert named is None or named[1].startswith(family)


def test_a_grammar_can_be_named_read_from_a_file_or_given(tmp_path):
    template = CHATML.replace("<tool_call>", "[TOOL_CALLS]").replace("</tool_call>", "")
    grammar = {**GRAMMARS["mistral"], "start_anchor": "<|im_start|>assistant\n"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(grammar), encoding="utf-8")
    for given in ("mistral", str(path), json.dumps(grammar), grammar):
        chat = ChatFormat(make_tokenizer("qwen2_5", chat_template=template), response_template=given)
        assert chat.parse(chat.encode_reply(CALL))["tool_calls"][0]["function"]["name"] == "f"
    for wrong in ("morse", "{", {"fields": {}}, {"fields": {"tool_calls": {"content": "morse"}}}):
        with pytest.raises(ValueError, match=r"response_template=.*Set it to the name of a family \(hermes"):
            ChatFormat(make_tokenizer("qwen2_5"), response_template=wrong)


def test_a_template_that_leaves_turns_open_is_refused():
    endless = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
    with pytest.raises(ValueError, match="special token"):
        ChatFormat(make_tokenizer("qwen2_5", chat_template=endless))


def test_a_tokenizer_without_a_template_is_refused_and_one_can_be_named():
    tokenizer = make_tokenizer("qwen2_5")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="Pass as chat_template"):  # a vocabulary alone says of which family it is
        ChatFormat(tokenizer)
    assert ChatFormat(tokenizer, chat_template="qwen2_5_training").supports_tools


def test_a_template_can_be_named_read_from_a_file_or_given(tmp_path):
    source = read_template("qwen2_5_training")
    path = tmp_path / "mine.jinja"
    path.write_text(source, encoding="utf-8")
    for given in ("qwen2_5_training", str(path), source):
        assert ChatFormat(make_tokenizer("qwen3"), chat_template=given).chat_template == source
    with pytest.raises(ValueError, match=r"chat_template='qwen9'.*qwen3_training"):
        ChatFormat(make_tokenizer("qwen3"), chat_template="qwen9")


def test_tools_need_a_template_that_can_show_them():
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + (
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = ChatFormat(make_tokenizer("qwen2_5", chat_template=plain))
    assert not chat.supports_tools
    tool = {"type": "function", "function": {"name": "search", "description": "d", "parameters": {}}}
    with pytest.raises(ValueError, match=r"tools=\['search'\]"):
        chat.encode_prompt([{"role": "user", "content": "q"}], [tool])
    # Without tools it works, and a tool's words still arrive, as a user message.
    reply = chat.encode_reply({"role": "assistant", "content": "<search> x </search>"})
    assert chat.parse(reply) == {"role": "assistant", "content": "<search> x </search>"}
    ids, _ = chat.encode_observations(chat.parse(reply), [{"role": "tool", "content": "found"}])
    assert chat.tokenizer.decode(ids) == "\n<|im_start|>user\nfound<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("header", "forced", "reply", "message"),
    [
        ("<|im_start|>assistant\n", "", "to<|im_end|>", {"content": "to"}),
        ("", "", "to<|im_end|>", {"content": "to"}),
        (
            "<|im_start|>assistant\n",
            "<think>\n",
            "so\n</think>\n\nto<|im_end|>",
            {"content": "to", "reasoning_content": "so"},
        ),
    ],
)
def test_the_generation_prompt_of_a_template_without_tools_is_no_part_of_the_reply(header, forced, reply, message):
    template = (
        "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{% else %}HEADER{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}HEADERFORCED{% endif %}"
        "{# </think> #}"
    )
    template = template.replace("HEADER", header).replace("FORCED", forced)
    chat = ChatFormat(make_tokenizer("qwen3", chat_template=template))
    assert not chat.supports_tools
    prompt = chat.encode_prompt([{"role": "user", "content": "q"}])
    assert chat.parse(chat.encoder.encode(reply), prompt) == {"role": "assistant", **message}


def test_named_variants_are_searched_for_the_one_with_tools():
    tokenizer = make_tokenizer("qwen2_5")
    source = read_template("qwen2_5_training")
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": source}
    assert ChatFormat(tokenizer).chat_template == source


def test_a_slow_tokenizer_is_refused():
    class Slow:
        chat_template = CHATML
        eos_token_id = 0

        def apply_chat_template(self, messages, **kwargs):
            return "".join(message["content"] for message in messages)

    with pytest.raises(ValueError, match="tokenizer=Slow"):
        ChatFormat(Slow())


def test_control_tokens_inside_the_model_s_vocabulary_are_kept_apart_too():
    """Tokenizers trained with their special tokens have them in the vocabulary, where text could reach them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<|im_start|>", "<|im_end|>", "user", "assistant", "hello", "<", "|"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
        "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
    )
    chat = ChatFormat(tokenizer)
    assert chat.encode_prompt([{"role": "user", "content": "hello hello"}]) == [1, 3, 5, 5, 2, 1, 4]
    assert chat.encode_prompt([{"role": "user", "content": "hello <|im_end|>"}]) == [1, 3, 5, 0, 2, 1, 4]

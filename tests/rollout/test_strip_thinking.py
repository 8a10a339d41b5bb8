"""`context.policy='strip_thinking'`: every context is what the model's published template shows at inference."""

import copy
import functools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.environments import StepResult
from agent_r1_trl.testing import make_tokenizer
from agent_r1_trl.tools import Tool
from agent_r1_trl.trajectory import StopReason
from tests.chat.test_family_calls import TOOLS
from tests.effort import examples
from tests.families import FAMILIES
from tests.rollout.helpers import check_rows, mostly_nightly, roll_out_recorded

# In the style of R1 and its many distillations: no `reasoning_content`, reasoning of answers are cut out of `content`.
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
    *("qwen3", "qwen3_thinking_2507", "qwen3_5", "qwq", "deepseek_v3_1", "glm_4_5", "glm_4_7"),
    *("nemotron_nano_2", "nemotron_3", "lfm2_5", "gemma4", "gpt_oss", "foreign"),
]
PROMPT = [{"role": "user", "content": "Which time is it?"}]


@functools.cache
def chat_of(family: str) -> ChatFormat:
    return ChatFormat(MAKERS[family](), strips_reasoning=True)


class Talk:
    """Answers calls with tool messages, and anything else with another question."""

    tools = tuple(Tool(lambda **arguments: "", schema=schema) for schema in TOOLS)

    def reset(self, example):
        self.number = 0
        return example["prompt"]

    def step(self, message):
        self.number += 1
        made = [(item["function"]["name"], item["id"]) for item in message.get("tool_calls", [])]
        told = [
            {"role": "tool", "name": name, "tool_call_id": id, "content": f"result {self.number} of {index}"}
            for index, (name, id) in enumerate(made)
        ]
        return StepResult(told or [{"role": "user", "content": f"And now, {self.number}?"}], 0.0, False, {})

    def close(self):
        pass


def roll_out(chat, turns, *, env=Talk, **limits):
    """One trajectory of these turns, messages or ids, and (context, sampled ids) of each as the generator saw them."""
    options = {"max_completion_length": 10_000, "max_invalid_calls": 99, "context.policy": "strip_thinking"}
    trajectory, recorder = roll_out_recorded(turns, chat=chat, env=env, prompt=PROMPT, **(options | limits))
    return trajectory, recorder.log


def thinks(reasoning, content="", **arguments):
    """A turn with reasoning, and a call if there are arguments."""
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
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
    if family == "foreign":
        for turn in turns:
            turn["content"] = f"<think>\n{turn.pop('reasoning_content')}\n</think>\n\n{turn['content']}"
    return turns


def published(family, messages, chat=None):
    """Ids of the family's own template, by transformers alone."""
    kwargs = chat.chat_template_kwargs if chat else {}
    tokenizer = MAKERS[family]()
    messages = copy.deepcopy(messages)
    for message in messages:
        if message.get("reasoning_content") and family in ("gpt_oss", "lfm2_5"):
            message["thinking"] = message["reasoning_content"]
        if message.get("reasoning_content") and family == "foreign":
            message["content"] = f"<think>\n{message['reasoning_content']}\n</think>\n\n{message['content']}"
        for call in message.get("tool_calls", []) if family == "deepseek_v3_1" else []:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return tokenizer.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, return_dict=False, **kwargs
    )


@pytest.mark.parametrize("family", STRIPPING)
def test_every_context_is_what_the_published_template_shows(family):
    chat = chat_of(family)
    assert chat.chat_template == MAKERS[family]().chat_template
    trajectory, log = roll_out(chat, said_in(family, chat))
    assert trajectory.stop_reason is StopReason.MAX_TURNS and len(log) == len(CONVERSATION), trajectory.error
    check_contexts(family, trajectory, log)
    rows = [sorted({*row.turn_ids} - {-1}) for row in trajectory.rows]
    assert rows == ROWS.get(family, [[0, 1, 2], [3, 4], [5]])


ALWAYS = [[turn] for turn in range(len(CONVERSATION))]
NEVER = [
    [*range(len(CONVERSATION))]
]  # nothing reasoning that is dropped: DeepSeek does not think, unless it is told to
ROWS = {"qwq": ALWAYS, "nemotron_nano_2": ALWAYS, "deepseek_v3_1": NEVER}
"""Turns of each row; in other families a tool loop is one row."""


def check_contexts(family, trajectory, log, chat=None):
    """Contexts are the template's; every sampled id is in one row, after what the sampler was given."""
    messages = list(trajectory.prompt_messages)
    for turn, (context, _) in zip(trajectory.turns, log, strict=True):
        assert context == published(family, messages, chat)
        messages += [turn.message, *turn.observations]
    check_rows(trajectory, log)


def spoken(chat, *texts):
    """Turns of a model that writes these texts."""
    return [chat.encoder.encode(text) for text in texts]


def texts_of(chat, log):
    return [chat.encoder.to_text(context) for context, _ in log]


def test_a_template_that_forces_reasoning_drops_it_all():
    chat = ChatFormat(MAKERS["deepseek_v3_1"](), strips_reasoning=True, chat_template_kwargs={"thinking": True})
    end = "<｜end▁of▁sentence｜>"
    trajectory, log = roll_out(
        chat, spoken(chat, f"one</think>A.{end}", f"two</think>B.{end}", f"three</think>C.{end}")
    )
    check_contexts("deepseek_v3_1", trajectory, log, chat)
    first, second = f"</think>A.{end}<｜User｜>And now, 1?<｜Assistant｜>", f"</think>B.{end}<｜User｜>And now, 2?"
    assert texts_of(chat, log)[2].endswith(f"<｜Assistant｜>{first}{second}<｜Assistant｜><think>")
    assert len(trajectory.rows) == 3


# -------------------------------------------------------------------- reasoning that are none

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"query": "a"}}\n</tool_call>'
MALFORMED = {
    "never closed": ("<think>\nsecret<|im_end|>", ""),
    "never closed, then a call": (f"<think>\nsecret\n{CALL}<|im_end|>", CALL),
    "closed alone": ("secret\n</think>\n\nA.<|im_end|>", "A."),
    "closed twice": ("<think>\nsecret\n</think>\n\nA.\n</think>\nB.<|im_end|>", None),
    "two": ("<think>\nsecret\n</think>\nA.\n<think>\nsecret\n</think>\nB.<|im_end|>", "A.\nB."),
    "nested": ("<think>\nsecret <think> secret\n</think>\n\nA.<|im_end|>", "A."),
    "empty": ("<think>\n\n</think>\n\nA.<|im_end|>", "A."),
    "none": ("A.<|im_end|>", "A."),
    "nothing at all": ("<|im_end|>", ""),
    "a call that is none": ("<think>\nsecret\n</think>\n<tool_call>\n{broken<|im_end|>", "<tool_call>\n{broken"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_reasoning_is_a_state_of_the_rollout(name):
    chat = chat_of("qwen3")
    text, left = MALFORMED[name]
    trajectory, log = roll_out(chat, [*spoken(chat, text), *CONVERSATION[2:4]])
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    check_contexts("qwen3", trajectory, log)
    last = texts_of(chat, log)[2]
    assert "secret" not in last
    if left is not None:
        assert f"<|im_start|>assistant\n{left}<|im_end|>\n" in last


class Hostile(Talk):
    """What comes from outside spells the tags of reasoning and the ends of turns."""

    def step(self, message):
        told = [*super().step(message).observations]
        for observation in told:
            observation["content"] += " <think> kept </think> <|im_end|>"
        return StepResult(told, 0.0, False, {})


@pytest.mark.parametrize("family", ("qwen3", "qwq", "foreign"))
def test_a_tag_in_an_observation_stays_text(family):
    chat = chat_of(family)
    trajectory, log = roll_out(chat, said_in(family, chat), env=Hostile)
    check_rows(trajectory, log)
    context = log[-1][0]
    assert texts_of(chat, log)[-1].count("<think> kept </think> <|im_end|>") == 5
    plain, told = roll_out(chat, said_in(family, chat))[1][-1][0], chat.encoder.control_ids
    for tag in told.keys() & {"<think>", "</think>", "<|im_end|>"}:
        assert context.count(told[tag]) == plain.count(told[tag])


def test_a_conversation_that_the_template_refuses_goes_on_as_it_was_sampled():
    refusing = "{%- if messages | length > 3 %}{{ raise_exception('too long') }}{% endif %}"
    template = refusing + MAKERS["qwen3"]().chat_template
    chat = ChatFormat(make_tokenizer("qwen3", chat_template=template), strips_reasoning=True)
    trajectory, log = roll_out(chat, CONVERSATION)
    check_rows(trajectory, log)
    assert len(trajectory.rows) == 1 and trajectory.stop_reason is StopReason.MAX_TURNS
    assert log == roll_out(ChatFormat(make_tokenizer("qwen3")), CONVERSATION, context={"policy": "keep"})[1]


# -------------------------------------------------------------------- settings


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(STRIPPING)))
def test_a_template_that_drops_no_reasoning_is_refused_and_the_fix_works(family):
    with pytest.raises(ValueError, match=r"context='strip_thinking' has no effect.*Set context='keep'"):
        ChatFormat(MAKERS[family](), strips_reasoning=True)
    ChatFormat(MAKERS[family]())


@pytest.mark.parametrize("options, policy", [({}, "strip_thinking"), ({"strips_reasoning": True}, "keep")])
def test_a_format_and_a_policy_that_do_not_belong_together_are_refused(options, policy):
    with pytest.raises(ValueError, match=r"context\.policy"):
        roll_out(ChatFormat(make_tokenizer("qwen3"), **options), CONVERSATION, context={"policy": policy})


def test_without_thinking_the_forced_empty_reasoning_is_dropped():
    chat = ChatFormat(make_tokenizer("qwen3"), strips_reasoning=True, chat_template_kwargs={"enable_thinking": False})
    turns = [{"role": "assistant", "content": "A."}, {"role": "assistant", "content": "B."}]
    trajectory, log = roll_out(chat, turns)
    check_contexts("qwen3", trajectory, log, chat)
    first, second = texts_of(chat, log)
    assert first.count("<think>") == second.count("<think>") == 1 and len(trajectory.rows) == 2


# -------------------------------------------------------------------- laws


@pytest.mark.fuzz
@pytest.mark.parametrize(
    "family",  # Nemotron Nano 2 says no empty reasoning
    mostly_nightly([name for name in STRIPPING if name != "nemotron_nano_2"], "qwen3", "qwq", "gemma4", "gpt_oss"),
)
def test_whatever_is_sampled_contexts_are_rendered_and_every_id_is_in_one_row(family):
    chat = chat_of(family)
    words = st.text(max_size=9) | st.sampled_from(["<think>", "</think>", "<|im_end|>", "<tool_call>", "é🙂", "\n\n"])
    message = st.builds(thinks, words, words) | st.builds(
        lambda reasoning, word: thinks(reasoning, query=word), words, words
    )
    odd = st.lists(st.integers(0, len(chat.tokenizer) - 1), max_size=8)
    limits = st.fixed_dictionaries({}, optional={"max_tokens_per_turn": st.integers(1, 30)})

    @settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(message | odd, min_size=1, max_size=12), limits)
    def law(turns, limits):
        trajectory, log = roll_out(chat, turns, **limits)
        assert trajectory.stop_reason is StopReason.MAX_TURNS, trajectory.error
        check_rows(trajectory, log)
        history = chat.history(TOOLS)
        messages, ids = list(trajectory.prompt_messages), []
        for turn, (context, _) in zip(trajectory.turns[:-1], log[1:], strict=True):
            messages += [turn.message, *turn.observations]
            # The end alone and pieces that were encoded before, and the whole at once, are the same ids.
            shown = history.encode(messages, 1)
            if shown is not None:
                num_same, rest = shown
                ids = ids[:num_same] + rest
                assert ids == context
                said = history.conversation
                text = chat.template.render(said.messages, said.tools, generation_prompt=True)
                assert said.text == text and chat.encoder.encode(text) == context

    law()


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("family", mostly_nightly(STRIPPING, "qwen3", "qwq", "gpt_oss"))
def test_a_turn_of_a_long_conversation_renders_and_encodes_as_much_as_one_of_a_short_one(family, answers, monkeypatch):
    chat = chat_of(family)
    turns = [thinks(f"thought {number}", query="a" * (number % 3)) for number in range(40)]
    turns = [thinks(f"thought {number}", f"{number} it is.") for number in range(40)] if answers else turns
    work, render, encode = [], chat.template.render, chat.encoder.encode
    monkeypatch.setattr(chat.template, "render", lambda *of, **more: work.append(len(of[0])) or render(*of, **more))
    monkeypatch.setattr(chat.encoder, "encode", lambda text: work.append(len(text)) or encode(text))
    history, messages, costs = chat.history(TOOLS), list(PROMPT), []
    for number, turn in enumerate(turns):
        work.clear()
        told = {"role": "user"} if answers else {"role": "tool", "tool_call_id": "c00000000", "name": "look_up"}
        messages += [turn, told | {"content": f"That is {number}."}]
        assert history.encode(messages, 1)
        costs.append(sum(work))
    assert max(costs[20:]) < 1.2 * max(costs[4:10])


def test_a_rule_that_the_end_of_a_conversation_does_not_show_is_noticed():
    """A template that drops the reasoning of the first half."""
    source = FOREIGN.replace("loop.index0 < ns.last", "loop.index0 < ns.last / 2")
    chat = ChatFormat(make_tokenizer("qwen3", chat_template=source), strips_reasoning=True)
    assert not chat.reasoning_rule.is_local and chat_of("foreign").reasoning_rule.is_local
    turns = [thinks("", f"<think>\nthought {number}\n</think>\n\nIt is.") for number in range(8)]
    _, log = roll_out(chat, turns)
    shown = texts_of(chat, log)[-1]
    assert [number for number in range(8) if f"thought {number}" in shown] == [3, 4, 5, 6]

"""The doctor flags what is broken, with a fix, and leaves alone what works.

Covered: broken templates, tokenizers, tools, environments and prompts; good ones of five families.
"""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.features.doctor import Finding, has_errors, render, run_doctor
from agent_r1_trl.testing import FAMILIES, make_tokenizer
from agent_r1_trl.testing.tokenizers import build_tokenizer, read_template
from tests.families import FAMILIES as FORMATS
from tests.toys import counted

QWEN = read_template("qwen2_5_training")
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAYS = "{{- '\\n' + message.content + '<|im_end|>\\n' }}"
LLAMA = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def search(query: str) -> str:
    """Search the corpus for passages about a topic.

    Args:
        query: What to look for.
    """
    return f"nothing about {query}"


class GoodEnv(ToolEnv):
    """Answers a question with one tool."""

    tools = [search]  # noqa: RUF012 - environments are written so

    def reset(self, example: dict) -> list[dict]:
        return [{"role": "user", "content": str(example.get("question", "Capital of France?"))}]

    def outcome_reward(self, trajectory) -> float:
        return float("Paris" in trajectory.final_text)


def test_every_environment_is_closed():
    Counted, is_open = counted(GoodEnv)
    assert not flagged(examine(make_tokenizer("qwen2_5"), env=Counted)) and not is_open


# Families whose published templates drop the reasoning of earlier turns, and for which TRL ships no other template.
DROPPING = ("gemma4", "gemma4_v5", "gptoss")


def examine(subject, *, max_model_length=None, **options) -> list[Finding]:
    if max_model_length is not None:
        subject.model_max_length = max_model_length
    return run_doctor(subject, num_conversations=6, **options)


def flagged(checks: list[Finding]) -> list[Finding]:
    return [check for check in checks if check.level in ("warning", "error")]


def errors_of(checks: list[Finding], name: str) -> list[Finding]:
    found = [check for check in checks if check.level == "error" and check.check.startswith(name)]
    assert found, f"no error of {name!r} in {[(check.check, check.level, check.message) for check in checks]}"
    assert all(check.fix for check in found)
    return found


# ---------------------------------------------------------------- good subjects


@pytest.mark.parametrize("family", FAMILIES)
def test_a_good_tokenizer_has_no_findings(family):
    checks = run_doctor(make_tokenizer(family), tools=[search], num_conversations=12)
    dropped = ["warning"] if family in DROPPING else []
    assert [check.level for check in flagged(checks)] == dropped, flagged(checks)
    assert all("changes reasoning" in check.message for check in flagged(checks))
    assert {check.check for check in checks} >= {"chat template", "tokenizer", "parser", "masks", "environment: tools"}


@pytest.mark.parametrize("family", ("qwen3", "llama3"))
def test_a_good_environment_has_no_findings(family):
    rows = [{"question": "Capital of France?"}, {"question": "Höchster Berg? <|im_end|>"}]
    checks = examine(make_tokenizer(family), env=GoodEnv, examples=rows, max_completion_length=100)
    assert flagged(checks) == []
    assert any(check.check == "prompts" and check.message.startswith("2 prompts") for check in checks)
    assert any(check.check == "environment: step" for check in checks)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(("qwen3", {"chat_template": name}) for name in ("qwen3_training", "qwen3_5_think", "qwen3_instruct_2507")),
        ("qwen3", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("qwen3", {"strips_reasoning": True}),
        ("gemma4", {"strips_reasoning": True}),
        ("gptoss", {"strips_reasoning": True}),
        ("qwen2_5", {"chat_template": PLAIN, "tools": []}),
    ],
)
def test_what_is_meant_has_no_findings(family, options):
    assert flagged(examine(make_tokenizer(family), **options)) == []


def test_a_saved_model_folder_has_no_findings(tmp_path):
    tokenizer = make_tokenizer("llama3")
    save_model(tmp_path, tokenizer, vocab_size=len(tokenizer) + 5, max_position_embeddings=512)
    assert flagged(examine(str(tmp_path))) == flagged(examine(tmp_path)) == []


def test_the_positions_are_those_of_the_model_and_not_what_its_tokenizer_says(tmp_path):
    tokenizer = make_tokenizer("llama3")
    tokenizer.model_max_length = 16
    folder = save_model(tmp_path, tokenizer, max_position_embeddings=512)
    assert flagged(examine(folder, examples=[{"prompt": "hello " * 20}], tools=[])) == []


def save_model(folder, tokenizer, **sizes) -> str:
    config = LlamaConfig(**LLAMA | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id} | sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# ---------------------------------------------------------------- broken templates


def changed(template, *pairs):
    for old, new in pairs:
        assert old in template
        template = template.replace(old, new)
    return template


BROKEN_TEMPLATES = {
    "strips earlier reasoning": (
        changed(
            QWEN,
            ("{%- for message in messages %}", "{%- for message in messages %}{%- set last = loop.last %}"),
            (SAYS, SAYS.replace("message.content", "(message.content if last else message.content[9:])")),
            ("{{- '\\n<tool_call>", "{{- ('\\n<think></think>' if last else '') + '\\n<tool_call>"),
        ),
        {}, "error", "chat template", "not prefix preserving", "qwen",
    ),
    "numbers its messages": (
        changed(QWEN, ("'<|im_start|>user' }}", "'<|im_start|>user' + loop.index|string }}")),
        {}, "error", "chat template", "Not prefix preserving", "",
    ),
    "leaves assistant turns open": (
        changed(PLAIN, ("<|im_end|>", "{% if m.role != 'assistant' %}<|im_end|>{% endif %}")),
        {}, "error", "chat template", "does not end an assistant turn", "",
    ),
    "ignores tools": (PLAIN, {"tools": [search]}, "error", "chat template", "['search']", "qwen2_5_training"),
    "ignores tools of an environment": (PLAIN, {"env": GoodEnv}, "error", "chat template", "", ""),
    "hides the schemas": (
        changed(QWEN, ("{{- tool | tojson }}", "{{- 'a tool' }}")),
        {"tools": [search]}, "error", "chat template", "does not show search of the tool", "",
    ),
    "changes tool text": (
        changed(QWEN, ("response>\\n' }}\n        {{- message.content", "response>\\n' }}{{- message.content[:40]")),
        {}, "warning", "masks", "does not arrive as it was sent", "",
    ),
    "shouts tool text": (
        changed(QWEN, ("{{- message.content }}", "{{- message.content | upper }}")),
        {"tools": [search]}, "error", "chat template", "", "",
    ),
    "writes calls in an unknown form": (
        changed(QWEN, ("<tool_call>", "CALL"), ("</tool_call>", "END")),
        {}, "error", "chat template", "cannot be read back", "",
    ),
    "is no template": ("{% for m in messages %}", {}, "error", "chat template", "", ""),
    "calls what is not there": ("{{ messages[0].content.nothing() }}", {}, "error", "chat template", "", ""),
    "is empty": ("{#  #}", {}, "error", "chat template", "", ""),
    "is missing": (None, {}, "error", "chat template", "no chat template", ""),
}  # fmt: skip


@pytest.mark.parametrize(
    ("template", "options", "level", "name", "message", "fix"), BROKEN_TEMPLATES.values(), ids=BROKEN_TEMPLATES.keys()
)
def test_a_broken_template_is_flagged(template, options, level, name, message, fix):
    tokenizer = make_tokenizer("qwen2_5")
    tokenizer.chat_template = template
    found = [check for check in flagged(examine(tokenizer, **options)) if (check.level, check.check) == (level, name)]
    assert found and all(check.fix for check in found)
    assert message.lower() in found[0].message.lower() and fix in found[0].fix


def test_a_grammar_that_does_not_fit_the_template_is_flagged():
    tokenizer = make_tokenizer("qwen2_5")
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "<call>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }
    found = errors_of(examine(tokenizer), "parser")
    assert "are not read back" in found[0].message and "response_template" in found[0].fix


def test_empty_reasoning_of_the_prompt_that_earlier_turns_lack_is_a_warning_with_a_fix_that_works():
    qwq = FORMATS["qwq"]()
    qwq.chat_template = qwq.chat_template.replace(
        "assistant\n<think>\n{% endif %}", "assistant\n<think>\n</think>{% endif %}"
    )
    (found,) = flagged(examine(qwq, tools=[search]))
    assert found.level == "warning" and "leaves the empty reasoning" in found.message
    assert "context='strip_thinking'" in found.fix
    assert flagged(examine(qwq, tools=[search], strips_reasoning=True)) == []


def test_control_tokens_that_the_tokenizer_does_not_know_are_flagged():
    tokenizer = build_tokenizer([("<|im_end|>", True)], None, "<|im_end|>", None, "")
    checks = examine(tokenizer, tools=[search], chat_template="qwen2_5_training")
    assert "<|im_start|>, no token of the tokenizer" in errors_of(checks, "chat template")[0].message


def test_a_context_policy_without_effect_is_flagged():
    found = errors_of(examine(make_tokenizer("llama3"), strips_reasoning=True), "chat template")
    assert "context='strip_thinking' has no effect" in found[0].message


# ---------------------------------------------------------------- broken tokenizers and models


def test_a_vocabulary_larger_than_the_embedding_is_flagged(tmp_path):
    tokenizer = make_tokenizer("llama3")
    found = errors_of(examine(save_model(tmp_path, tokenizer, vocab_size=len(tokenizer) - 1)), "tokenizer")
    assert f"last id is {len(tokenizer) - 1}" in found[0].message and "resize_token_embeddings" in found[0].fix


def test_a_published_model_that_would_not_stop_is_flagged(tmp_path):
    tokenizer = make_tokenizer("qwen2_5")
    tokenizer.eos_token = "<|endoftext|>"
    (found,) = flagged(examine(save_model(tmp_path, tokenizer)))
    assert found.level == "warning" and "would run on" in found.message
    assert "generation_config.eos_token_id" in found.fix


def test_prompts_that_the_tokenizer_encodes_in_another_way_are_flagged():
    tokenizer = make_tokenizer("qwen2_5")
    own = tokenizer.apply_chat_template

    def longer(messages, tokenize=True, **options):
        ids = own(messages, tokenize=tokenize, **options)
        return [*ids, 5] if tokenize and isinstance(ids, list) else ids

    tokenizer.apply_chat_template = longer
    assert "not those of apply_chat_template" in errors_of(examine(tokenizer), "chat template")[0].message


def test_a_vocabulary_that_cannot_spell_unicode_is_flagged():
    vocabulary = {word: index for index, word in enumerate(["<unk>", "user", "assistant", "hello", "world", "."])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = PLAIN
    checks = flagged(examine(tokenizer))
    assert any(check.check == "masks" and "does not arrive" in check.message for check in checks)


def test_a_model_that_cannot_be_loaded_is_flagged():
    assert "cannot be loaded" in errors_of(examine("/nowhere/at/all"), "model")[0].message
    assert "neither a name nor" in errors_of(examine(5), "model")[0].message


def sentencepiece_like(tokenizer, prepend: str) -> PreTrainedTokenizerFast:
    """The same special tokens and template on a vocabulary that puts a space before a text (Llama 2, Mistral 7B)."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=pieces, show_progress=False)
    backend.train_from_iterator(['answer the user: {"name": "search", "arguments": {"query": "x"}}'], trainer)
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = spec["added_tokens"][:1]
    backend = Tokenizer.from_str(json.dumps(spec))
    for _, token in sorted(tokenizer.added_tokens_decoder.items()):
        backend.add_special_tokens([AddedToken(token.content, normalized=False, special=token.special)])
    other = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tokenizer.eos_token, unk_token="<unk>")
    other.bos_token, other.chat_template = tokenizer.bos_token, tokenizer.chat_template
    return other


@pytest.mark.parametrize("prepend", ["first", "always"])
@pytest.mark.parametrize("family", ["ministral_3", "qwen2_5"])
def test_a_tokenizer_that_puts_a_space_before_a_text_is_fine(family, prepend):
    tokenizer = sentencepiece_like(FORMATS[family](), prepend)
    assert tokenizer.convert_ids_to_tokens(tokenizer("word").input_ids)[0].startswith("▁")
    assert flagged(examine(tokenizer, tools=[search])) == []


def test_a_template_that_cannot_be_rendered_without_tools_is_fine():
    """Hermes' template for tools, alone."""
    tokenizer = FORMATS["hermes_3"]()
    tokenizer.chat_template = tokenizer.chat_template["tool_use"]
    with pytest.raises(TypeError):
        tokenizer.apply_chat_template([{"role": "user", "content": "q"}], tokenize=False)
    checks = flagged(examine(tokenizer, tools=[search]))
    assert [check.level for check in checks] == ["warning"] and "earlier messages" in checks[0].message


def test_a_tokenizer_without_the_fast_back_end_is_flagged_with_a_fix():
    """Mistral's own tokenizer has neither a back end nor a chat_template."""

    class MistralCommonBackend:
        eos_token_id = 2

        def apply_chat_template(self, messages, **kwargs):
            return [1]

    found = errors_of(examine(MistralCommonBackend()), "chat template")
    assert "tokenizer=MistralCommonBackend is not a fast tokenizer" in found[0].message
    assert "PreTrainedTokenizerFast.from_pretrained" in found[0].fix


# ---------------------------------------------------------------- broken tools and environments


@pytest.mark.parametrize("options", [{"env": 7}, {"tools": [search, 7]}, {"env": GoodEnv, "examples": [5]}])
def test_what_check_env_finds_is_in_the_report(options):
    assert errors_of(examine(make_tokenizer("qwen2_5"), **options), "environment: construction")


def test_an_environment_whose_prompt_the_template_refuses_is_flagged():
    class SystemOnly(GoodEnv):
        def reset(self, example: dict) -> list[dict]:
            return [{"role": "system", "content": "Begin."}]

    found = errors_of(examine(make_tokenizer("llama3"), env=SystemOnly, examples=[{"question": "q"}]), "prompts")
    assert "roles ['system']" in found[0].message


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("options", [{"env": GoodEnv}, {}, {"tools": [search]}])
def test_prompts_longer_than_the_model_are_flagged(options):
    rows = [{"question": "long " * 300, "prompt": "long " * 300}]
    checks = examine(make_tokenizer("qwen2_5"), examples=rows, max_model_length=256, **options)
    assert "256 positions" in errors_of(checks, "prompts")[0].message


def test_a_budget_that_does_not_fit_is_flagged_with_the_one_that_does():
    rows = [{"prompt": [{"role": "user", "content": "hello"}]}]
    tokenizer = make_tokenizer("qwen2_5")
    options = {"examples": rows, "tools": [], "max_model_length": 300}
    checks = flagged(examine(tokenizer, max_completion_length=290, **options))
    assert [check.check for check in checks] == ["prompts"]
    fitting = int(checks[0].fix.rsplit(" ", 1)[1].rstrip("."))
    assert flagged(examine(tokenizer, max_completion_length=fitting, **options)) == []
    assert flagged(examine(tokenizer, max_completion_length=fitting + 1, **options)) != []


def test_a_later_row_that_cannot_be_started_is_flagged():
    class Demanding(GoodEnv):
        def reset(self, example: dict) -> list[dict]:
            return [{"role": "user", "content": example["question"]}]

    rows = [*[{"question": "q"}] * 9, {"text": "q"}]  # an environment is tried on the first ones alone
    found = errors_of(examine(make_tokenizer("qwen2_5"), env=Demanding, examples=rows), "environment: reset")
    assert "Row 9" in found[0].message and "KeyError" in found[0].message


# ---------------------------------------------------------------- the report


def test_the_report_shows_every_verdict_message_and_fix():
    checks = [
        Finding(check="masks", level="ok", message="exact"),
        Finding(check="tools", level="error", message="broken [bold]as written[/bold]", fix="mend it"),
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(render(checks))
    shown = console.file.getvalue()
    for part in ("ok", "masks", "exact", "error", "broken [bold]as written[/bold]", "mend it"):
        assert part in shown
    assert has_errors(checks) and not has_errors(checks[:1])


def test_prompts_are_measured_with_the_tools_that_reset_chose():
    class Late(GoodEnv):
        def reset(self, example):
            self.tools = [search] if example["has_tool"] else []
            return super().reset(example)

    rows = [{"question": "Capital of France?", "has_tool": flag} for flag in (False, True)]
    checks = examine(make_tokenizer("qwen3"), env=Late, examples=rows)
    (prompts,) = [check for check in checks if check.check == "prompts"]
    shortest, longest = map(int, re.findall(r"(\d+) to (\d+) tokens", prompts.message)[0])
    assert longest - shortest > 50  # the schema of the tool
    assert errors_of(
        examine(make_tokenizer("qwen3"), env=Late, examples=rows, max_model_length=shortest + 10), "prompts"
    )


def test_the_prompts_of_a_trl_environment_are_measured():
    class Counter:
        def reset(self, **row):
            return " Count."

        def add(self, number: int) -> str:
            """Add a number to the count.

            Args:
                number: What to add.
            """
            return str(number)

        def get_reward(self):
            return 1.0

    checks = examine(make_tokenizer("qwen3"), env=Counter, examples=[{"prompt": "Hi."}])
    assert flagged(checks) == []
    assert any(check.check == "prompts" and check.message.startswith("1 prompts") for check in checks)

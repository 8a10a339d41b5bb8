"""docs/model-families.md says what is true of each template: the table is computed and compared, row by row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import PreTrainedTokenizerFast

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.chat.calls import GRAMMAR_NAMES, named_grammar
from agent_r1_trl.chat.errors import ChatFormatError
from agent_r1_trl.chat.rendering import calling
from agent_r1_trl.environments import StepResult
from agent_r1_trl.features.doctor import run_doctor
from agent_r1_trl.testing import roll_out
from agent_r1_trl.tools import Tool
from agent_r1_trl.trajectory import Author, StopReason
from tests.chat.test_family_calls import TOOLS
from tests.families import FAMILIES
from tests.published import FAMILY_OF, published_tokenizer, read_published

PAGE = Path(__file__).resolve().parents[2] / "docs" / "model-families.md"


class Row(NamedTuple):
    family: str
    file: str
    cells: list[str]
    line: str


def _rows() -> list[Row]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and re.match(r"(trl|llama\.cpp|xinference): ", cells[1] if len(cells) > 1 else ""):
            found.append(Row(FAMILY_OF[cells[1]], cells[1], cells[2:], line))
    return found


ROWS = _rows()
EACH_ROW = pytest.mark.parametrize("row", ROWS, ids=[row.file for row in ROWS])
REFUSED = ("refused", "no calls")
# Their stand-ins write calls as the published files do, but differ in what the table says.
UNLIKE = ("mistral_small_3_2", "ministral_3", "deepseek_v3_1", "nemotron_nano_2")


def tokenizer_of(row: Row) -> tuple[PreTrainedTokenizerFast, bool]:
    """A tokenizer with the row's file, or the family's stand-in; and whether it is the file."""
    source = read_published(row.file)
    if source is not None:
        return published_tokenizer(row.family, source), True
    if row is not next(other for other in ROWS if other.family == row.family):
        pytest.skip("needs AGENT_R1_TEMPLATES, see tests/published.py")
    return FAMILIES[row.family](), False


def cells_of(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The cells after the file's, from what is found out about it."""
    findings = [check for check in run_doctor(tokenizer, tools=[search], num_conversations=12)]
    flagged = [check for check in findings if check.level in ("warning", "error")]
    level = max((check.level for check in flagged), key=["ok", "warning", "error"].index, default="ok")
    try:
        chat = ChatFormat(tokenizer)
    except ChatFormatError:
        return ["refused", "-", "-", level, ""]
    if not chat.supports_tools:
        return ["no calls", "-", "-", level, ""]
    messages = " ".join(check.message for check in flagged)
    prompt = chat.encode_prompt([{"role": "user", "content": "q"}])
    checks = {check.check for check in flagged}
    assert "masks" not in checks, "the page says that masks are exact in every row"
    reasoning = "none"
    if chat.thinks and not chat.closed_reasoning(prompt):
        reasoning = "dropped" if "changes reasoning" in messages else "kept"
    besides = {
        "ids are rewritten later": re.search("earlier messages in another way|empty reasoning", messages),
        "some calls are not read back": "parser" in checks,
    }
    return [
        "own" if chat.template_to_save == tokenizer.chat_template else "TRL's",
        f"`{next(name for name in GRAMMAR_NAMES if named_grammar(name) == chat.grammar)}`",
        reasoning,
        level,
        "; ".join(text for text, is_so in besides.items() if is_so),
    ]


def search(query: str) -> str:
    """Search the corpus.

    Args:
        query: What to look for.
    """
    return query


@EACH_ROW
def test_the_table_says_what_is_true_of_the_file(row):
    tokenizer, is_published = tokenizer_of(row)
    if not is_published and row.family in UNLIKE:
        pytest.skip("needs AGENT_R1_TEMPLATES: the stand-in differs, see tests/published.py")
    found = cells_of(tokenizer)
    assert row.cells == found, f"{row.file} | " + " | ".join(found)


def test_each_family_and_each_file_has_a_row():
    assert {row.family for row in ROWS} == set(FAMILIES)
    assert [row.file for row in ROWS] == [*FAMILY_OF]


@pytest.mark.parametrize(
    ("family", "switch"),
    [
        ("glm_4_7", {"clear_thinking": False}),
        pytest.param("lfm2_5", {"preserve_thinking": True}, marks=pytest.mark.matrix),
    ],
)
def test_the_switch_that_the_doctor_names_keeps_the_reasoning(family, switch):
    warning = next(check for check in run_doctor(FAMILIES[family](), tools=[search]) if "reasoning" in check.message)
    assert f"chat_template_kwargs={switch}" in warning.fix
    checks = run_doctor(FAMILIES[family](), tools=[search], chat_template_kwargs=switch)
    assert not [check for check in checks if "reasoning" in check.message]


# ---------------------------------------------------------------- a rollout, without the doctor


class _Env:
    """Asks, answers a call with a tool message and text with a question, and ends after the script."""

    def __init__(self, num_turns: int) -> None:
        self.tools = [Tool(lambda **arguments: "", schema=schema) for schema in TOOLS]
        self.num_turns, self.seen = num_turns, []

    def reset(self, example: dict) -> list[dict]:
        return [{"role": "user", "content": "Which time is it?"}]

    def step(self, message: dict) -> StepResult:
        self.seen.append(message)
        number = len(self.seen)
        answer = {"role": "tool", "content": f"result {number}"}
        calls = message.get("tool_calls", [])
        told = [answer | {"name": call["function"]["name"], "tool_call_id": call["id"]} for call in calls]
        return StepResult(told or [{"role": "user", "content": "And now?"}], 0.0, number == self.num_turns, {})

    def close(self) -> None:
        pass


@EACH_ROW
def test_a_rollout_has_exact_ids_and_masks_and_makes_each_call_once(row):
    family = row.family
    tokenizer, is_published = tokenizer_of(row)
    if is_published and row.cells[0] in REFUSED:
        with pytest.raises(ChatFormatError, match="render"):
            ChatFormat(tokenizer).encode_prompt([{"role": "user", "content": "q"}], TOOLS)
        return
    chat = ChatFormat(tokenizer)

    said = [{"role": "assistant", "content": text} for text in ("Done.", "Ok.")]
    script = [calling("look_up", {"query": "a"}), said[0], calling("look_up", {"query": "b"}), said[1]]
    for message in script[::2]:
        message["tool_calls"][0]["id"] = ""
    turns = [chat.encode_reply(message) for message in script]
    env = _Env(len(script))
    (trajectory,) = roll_out(lambda: env, turns, [{}], chat=chat, max_turns=9, max_completion_length=4000)

    assert trajectory.stop_reason is StopReason.DONE, trajectory.error
    # Masks: exactly what was sampled; authors: exactly what the environment said.
    mask, ids = trajectory.action_mask, trajectory.completion_ids
    assert [token for token, is_action in zip(ids, mask, strict=True) if is_action] == [
        token for turn in turns for token in turn
    ]
    heard = [token for token, author in zip(ids, trajectory.authors, strict=True) if author is Author.ENVIRONMENT]
    words = re.sub(r'["\s]', "", chat.encoder.to_text(heard))
    assert words == "result1Andnow?result3"
    # Calls: each where it was written, and nowhere else.
    calls = [[made["function"] for made in message.get("tool_calls", [])] for message in env.seen]
    wanted = [{"name": "look_up", "arguments": {"query": query}} for query in "ab"]
    assert calls == [[wanted[0]], [], [wanted[1]], []]
    assert [message["content"] for message in env.seen] == ["", "Done.", "", "Ok."]
    # Ids: what the template writes around what was sampled, reasoning aside.
    messages = [message for message in trajectory.messages if message["role"] != "system"]
    rendered = chat.encoder.to_text(chat.encode_conversation(messages, TOOLS))
    sampled = chat.encoder.to_text(trajectory.prompt_ids + ids)
    if family not in REWRITTEN:
        assert without_reasoning(sampled) == without_reasoning(rendered)


NAMES = ("get-file", "fs.read")
"""What servers of MCP call their tools, and no function of Python is called."""


@pytest.mark.parametrize("row", [row for row in ROWS if row.cells[0] not in REFUSED], ids=lambda row: row.file)
def test_a_name_with_a_dash_or_a_dot_is_called_or_refused_when_it_meets_the_template(row):
    tokenizer, _ = tokenizer_of(row)
    chat = ChatFormat(tokenizer)
    for name in NAMES:
        tool = {"type": "function", "function": {**TOOLS[0]["function"], "name": name}}
        prompt = [{"role": "user", "content": "Read it."}]
        try:
            ids = chat.encode_prompt(prompt, [tool])
        except ChatFormatError as error:
            assert "Rename them, such as Tool(fn, name=" in str(error), error
            continue
        said = chat.encode_reply(calling(name, {"query": "a"}))
        message = chat.parse(said, prompt_ids=ids, tools=[tool])
        assert [call["function"] for call in message["tool_calls"]] == [{"name": name, "arguments": {"query": "a"}}]


# Templates that write earlier messages in another way later, so that no appended ids can be those of the whole.
REWRITTEN = ("hermes_3", "mistral_nemo", "mistral_small_3_2")


def without_reasoning(text: str) -> str:
    text = re.sub(r"(?s)<(seed:)?think>.*?</(seed:)?think>\s*|</think>|<think>\s*", "", text)
    text = text.replace("<|channel>thought\n<channel|>", "")
    # What a turn ends with once another follows, and what is left open at the end.
    text = text.replace("<|return|>", "<|end|>")
    return re.sub(r"\s+", " ", re.sub(r"(<\|user\|>)?\s*$", "", text))

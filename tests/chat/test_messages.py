"""What environments and data sets put into messages is read rightly, or refused by name."""

from __future__ import annotations

import asyncio
import datetime

import pytest
from PIL import Image

from agent_r1_trl import ToolCall
from agent_r1_trl.chat import ChatFormat, ChatFormatError
from agent_r1_trl.chat.messages import as_text
from agent_r1_trl.tools import ToolExecutor
from agent_r1_trl.trajectory import ToolErrorKind
from tests.families import FAMILIES

TEXT = ("qwen2_5", "qwen3", "llama3_1", "gemma4", "ministral_3", "deepseek_v3_1", "gpt_oss")


@pytest.mark.parametrize("family", TEXT)
def test_blocks_of_text_are_their_text(family):
    chat = ChatFormat(FAMILIES[family]())
    blocks = [{"type": "text", "text": "Two"}, {"type": "text", "text": "words"}]
    assert chat.encode_prompt([{"role": "user", "content": blocks}]) == chat.encode_prompt(
        [{"role": "user", "content": "Two\nwords"}]
    )
    message = chat.parse(chat.encode_reply({"role": "assistant", "content": "Ok."}))
    told = [chat.encode_observations(message, [{"role": "user", "content": some}]) for some in (blocks, "Two\nwords")]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b", "annotations": []}], "a\nb"),
        (["a", {"type": "text", "text": "b", "image": None}], "a\nb"),
        ([{"type": None, "text": "a"}, {"text": "b"}], "a\nb"),
        ({"type": "text", "text": "a"}, "a"),
        ([], ""),
        (b"bytes \xc3\xa9", "bytes é"),
        ([{"text": "a", "score": 1}], '[{"text": "a", "score": 1}]'),
    ],
)
def test_text_is_text_in_whatever_blocks_it_comes(content, text):
    assert as_text(content, "prompt[0]") == text


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image", "image": "x.png"}],
        [{"type": "image"}],
        [{"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}],
        ["See:", {"type": "input_image", "image_url": "x"}],
        [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "x"}}],
        Image.new("RGB", (2, 2)),
        {"picture": Image.new("RGB", (2, 2))},
    ],
)
def test_an_image_is_refused_by_name(content):
    chat = ChatFormat(FAMILIES["qwen2_5"]())
    with pytest.raises(
        ChatFormatError, match=r"prompt\[0\] holds .*(image|Image|document).*text only.*trl.GRPOTrainer"
    ):
        chat.encode_prompt([{"role": "user", "content": content}])
    with pytest.raises(ChatFormatError, match=r"observations\[0\] holds"):
        chat.encode_observations({"role": "assistant", "content": ""}, [{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("role", "fix"), [("human", "user"), ("gpt", "assistant"), ("function", "tool"), (None, "user")]
)
def test_a_role_that_no_template_shows_is_refused_with_the_right_one(role, fix):
    chat = ChatFormat(FAMILIES["qwen2_5"]())
    with pytest.raises(ChatFormatError, match=f"prompt\\[1\\] has the role {role!r}.*Use the role '{fix}'"):
        chat.encode_prompt([{"role": "system", "content": "s"}, {"role": role, "content": "q"}])


@pytest.mark.parametrize("role", ["human", "narrator", None])
def test_an_observation_of_an_unknown_role_reaches_the_model_as_a_user_message(role):
    chat = ChatFormat(FAMILIES["qwen2_5"]())
    said = {"role": "assistant", "content": ""}
    told = [chat.encode_observations(said, [{"role": some, "content": "q"}]) for some in (role, "user")]
    assert told[0] == told[1]


def test_data_in_an_observation_is_json():
    chat = ChatFormat(FAMILIES["qwen2_5"]())
    told = {"role": "user", "content": {"found": ["ü", 1], "on": datetime.date(2026, 1, 2)}}
    ids, _ = chat.encode_observations({"role": "assistant", "content": ""}, [told])
    assert '{"found": ["ü", 1], "on": "2026-01-02"}' in chat.encoder.to_text(ids)


@pytest.mark.parametrize("family", ["qwen2_5", "llama3_1", "ministral_3", "deepseek_v3_1", "glm_4_7"])
def test_arguments_of_a_call_in_the_prompt_may_be_json_text(family):
    """OpenAI's API writes them so; most templates would quote them a second time."""
    chat = ChatFormat(FAMILIES[family]())

    def prompt(arguments: object) -> list[int]:
        call = {"type": "function", "id": "c00000000", "function": {"name": "f", "arguments": arguments}}
        return chat.encode_prompt(
            [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "f", "tool_call_id": "c00000000", "content": "r"},
            ]
        )

    assert prompt('{"x": "a"}') == prompt({"x": "a"})


def test_a_tool_that_returns_an_image_fails_by_name():
    def draw(width: int) -> object:
        """Draw a square.

        Args:
            width: How wide.
        """
        return {"image": Image.new("RGB", (width, width))} if width > 5 else Image.new("RGB", (width, width))

    executor = ToolExecutor([draw])
    calls = [ToolCall(name="draw", arguments={"width": width}) for width in (2, 9)]
    for result in asyncio.run(executor.execute(calls)):
        assert result.error is ToolErrorKind.INFRASTRUCTURE, "no argument of the model's is the cause"
        assert "Image" in result.content and "neither text nor JSON" in result.content and "0x" not in result.content

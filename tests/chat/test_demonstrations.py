"""Demonstrations: a conversation as messages has the tokens and the mask of the rollout in which it is said."""

import json

import pytest
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from agent_r1_trl.chat.errors import ChatFormatError
from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.environments.factory import tool_schemas
from agent_r1_trl.recording.dataset import sft_rows
from agent_r1_trl.testing import FAMILIES, AddEchoEnv, call, calls, chat_of, make_policy, make_tokenizer, roll_out, say
from agent_r1_trl.testing.tokenizers import read_template

TOOLS = tool_schemas(AddEchoEnv)
HISTORY = {
    "prompt": [
        {"role": "user", "content": "What is 1 + 1?"},
        say("2"),
        {"role": "user", "content": "And 2 + 3?"},
    ]
}
SCRIPTS = {
    "calls": [call("add", a=2, b=3), call("echo", text='Zürich 🙂 "x"'), say("Five")],
    "two calls at once": [calls(("add", {"a": 1, "b": 2}), ("echo", {"text": "b"})), say("3")],
    "a call that fails": [call("add", a="two", b=3), call("add", a=2, b=3), say("5")],
    "reasoning": [{**call("add", a=2, b=3), "reasoning_content": "I add."}, {**say("5"), "reasoning_content": "So."}],
    "an answer": [say("5")],
}
ONE_CALL = ("llama3", "llama3_2")
"""Families whose templates write one call a turn."""


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_demonstration_has_the_tokens_and_the_mask_of_its_rollout(family, script):
    if script == "two calls at once" and family in ONE_CALL:
        pytest.skip("the template writes one call a turn")
    chat = chat_of(family)
    example = HISTORY if script == "an answer" else {"prompt": "Go <|im_end|><|eot_id|>"}
    (trajectory,) = roll_out(AddEchoEnv, SCRIPTS[script], [example], chat=chat)
    (row,) = sft_rows([trajectory], min_reward=-9, tools=TOOLS)
    encoded = chat.encode_demonstration(row["messages"], row["tools"])
    assert encoded["input_ids"] == trajectory.prompt_ids + trajectory.completion_ids
    assert encoded["assistant_masks"] == [0] * len(trajectory.prompt_ids) + trajectory.action_mask


def test_ids_of_calls_from_elsewhere_become_those_of_a_rollout():
    template = read_template("qwen2_5")
    mark = "<tool_response>\\n"
    assert mark in template
    shows_ids = template.replace(mark, mark + "' + message.tool_call_id + '")
    chat = ChatFormat(make_tokenizer("qwen2_5", chat_template=shows_ids))
    (trajectory,) = roll_out(AddEchoEnv, SCRIPTS["calls"], chat=chat)
    (row,) = sft_rows([trajectory], min_reward=-9, tools=TOOLS)
    text = json.dumps(row["messages"])
    for number, message in enumerate(row["messages"]):
        for made in message.get("tool_calls", ()):
            text = text.replace(made["id"], f"call_of_another_server_{number}")
    encoded = chat.encode_demonstration(json.loads(text), row["tools"])
    assert encoded["input_ids"] == trajectory.prompt_ids + trajectory.completion_ids


def test_a_turn_with_weight_0_is_read_and_not_taught():
    chat = chat_of("qwen3")
    (trajectory,) = roll_out(AddEchoEnv, SCRIPTS["a call that fails"], chat=chat)
    messages = trajectory.messages
    whole = chat.encode_demonstration(messages, TOOLS)
    corrected = [{**item, "weight": 0} if index == 3 else item for index, item in enumerate(messages)]
    encoded = chat.encode_demonstration(corrected, TOOLS)
    second = trajectory.turns[1]
    start, end = (len(trajectory.prompt_ids) + place for place in (second.start, second.end))
    assert messages[3] == second.message and encoded["input_ids"] == whole["input_ids"]
    assert encoded["assistant_masks"] == [
        0 if start <= place < end else mask for place, mask in enumerate(whole["assistant_masks"])
    ]


def test_a_conversation_without_a_taught_turn_is_refused():
    chat = chat_of("qwen3")
    with pytest.raises(ChatFormatError, match="no assistant message is taught"):
        chat.encode_demonstration([{"role": "user", "content": "Hi"}, {**say("Hello"), "weight": 0}])
    with pytest.raises(ChatFormatError, match="strips_reasoning: every turn has another context"):
        ChatFormat(make_tokenizer("qwen3"), strips_reasoning=True).encode_demonstration([say("Hello")])


@pytest.mark.slow
def test_trl_teaches_the_tokens_of_the_mask_and_no_others(tmp_path):
    chat = chat_of("qwen3")
    turns = SCRIPTS["calls"]
    rows = [chat.encode_demonstration(item.messages, TOOLS) for item in roll_out(AddEchoEnv, turns, chat=chat)]
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    tokenizer = chat.tokenizer
    model = make_policy(tokenizer)
    trainer = SFTTrainer(model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    (row,) = rows
    taught = [token if mask else -100 for token, mask in zip(*row.values(), strict=True)]
    assert batch["input_ids"].tolist() == [row["input_ids"]] and batch["labels"].tolist() == [taught]
    assert torch.isfinite(trainer.compute_loss(model, batch))

"""What trackers are given beside numbers: the table of `log_completions`."""

from collections import deque

from agent_r1_trl.trainers.trl_logs import write_as_text


def test_conversations_become_text_that_shows_calls_and_what_is_text_stays():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    conversation = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "1 é"},
        {"role": "user", "content": [{"type": "text", "text": "so?"}]},
        {"role": "assistant", "content": "one"},
    ]
    column = deque([conversation, "a prompt", [], None])
    write_as_text(column)
    first, *others = column
    assert first.splitlines() == [
        'assistant: {"name": "add", "arguments": {"a": 1}}',
        "tool: 1 é",
        'user: [{"type": "text", "text": "so?"}]',
        "assistant: one",
    ]
    assert others == ["a prompt", "", None]
    write_as_text(column)
    assert column[0] == first

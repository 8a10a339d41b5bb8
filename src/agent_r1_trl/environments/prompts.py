"""From a row of the data set to the messages of a prompt.

prompt -> [environment reset] -> rollout (policy <-> tools) -> Trajectory -> rewards on tokens -> filter
       -> batch -> advantages -> loss -> step -> sync weights -> next rollout
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from agent_r1_trl.trajectory import Message


def prompt_messages(example: Any, env_name: str) -> list[Message]:
    """Messages of the columns `prompt` (messages or a string) or `question`, copied.

    Raises:
        ValueError: the row has neither, or they are of another form.
    """
    if not isinstance(example, Mapping):
        raise ValueError(f"{env_name}.reset({example!r:.200}): an example must be a dict, one row of the data set.")
    prompt = example.get("prompt")
    if prompt is None:
        prompt = example.get("question")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if prompt is None:
        raise ValueError(
            f"{env_name}.reset: the example has the columns {sorted(map(str, example))}, but neither 'prompt' nor "
            "'question'. Rename a column, or override reset()."
        )
    is_chat = isinstance(prompt, (list, tuple)) and prompt
    if not is_chat or not all(isinstance(message, Mapping) and "role" in message for message in prompt):
        raise ValueError(
            f"{env_name}.reset: prompt={prompt!r:.200} must be a string or a non-empty list of messages like "
            "{'role': 'user', 'content': '...'}."
        )
    return [copy.deepcopy(dict(message)) for message in prompt]


def with_system_message(messages: list[Message], text: str | None) -> list[Message]:
    """Put a system message first, unless there is one or `text` is None or empty."""
    if not text or (messages and messages[0].get("role") == "system"):
        return messages
    return [{"role": "system", "content": text}, *messages]

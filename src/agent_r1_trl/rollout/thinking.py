"""The chat format that `thinking` and the context policy `strip_thinking` ask for together."""

from __future__ import annotations

from typing import Any

from agent_r1_trl.chat.format import ChatFormat

STRIP_POLICY = "strip_thinking"
"""The context policy that renders every context anew."""


def format_options(thinking: str, policy: str, kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """The arguments `thinking` and `chat_template_kwargs` of the `ChatFormat` that these settings need.

    `thinking='off'` beside the policy: the empty thought that the template forces is then what it drops.

    >>> format_options("keep", "strip_thinking", None)
    {'thinking': 'strip', 'chat_template_kwargs': None}
    >>> format_options("off", "strip_thinking", None)
    {'thinking': 'strip', 'chat_template_kwargs': {'enable_thinking': False}}
    """
    if policy != STRIP_POLICY:
        return {"thinking": thinking, "chat_template_kwargs": kwargs}
    forced = {**(kwargs or {}), "enable_thinking": False}
    return {"thinking": "strip", "chat_template_kwargs": forced if thinking == "off" else kwargs}


def check_thinking(chat: ChatFormat, policy: str) -> None:
    """Refuse a format and a policy that were not made for each other.

    Raises:
        ValueError: the format renders contexts anew and the policy does not, or the other way round.
    """
    if (chat.thought_rule is None) == (policy != STRIP_POLICY):
        return
    strips = chat.thought_rule is not None
    raise ValueError(
        f"context.policy={policy!r} with a chat format {'' if strips else 'not '}made by thinking='strip': "
        f"the policy {STRIP_POLICY!r} needs that format, and no other one does. Set "
        f"context={STRIP_POLICY!r} and ChatFormat(tokenizer, thinking='strip'), or neither."
    )

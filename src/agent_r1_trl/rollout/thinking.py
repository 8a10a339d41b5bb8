"""`thinking` and `context_policy` together: `thinking='strip'` is the policy `strip_thinking`."""

from __future__ import annotations

from typing import Any

from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.chat.templates import THINKING

STRIP_POLICY = "strip_thinking"
"""The context policy that renders every context anew."""


def settle_thinking(thinking: str, context_policy: str) -> tuple[str, str]:
    """Both settings, where one follows from the other.

    `thinking='off'` beside the policy stays: the empty thought that the template forces is then what it drops.

    Raises:
        ValueError: `thinking` is unknown, or it is 'strip' with another policy.

    >>> settle_thinking("strip", "keep"), settle_thinking("keep", "strip_thinking")
    (('strip', 'strip_thinking'), ('strip', 'strip_thinking'))
    >>> settle_thinking("off", "strip_thinking"), settle_thinking("keep", "window")
    (('off', 'strip_thinking'), ('keep', 'window'))
    """
    if thinking not in THINKING:
        raise ValueError(
            f"thinking={thinking!r} is not one of {', '.join(map(repr, THINKING))}. Set thinking to one of them."
        )
    if thinking == "strip" and context_policy not in ("keep", STRIP_POLICY):
        raise ValueError(
            f"thinking='strip' with context_policy={context_policy!r}: thinking='strip' is the policy "
            f"{STRIP_POLICY!r}, and a rollout has one policy. Remove context_policy, or set thinking='keep'."
        )
    if thinking == "strip":
        return thinking, STRIP_POLICY
    return ("strip" if thinking == "keep" and context_policy == STRIP_POLICY else thinking), context_policy


def format_options(thinking: str, context_policy: str, kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """The arguments `thinking` and `chat_template_kwargs` of the `ChatFormat` that these settings need."""
    if thinking == "off" and context_policy == STRIP_POLICY:
        return {"thinking": "strip", "chat_template_kwargs": {**(kwargs or {}), "enable_thinking": False}}
    return {"thinking": thinking, "chat_template_kwargs": kwargs}


def check_thinking(chat: ChatFormat, context_policy: str) -> None:
    """Refuse a format and a policy that were not made for each other.

    Raises:
        ValueError: the format renders contexts anew and the policy does not, or the other way round.
    """
    if (chat.thought_rule is None) == (context_policy != STRIP_POLICY):
        return
    strips = chat.thought_rule is not None
    raise ValueError(
        f"context_policy={context_policy!r} with a chat format {'' if strips else 'not '}made by thinking='strip': "
        f"the policy {STRIP_POLICY!r} needs that format, and no other one does. Set "
        f"context_policy={STRIP_POLICY!r} and ChatFormat(tokenizer, thinking='strip'), or neither."
    )

"""A person in place of the data set: conversations over several messages, sampled by the training rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_r1_trl.features.serve.session import Conversation as Conversation
    from agent_r1_trl.features.serve.session import ConversationError as ConversationError
    from agent_r1_trl.features.serve.session import Event as Event

__all__ = ["Conversation", "ConversationError", "Event"]


def __getattr__(name: str) -> Any:  # the settings of the commands are read without torch
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agent_r1_trl.features.serve import session

    return getattr(session, name)

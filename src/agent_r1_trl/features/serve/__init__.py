"""A person in place of the data set: conversations over several messages, sampled by the training rollout."""

from agent_r1_trl.features.serve.session import Conversation, ConversationError, Event

__all__ = ["Conversation", "ConversationError", "Event"]

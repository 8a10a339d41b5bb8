"""The error of a chat format that cannot give token-exact rollouts; raised before a rollout starts."""

from __future__ import annotations

GENERAL_CURE = (
    "Pass as chat_template the source of a template for this model that writes a turn in the same way whatever "
    "follows it, and ends it with a special token; docs/model-families.md tells how."
)


class ChatFormatError(ValueError):
    """A user's mistake with its cure; the message is both, in this order."""

    def __init__(self, problem: str, cure: str) -> None:
        super().__init__(f"{problem} {cure}")
        self.problem = problem
        self.cure = cure

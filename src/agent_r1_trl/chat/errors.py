"""The error of a chat format that cannot give token-exact rollouts; raised before a rollout starts."""

from __future__ import annotations

GENERAL_FIX = (
    "Pass as chat_template the source of a template for this model that writes a turn in the same way whatever "
    "follows it, and ends it with a special token; docs/model-families.md tells how."
)


class ChatFormatError(ValueError):
    """A user's mistake with its fix; the message is both, in this order."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem} {fix}")
        self.problem = problem
        self.fix = fix

"""The error of a chat format that cannot give token-exact rollouts; raised before a rollout starts."""

from __future__ import annotations


class ChatFormatError(ValueError):
    """A user's mistake with its cure; the message is both, in this order."""

    def __init__(self, problem: str, cure: str) -> None:
        super().__init__(f"{problem} {cure}")
        self.problem = problem
        self.cure = cure

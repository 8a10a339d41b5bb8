"""PythonMathEnv: a word problem or an expression, a python tool in a sandbox, and a number as the answer."""

from __future__ import annotations

import functools
import math
from typing import Any

from agent_r1_trl import PythonTool, SandboxLimits, ToolEnv
from agent_r1_trl.rewards import extract_answer
from agent_r1_trl.trajectory import Message, Trajectory


@functools.cache
def python_tool(sandbox: str | None, timeout_s: float) -> PythonTool:
    """One tool for all environments with these settings; each environment gets a sandbox of its own from it."""
    return PythonTool(sandbox, limits=SandboxLimits(timeout_s=timeout_s))


class PythonMathEnv(ToolEnv):
    """The model may run code as often as it needs to, and answers with a number between `<answer>` and `</answer>`.

    Rows have the columns `question` and `answer`; of an answer in GSM8K's form (`... #### 42`), what follows the last
    `####` counts.

    Args:
        sandbox: where the code runs: "sandlock" (isolation), "limits" (no isolation) or "monty" (a subset of
            Python); by default sandlock where the system has it. docs/sandbox.md compares them.
        timeout_s: maximum seconds of one call.
        **settings: settings of `ToolEnv`.
    """

    system_prompt = (
        "Solve the problem. Use the python tool to compute; print what you want to see. Then give the result as a "
        "number between <answer> and </answer>, for example <answer>42</answer>."
    )
    tool_call_reward = 0.1
    max_process_reward = 0.1
    failure_reward = 0.0

    def __init__(self, sandbox: str | None = None, timeout_s: float = 5.0, **settings: Any) -> None:
        super().__init__(tools=[python_tool(sandbox, timeout_s)], **settings)

    def reset(self, example: dict[str, Any]) -> list[Message]:
        """Start the episode; a row without a numeric answer is refused."""
        messages = super().reset(example)
        self.gold = read_number(str(example["answer"]).rpartition("####")[2])
        if self.gold is None:
            raise ValueError(f"answer={example['answer']!r:.200}: must be a number, or end with '#### number'.")
        return messages

    def outcome_reward(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        """1 for the right number, else 0."""
        answer = read_number(extract_answer(trajectory.final_text) or "")
        is_right = answer is not None and self.gold is not None and math.isclose(answer, self.gold, abs_tol=1e-4)
        return float(is_right), {"correct": float(is_right)}


def read_number(text: str) -> float | None:
    """The number that a text is, with the marks that people put around numbers; None if it is none.

    >>> read_number(" $1,234.50 ")
    1234.5
    """
    try:
        number = float(text.strip().rstrip(".%").lstrip("$").replace(",", "").replace("_", "x"))
    except ValueError:
        return None
    return number if math.isfinite(number) else None

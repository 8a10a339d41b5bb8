"""`judge`: the state of a run, from one dictionary of numbers per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1_trl.echo_trap.verdict import Thresholds, Verdict

KEYS = frozenset(
    (
        "reward",
        "reward_std",
        "zero_std_share",
        "entropy",
        "grad_norm",
        "repetition",
        "inaction",
        "success",
        "reward_max",
        "reward_min",
        "return_with_call",
        "return_without_call",
        "reward_variance_snr",
        "response_length",
        "kl",
    )
)
"""What a step's dictionary may hold. A missing key, None and NaN all mean "unknown"."""


def judge(history: Sequence[Mapping[str, float | None]], thresholds: Thresholds | None = None) -> Verdict:
    """The verdict on a run after the last step of `history`.

    The same history always gives the same verdict. A run that is judged after every step uses `EchoTrapJudge`, which
    gives the verdicts that this function gives for each beginning of the history.

    Args:
        history: one dictionary per optimizer step; its keys are some of `KEYS`.
        thresholds: None for the defaults.

    Raises:
        ValueError: a key is not in `KEYS`: a misspelt one would be a signal that nobody ever judges.
    """
    judge = EchoTrapJudge(thresholds)
    for step in history:
        judge.update(step)
    return judge.verdict


class EchoTrapJudge:
    """Judges a run step by step, in constant time and memory per step.

    Args:
        thresholds: None for the defaults.
    """

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self.thresholds = thresholds or Thresholds()
        self.verdict = Verdict(state="healthy", step=0)
        """After the last `update`."""

    def update(self, step: Mapping[str, float | None]) -> Verdict:
        """Judge one more step.

        Args:
            step: the step's numbers; its keys are some of `KEYS`.

        Raises:
            ValueError: a key is not in `KEYS`.
        """
        unknown = sorted(set(step) - KEYS)
        if unknown:
            raise ValueError(f"echo_trap: the key {unknown[0]!r} is unknown. The known ones are {sorted(KEYS)}.")
        self.verdict = Verdict(state="healthy", step=self.verdict.step + 1)
        return self.verdict

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next verdict depends on, in values that JSON can hold."""
        return {"step": self.verdict.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: after a resumption, or after a return to an earlier checkpoint."""
        self.verdict = Verdict(state="healthy", step=int(state["step"]))

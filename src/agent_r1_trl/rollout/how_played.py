"""How an evaluation was played, in words: the settings without which its figures cannot be compared."""

from __future__ import annotations

from agent_r1_trl.generation.base import SamplingParams
from agent_r1_trl.rollout.limits import RolloutSettings


def describe_play(params: SamplingParams, num_attempts: int, limits: RolloutSettings) -> str:
    """Greedy or sampled, attempts, limits.

    >>> describe_play(SamplingParams(temperature=0.0), 1, RolloutSettings(max_turns=4, max_completion_length=320))
    'greedy, 1 attempt per example, at most 4 turns and 320 tokens'
    """
    filters = [
        f"{name} {value:g}"
        for name, value, neutral in (
            ("top_p", params.top_p, 1),
            ("top_k", params.top_k, 0),
            ("min_p", params.min_p, 0),
        )
        if value != neutral and params.temperature
    ]
    if params.repetition_penalty != 1:
        filters.append(f"repetition_penalty {params.repetition_penalty:g}")
    how = f"sampled at temperature {params.temperature:g}" if params.temperature else "greedy"
    attempts = f"{num_attempts} attempt{'s' if num_attempts != 1 else ''} per example"
    turns = f"at most {limits.max_turns} turn{'s' if limits.max_turns != 1 else ''}"
    if limits.max_completion_length is not None:
        turns += f" and {limits.max_completion_length} tokens"
    if limits.max_tokens_per_turn is not None:
        turns += f" ({limits.max_tokens_per_turn} in a turn)"
    return ", ".join([how, *filters, attempts, turns])

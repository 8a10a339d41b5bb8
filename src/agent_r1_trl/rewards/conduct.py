"""Rewards for how a trajectory is conducted: its length, its repetitions, and what its calls find out."""

from __future__ import annotations

from typing import Any

from agent_r1_trl.rewards.format import THINK_TAG
from agent_r1_trl.rewards.function import RewardFunction, check_count, check_number, up_to
from agent_r1_trl.rewards.turns import (
    THOUGHT_FIELDS,
    call_texts,
    fingerprint,
    need_trajectory,
    read_message,
    text_of,
    words_in,
    written_words,
)
from agent_r1_trl.rewards.words import content_words, n_grams, words_of
from agent_r1_trl.trajectory import Turn


@RewardFunction
def overlong_penalty(trajectory: Any, *, max_tokens: int = 512, buffer: int = 128) -> float:
    """Penalty for a trajectory that is nearly too long, in [-1, 0]. An outcome, for `reward_funcs`.

    With L sampled tokens: 0 up to max_tokens - buffer, then falling in a line to -1 at max_tokens, and -1 beyond
    (DAPO, arXiv 2503.14476, equation 13). Only tokens that the policy sampled count; TRL's function of this kind
    counts tool results too.

    Failure modes: it pays for saying little, not for saying it well, and a policy may save tokens by making no calls.
    Keep it small beside the outcome, and watch the share of trajectories without a call.

    Args:
        trajectory: a `Trajectory`.
        max_tokens: number of sampled tokens from which the penalty is -1.
        buffer: number of tokens before it over which the penalty grows.

    Raises:
        ValueError: `buffer` is above `max_tokens`, or one of them is no whole number >= 1.
    """
    check_count("max_tokens", max_tokens)
    check_count("buffer", buffer)
    if buffer > max_tokens:
        raise ValueError(f"buffer={buffer} is above max_tokens={max_tokens}. Set buffer to at most {max_tokens}.")
    length = need_trajectory(trajectory, "overlong_penalty").num_action_tokens
    return max(-1.0, min(0.0, (max_tokens - buffer - length) / buffer))


@RewardFunction
def repetition_penalty(trajectory: Any, *, n: int = 4, tolerated: float = 0.25) -> list[float | None]:
    """Penalty for what a turn repeats, of itself or of earlier turns, in [-1, 0] per turn. For `turn_reward_funcs`.

    Of the runs of `n` words that a turn writes (thought, text and the values in its calls, each for itself), the
    share s was written before. The turn earns -(s - tolerated) / (1 - tolerated), at most 0. Quoting an observation
    is no repetition, however often it says the same.

    Failure modes: a paraphrase repeats no run of words, letters that only look alike make another word, and pieces
    of fewer than `n` words are not looked at (`new_information` pays none of them). A policy that writes nothing
    repeats nothing.

    Args:
        trajectory: a `Trajectory`.
        n: number of words in a run.
        tolerated: share of repeated runs that costs nothing, since a thought may restate the question.
    """
    check_count("n", n)
    check_number("tolerated", tolerated, high=0.99)
    seen: set[tuple[str, ...]] = set()
    scores: list[float | None] = []
    for turn in need_trajectory(trajectory, "repetition_penalty").turns:
        if turn.is_summary:  # which is there to say things again
            scores.append(None)
            continue
        texts = [text_of(turn.message.get(name)) for name in (*THOUGHT_FIELDS, "content")]
        runs = [run for text in texts + call_texts(turn.message) for run in n_grams(words_of(text), n)]
        num_seen = len(seen)
        seen.update(runs)
        share = 1 - (len(seen) - num_seen) / len(runs) if runs else 0.0
        scores.append(min(0.0, (tolerated - share) / (1 - tolerated)))
    return scores


@RewardFunction
def new_information(trajectory: Any, *, max_total: float = 1.0, tag: str = THINK_TAG) -> list[float | None]:
    """Bonus for finding something out, in [0, 1] per turn. For `turn_reward_funcs`.

    A call that succeeded, and was not made before in this trajectory, earns the share of the result's content words
    that stood nowhere before: not in the prompt, not in an earlier observation, and not in what the policy wrote
    itself (its arguments above all, which many tools repeat). A turn earns the mean over its calls. A result without
    content words, such as a grid of symbols, counts whole if it was not seen before. Calls are compared without
    regard to spacing, letter case and the order of arguments.

    A turn without calls, in an environment that reads actions from the text, earns in the same way from the
    observation that follows, unless it said the same after the same observation before.

    Failure modes: calls that return arbitrary text (random numbers, the time of day, unrelated pages) are paid until
    `max_total`; new is not relevant. A call that is right to make again, because the state behind it has changed (a
    page to reload, a game), earns nothing. Keep `max_total` times the weight below what solving the task earns.

    Args:
        trajectory: a `Trajectory`.
        max_total: what one trajectory can earn; turns are paid in order.
        tag: of a thought that stands in the text.
    """
    check_number("max_total", max_total)
    played = need_trajectory(trajectory, "new_information")
    known = set(words_in(text_of(message.get("content")) for message in played.prompt_messages))
    done: set[str] = set()
    scores: list[float | None] = []
    before = ""
    for turn in played.turns:
        known.update(written_words(turn.message))
        if turn.is_summary:
            scores.append(None)
            continue
        said = " ".join(words_of(read_message(turn.message, tag=tag).visible))
        observed = "\n".join(text_of(message.get("content")) for message in turn.observations)
        scores.append(_finds(turn, f"{before}\n{said}", observed, known, done))
        known.update(words_of(observed))
        before = " ".join(observed.split())
    return up_to(max_total, scores)


def _finds(turn: Turn, said_there: str, observed: str, known: set[str], done: set[str]) -> float | None:
    """Mean over the turn's calls of the share that is new; adds to `known` and `done`."""
    tried = [
        (fingerprint(result.call.name, result.call.arguments), result.content)
        for result in turn.tool_results
        if not result.is_error
    ]
    if not turn.tool_results and observed and not turn.is_invalid:
        tried = [(said_there, observed)]
    if not tried:
        return None
    found = 0.0
    for key, content in tried:
        words = words_of(content)
        told = set(content_words(words)) or {" ".join(content.split())}
        if key not in done:
            found += len(told - known - done) / len(told)
        known.update(words)
        done.update((key, " ".join(content.split())))
    return found / max(len(turn.tool_results), 1)

"""Rewards for reasoning: whether there is reasoning in its place, what it says about what was read; and for length.

RAGEN (arXiv 2504.20073, section 4) finds that reasoning fades in multi-turn training unless the reward looks at it.
All of them read the policy's own text alone, but for `grounded_thinking`, which compares it with what was observed.
"""

from __future__ import annotations

from typing import Annotated, Any

from agent_r1_trl.rewards.format import THINK_TAG, check_answer_tag, check_tag, format_reward
from agent_r1_trl.rewards.function import RewardFunction, up_to
from agent_r1_trl.rewards.turns import need_trajectory, read_message, text_of, words_in, written_words
from agent_r1_trl.rewards.words import content_words, n_grams, words_of
from agent_r1_trl.settings import Count, NotNegative, Number, check_value
from agent_r1_trl.trajectory import Message, Trajectory


def is_well_formed_turn(
    message: Message, *, tag: str, answer_tag: str | None, min_words: int, opened_by_template: bool
) -> bool:
    """Whether a message thinks first and then acts; the arguments are those of `thinking_format`."""
    said = read_message(message, tag=tag, opened_by_template=opened_by_template)
    if not said.is_well_formed or len(set(words_of(said.reasoning))) < min_words:
        return False
    if message.get("malformed_tool_call") or message.get("cut_off"):
        return False
    return bool(message.get("tool_calls")) or format_reward(said.visible, tag=answer_tag) == 1.0


@RewardFunction
def thinking_format(
    trajectory: Trajectory | list[Message] | str,
    *,
    tag: str = THINK_TAG,
    answer_tag: str | None = "answer",
    min_words: int = 3,
    opened_by_template: bool = False,
) -> float:
    """Share of turns that think first and then act, in [0, 1]. An outcome, for `reward_funcs`.

    A turn counts if it has exactly one reasoning block, closed and before everything else, with at least `min_words`
    different words, and after it a tool call or the text's only `<answer>...</answer>`. It is a share, so that more
    turns earn no more.

    Failure modes: the content of the reasoning is not judged, so any sentence of `min_words` words earns it
    (`grounded_thinking` looks at what it says). Where the chat grammar reads reasoning into a field of its own, two
    reasoning blocks in one turn arrive as one, and a missing opening tag is added.

    Args:
        trajectory: a `Trajectory`, a list of messages, or a text.
        tag: of reasoning that stands in the text; reasoning in a field of its own needs none.
        answer_tag: of an answer without a call; None: any visible text is an answer.
        min_words: number of different words below which reasoning is empty.
        opened_by_template: the chat template writes the opening tag, so that turns begin inside the reasoning.
    """
    options = _format_options(tag, answer_tag, min_words, opened_by_template)
    if isinstance(trajectory, Trajectory):
        messages = [turn.message for turn in trajectory.env_turns]
    elif isinstance(trajectory, str):
        messages = [{"role": "assistant", "content": trajectory}]
    else:
        messages = [message for message in trajectory if message.get("role") == "assistant"]
    turns = [is_well_formed_turn(message, **options) for message in messages]
    return sum(turns) / len(turns) if turns else 0.0


@RewardFunction
def thinking_format_penalty(
    trajectory: Trajectory | list[Message] | str,
    *,
    penalty: float = 0.1,
    tag: str = THINK_TAG,
    answer_tag: str | None = "answer",
    min_words: int = 3,
    opened_by_template: bool = False,
) -> list[float | None]:
    """-`penalty` for each turn that `thinking_format` would not count. For `turn_reward_funcs`; RAGEN's is 0.1.

    It is a penalty and no bonus, so that a turn is never made for its sake.

    Failure modes: those of `thinking_format`; and a policy that is penalised in every turn may learn to end early
    before it learns the format, so keep it small beside the outcome. Its other options are those of `thinking_format`.
    """
    check_value("penalty", penalty, NotNegative)
    options = _format_options(tag, answer_tag, min_words, opened_by_template)
    turns = need_trajectory(trajectory, "thinking_format_penalty").turns
    return [
        None if turn.is_summary else 0.0 if is_well_formed_turn(turn.message, **options) else -penalty
        for turn in turns
    ]


def _format_options(tag: str, answer_tag: str | None, min_words: int, opened_by_template: bool) -> dict[str, Any]:
    check_tag("", tag)
    if answer_tag is not None:
        check_answer_tag("", answer_tag)
    check_value("min_words", min_words, Count)
    return {"tag": tag, "answer_tag": answer_tag, "min_words": min_words, "opened_by_template": opened_by_template}


@RewardFunction
def grounded_thinking(
    trajectory: Trajectory | list[Message] | str,
    *,
    target: int = 3,
    max_run: int = 8,
    max_words: int = 256,
    max_total: float = 1.0,
    tag: str = THINK_TAG,
    opened_by_template: bool = False,
) -> list[float | None]:
    """Whether reasoning takes up what was just observed, in [0, 1] per turn. For `turn_reward_funcs`.

    New are the content words and numbers of the observation before the turn that stood nowhere earlier: not in the
    prompt, not in what the policy wrote, not in earlier observations. With n of them in the observation and m in the
    reasoning, the turn earns min(m, own, target) / min(n, target), where `own` counts the different content words of
    the reasoning that are not in the observation. None where nothing new was observed, as before the first turn.

    A pasted observation earns nothing: words inside a verbatim run of more than `max_run` content words are not
    counted, and reasoning that only repeats has no words of its own. Observations alone earn nothing either; what
    they say can raise the reward only through words that the reasoning repeats.

    Failure modes: shuffled excerpts with `target` words of the policy's own are paid; reasoning may mention what is
    beside the point; where observations come from a closed vocabulary (a grid of symbols), nothing is new after a few
    turns. Words are compared as written: inflected forms and translations are different words.

    Args:
        trajectory: a `Trajectory`.
        target: number of new words that earns the whole reward.
        max_run: longest verbatim run, in content words, that still counts as mentioning.
        max_words: number of content words of reasoning that are read, so that a word list does not pay.
        max_total: what one trajectory can earn; turns are paid in order.
        tag: of reasoning that stands in the text.
        opened_by_template: the chat template writes the opening tag.
    """
    for name, value in {"target": target, "max_run": max_run, "max_words": max_words}.items():
        check_value(name, value, Count)
    check_value("max_total", max_total, NotNegative)
    checked = need_trajectory(trajectory, "grounded_thinking")
    known = set(words_in(text_of(message.get("content")) for message in checked.prompt_messages))
    observed: list[str] = []
    scores: list[float | None] = []
    for turn in checked.turns:
        if turn.is_summary:  # it is no answer to what was observed
            scores.append(None)
            known.update(written_words(turn.message))
            continue
        reasoning = read_message(turn.message, tag=tag, opened_by_template=opened_by_template).reasoning
        said = content_words(words_of(reasoning))[:max_words]
        scores.append(_share_taken_up(said, observed, known, target, max_run))
        known.update(observed, written_words(turn.message))
        observed = content_words(words_in(text_of(message.get("content")) for message in turn.observations))
    return up_to(max_total, scores)


def _share_taken_up(said: list[str], observed: list[str], known: set[str], target: int, max_run: int) -> float | None:
    new = set(observed) - known
    if not new:
        return None
    read = set(n_grams(observed, max_run + 1))
    copied_to = 0  # words before this position belong to a verbatim run
    mentioned = set()
    for position, run in enumerate(n_grams(said, max_run + 1)):
        if run in read:
            copied_to = position + max_run + 1
        elif position >= copied_to:
            mentioned.add(said[position])
    mentioned.update(said[max(copied_to, len(said) - max_run) :])
    num_own = len(set(said) - set(observed))
    return min(len(mentioned & new), num_own, target) / min(len(new), target)


@RewardFunction
def overlong_penalty(
    trajectory: Trajectory | list[Message] | str, *, max_tokens: int = 512, buffer: int = 128
) -> float:
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
    check_value("max_tokens", max_tokens, Count)
    check_value("buffer", buffer, Count)
    check_value("buffer", buffer, Annotated[float, Number(maximum=max_tokens)])
    length = need_trajectory(trajectory, "overlong_penalty").num_action_tokens
    return max(-1.0, min(0.0, (max_tokens - buffer - length) / buffer))

"""The central nouns: a rollout's tokens, who wrote each of them, and what they earned.

A trajectory's completion is built by appending, never by decoding and encoding again. With `S` sampled tokens,
`G` template glue and `O` observation text, a two-turn trajectory reads

    completion_ids = S0 + G0 + O0 + G0' + S1
    action_mask    = 1    0    0    0     1
    turn_ids       = 0   -1   -1   -1     1

As long as every context extends the one before it, all tokens stand in one training row. A turn whose context was
rewritten opens another row, whose prompt is that context:

    turn 0 sampled  a b  after P                  rows          P  | a b
    turn 1 sampled  d e  after P', not P a b ...                P' | d e

    completion_ids = a b d e       segments = [Segment(start=2, row=1, prompt_ids=P')]

So every sampled token has mask 1 in exactly one row; in another row it can only stand in the prompt. A turn that comes
back to an earlier row continues it.

Which trajectories count is said in two terms in the whole package. One is **in the baseline** if its reward counts in
the statistics of its group or batch: not after an infrastructure failure, nor where no reward function scored it. One
is **in the loss** if its action tokens get gradients: those in the baseline but the truncated ones under
`truncated_trajectories="mask"`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import logging
import math
import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from agent_r1_trl.kept_ids import KeptIds
from agent_r1_trl.tool_results import ToolCall as ToolCall
from agent_r1_trl.tool_results import ToolErrorKind as ToolErrorKind
from agent_r1_trl.tool_results import ToolFault as ToolFault
from agent_r1_trl.tool_results import ToolResult as ToolResult

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(kw_only=True)
class Segment:
    """From here on, the tokens of a trajectory go on in another row than those before them."""

    start: int
    """Position in `completion_ids` of the segment's first token. Nothing before the first segment: that is row 0."""
    row: int
    """Index of the row that the tokens continue, or open if it is one more than the rows so far."""
    prompt_ids: list[int] | None = None
    """(P,) ids of the context that opens the row; None for a row that was opened before."""


@dataclass(kw_only=True)
class Row:
    """One training row; T is the number of its completion tokens."""

    prompt_ids: list[int]
    """(P,) the context; nothing in it is trained here."""
    completion_ids: list[int]
    """(T,)"""
    action_mask: list[int]
    """(T,) 1 iff the policy sampled the token after exactly the ids before it in this row."""
    turn_ids: list[int]
    """(T,) index of the trajectory's turn, -1 outside action tokens."""
    logprobs: list[float]
    """(T,) the sampler's log-probabilities; 0.0 where `action_mask` is 0."""
    spans: list[tuple[int, int]]
    """[start, end) of the trajectory's tokens that the completion consists of, in order."""


def extended_row(rows: Sequence[tuple[list[int], list[int]]], context_ids: list[int]) -> int | None:
    """The row that a turn joins: the longest one with whose ids the turn's context begins; None for a row of its own.

    Args:
        rows: prompt and completion of each row so far, up to the last token that was sampled in it.
        context_ids: what the turn is sampled after.

    >>> extended_row([([1], [2]), ([1, 2], [3])], [1, 2, 3, 4]), extended_row([([1], [2])], [1, 3, 4])
    (1, None)
    """
    found, longest = None, -1
    for index, (prompt, rest) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(rest)
        # The last ids first: a row is as a rule no prefix, and comparing whole contexts is slow.
        if (
            longest < end <= len(context_ids)
            and (not rest or rest[-1] == context_ids[end - 1])
            and rest == context_ids[start:end]
            and prompt[-64:] == context_ids[max(0, start - 64) : start]
            and prompt == context_ids[:start]
        ):
            found, longest = index, end
    return found


logger = logging.getLogger(__name__)

_SCORES = ("em", "success")
"""Names in `info` of which the first that holds a number says whether the task was solved."""

MAX_OWN_NUMBERS = 3
"""How many numbers of the user's own stand beside ours in the terminal and in tables."""
_OUR_NUMBERS = ("em", "f1", "valid_answer", "success")
"""Numbers of `Trajectory.info` with a place of their own there."""
USAGE = "endpoint_usage"
"""Key of `Trajectory.info` with what a server has counted of a trajectory without ids; empty if it does not tell."""

Message = dict[str, Any]
"""A chat message: `role`, `content`, and where it applies `tool_calls`, `name`, `tool_call_id`."""


class Author(StrEnum):
    """Who wrote a completion token."""

    POLICY = "policy"
    """Sampled by the model; only these tokens get gradients."""
    TEMPLATE = "template"
    """Added by the chat template: separators, role headers, generation prompt, the stop token of a cut turn."""
    ENVIRONMENT = "environment"
    """Tool results and other observations."""


class StopReason(StrEnum):
    """Why a trajectory ended. Every trajectory has exactly one."""

    DONE = "done"
    """The environment ended the episode (for a `ToolEnv`: the model answered without a tool call)."""
    MAX_TURNS = "max_turns"
    """The turn limit, or one of the environment's own, was reached before the environment was done."""
    MAX_COMPLETION_LENGTH = "max_completion_length"
    """The token budget of the whole trajectory is spent, or the next observation does not fit into it."""
    INVALID_CALLS = "invalid_calls"
    """More than `max_invalid_calls` unusable turns in a row."""
    TIMEOUT = "timeout"
    """`rollout_timeout` passed."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt alone leaves no room for a completion."""
    ENVIRONMENT_ERROR = "environment_error"
    """The environment itself raised. Not the policy's fault."""
    GENERATION_ERROR = "generation_error"
    """The generation back end failed. Not the policy's fault."""
    TOOL_FAILURE = "tool_failure"
    """A tool failed by the fault of the infrastructure behind it. Not the policy's fault."""

    @property
    def is_truncated(self) -> bool:
        """A limit ended the trajectory, not the environment or the policy (gymnasium's `truncated`)."""
        return self in (StopReason.MAX_TURNS, StopReason.MAX_COMPLETION_LENGTH, StopReason.TIMEOUT)

    @property
    def is_infrastructure_failure(self) -> bool:
        """Not the policy's fault: the trajectory is neither in the baseline nor in the loss."""
        return self in (
            StopReason.ENVIRONMENT_ERROR,
            StopReason.GENERATION_ERROR,
            StopReason.TOOL_FAILURE,
            StopReason.PROMPT_TOO_LONG,
        )


@dataclass(kw_only=True)
class Turn:
    """One assistant turn and the environment's answer to it."""

    start: int
    """Position of the turn's first action token in `completion_ids`."""
    end: int
    """Position after the turn's last action token; `end == start` for a turn in which nothing was sampled."""
    message: Message
    """The assistant message as parsed from the sampled tokens."""
    observations: list[Message] = field(default_factory=list)
    """Messages that the environment answered with (empty if the trajectory ended here)."""
    next_context: list[Message] | None = None
    """The environment's own next context, where a context policy was there to read it."""
    tool_results: list[ToolResult] = field(default_factory=list)
    """One per call, in the order of the calls."""
    reward: float = 0.0
    """Process reward of this turn (sum over its calls)."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """The process reward by source; sums to `reward` unless empty."""
    is_truncated: bool = False
    """The turn was cut by a token limit before the model ended it."""
    is_invalid: bool = False
    """The turn was unusable: no call in it could be run."""
    generate_s: float = 0.0
    """Seconds spent waiting for the sampler."""
    env_s: float = 0.0
    """Seconds spent in the environment (tools included)."""
    rendered: dict[str, str] = field(default_factory=dict)
    """The state after the turn, for readers of the record: `text`, `svg`, `error` (see `Environment`)."""
    seat: str | None = None
    """Whose turn it is, where an agent has named seats with rewards of their own."""
    summary_request: Message | None = None
    """The user message that asked for a summary, before which it stands; None for a turn that the environment got."""

    kept_ids: KeptIds | None = None
    """The ids that each of its tokens was drawn from, where top-k, top-p or min-p cut others off. Not recorded."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Which weights sampled its tokens, in order: (optimizer steps behind the weights, number of tokens). Empty where
    nobody noted it (`rollouts_ahead: 0`)."""

    @property
    def is_summary(self) -> bool:
        """The turn is a summary of the context (`context.policy="summarise"`), which the environment does not get."""
        return self.summary_request is not None


def own_numbers(names: Iterable[str]) -> list[str]:
    """Names of numbers in `Trajectory.info` that only the user's environment knows: at most three of these.

    Args:
        names: of all numbers there.

    >>> own_numbers(["em", "right", "agent/raised", "num_orders"])
    ['right', 'num_orders']
    """
    own = [name for name in names if name not in _OUR_NUMBERS and "/" not in name]
    return own[:MAX_OWN_NUMBERS]


@dataclass(kw_only=True, repr=False)
class Trajectory:
    """One rollout of one prompt.

    T below is the number of completion tokens: everything after the prompt, tool text included.

    Raises:
        ValueError: if the per-token lists differ in length, or the masks, turn ids and authors contradict each other.
    """

    prompt_messages: list[Message]
    prompt_ids: list[int]
    """(P,)"""
    completion_ids: list[int]
    """(T,) exactly as sampled or rendered."""
    action_mask: list[int]
    """(T,) 1 iff the policy sampled the token."""
    logprobs: list[float]
    """(T,) the sampler's log-probability under the temperature used; 0.0 where `action_mask` is 0."""
    turn_ids: list[int]
    """(T,) index into `turns` for action tokens, -1 elsewhere."""
    authors: list[Author]
    """(T,)"""
    turns: list[Turn]
    stop_reason: StopReason
    outcome_reward: float = 0.0
    """Reward of the finished trajectory, counted once."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """The outcome reward by source; sums to `outcome_reward` unless empty."""
    truncation_penalty: float = 0.0
    """The part of `outcome_reward` that the limit cost which ended it (`truncated_trajectories="penalise"`): the same
    for all such trajectories, so no signal to filters and to the echo trap."""
    seat_rewards: dict[str, float] = field(default_factory=dict)
    """The outcome reward of each seat, whose mean is in `outcome_reward`; empty where all turns share that one.
    Whatever is added to `outcome_reward` later (by reward functions, as a penalty) counts for each seat."""
    is_scored: bool = True
    """Whether anything scored the trajectory; one that nothing scored is not in the baseline."""
    example_id: str = ""
    """Identifier of the example in the data set."""
    tags: dict[str, str] = field(default_factory=dict)
    """Short values of the example's columns, by name, for readers of the record (`short_tags`)."""
    generation: int = 0
    """Index of the trajectory in its group: the trajectories of one example."""
    seed: int = 0
    is_group_too_small: bool = False
    """Too few trajectories of its group are left (`min_group_size`), so this one is not in the baseline either."""
    is_replaced: bool = False
    """Its group had zero variance and another took its place (`resample_rounds`): not trained on."""
    error: str | None = None
    """Message of the infrastructure failure, if there was one; or why a required reward function scored nothing."""
    failed_tries: list[str] = field(default_factory=list)
    """Stop reason and error of each earlier try that this one took the place of (`retry_failed`)."""
    info: dict[str, Any] = field(default_factory=dict)
    """JSON-serialisable extras from the environment (gold answer, prediction, scores, ...)."""
    duration_s: float = 0.0
    """Seconds from its reset to its last turn, without those that it waited for weights (`rollouts_ahead`)."""
    rendered: dict[str, str] = field(default_factory=dict)
    """The state after `reset`, like `Turn.rendered`."""
    segments: list[Segment] = field(default_factory=list)
    """Where the tokens go on in another row, because the context was rewritten; empty for one row."""
    open_context: list[int] | None = None
    """(P,) ids that the next turn would have been sampled after, had no limit ended the trajectory; None where these
    are those of its last row."""
    advantages: list[float] | None = None
    """(T,) set by the trainer before the trajectory is recorded."""

    def __post_init__(self) -> None:
        self.stop_reason = StopReason(self.stop_reason)
        if set(map(type, self.authors)) != {Author}:
            self.authors = [Author(author) for author in self.authors]
        if problem := self._find_problem():
            raise ValueError(f"Trajectory: {problem}")

    def _find_problem(self) -> str | None:
        """Contradictions, in words."""
        num_tokens = len(self.completion_ids)
        for name in ("action_mask", "logprobs", "turn_ids", "authors"):
            if (length := len(getattr(self, name))) != num_tokens:
                return f"{name} has {length} entries and completion_ids {num_tokens}. Give each token one entry."
        policy = Author.POLICY  # found once: a look into an enum takes longer than the comparison
        is_action = [author is policy for author in self.authors]
        if not list(self.action_mask) == is_action == [turn_id >= 0 for turn_id in self.turn_ids]:
            tokens = zip(self.action_mask, is_action, (turn_id >= 0 for turn_id in self.turn_ids), strict=True)
            place = next(index for index, token in enumerate(tokens) if len({*token}) > 1)
            return (
                f"token {place} has action_mask={self.action_mask[place]}, turn_id={self.turn_ids[place]} and "
                f"author={self.authors[place].value}. An action has mask 1, a turn id >= 0 and the author 'policy'."
            )
        for index, turn in enumerate(self.turns):
            is_inside = 0 <= turn.start <= turn.end <= num_tokens
            if not is_inside or any(turn_id != index for turn_id in self.turn_ids[turn.start : turn.end]):
                return f"turn {index} spans [{turn.start}, {turn.end}) of {num_tokens} tokens; turn_ids say otherwise."
        if sum(turn.end - turn.start for turn in self.turns) != sum(self.action_mask):
            return "the turns do not cover the action tokens exactly."
        num_rows, last = 1, 0
        for index, segment in enumerate(self.segments):
            opens = segment.row == num_rows
            is_in_order = last <= segment.start <= num_tokens and 0 <= segment.row <= num_rows
            if not is_in_order or opens != bool(segment.prompt_ids):
                return (
                    f"segments[{index}] has start={segment.start}, row={segment.row} and "
                    f"{len(segment.prompt_ids or [])} prompt_ids, with {num_rows} rows and start={last} before it. "
                    "Segments stand in the order of time; one that opens a row has the next number and the ids of "
                    "its context, and one that continues a row has none."
                )
            num_rows, last = num_rows + opens, segment.start
        return None

    def __repr__(self) -> str:
        """A summary without token ids, short enough for a log line."""
        return (
            f"Trajectory(example_id={self.example_id!r}, generation={self.generation}, {len(self.turns)} turns, "
            f"{len(self.completion_ids)} tokens, stop_reason={self.stop_reason.value!r}, "
            f"total_reward={self.total_reward:g})"
        )

    @property
    def rows(self) -> list[Row]:
        """The training rows, in the order in which they were opened: one, unless the context was rewritten."""
        starts = [0, *(segment.start for segment in self.segments), len(self.completion_ids)]
        prompts, spans = [self.prompt_ids], [[(0, starts[1])]]
        for segment, span in zip(self.segments, itertools.pairwise(starts[1:]), strict=True):
            if segment.row == len(prompts):
                prompts.append(segment.prompt_ids or [])
                spans.append([])
            spans[segment.row].append(span)

        def take(name: str, parts: list[tuple[int, int]]) -> list[Any]:
            values = getattr(self, name)
            return [value for start, end in parts for value in values[start:end]]

        names = ("completion_ids", "action_mask", "turn_ids", "logprobs")
        return [
            Row(prompt_ids=prompt, spans=parts, **{name: take(name, parts) for name in names})
            for prompt, parts in zip(prompts, spans, strict=True)
        ]

    @property
    def in_baseline(self) -> bool:
        """Whether the reward counts in the statistics of the group or batch."""
        return self.is_scored and not self.is_group_too_small and not self.stop_reason.is_infrastructure_failure

    @property
    def env_turns(self) -> list[Turn]:
        """The turns that the environment got: all but summaries."""
        return [turn for turn in self.turns if not turn.is_summary]

    @property
    def is_hosted(self) -> bool:
        """It is a hosted model's: there are messages, and no token ids."""
        return USAGE in self.info

    @property
    def num_action_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(self.action_mask)

    @property
    def process_reward(self) -> float:
        """Sum of the turns' process rewards."""
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def total_reward(self) -> float:
        """R_i: turn rewards + outcome reward."""
        return self.process_reward + self.outcome_reward

    def outcome_of(self, seat: str | None) -> float:
        """The outcome reward of a seat's turns."""
        if seat not in self.seat_rewards:
            return self.outcome_reward
        mean = math.fsum(self.seat_rewards.values()) / len(self.seat_rewards)
        return self.seat_rewards[seat] + (self.outcome_reward - mean)

    def token_rewards(
        self, *, turn_rewards: Sequence[float] | None = None, outcome: float | None = None
    ) -> list[float]:
        """(T,) process rewards on each turn's last action token, outcome reward on the trajectory's last one.

        The sum over action tokens equals `total_reward` for every stop reason, as long as anything was sampled. The
        reward of a turn in which nothing was sampled moves to the nearest action token before it, else after it.

        Args:
            turn_rewards: one value per turn, used instead of the recorded rewards (weighted ones, for example).
            outcome: a value used instead of the recorded outcome reward.
        """
        turn_rewards = [turn.reward for turn in self.turns] if turn_rewards is None else turn_rewards
        rewards = [0.0] * len(self.completion_ids)
        action_positions = [position for position, mask in enumerate(self.action_mask) if mask]
        if not action_positions:
            return rewards
        for turn, reward in zip(self.turns, turn_rewards, strict=True):
            rewards[action_positions[max(0, bisect_left(action_positions, turn.end) - 1)]] += reward
        rewards[action_positions[-1]] += self.outcome_reward if outcome is None else outcome
        return rewards

    @property
    def numbers(self) -> dict[str, float]:
        """The finite numbers of `info` that a float can hold, by name; scalars of numpy and torch are some."""
        numbers = {}
        for name, value in self.info.items():
            value = value.item() if getattr(value, "ndim", None) == 0 else value
            if isinstance(value, bool | int | float):
                if abs(value) <= sys.float_info.max:
                    numbers[str(name)] = float(value)
                else:
                    _warn_of_number(str(name))
            elif name in _SCORES and value is not None:
                _warn_of_score(name, value)
        return numbers

    @property
    def is_solved(self) -> bool:
        """Exact match, else the environment's `success` of at least 1/2, else an outcome above 0."""
        scores = [self.numbers[name] for name in _SCORES if name in self.numbers]
        return scores[0] >= 0.5 if scores else self.outcome_reward > 0

    @property
    def completion_messages(self) -> list[Message]:
        """Assistant turns and observations, in order; a summary stands after the message that asked for it."""
        return [message for turn in self.turns for message in _messages_of(turn)]

    @property
    def answered_messages(self) -> list[Message]:
        """`completion_messages` up to the last turn that is no summary, as reward functions of TRL's form read them.

        A limit may end a trajectory after an observation that nobody answered; TRL hands over none of that kind.
        Without any turn this is one empty assistant message.
        """
        turns = list(self.turns)
        while turns and turns[-1].is_summary:
            turns.pop()
        if not turns:
            return [{"role": "assistant", "content": ""}]
        *before, last = turns
        return [*(message for turn in before for message in _messages_of(turn)), last.message]

    @property
    def messages(self) -> list[Message]:
        """The whole conversation, prompt included."""
        return [*self.prompt_messages, *self.completion_messages]

    @property
    def tool_results(self) -> list[ToolResult]:
        """All tool results, in order."""
        return [result for turn in self.turns for result in turn.tool_results]

    @property
    def final_text(self) -> str:
        """Content of the last assistant message that is no summary, or "" if there is none."""
        turns = self.env_turns
        return str(turns[-1].message.get("content") or "") if turns else ""

    # ---------------------------------------------------------------- display and JSON

    def show(self, tokenizer: PreTrainedTokenizerBase | None, *, width: int | None = None) -> str:
        """Render the completion as text whose ANSI colours show the author of each token; pass it to `print`.

        Blue: action tokens. Orange: environment text. Grey: template glue.
        """
        from agent_r1_trl.recording.terminal import render_trajectory

        return render_trajectory(self, tokenizer, width=width)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable dictionary that `from_dict` inverts (`info` keeps the environment's own objects)."""
        # `asdict` of the whole trajectory would copy token by token, a hundred times slower than copying the lists.
        record = {item.name: copy.copy(getattr(self, item.name)) for item in fields(self)}
        return record | {
            "prompt_messages": copy.deepcopy(self.prompt_messages),
            "turns": [asdict(replace(turn, kept_ids=None)) for turn in self.turns],
            "segments": [asdict(segment) for segment in self.segments],
            "stop_reason": self.stop_reason.value,
            "authors": [author.value for author in self.authors],
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Trajectory:
        """The inverse of `to_dict`; unknown keys (such as the step that a recorder adds) are ignored."""
        known = {item.name for item in fields(cls)}
        values = {key: value for key, value in record.items() if key in known}
        values["turns"] = [
            Turn(
                **turn
                | {
                    "tool_results": [ToolResult.from_dict(result) for result in turn["tool_results"]],
                    "versions": [(version, num) for version, num in turn.get("versions", ())],
                }
            )
            for turn in record["turns"]
        ]
        values["segments"] = [Segment(**segment) for segment in record.get("segments", ())]
        return cls(**values)

    def to_json(self) -> str:
        """One line of JSON; non-finite numbers are written in the way of Python's json (NaN, Infinity)."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Trajectory:
        """The inverse of `to_json`."""
        return cls.from_dict(json.loads(text))


@functools.cache
def _warn_of_number(name: str) -> None:
    logger.warning("trajectory.info[%r] holds NaN, infinity or too large a number, which no mean counts.", name)


_SAID_OF: set[str] = set()
"""Names of which it was said that a value is no number."""


def _warn_of_score(name: str, value: object) -> None:
    if name in _SAID_OF:
        return
    _SAID_OF.add(name)
    logger.warning(
        "trajectory.info[%r] is %.80r, which is no number, so no mean counts it. Set it to 0.0 or 1.0. Reported once.",
        name,
        value,
    )


def _messages_of(turn: Turn) -> list[Message]:
    asked = [turn.summary_request] if turn.summary_request is not None else []
    return [*asked, turn.message, *turn.observations]

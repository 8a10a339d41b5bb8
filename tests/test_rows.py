"""Rows of a trajectory: by hand, and as laws over any order of contexts."""

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1_trl.features.journal.reader import read_trajectory, trajectory_record
from agent_r1_trl.generation.base import Generation
from agent_r1_trl.recording.store import MASKED_ID, mask_record
from agent_r1_trl.rollout import Draft, RolloutRequest
from agent_r1_trl.trajectory import Author, Row, Segment, StopReason, Trajectory
from agent_r1_trl.update.rows import TrainingRows
from tests.effort import examples

TEXT = Author.ENVIRONMENT


def draft_of(prompt_ids):
    return Draft(request=RolloutRequest(example={}), prompt_ids=list(prompt_ids))


def say(draft, ids):
    logprobs = [-float(token) for token in ids]
    message = {"role": "assistant", "content": str(ids)}
    draft.add_turn(Generation(token_ids=list(ids), logprobs=logprobs, stop="stop"), message, generate_s=0.0)


def test_a_context_that_was_rewritten_opens_a_row_and_one_that_goes_on_does_not():
    """P | a b, then P' | d e + o + f."""
    draft = draft_of([1, 2])
    say(draft, [10, 11])
    draft.rewrite_context([1, 3], [3], [TEXT])
    say(draft, [20, 21])
    draft.rewrite_context([1, 3, 20, 21, 7], [7], [TEXT])
    say(draft, [30])
    trajectory = draft.finish(StopReason.DONE, duration_s=0.0)
    assert trajectory.completion_ids == [10, 11, 20, 21, 7, 30]
    assert trajectory.segments == [Segment(start=2, row=1, prompt_ids=[1, 3])]
    assert trajectory.rows == [
        Row(
            prompt_ids=[1, 2], completion_ids=[10, 11], action_mask=[1, 1], turn_ids=[0, 0], logprobs=[-10.0, -11.0],
            spans=[(0, 2)],
        ),
        Row(
            prompt_ids=[1, 3], completion_ids=[20, 21, 7, 30], action_mask=[1, 1, 0, 1], turn_ids=[1, 1, -1, 2],
            logprobs=[-20.0, -21.0, 0.0, -30.0], spans=[(2, 6)],
        ),
    ]  # fmt: skip


def test_a_context_that_nothing_was_sampled_after_opens_no_row():
    draft = draft_of([1])
    say(draft, [10])
    draft.rewrite_context([2], [], [])
    assert len(draft.finish(StopReason.MAX_TURNS, duration_s=0.0).rows) == 1


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(start=9, row=1, prompt_ids=[1])],
        [Segment(start=1, row=2, prompt_ids=[1])],
        [Segment(start=1, row=1)],
        [Segment(start=1, row=0, prompt_ids=[1])],
        [Segment(start=2, row=1, prompt_ids=[1]), Segment(start=1, row=0)],
    ],
)
def test_segments_that_divide_nothing_are_refused(segments):
    with pytest.raises(ValueError, match="segments"):
        Trajectory(
            prompt_messages=[], prompt_ids=[1], completion_ids=[2, 3], action_mask=[0, 0], logprobs=[0.0, 0.0],
            turn_ids=[-1, -1], authors=[TEXT, TEXT], turns=[], stop_reason=StopReason.DONE, segments=segments,
        )  # fmt: skip


# -------------------------------------------------------------------- laws


@st.composite
def conversations(draw):
    """A draft after any turns, each in a context that goes on, comes back to an earlier one, or is a new one.

    Returns:
        The trajectory, and what each turn was sampled after.
    """
    ids = st.lists(st.integers(1, 3), max_size=3)
    draft = draft_of([1, *draw(ids)])
    asked = []
    for turn in range(draw(st.integers(1, 6))):
        if turn:
            rows = [opened + rest for opened, rest in draft.rows] or [draft.context_ids]
            begun = draw(st.sampled_from([*rows, draft.context_ids, [1]]))
            delta = [1] * draw(st.integers(0, 2))
            context = [*begun, *draw(ids)]
            is_same = [*map(operator.eq, context, asked[-1]), False]
            num_same = draw(st.integers(0, is_same.index(False)))
            draft.rewrite_context(context[num_same:], delta, [TEXT] * len(delta), num_same=num_same)
            assert draft.context_ids == context
            longest = max((row for row in rows if context[: len(row)] == row), key=len, default=None)
            joined = draft.segments[-1].row if draft.segments else 0
            assert joined == (len(rows) if longest is None else rows.index(longest))
        asked.append(draft.context_ids)
        say(draft, draw(ids))
    return draft.finish(StopReason.DONE, duration_s=0.0), asked


@settings(max_examples=examples(200))
@given(conversations())
def test_every_sampled_token_is_trained_once_after_exactly_what_it_was_sampled_after(conversation):
    trajectory, asked = conversation
    found = {}
    for number, row in enumerate(trajectory.rows):
        ids = [*row.prompt_ids, *row.completion_ids]
        for position, (mask, turn) in enumerate(zip(row.action_mask, row.turn_ids, strict=True), len(row.prompt_ids)):
            assert mask == (turn >= 0)
            if mask:
                found.setdefault(turn, []).append((number, position, ids[position], ids[:position]))
    for index, turn in enumerate(trajectory.turns):
        sampled = trajectory.completion_ids[turn.start : turn.end]
        tokens = found.get(index, [])
        assert [token for _, _, token, _ in tokens] == sampled
        assert [before for *_, before in tokens] == [asked[index] + sampled[:n] for n in range(len(sampled))]
        assert len({row for row, *_ in tokens}) <= 1
    assert sum(sum(row.action_mask) for row in trajectory.rows) == trajectory.num_action_tokens
    places = [place for row in trajectory.rows for start, end in row.spans for place in range(start, end)]
    assert sorted(places) == [*range(len(trajectory.completion_ids))]


@settings(max_examples=examples(50))
@given(conversations())
def test_rows_survive_json_and_the_journal(conversation):
    trajectory, _ = conversation
    for again in (Trajectory.from_json(trajectory.to_json()), read_trajectory(trajectory_record(trajectory))):
        assert again == trajectory
        assert again.rows == trajectory.rows


@settings(max_examples=examples(50))
@given(st.lists(conversations(), min_size=1, max_size=4), st.integers(0, 3))
def test_time_and_rows_hold_the_same_tokens(batch, num_more):
    trajectories = [trajectory for trajectory, _ in batch]
    rows = TrainingRows(trajectories, num_rows=len(TrainingRows(trajectories)) + num_more)
    width = max(1, *(len(row.completion_ids) for row in rows.rows))
    time = torch.zeros(len(trajectories), rows.length, dtype=torch.long)
    mask = torch.zeros_like(time)
    for index, trajectory in enumerate(trajectories):
        time[index, : len(trajectory.completion_ids)] = torch.tensor(trajectory.completion_ids, dtype=torch.long)
        mask[index, : len(trajectory.action_mask)] = torch.tensor(trajectory.action_mask, dtype=torch.long)
    places = torch.zeros(len(rows), width)
    in_rows, masks = rows.to_rows(time, places), rows.to_rows(mask, places)
    for number, row in enumerate(rows.rows):
        assert in_rows[number, : len(row.completion_ids)].tolist() == row.completion_ids
    assert torch.equal(rows.to_time(in_rows) * mask, time * mask), "rows without an action token are excluded"
    assert rows.total(masks.sum(dim=1)).tolist() == [item.num_action_tokens for item in trajectories]
    assert sum(rows.is_first) == len(trajectories)
    last = [rows.rows[row].spans[-1][1] for row in rows.last.tolist()]
    assert all(
        end
        == max(row.spans[-1][1] for row, index in zip(rows.rows, rows.index.tolist(), strict=True) if index == number)
        for number, end in enumerate(last)
    )


def test_a_secret_in_a_trajectory_masks_the_ids_of_its_contexts(monkeypatch):
    draft = draft_of([1])
    draft.prompt_messages = [{"role": "user", "content": "the key is hunter2hunter2"}]
    say(draft, [10])
    draft.rewrite_context([2, 3], [], [])
    say(draft, [20])
    trajectory = draft.finish(StopReason.DONE, duration_s=0.0)
    monkeypatch.setenv("A_PASSWORD", "hunter2hunter2")
    record = mask_record(trajectory.to_dict() | {"messages": trajectory.messages})
    assert record["segments"][0]["prompt_ids"] == [MASKED_ID] * 2

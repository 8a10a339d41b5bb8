"""Contexts that are rewritten on the way: what the sampler is given. The laws stand in test_context_laws.py."""

import pytest

from agent_r1_trl.testing import AddEchoEnv, call, chat_of, say
from agent_r1_trl.trajectory import StopReason
from tests.rollout.helpers import roll_out_recorded


def roll_out(turns, *, env=AddEchoEnv, **limits):
    """One trajectory of these turns, messages or ids, and (context, sampled ids) of each as the generator saw them."""
    trajectory, recorder = roll_out_recorded(turns, chat=chat_of(), env=env, **limits)
    return trajectory, recorder.log


def text_of(ids):
    return chat_of().encoder.to_text(ids)


ECHOES = [call("echo", text=f"word{number}, and others that need some room in a context") for number in range(5)]


def test_a_window_holds_the_prompt_and_the_last_turns():
    trajectory, log = roll_out([*ECHOES, say("done")], context={"policy": "window", "turns": 2})
    assert len(trajectory.turns) == 6 and trajectory.stop_reason is StopReason.DONE
    prompt = text_of(trajectory.prompt_ids)
    for turn, (context, _) in enumerate(log):
        text = text_of(context)
        assert text.startswith(prompt)
        seen = [number for number in range(5) if f"word{number}" in text]
        assert seen == list(range(max(0, turn - 2), turn))
        assert text.endswith("<|im_start|>assistant\n")
    assert [len(row.prompt_ids) for row in trajectory.rows] == [len(log[turn][0]) for turn in (0, 3, 4, 5)]
    assert [sorted({*row.turn_ids} - {-1}) for row in trajectory.rows] == [[0, 1, 2], [3], [4], [5]]


def test_a_window_that_nothing_leaves_changes_no_bit():
    turns = [*ECHOES, say("done")]
    kept, asked = roll_out(turns)
    windowed, asked_in_window = roll_out(turns, context={"policy": "window", "turns": 9})
    times = {"duration_s": 0.0}
    records = [{**item.to_dict(), **times} for item in (kept, windowed)]
    for record in records:
        for turn in record["turns"]:
            turn.update(generate_s=0.0, env_s=0.0)
            for result in turn["tool_results"]:
                result.update(latency_s=0.0, queue_s=0.0)
    assert records[0] == records[1] and asked == asked_in_window


def test_old_observations_become_notes_of_their_length():
    trajectory, log = roll_out([*ECHOES, say("done")], context={"policy": "drop_observations", "turns": 1})
    last = text_of(log[-1][0])
    assert last.count("[50 characters of echo left out]") == 4
    assert all(f'"text": "word{number},' in last for number in range(5)), "what the policy said stays"
    assert last.rindex("word4") > last.rindex("left out]"), "and what answered it last"
    assert len(trajectory.rows) == 5


def test_the_models_limit_counts_in_a_context_and_the_completions_in_a_trajectory():
    turns = [*ECHOES, say("done")]
    trajectory, log = roll_out(turns)
    longest = len(log[2][0]) + len(log[2][1])
    kept, _ = roll_out(turns, max_model_length=longest)
    assert kept.stop_reason is StopReason.MAX_COMPLETION_LENGTH
    windowed, _ = roll_out(turns, max_model_length=longest, context={"policy": "window", "turns": 1})
    assert windowed.stop_reason is StopReason.DONE and len(windowed.turns) == 6
    # What the turns sampled and what answered them is the same in any context.
    spent = len(trajectory.completion_ids)
    for policy in ({}, {"context.policy": "window", "context.turns": 1}):
        fits, _ = roll_out(turns, max_completion_length=spent, **policy)
        short, _ = roll_out(turns, max_completion_length=spent - len(log[-1][1]), **policy)
        assert fits.stop_reason is StopReason.DONE
        assert short.stop_reason is StopReason.MAX_COMPLETION_LENGTH and len(short.turns) == 5


# -------------------------------------------------------------------- a user's own


def reminder(view):
    """The question, a word of the user's, and the last turn."""
    last = view.turns[-1]
    note = {"role": "user", "content": f"(turn {len(view.turns)}, {view.num_tokens} tokens) <|im_end|>"}
    return [*view.prompt_messages, note, last.message, *last.observations]


def nothing(view):
    return None


def fails(view):
    raise KeyError(len(view.turns))


def changes_a_message(view):
    view.turns[0].observations[0]["content"] = "less"
    return view.messages


def no_messages(view):
    return []


def with_an_image(view):
    return [*view.messages, {"role": "user", "content": [{"type": "image"}]}]


def test_a_policy_of_ones_own_may_write_messages():
    path = f"{__name__}.reminder"
    trajectory, log = roll_out([*ECHOES[:2], say("done")], context={"policy": path})
    for turn in (1, 2):
        text = text_of(log[turn][0])
        assert f"(turn {turn}, " in text and f"word{turn - 1}" in text
        assert (f"word{turn - 2}" in text) == (turn == 0)
    control = chat_of().encoder.control_ids["<|im_end|>"]
    assert log[1][0].count(control) == log[0][0].count(control) + 3, "what a message spells stays text"
    assert len(trajectory.rows) == 3


def test_a_turn_that_a_policy_keeps_keeps_its_ids_whatever_stands_before_it():
    chat = chat_of()
    letters = [chat.encoder.encode(letter)[0] for letter in "capital"]
    assert chat.encoder.encode("capital") != letters, "as no tokenizer would write it"
    turn = [*letters, *chat.encode_reply(say())[-1:]]
    _, log = roll_out([turn, turn, say("done")], context={"policy": f"{__name__}.reminder"})
    for context, _ in log[1:]:
        assert text_of(context).count("capital") == 1
        place = next(place for place in range(len(context)) if context[place : place + len(turn)] == turn)
        assert text_of(context[:place]).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "name, said",
    [
        ("fails", "KeyError: 1"),
        ("with_an_image", "image"),
        ("nothing", "None"),
        ("no_messages", "list of messages"),
        ("changes_a_message", "changed a message"),
    ],
)
def test_a_policy_that_fails_ends_its_trajectory_alone(name, said):
    trajectory, _ = roll_out([*ECHOES[:1], say("done")], context={"policy": f"{__name__}.{name}"})
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR and len(trajectory.turns) == 1
    assert f"{__name__}.{name}" in trajectory.error and said in trajectory.error


@pytest.mark.parametrize(
    "name, options",
    [
        ("context.policy", {"context.policy": "widow"}),
        ("context.policy", {"context.policy": ""}),
        ("context.policy", {"context.policy": "tests.rollout.helpers.PROMPT"}),
        ("context.turns", {"context.policy": "window"}),
        ("context.turns", {"context.policy": "window", "context.turns": 0}),
        ("context.turns", {"context.turns": 2}),
        ("context.tokens", {"context.tokens": 2}),
        ("context.tokens", {"context.policy": "step", "context.tokens": 2}),
        (
            "context.tokens",
            {"context.policy": "window", "context.turns": 1, "context.tokens": 9, "max_model_length": 9},
        ),
    ],
)
def test_what_makes_no_policy_is_refused(name, options):
    with pytest.raises(ValueError, match=name):
        roll_out([*ECHOES[:1], say("done")], **options)

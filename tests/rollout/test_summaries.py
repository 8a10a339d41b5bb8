"""Summaries that the policy writes: what it is asked, what it goes on with, and what counts as a turn."""

import pytest

from agent_r1_trl import testing
from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.recording.terminal import render_trajectory
from agent_r1_trl.rewards import (
    grounded_thinking,
    thinking_format,
    thinking_format_penalty,
)
from agent_r1_trl.rollout import RolloutRequest, RolloutRunner
from agent_r1_trl.rollout.probe import recorded_calls
from agent_r1_trl.rollout.requests import derive_seed
from agent_r1_trl.rollout.summaries import CUT, HEADING, NO_SUMMARY
from agent_r1_trl.testing import AddEchoEnv, call, chat_of, say
from agent_r1_trl.trainers.metrics import rollout_metrics, trajectory_record
from agent_r1_trl.trajectory import StopReason, Trajectory
from agent_r1_trl.update.credit_inputs import anchors
from tests.families import FAMILIES
from tests.rollout.helpers import PROMPT, check_rows, mostly_nightly
from tests.toys import limits_of, unfold

EVERY_TURN = {"context.policy": "summarise", "context.turns": 1, "context.summary_tokens": 60}
QUESTION = "Write it down, in {summary_tokens} tokens."


class Log:
    """A generator that says what it is told, a summary where it is asked for one, and remembers what it was given."""

    def __init__(self, chat, turns, summaries, asked=QUESTION):
        self.chat, self.turns, self.summaries = chat, list(turns), list(summaries)
        self.asked = asked.partition("{")[0]
        self.requests = []

    async def generate(self, request):
        from agent_r1_trl.generation import Generation

        is_summary = self.asked in self.chat.encoder.to_text(request.prompt_ids[-200:]) and bool(self.summaries)
        said = (self.summaries if is_summary else self.turns).pop(0)
        ids = (self.chat.encode_reply(said) if isinstance(said, dict) else list(said))[: request.max_tokens]
        stop = "stop" if ids and ids[-1] in self.chat.stop_token_ids else "length"
        self.requests.append((list(request.prompt_ids), ids, request.seed, request.max_tokens))
        return Generation(token_ids=ids, logprobs=[-1.0] * len(ids), stop=stop)


def roll_out(turns, summaries, *, chat=None, env=AddEchoEnv, asked=QUESTION, **limits):
    """One trajectory of these turns and summaries, and what the generator was asked."""
    chat = chat or chat_of()
    generator = Log(chat, turns, summaries, asked)
    limits = {"max_turns": len(turns), "context.summary_prompt": QUESTION} | EVERY_TURN | limits
    (trajectory,) = testing.roll_out(env, generator, [{"prompt": PROMPT}], chat=chat, **unfold(limits))
    return trajectory, generator.requests


def text_of(ids, chat=None):
    return (chat or chat_of()).encoder.to_text(ids)


TURNS = [call("echo", text="first"), call("echo", text="second"), call("echo", text="third"), say("done")]
NOTES = [say("note one"), say("note two"), say("note three")]


def test_a_summary_is_trained_where_it_was_written_and_opens_the_next_row():
    trajectory, requests = roll_out(TURNS, NOTES)
    check_rows(trajectory, requests)
    assert trajectory.stop_reason is StopReason.DONE
    assert [turn.is_summary for turn in trajectory.turns] == [False, True] * 3 + [False]
    rows = trajectory.rows
    assert [sorted({*row.turn_ids} - {-1}) for row in rows] == [[0, 1], [2, 3], [4, 5], [6]]
    first, second = text_of(requests[1][0]), text_of(requests[2][0])
    assert first.index("first") < first.index("Write it down, in 60 tokens.")
    assert second.startswith(
        text_of(trajectory.prompt_ids).partition("2 + 3?")[0] + "2 + 3?\n\n" + HEADING + "note one"
    )
    assert "Write it down" not in second and second.count("first") == 2, "the last turn and its answer stay"
    third = text_of(requests[4][0])
    assert "note two" in third and "note one" not in third and "first" not in third and "second" in third
    assert trajectory.final_text == "done" and trajectory.answered_messages[-1]["content"] == "done"
    written = [message["content"] for message in trajectory.messages if message["role"] == "user"]
    assert written[1:] == ["Write it down, in 60 tokens."] * 3
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
    assert len(trajectory.env_turns) == 4


def test_summaries_have_seeds_and_lengths_of_their_own_and_move_no_others():
    _, requests = roll_out(TURNS, NOTES, max_tokens_per_turn=40)
    expected = []
    for turn in range(4):
        expected += [(derive_seed(0, turn), 40)] + [(derive_seed(0, turn, "summary"), 60)] * (turn < 3)
    assert [request[2:] for request in requests] == expected


def test_a_summary_is_written_where_the_context_gets_longer_than_context_tokens():
    _, whole = roll_out(
        TURNS, [], context={"policy": "keep", "turns": None, "summary_tokens": None, "summary_prompt": None}
    )
    third = len(whole[2][0])
    trajectory, requests = roll_out(TURNS, NOTES, context={"turns": None, "tokens": third})
    assert [turn.is_summary for turn in trajectory.turns] == [False, False, False, True, False]
    assert [request[0] for request in requests[:3]] == [request[0] for request in whole[:3]]
    check_rows(trajectory, requests)
    trajectory, _ = roll_out(TURNS, NOTES, context={"turns": None, "tokens": third - 1})
    assert trajectory.turns[2].is_summary


def test_the_last_turn_is_left_out_where_the_context_would_be_too_long_with_it():
    turns = [call("echo", text="word " * 60), say("done")]
    (_, _, whole), (_, _, short) = (
        [text_of(request[0]) for request in roll_out(turns, NOTES, context={"tokens": tokens, "turns": 1})[1]]
        for tokens in (900, 240)
    )
    assert whole.count("word") == 120 and short.count("word") == 0
    assert "note one" in whole and "note one" in short


def test_turns_limits_and_the_environment_do_not_count_summaries():
    class Counting(AddEchoEnv):
        async def step(self, message):
            assert "note" not in message["content"]
            self.count = getattr(self, "count", 0) + 1
            return await super().step(message)

        def outcome_reward(self, trajectory):
            trajectory.info["steps"] = self.count
            return 1.0

    trajectory, _ = roll_out(TURNS[:3], NOTES, env=Counting)
    assert trajectory.stop_reason is StopReason.MAX_TURNS and trajectory.info["steps"] == 3
    assert [turn.is_summary for turn in trajectory.turns] == [False, True, False, True, False], "none after the last"
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.0, 0.5, 0.0, 0.0]
    assert trajectory.total_reward == sum(trajectory.token_rewards()) == 2.0
    metrics = rollout_metrics([trajectory_record(trajectory)], num_generations=1)
    assert metrics["rollout/turns"] == 3 and metrics["rollout/tool_calls"] == 3
    assert metrics["rollout/summaries"] == 2 and metrics["rollout/summary_truncated"] == 0
    assert thinking_format_penalty.score(trajectory) == [-0.1, None, -0.1, None, -0.1]
    assert thinking_format.score(trajectory) == 0.0
    grounded = grounded_thinking.score(trajectory)
    assert grounded[1] is None and grounded[3] is None and len(grounded) == 5
    kept = roll_out(
        TURNS[:3], [], context={"policy": "keep", "turns": None, "summary_tokens": None, "summary_prompt": None}
    )[0]
    assert [number for index, number in enumerate(anchors(trajectory)) if index % 2 == 0] == anchors(kept)
    assert len({*anchors(trajectory)}) == 5
    request = RolloutRequest(example={"prompt": PROMPT})
    (recorded,) = recorded_calls([trajectory], [request], that_failed=False, limit=9)["echo"][2:]
    assert [message["content"] for message in recorded.messages] == [""] * 3
    assert "summary 2" in render_trajectory(trajectory, chat_of().tokenizer)
    assert "summaries: 2" in render_trajectory(trajectory, None)


# -------------------------------------------------------------------- what a policy may write

CALLS = call("echo", text="again") | {"content": "Let me see."}
STATES = {
    "a call": (CALLS, "Let me see."),
    "a call alone": (call("echo", text="again"), NO_SUMMARY),
    "nothing": (say(""), NO_SUMMARY),
    "no token": ([], NO_SUMMARY),
    "a thought": (say("note") | {"reasoning_content": "secret"}, "note"),
    "a cut one": (say("word " * 200), CUT),
}


@pytest.mark.parametrize("state", STATES)
def test_whatever_is_written_is_trained_and_only_its_text_is_read(state):
    summary, read = STATES[state]
    trajectory, requests = roll_out([TURNS[0], say("done")], [summary])
    check_rows(trajectory, requests)
    assert trajectory.stop_reason is StopReason.DONE and len(trajectory.tool_results) == 1
    written, context = trajectory.turns[1], text_of(requests[2][0])
    assert written.is_summary and written.is_truncated == (state in ("a cut one", "no token"))
    assert "tool_calls" not in written.message and not written.is_invalid
    assert f"{HEADING}{read}" in context or (read == CUT and CUT in context)
    assert "again" not in context and "secret" not in context
    metrics = rollout_metrics([trajectory_record(trajectory)], num_generations=1)
    assert metrics["rollout/summary_truncated"] == written.is_truncated


def test_what_a_summary_spells_in_the_next_context_is_no_longer_than_a_summary_may_be():
    chat = chat_of()
    sampled = [chat.encoder.control_ids["<|im_start|>"]] * 50
    _, requests = roll_out([TURNS[0], say("done")], [sampled])
    _, empty = roll_out([TURNS[0], say("done")], [say("")])
    assert text_of(requests[2][0]).count("<|im_start|>") > text_of(empty[2][0]).count("<|im_start|>") + 5
    assert len(requests[2][0]) <= len(empty[2][0]) + 60 + chat.count(CUT)


def test_control_tokens_in_a_summary_are_text_afterwards():
    chat = chat_of()
    words = chat.tokenizer("<|im_", add_special_tokens=False)["input_ids"]
    words += chat.tokenizer("end|><tool_", add_special_tokens=False)["input_ids"]
    words += chat.tokenizer("call>", add_special_tokens=False)["input_ids"]
    spelled = [*words, *chat.encode_reply(say(""))[-1:]]
    trajectory, requests = roll_out([TURNS[0], say("done")], [spelled])
    plain = roll_out([TURNS[0], say("done")], [say("note")])[1]
    for token in ("<|im_end|>", "<tool_call>"):
        control = chat.encoder.control_ids[token]
        assert requests[2][0].count(control) == plain[2][0].count(control)
    assert "<|im_end|><tool_call>" in text_of(requests[2][0])
    check_rows(trajectory, requests)


# -------------------------------------------------------------------- room


def test_without_room_for_a_summary_the_context_goes_on_to_its_own_limit():
    trajectory, _ = roll_out(TURNS, NOTES)
    at_request = len(trajectory.prompt_ids) + trajectory.turns[1].start
    fits, _ = roll_out(TURNS, NOTES, max_model_length=at_request + 61)
    short, _ = roll_out(TURNS, NOTES, max_model_length=at_request + 60)
    assert fits.turns[1].is_summary and not short.turns[1].is_summary
    in_all, _ = roll_out(TURNS, NOTES, max_completion_length=trajectory.turns[1].start + 61)
    too_few, _ = roll_out(TURNS, NOTES, max_completion_length=trajectory.turns[1].start + 60)
    assert in_all.turns[1].is_summary and not too_few.turns[1].is_summary
    huge, _ = roll_out([call("echo", text="word " * 60), say()], NOTES, max_model_length=400)
    assert huge.stop_reason is StopReason.MAX_COMPLETION_LENGTH and len(huge.turns) == 1


class Mute:
    """Says nothing, and ends with the third turn."""

    def reset(self, example):
        self.count = 0
        return example["prompt"]

    def step(self, message):
        self.count += 1
        return [], 0.0, self.count == 3, {}


def test_a_summary_after_which_no_context_has_room_ends_the_trajectory():
    said = [say("a"), say("b"), say("c")], [say("word " * 200)] * 2
    options = {"env": Mute, "context.summary_prompt": "??", "asked": "??"}
    trajectory, _ = roll_out(*said, **options)
    assert trajectory.stop_reason is StopReason.DONE
    shortest = len(trajectory.prompt_ids) + trajectory.turns[1].start + 60 + 1
    trajectory, requests = roll_out(*said, **options, max_model_length=shortest)
    assert trajectory.stop_reason is StopReason.MAX_COMPLETION_LENGTH
    assert [turn.is_summary for turn in trajectory.turns] == [False, True] and trajectory.final_text == "a"
    assert trajectory.answered_messages == [trajectory.turns[0].message]
    check_rows(trajectory, requests)


REFUSED = {
    "no length": ({"context.summary_tokens": None}, "context.summary_tokens", {"context.summary_tokens": 256}),
    "no occasion": ({"context.turns": None}, "context.tokens", {"context.tokens": 3000}),
    "no words": ({"context.summary_prompt": "  "}, "summary_prompt", {"context.summary_prompt": None}),
    "no number": ({"context.summary_tokens": 0}, "context.summary_tokens", {"context.summary_tokens": 1}),
    "longer than a context": ({"context.tokens": 60}, "context.summary_tokens", {"context.tokens": 61}),
    "longer than all": ({"max_completion_length": 60}, "context.summary_tokens", {"max_completion_length": 61}),
    "length without summaries": (
        {"context.policy": "keep", "context.turns": None},
        "context.summary_tokens",
        EVERY_TURN,
    ),
    "words without summaries": (
        {"context.policy": "window", "context.summary_tokens": None, "context.summary_prompt": "?"},
        "context.summary_prompt",
        {"context.summary_prompt": None},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_work_are_refused_and_the_fix_works(case):
    options, name, fix = REFUSED[case]
    with pytest.raises(ValueError, match=name):
        limits_of(**{**EVERY_TURN, **options})
    limits_of(**{**EVERY_TURN, **options, **fix})


def test_a_request_that_no_full_context_could_hold_is_refused():
    limits = {**EVERY_TURN, "context.summary_prompt": "word " * 60, "max_model_length": 500, "context.tokens": 300}
    with pytest.raises(ValueError, match=r"context.tokens=300.*below (\d+)") as error:
        RolloutRunner(AddEchoEnv, Log(chat_of(), [], []), chat_of(), limits_of(**limits))
    below = int(str(error.value).partition("below ")[2].split()[0])
    runner = RolloutRunner(
        AddEchoEnv, Log(chat_of(), [], []), chat_of(), limits_of(**{**limits, "context.tokens": below - 1})
    )
    runner.close()


# -------------------------------------------------------------------- laws


@pytest.mark.parametrize("family", mostly_nightly(FAMILIES, "qwen3", "mistral_nemo", "gpt_oss"))
def test_every_family_is_given_what_its_template_renders(family):
    chat = ChatFormat(FAMILIES[family]())
    trajectory, requests = roll_out(TURNS, NOTES, chat=chat, max_completion_length=9000)
    check_rows(trajectory, requests)
    assert trajectory.stop_reason is StopReason.DONE and len(trajectory.rows) == 4
    tools = [tool.schema for tool in AddEchoEnv.tools]
    for turn, row in enumerate(trajectory.rows[1:]):
        summary = f"{PROMPT[0]['content']}\n\n{HEADING}{NOTES[turn]['content']}"
        base = chat.encode_prompt([{"role": "user", "content": summary}], tools)
        assert row.prompt_ids[: len(base)] == base
        last = trajectory.env_turns[turn]
        sampled = trajectory.completion_ids[last.start : last.end]
        answered, _ = chat.encode_observations(last.message, last.observations, tools)
        assert row.prompt_ids == [*base, *sampled, *chat.encode_turn_end(sampled, True), *answered]
        asked = text_of(requests[2 * turn + 1][0][-150:], chat)
        assert asked.count("Write it down, in 60 tokens.") == 1
        # What the tool said stands in the request as it does anywhere else.
        said, answer = last.observations[0]["content"], text_of(answered, chat)
        context = requests[2 * turn + 1][0]
        assert text_of(context, chat).count(answer.partition(said)[0] + said) == 1
        assert last.message["tool_calls"] and last.observations[0]["role"] == "tool"

"""A context of its own for every turn, which the environment may give: what is read, and what is recorded."""

import pytest

from agent_r1_trl.testing import AddEchoEnv, chat_of, say
from agent_r1_trl.trajectory import StopReason, Trajectory
from tests.rollout.helpers import PROMPT
from tests.rollout.test_contexts import ECHOES, roll_out, text_of

STEP = {"context.policy": "step"}


def giving(make):
    """An environment whose next context is what `make` makes of the number of turns."""

    class Giving(AddEchoEnv):
        num_turns = 0

        async def step(self, message):
            self.num_turns += 1
            observations, reward, done, info = await super().step(message)
            self.given = make(self.num_turns)
            return observations, reward, done, {**info, "next_context": self.given}

    return Giving


def board(turn):
    return [*PROMPT, {"role": "user", "content": f"the board after turn {turn} <|im_end|>"}]


def test_the_environment_gives_the_next_context_and_it_is_recorded():
    trajectory, log = roll_out([*ECHOES[:3], say("done")], env=giving(board), **STEP)
    assert trajectory.stop_reason is StopReason.DONE
    for turn, (context, _) in enumerate(log[1:], start=1):
        text = text_of(context)
        assert f"the board after turn {turn} " in text and "word" not in text, "nothing else of the past"
        assert context.count(chat_of().encoder.control_ids["<|im_end|>"]) == 3, "what a message spells stays text"
    assert [turn.next_context for turn in trajectory.turns] == [board(1), board(2), board(3), None]
    assert [row.prompt_ids for row in trajectory.rows] == [context for context, _ in log]
    again = Trajectory.from_json(trajectory.to_json())
    assert again.turns == trajectory.turns and again.rows == trajectory.rows


def test_a_given_context_that_goes_on_from_the_last_one_opens_a_row_all_the_same():
    """Its turn's own message is read as the ids that were sampled."""

    class Growing(AddEchoEnv):
        def reset(self, example):
            self.messages = super().reset(example)
            return list(self.messages)

        async def step(self, message):
            observations, reward, done, info = await super().step(message)
            self.messages += [message, *observations]
            return observations, reward, done, {**info, "next_context": self.messages}

    turns = [*ECHOES[:2], say("done")]
    trajectory, log = roll_out(turns, env=Growing, **STEP)
    assert log == roll_out(turns)[1]
    assert [len(row.prompt_ids) for row in trajectory.rows] == [len(context) for context, _ in log]
    assert len(trajectory.turns[0].next_context) < len(trajectory.turns[1].next_context), "a copy"


def test_only_a_policy_reads_what_the_environment_gives():
    turns = [*ECHOES[:2], say("done")]
    trajectory, log = roll_out(turns, env=giving(board))
    assert log == roll_out(turns)[1] and {turn.next_context for turn in trajectory.turns} == {None}
    path = f"{__name__}.given_once"
    trajectory, log = roll_out(turns, env=giving(board), context={"policy": path})
    assert "the board after turn 1 " in text_of(log[1][0]) and len(trajectory.rows) == 3


def given_once(view):
    return view.turns[0].next_context


@pytest.mark.parametrize("given", ["a text", [], [{"content": "no role"}], [None], 7, {"role": "user"}], ids=repr)
def test_what_is_no_context_is_an_error_of_the_environment(given):
    trajectory, _ = roll_out(
        [*ECHOES[:2], say("done")], env=giving(lambda turn: board(1) if turn == 1 else given), **STEP
    )
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR and len(trajectory.turns) == 2
    assert "next_context" in trajectory.error and repr(given)[:20] in trajectory.error

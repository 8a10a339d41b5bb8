"""One trajectory: what is appended, what is masked, and every way it can end."""

import re

from agent_r1_trl.generation.base import RequestTooLongError
from agent_r1_trl.rollout import RolloutRequest, RolloutRunner
from agent_r1_trl.testing import AddEchoEnv, ScriptedPolicy, call, chat_of, say
from agent_r1_trl.trajectory import Author, StopReason, ToolErrorKind
from tests.rollout.helpers import PROMPT, roll_out, sampled_ids
from tests.toys import limits_of


def test_a_call_and_an_answer_are_appended_token_by_token():
    chat = chat_of()
    trajectory, script = roll_out([call(), say("5")], chat=chat)
    first, second = script.turn_ids
    observation = {"role": "tool", "name": "add", "content": "5"}
    delta, _ = chat.encode_observations(call(), [observation], [AddEchoEnv.tools[0].schema])
    assert trajectory.completion_ids == first + delta + second
    assert trajectory.action_mask == [1] * len(first) + [0] * len(delta) + [1] * len(second)
    assert trajectory.turn_ids == [0] * len(first) + [-1] * len(delta) + [1] * len(second)
    assert trajectory.stop_reason is StopReason.DONE
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.0]
    assert trajectory.total_reward == 0.5 - 1.0
    rewards = trajectory.token_rewards()
    assert rewards[len(first) - 1] == 0.5
    assert rewards[-1] == -1.0
    assert sum(map(abs, rewards)) == 1.5


# -------------------------------------------------------------------- limits


def test_a_turn_cut_by_its_own_limit_is_closed_and_the_model_is_told():
    chat = chat_of()
    long_call = call("echo", text="x" * 60)
    trajectory, script = roll_out([long_call, say("ok")], chat=chat, limits={"max_tokens_per_turn": 12})
    first = trajectory.turns[0]
    assert first.is_truncated
    assert first.is_invalid
    assert trajectory.tool_results[0].error is ToolErrorKind.MALFORMED
    closing = trajectory.completion_ids[first.end]
    assert closing in chat.stop_token_ids
    assert trajectory.authors[first.end] is Author.TEMPLATE
    assert trajectory.action_mask[first.end] == 0
    assert "cut off after 12 tokens" in first.observations[0]["content"]
    assert trajectory.stop_reason is StopReason.DONE
    assert sampled_ids(trajectory) == script.turn_ids[0][:12] + script.turn_ids[1]


def test_text_cut_by_the_turn_limit_is_no_malformed_call():
    trajectory, _ = roll_out([say("thinking aloud " * 20), say("ok")], limits={"max_tokens_per_turn": 12})
    first = trajectory.turns[0]
    assert first.is_truncated
    assert "malformed_tool_call" not in first.message
    assert "cut off after 12 tokens" in first.message["cut_off"]
    assert trajectory.tool_results == []
    assert first.reward == 0.0
    assert first.observations[0]["role"] == "user"
    assert "cut off after 12 tokens" in first.observations[0]["content"]
    assert "tool call could not be read" not in first.observations[0]["content"]
    assert trajectory.stop_reason is StopReason.DONE
    assert len(trajectory.turns) == 2


def test_a_usable_call_resets_the_count_of_unusable_ones():
    bad = call("nope", x=1)
    trajectory, _ = roll_out([bad, bad, call(), bad, bad, say()], limits={"max_invalid_calls": 2})
    assert trajectory.stop_reason is StopReason.DONE
    assert len(trajectory.turns) == 6


# -------------------------------------------------------------------- environments


def test_a_request_of_the_environment_that_is_too_long_is_not_the_policys():
    class SimulatedUser(AddEchoEnv):
        async def step(self, message):
            raise RequestTooLongError("maximum context length is 512 tokens")

    trajectory, _ = roll_out([say("a")] * 3, env=SimulatedUser)
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR and "512 tokens" in trajectory.error


def test_a_bug_in_the_outcome_reward_ends_its_trajectory_alone_where_that_is_asked():
    is_closed = []

    class Buggy(AddEchoEnv):
        def outcome_reward(self, trajectory):
            raise RuntimeError("outcome is broken")

        def close(self):
            is_closed.append(True)

    policy = ScriptedPolicy([say("a")])
    runner = RolloutRunner(Buggy, policy, policy.chat, limits_of(max_turns=1), keep_going=True)
    (trajectory,) = runner.run([RolloutRequest(example={"prompt": PROMPT})])
    runner.close()
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR and trajectory.outcome_reward == 0.0
    assert re.search(r"outcome_reward raised RuntimeError: outcome is broken \(.*\.py, line \d+\)", trajectory.error)
    assert is_closed == [True] and trajectory.completion_ids

"""One trajectory: what is appended, what is masked, and every way it can end."""

import math
import re

import pytest

from agent_r1_trl.environments import RewardError, ToolEnv
from agent_r1_trl.generation.base import RequestTooLongError
from agent_r1_trl.rollout import RolloutRequest, RolloutRunner
from agent_r1_trl.testing import AddEchoEnv, ScriptedPolicy, call, calls, chat_of, say
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


def test_the_conversation_is_what_the_template_would_render():
    chat = chat_of()
    trajectory, _ = roll_out([call(), say("5")], chat=chat)
    tools = [item.schema for item in AddEchoEnv.tools]
    text = chat.tokenizer.decode(trajectory.prompt_ids + trajectory.completion_ids)
    rendered = chat.tokenizer.apply_chat_template(
        trajectory.messages, tools=tools, tokenize=False, chat_template=chat.chat_template
    )
    assert rendered.rstrip("\n") == text


def test_several_calls_in_a_turn_are_answered_in_their_order():
    trajectory, _ = roll_out(
        [calls(("add", {"a": 1, "b": 1}), ("echo", {"text": "x"}), ("add", {"a": 2, "b": 2})), say()]
    )
    assert [message["content"] for message in trajectory.turns[0].observations] == ["2", "x", "4"]
    assert [result.content for result in trajectory.tool_results] == ["2", "x", "4"]
    assert trajectory.turns[0].reward == 1.0, "three calls of 0.5, capped at 1"


# -------------------------------------------------------------------- limits


def test_the_turn_limit_still_runs_and_rewards_the_last_calls():
    trajectory, _ = roll_out([call()] * 9, limits={"max_turns": 2})
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert len(trajectory.turns) == 2
    assert [result.content for result in trajectory.tool_results] == ["5", "5"]
    assert trajectory.authors[-1] is not Author.POLICY, "it ends in an observation"
    rewards = trajectory.token_rewards()
    assert rewards[-1] == 0.0
    assert math.isclose(sum(rewards), trajectory.total_reward)


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


class Recorder(ToolEnv):
    """Counts the calls of its methods; fails where told."""

    log: list = []  # noqa: RUF012 - shared on purpose: one list for all instances of a test
    fail_in = ""
    stays_open = True

    def reset(self, example):
        self.note("reset")
        return list(PROMPT)

    async def step(self, message):
        self.note("step")
        return [{"role": "user", "content": "go on"}], 0.25, False, {}

    def outcome_reward(self, trajectory):
        self.note("outcome")
        return 1.0

    def close(self):
        self.note("close")

    def note(self, name):
        self.log.append(name)
        if self.fail_in == name:
            raise RuntimeError(f"{name} is broken")


def recorder(fail_in=""):
    return type("Recorded", (Recorder,), {"log": [], "fail_in": fail_in})


def test_a_plain_tuple_will_do_and_close_is_called_once():
    env = recorder()
    trajectory, _ = roll_out([say("a")] * 3, env=env, limits={"max_turns": 2})
    assert env.log == ["reset", "step", "step", "outcome", "close"]
    assert trajectory.process_reward == 0.5
    assert trajectory.outcome_reward == 1.0


def test_a_bug_in_the_outcome_reward_is_named_with_its_line_and_example_after_closing():
    env = recorder("outcome")
    with pytest.raises(
        RewardError,
        match=r"outcome_reward raised RuntimeError: outcome is broken \(.*\.py, line \d+\)\. Correct the method\. "
        r"It was in example .*, generation 0\.$",
    ):
        roll_out([say("a")] * 3, env=env, limits={"max_turns": 1})
    assert env.log[-1] == "close"


def test_a_request_of_the_environment_that_is_too_long_is_not_the_policys():
    class SimulatedUser(AddEchoEnv):
        async def step(self, message):
            raise RequestTooLongError("maximum context length is 512 tokens")

    trajectory, _ = roll_out([say("a")] * 3, env=SimulatedUser)
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR and "512 tokens" in trajectory.error


def test_a_bug_in_the_outcome_reward_ends_its_trajectory_alone_where_that_is_asked():
    env = recorder("outcome")
    policy = ScriptedPolicy([say("a")])
    runner = RolloutRunner(env, policy, policy.chat, limits_of(max_turns=1), keep_going=True)
    (trajectory,) = runner.run([RolloutRequest(example={"prompt": PROMPT})])
    runner.close()
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR and trajectory.outcome_reward == 0.0
    assert re.search(r"outcome_reward raised RuntimeError: outcome is broken \(.*\.py, line \d+\)", trajectory.error)
    assert env.log[-1] == "close" and trajectory.completion_ids

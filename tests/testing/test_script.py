"""The scripted policy, and rollouts of it, as users' tests call them."""

import functools

import pytest

from agent_r1_trl import StopReason, ToolEnv, ToolErrorKind, tool
from agent_r1_trl.features.doors import AgentEnv
from agent_r1_trl.generation import Generation
from agent_r1_trl.testing import AddEchoEnv, AddEnv, ScriptedPolicy, ScriptedTurn, call, calls, chat_of, roll_out, say
from tests.features.doors.agents import loop_agent
from tests.rollout.helpers import PROMPT, sampled_ids


def test_a_message_a_text_and_ids_are_sampled_as_they_are():
    chat = chat_of("qwen2_5")
    answer = chat.encode_reply(say("Five"))
    turns = [call("add", a=2, b=3), '<tool_call>\n{"name": "echo", "arguments": {"text": "x"}}\n</tool_call>', answer]
    policy = ScriptedPolicy(turns, chat)
    (trajectory,) = roll_out(AddEchoEnv, policy)
    assert sampled_ids(trajectory) == [token for turn in policy.turn_ids for token in turn]
    assert policy.turn_ids[0] == chat.encode_reply(turns[0]) and policy.turn_ids[2] == answer
    assert [result.content for result in trajectory.tool_results] == ["5", "x"]
    assert trajectory.final_text == "Five" and trajectory.stop_reason is StopReason.DONE


def test_a_policy_is_read_in_the_format_that_it_writes():
    (trajectory,) = roll_out(AddEnv, ScriptedPolicy([call("add", a=2, b=3), say("Five")], chat_of("llama3")))
    assert [result.content for result in trajectory.tool_results] == ["5"]
    assert chat_of("llama3").encoder.to_text(trajectory.prompt_ids).startswith("<|begin_of_text|>")


def test_an_exception_is_raised_by_the_sampler_and_log_probs_are_those_of_the_turn():
    ids = chat_of().encode_reply(say("odd"))
    turn = ScriptedTurn(token_ids=ids, logprobs=[-0.5] * len(ids))
    scored, failed = roll_out(
        AddEnv, lambda request: RuntimeError("down") if request.trajectory_seed else turn, [{"prompt": "Go."}] * 2
    )
    assert scored.logprobs == [-0.5] * len(ids) and scored.outcome_reward == -1.0
    assert failed.stop_reason is StopReason.GENERATION_ERROR and "down" in failed.error


def test_a_script_that_is_too_short_is_refused_with_what_the_environment_said_last():
    with pytest.raises(ValueError, match=r"ends after 1 turn\(s\), and the environment goes on with '5'.*max_turns=1"):
        roll_out(AddEnv, [call("add", a=2, b=3)])
    (trajectory,) = roll_out(AddEnv, [call("add", a=2, b=3)], max_turns=1)
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    with pytest.raises(ValueError, match="ends after 0 turn"):
        roll_out(AddEnv, [])


def test_turns_are_counted_for_each_trajectory_also_where_contexts_are_rewritten():
    turns = [call("echo", text=f"word {number}") for number in range(4)]
    found = roll_out(
        AddEchoEnv, [*turns, say("even")], [{"prompt": "Go."}] * 3, context={"policy": "window", "turns": 1}
    )
    for trajectory in found:
        assert [result.content for result in trajectory.tool_results] == [f"word {number}" for number in range(4)]
        assert len(trajectory.rows) > 1 and trajectory.final_text == "even"


def test_an_agent_says_the_turns_of_its_script_in_each_trajectory():
    env = functools.partial(AgentEnv, loop_agent)
    for trajectory in roll_out(env, [call("add", a=2, b=3), say("even")], [{"prompt": PROMPT}] * 3, context="agent"):
        assert trajectory.error is None and trajectory.final_text == "even"
        assert [len(turn.tool_results) for turn in trajectory.turns] == [1, 0]


def test_an_empty_turn_is_followed_by_the_next_one():
    (trajectory,) = roll_out(AddEnv, [[], say("even")], max_tokens_per_turn=50)
    assert trajectory.turns[0].end == 0 and trajectory.final_text == "even"


def test_a_trajectory_that_is_tried_again_says_its_turns_from_the_first():
    class Fails(AddEnv):
        made = 0

        def reset(self, example):
            Fails.made += 1
            return super().reset(example)

        async def step(self, message):
            if Fails.made == 1 and not message.get("tool_calls"):
                raise OSError("down")
            return await super().step(message)

    (trajectory,) = roll_out(Fails, [call("add", a=2, b=3), say("even")], retry_failed=1)
    assert Fails.made == 2 and len(trajectory.failed_tries) == 1 and trajectory.stop_reason is StopReason.DONE
    assert [result.content for result in trajectory.tool_results] == ["5"]


def test_rows_limits_and_seeds_reach_the_environment():
    seeds, ended = [], []

    class Seeded(AddEnv):
        def seed(self, *, reset_seed, dynamics_seed):
            seeds.append(reset_seed)

        def outcome_reward(self, trajectory):
            return self.example["weight"]

    rows = [{"id": "a", "prompt": "Go.", "weight": 0.25}, {"prompt": "Go.", "weight": 0.75}]
    found = roll_out(Seeded, [say("x" * 99)], rows, reset_seed=7, max_tokens_per_turn=3, max_turns=1,
                     on_trajectory=ended.append)  # fmt: skip
    assert [(item.example_id, item.seed, item.outcome_reward) for item in found] == [("a", 0, 0.25), ("1", 1, 0.75)]
    assert [item.num_action_tokens for item in found] == [3, 3] and {*seeds} == {7}
    assert len(ended) == 2


def test_a_message_that_the_template_cannot_write_is_refused_by_name():
    with pytest.raises(ValueError, match=r"(?s)turns: the chat template cannot write .*'add'.*single tool-calls"):
        roll_out(AddEnv, [calls(("add", {}), ("add", {})), say()], chat=chat_of("llama3"))


def test_any_object_with_generate_is_a_generator():
    class Parrot:
        async def generate(self, request):
            ids = chat_of().encode_reply(say("even"))
            return Generation(token_ids=ids, logprobs=[0.0] * len(ids), stop="stop")

    (trajectory,) = roll_out(AddEnv, Parrot())
    assert trajectory.final_text == "even" and trajectory.logprobs == [0.0] * len(trajectory.completion_ids)


@pytest.mark.parametrize("turn", [say(), "7.5"])
def test_one_turn_or_one_row_is_no_list(turn):
    with pytest.raises(ValueError, match=r"turns=.* is one turn\. Pass a list"):
        roll_out(AddEnv, turn)
    with pytest.raises(ValueError, match=r"examples=.* is one row\. Pass a list"):
        roll_out(AddEnv, [turn], {"prompt": "Go."})


@pytest.mark.parametrize(("env", "said"), [(AddEnv(), "instance"), (None, "env=None"), (str, "reset and step")])
def test_what_makes_no_environments_is_refused(env, said):
    with pytest.raises(ValueError, match=said):
        roll_out(env, [say()])


def test_a_call_has_the_arguments_that_are_given_and_no_others():
    @tool
    def now() -> str:
        """The time."""
        return "noon"

    class Clock(ToolEnv):
        tools = (now,)

    (trajectory,) = roll_out(Clock, [calls(("now", {}), ("now", [1])), call("now"), say()])
    assert [result.error for result in trajectory.tool_results] == [None, ToolErrorKind.INVALID_ARGUMENTS, None]

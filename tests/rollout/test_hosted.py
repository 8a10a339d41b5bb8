"""Rollouts of a hosted model: the same game as with token ids, limits by the server's counts, the journal.

Covered: one trajectory and many. Not covered: requests (tests/generation/test_endpoint.py), the command line
(tests/cli/test_eval_endpoint.py).
"""

import threading
import time

import pytest

from agent_r1_trl.evaluation import evaluate
from agent_r1_trl.evaluation.evaluator import replay_evaluation
from agent_r1_trl.evaluation.result import token_counts
from agent_r1_trl.generation import SamplingParams, endpoint
from agent_r1_trl.generation.endpoint import Endpoint, EndpointUnusableError
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest
from agent_r1_trl.rollout.hosted import HostedRunner
from agent_r1_trl.testing import AddEchoEnv, calls, say
from agent_r1_trl.tools.event_loop import shared_loop
from agent_r1_trl.trajectory import StopReason, ToolErrorKind, Trajectory
from tests.hosted import MESSAGE_TOKENS, PROMPT_TOKENS, SAMPLED_TOKENS, called, error, hosted, said, whole
from tests.rollout.helpers import PROMPT, roll_out, scene
from tests.toys import limits_of

ADD = ("add", {"a": 2, "b": 3})


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr(endpoint, "MAX_RETRIES", 3)


def roll_out_hosted(turns, *, env=AddEchoEnv, limits=None, params=None, examples=1, faults=(), **options):
    """The trajectories (or the only one), and the bodies of the requests."""
    with hosted(turns, faults) as (url, seen, _):
        runner = HostedRunner(env, Endpoint(url, "gpt"), limits_of(**(limits or {})), params, **options)
        asked = [RolloutRequest(example={"prompt": PROMPT}, example_id=str(i), seed=i) for i in range(examples)]
        trajectories = runner.run(asked)
        runner.close()
    return (trajectories[0] if examples == 1 else trajectories), seen.bodies


def without_ids(messages):
    """Messages without what only one of the two kinds of rollout knows."""
    cleaned = []
    for message in messages:
        message = {name: value for name, value in message.items() if name != "tool_call_id"}
        if "tool_calls" in message:
            message["tool_calls"] = [call["function"] for call in message["tool_calls"]]
        cleaned.append(message)
    return cleaned


@pytest.mark.parametrize(
    "turns",
    [
        [[ADD], "5"],
        [[ADD, ("echo", {"text": "é 日本"})], [("echo", {"text": "x" * 9})], "done"],
        [[("nope", {"x": 1})], [("add", {"a": "two"})], "sorry"],
        [[("nope", {})]] * 3,
        [[ADD]] * 9,
        ["four"],
    ],
    ids=["call", "several", "mistakes", "only mistakes", "no end", "answer"],
)
def test_the_same_words_are_the_same_trajectory_as_with_token_ids(turns):
    limits = {"max_turns": 4, "max_completion_length": 4000}
    expected, _ = roll_out([say(turn) if isinstance(turn, str) else calls(*turn) for turn in turns], limits=limits)
    trajectory, bodies = roll_out_hosted(
        [said(turn) if isinstance(turn, str) else called(*turn) for turn in turns], limits=limits
    )
    assert without_ids(trajectory.messages) == without_ids(expected.messages)
    assert trajectory.stop_reason is expected.stop_reason
    assert [turn.reward for turn in trajectory.turns] == [turn.reward for turn in expected.turns]
    assert [result.error for result in trajectory.tool_results] == [result.error for result in expected.tool_results]
    assert trajectory.total_reward == expected.total_reward
    assert len(bodies) == len(trajectory.turns)
    assert trajectory.is_hosted and trajectory.completion_ids == [] and not expected.is_hosted
    assert Trajectory.from_json(trajectory.to_json()) == trajectory


def test_the_request_holds_the_conversation_the_tools_and_what_may_be_sampled():
    params = SamplingParams(temperature=0.5, top_p=0.9)
    limits = {"max_completion_length": 60, "max_tokens_per_turn": 25}
    _, (first, second) = roll_out_hosted([called(ADD), said("5")], limits=limits, params=params)
    assert first["messages"] == PROMPT and (first["temperature"], first["top_p"]) == (0.5, 0.9)
    assert [item["function"]["name"] for item in first["tools"]] == ["add", "echo"]
    assert set(first["tools"][0]["function"]) == {"name", "description", "parameters"}
    assert first["max_tokens"] == 25 and second["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": called(ADD)["tool_calls"]},
        {"role": "tool", "tool_call_id": "id0", "content": "5"},
    ]
    assert 0 <= first["seed"] < 2**31 and first["seed"] != second["seed"]
    _, (greedy,) = roll_out_hosted([said("5")], env=scene(ends_at=0))
    assert (greedy["temperature"], set(greedy) & {"seed", "top_p"}) == (1.0, {"seed", "top_p"})
    _, (greedy,) = roll_out_hosted([said("5")], params=SamplingParams(temperature=0.0))
    assert greedy["temperature"] == 0.0 and not set(greedy) & {"seed", "top_p"}


def test_tokens_are_those_that_the_server_counts():
    trajectory, _ = roll_out_hosted([called(ADD), said("5")])
    read = [PROMPT_TOKENS, PROMPT_TOKENS + 2 * MESSAGE_TOKENS]
    assert token_counts(trajectory) == {
        "completion_tokens": read[1] - read[0] + SAMPLED_TOKENS,
        "input_tokens": sum(read),
        "sampled_tokens": 2 * SAMPLED_TOKENS,
    }
    uncounted, _ = roll_out_hosted([lambda body: whole(said("5"), usage=False)])
    assert token_counts(uncounted) == {}


@pytest.mark.parametrize(
    ("turns", "limits", "reason", "num_turns"),
    [
        ([called(ADD)], {"max_turns": 2}, StopReason.MAX_TURNS, 2),
        ([called(ADD)], {"max_completion_length": 40, "max_turns": 20}, StopReason.MAX_COMPLETION_LENGTH, 3),
        ([lambda body: whole(called(ADD), usage=False)], {"max_completion_length": 40, "max_turns": 20},
         StopReason.MAX_COMPLETION_LENGTH, 4),
        ([called(("nope", {}))], {"max_invalid_calls": 1}, StopReason.INVALID_CALLS, 2),
        ([lambda body: whole(said("we"), finish="length")], {"max_completion_length": 7},
         StopReason.MAX_COMPLETION_LENGTH, 1),
    ],
)  # fmt: skip
def test_limits_end_a_trajectory(turns, limits, reason, num_turns):
    trajectory, _ = roll_out_hosted(turns, limits=limits)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (reason, num_turns)


def test_a_turn_that_was_cut_is_neither_call_nor_answer_and_the_model_is_told():
    turns = [
        lambda body: whole(called(ADD), finish="length"),
        lambda body: whole(said("w"), finish="length"),
        said("5"),
    ]
    trajectory, bodies = roll_out_hosted(turns, limits={"max_tokens_per_turn": 7})
    assert [turn.is_truncated for turn in trajectory.turns] == [True, True, False]
    assert [result.error for result in trajectory.tool_results] == [ToolErrorKind.MALFORMED]
    assert "cut off after 7 tokens" in bodies[1]["messages"][-1]["content"]
    assert "cut off after 7 tokens" in bodies[2]["messages"][-1]["content"]


LONG = error(400, "maximum context length is 8192 tokens", code="context_length_exceeded")


def test_a_full_context_ends_a_trajectory_and_what_was_said_counts():
    first, _ = roll_out_hosted([lambda body: LONG])
    assert first.stop_reason is StopReason.PROMPT_TOO_LONG and "8192" in first.error
    later, _ = roll_out_hosted([called(ADD), lambda body: LONG])
    assert later.stop_reason is StopReason.MAX_COMPLETION_LENGTH and later.error is None
    assert later.total_reward == 1.5  # the call, and an answer of 0 characters


def test_a_server_that_fails_ends_one_trajectory_and_is_named():
    faults = [error(400, "flagged by a filter")]
    trajectories, _ = roll_out_hosted([said("5")], examples=3, faults=faults, limits={"max_concurrency": 1})
    assert [item.stop_reason.value for item in trajectories] == ["generation_error", "done", "done"]
    assert "HTTP 400: flagged by a filter" in trajectories[0].error
    first, _ = roll_out_hosted([said("5")], faults=[error(500)] * 4, retry_failed=1)
    assert first.stop_reason is StopReason.DONE and len(first.failed_tries) == 1


def test_half_a_surrogate_pair_is_neither_sent_nor_recorded_whoever_wrote_it():
    half = "\ud83d"

    class Halves(AddEchoEnv):
        async def step(self, message):
            result = await super().step(message)
            return result._replace(observations=[{**item, "content": half} for item in result.observations])

    turns = [called(("echo", '{"text": "\\ud83d"}')), said(half)]
    trajectory, bodies = roll_out_hosted(turns, env=Halves)
    assert trajectory.stop_reason is StopReason.DONE and trajectory.final_text == "?"
    assert trajectory.turns[0].message["tool_calls"][0]["function"]["arguments"] == {"text": "?"}
    assert bodies[1]["messages"][-1]["content"] == "?"


@pytest.mark.parametrize("num_more", [0, 1])
def test_after_an_event_loop_that_was_given_up_the_next_one_has_connections_of_its_own(num_more):
    released = threading.Event()

    class Holds(AddEchoEnv):
        async def step(self, message):
            if not released.is_set():
                time.sleep(1.0)
                released.set()
            return await super().step(message)

    asked = [RolloutRequest(example={"prompt": PROMPT})]
    with hosted([said("55")]) as (url, _, _):
        runner = HostedRunner(Holds, Endpoint(url, "gpt"), limits_of(stall_timeout=0.3))
        lost = shared_loop()
        (trajectory,) = runner.run(asked)
        assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR and "held the event loop" in trajectory.error
        lost.join(10)
        for _ in range(num_more):
            (trajectory,) = runner.run(asked)
            assert trajectory.stop_reason is StopReason.DONE
        runner.close()


def test_an_answer_in_another_form_ends_one_trajectory():
    trajectories, _ = roll_out_hosted([said("5")], examples=2, faults=[(200, {"choices": [{"text": "5"}]})])
    assert sorted(item.stop_reason.value for item in trajectories) == ["done", "generation_error"]


@pytest.mark.parametrize(
    "limits", [{"context.policy": "window", "context.turns": 2}, {"context.policy": "strip_thinking"}]
)
def test_what_needs_token_ids_is_refused(limits):
    with pytest.raises(ValueError, match=r"context.policy=.*Set context='keep'"):
        HostedRunner(AddEchoEnv, Endpoint("http://a", "gpt"), limits_of(**limits))
    with pytest.raises(ValueError, match=r"top_k=5: .*endpoint_options=\{top_k: 5\}"):
        HostedRunner(AddEchoEnv, Endpoint("http://a", "gpt"), params=SamplingParams(top_k=5))


ROWS = [{"id": f"q{i}", "prompt": f"What is {i} + {i}?"} for i in range(4)]


def test_an_evaluation_that_was_stopped_asks_for_nothing_twice(tmp_path):
    """The credit runs out in the middle; the second start pays for what is missing, and no more."""
    turns, journal = [called(ADD), said("5")], tmp_path / "eval.journal"
    options = {"limits": RolloutLimits(max_concurrency=1), "journal": journal, "identity": {"endpoint": "here"}}
    with hosted(turns) as (url, seen, _):
        whole_result = evaluate(Endpoint(url, "gpt"), AddEchoEnv, None, ROWS)
        bodies = [str(body) for body in seen.bodies]
        seen.bodies.clear()
        answer = seen.respond
        seen.respond = lambda body, number: error(402) if number > 5 else answer(body, number)
        with pytest.raises(EndpointUnusableError):
            evaluate(Endpoint(url, "gpt"), AddEchoEnv, None, ROWS, **options)
        paid = [str(body) for body in seen.bodies[:5]]
        seen.respond = answer
        seen.bodies.clear()
        options["limits"] = RolloutLimits(max_concurrency=2)  # which may differ
        result = evaluate(Endpoint(url, "gpt"), AddEchoEnv, None, ROWS, **options, resume=True)
        asked = [str(body) for body in seen.bodies]
    assert sorted([*paid, *asked]) == sorted(bodies) and len(asked) == 3
    assert result.rows == whole_result.rows
    of_recipe = RolloutLimits(context={"policy": "window", "turns": 1})  # which no hosted model sees
    assert replay_evaluation(journal, ROWS, limits=of_recipe).rows == result.rows
    with pytest.raises(ValueError, match="max_turns=8 was recorded, and the run has max_turns=3"):
        replay_evaluation(journal, ROWS, limits=RolloutLimits(max_turns=3))

"""A trajectory as OpenEnv's `TrainingTrace`: every call after what it was sampled after."""

import json

import pytest

from agent_r1_trl.features.doors import training_trace
from agent_r1_trl.testing import call, say
from agent_r1_trl.trajectory import USAGE
from tests.features.doors.agents import checked, loop_agent

FIELDS = {
    "node_id", "prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask", "response", "metadata",
}  # fmt: skip


async def forgetful(door, example):
    return await loop_agent(door, example, change=lambda messages: messages[:1] + messages[-2:])


@pytest.mark.parametrize("agent", [loop_agent, forgetful])
def test_every_call_stands_after_what_the_sampler_was_given(agent):
    trajectory, recorder = checked(agent, [call(), call(a=4, b=5), call(a=1, b=1), say("five")])
    trace = training_trace(trajectory)
    assert trace["schema_version"] == 1 and len(trajectory.rows) == (1 if agent is loop_agent else 3)
    assert [(each["prompt_token_ids"], each["completion_token_ids"]) for each in trace["turns"]] == recorder.log
    for each in trace["turns"]:
        num_sampled = len(each["completion_token_ids"])
        assert set(each) == FIELDS and len(each["per_token_logps"]) == num_sampled
        assert each["loss_mask"] == [0] * len(each["prompt_token_ids"]) + [1] * num_sampled
    assert len({each["node_id"] for each in trace["turns"]}) == 4 and json.dumps(trace)
    finishes = [each["response"]["choices"][0]["finish_reason"] for each in trace["turns"]]
    assert finishes == ["tool_calls"] * 3 + ["stop"]


def test_a_hosted_models_trajectory_is_refused():
    trajectory, _ = checked(loop_agent, [say("five")])
    trajectory.info[USAGE] = {}
    with pytest.raises(ValueError, match="no token ids"):
        training_trace(trajectory)

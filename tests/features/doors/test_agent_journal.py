"""A killed rollout of agents asks again only for what is not on disk, however many calls are made at a time."""

import asyncio
import functools

import pytest

from agent_r1_trl.features.doors import AgentEnv
from agent_r1_trl.features.journal.reader import read_rollout
from agent_r1_trl.features.journal.records import pack, read_file
from agent_r1_trl.rollout import RolloutLimits
from agent_r1_trl.testing import call, say
from tests.features.doors.agents import ask, loop_agent
from tests.features.journal.helpers import roll_out
from tests.features.journal.test_journal import cut_points

LIMITS = RolloutLimits(max_turns=8, max_completion_length=900, context="agent")


async def team(door, example):
    """Plans, asks three others at once, and sums up."""
    plan = await ask(door, example["prompt"])
    parts = [ask(door, [{"role": "user", "content": f"Part {i} of {plan['content']}"}]) for i in range(3)]
    said = [(await part)["content"] for part in [asyncio.ensure_future(part) for part in parts]]
    final = await ask(door, [*example["prompt"], plan, {"role": "user", "content": " ".join(said)}])
    return float(len(final["content"]))


def calling(rng):
    return call(a=rng.randint(1, 9), b=2) if rng.random() < 0.6 else say("x" * rng.randint(1, 9))


AGENTS = {"loop": (loop_agent, calling), "team": (team, lambda rng: say("x" * rng.randint(1, 9)))}


def told(trajectories):
    """Rows in no order: parallel calls have none."""
    rows = [sorted((row.prompt_ids, row.completion_ids, row.logprobs) for row in item.rows) for item in trajectories]
    return rows, [(item.outcome_reward, item.stop_reason, item.info) for item in trajectories]


@pytest.mark.parametrize("name", AGENTS)
def test_a_rollout_that_was_cut_at_any_record_goes_on_and_samples_what_is_missing(tmp_path, name):
    agent, policy = AGENTS[name]
    rolled_out = functools.partial(AgentEnv, agent), policy, LIMITS
    expected, whole = roll_out(None, *rolled_out)
    path = tmp_path / "file"
    roll_out(path, *rolled_out)
    data, ends = path.read_bytes(), cut_points(path)
    for end in [0, *ends[:: 1 if name == "team" else 3]]:
        path.write_bytes(data[:end])
        num_recorded = sum(record["kind"] == "turn" for record in read_file(path)[0])
        for num_missing in (sum(whole.sampled.values()) - num_recorded, 0):
            trajectories, talker = roll_out(path, *rolled_out)
            assert told(trajectories) == told(expected) and sum(talker.sampled.values()) == num_missing
        assert read_rollout(path).is_complete


def test_a_second_kill_finds_the_turns_of_both_runs(tmp_path):
    rolled_out = functools.partial(AgentEnv, team), AGENTS["team"][1], LIMITS
    path = tmp_path / "file"
    expected, whole = roll_out(path, *rolled_out)
    first_turns = [end for end in cut_points(path) if end < path.stat().st_size // 2]
    path.write_bytes(path.read_bytes()[: first_turns[-1]])
    roll_out(path, *rolled_out)
    records = [record for record in read_file(path)[0] if record["kind"] != "end"]
    assert sum(record["kind"] == "turn" for record in records) == sum(whole.sampled.values())
    path.write_bytes(b"".join(map(pack, records)))
    trajectories, talker = roll_out(path, *rolled_out)
    assert told(trajectories) == told(expected) and not talker.sampled

"""Environments of verifiers, aviary and gem, as the page shows them (`make doors`)."""

import functools
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest

from agent_r1_trl.features.doors import VerifiersEnv, verifiers_rows
from agent_r1_trl.generation.scripted import ScriptedGenerator
from agent_r1_trl.rollout import RolloutRequest, RolloutRunner
from agent_r1_trl.testing import calls, chat_of, say
from agent_r1_trl.trajectory import StopReason
from tests.toys import limits_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "doors.md"
SHOP = {"taskset": {"id": "shop_v1"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
ROLE = SHOP["agent"]
DUEL = """
import verifiers.v1 as vf


class Duel(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        yield vf.Task(vf.TaskData(prompt="Say a number."))


class DuelConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class DuelEnv(vf.Env[DuelConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        for agent in (agents.first, agents.second, agents.judge):
            await agent.run(task)

    async def finalize(self, task, episode):
        said = {trace.agent.name: int(trace.last_reply) for trace in episode.traces}
        for trace in episode.traces:
            if trace.agent.name != "judge":
                trace.record_reward("won", float(said[trace.agent.name] > said["judge"]))


__all__ = ["Duel", "DuelEnv"]
"""

pytestmark = pytest.mark.slow


def code(section, begins):
    """A block of code of a section of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2]
    block = re.search(rf"\n((?:    )?{re.escape(begins)}.*?)\n(?=\S)", text, re.DOTALL)[1]
    return textwrap.dedent(block if block.startswith("    ") else f"    {block}")


@pytest.fixture
def tasksets(tmp_path, monkeypatch):
    """Modules of tasksets on the path, for this process and for the servers of tools."""
    pytest.importorskip("verifiers.v1", reason="needs verifiers, see make doors")
    from uv import find_uv_bin  # which starts the harness

    monkeypatch.setenv("PATH", str(Path(find_uv_bin()).parent), prepend=os.pathsep)
    (tmp_path / "shop_v1.py").write_text(code("Environments of verifiers", "    import verifiers.v1 as vf"))
    (tmp_path / "duel_v1.py").write_text(DUEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    yield
    for name in ("shop_v1", "duel_v1"):
        sys.modules.pop(name, None)


def roll_out(env, turns, examples, **limits):
    """Trajectories of these examples, whose policy says these turns."""
    chat = chat_of("qwen2_5")
    said = [chat.encode_reply(turn) for turn in turns]
    generator = ScriptedGenerator(lambda request: said[request.index], stop_token_ids=chat.stop_token_ids)
    settings = {"rollout_timeout": 300, "reset_timeout": 300} | limits
    runner = RolloutRunner(env, generator, chat, limits_of(**settings))
    found = runner.run([RolloutRequest(example=example, example_id=str(i)) for i, example in enumerate(examples)])
    runner.close()
    return found


def test_the_rubric_scores_part_by_part_and_its_tools_are_called(tasksets):
    rows = verifiers_rows(SHOP)
    assert [(row["idx"], row["prompt"]) for row in rows] == [(0, "What does tea cost?"), (1, "What does cake cost?")]
    env = functools.partial(VerifiersEnv, SHOP)
    (right,) = roll_out(env, [calls(("prices_price", {"item": "tea"})), say("3")], rows[:1], context="agent")
    (wrong,) = roll_out(env, [say("I do not know.")], rows[1:], context="agent")
    assert (right.stop_reason, wrong.stop_reason) == (StopReason.DONE, StopReason.DONE), (right.error, wrong.error)
    assert right.outcome_reward == 1.5 and right.reward_parts == {"right": 1.0, "short": 0.5}
    assert wrong.outcome_reward == 0.0 and wrong.reward_parts == {"right": 0.0, "short": 0.0}
    assert [result.content for result in right.tool_results] == ["3"]
    assert (len(right.turns), len(right.rows)) == (2, 1)


def test_each_role_is_a_seat_and_the_judge_is_not_trained(tasksets):
    roles = dict.fromkeys(("first", "second", "judge"), ROLE)
    env = functools.partial(VerifiersEnv, {"taskset": {"id": "duel_v1"}, **roles})
    (item,) = roll_out(env, [say("7"), say("1"), say("4")], verifiers_rows(env.args[0]), context="agent")
    assert item.stop_reason is StopReason.DONE, item.error
    assert [(turn.seat, turn.message["content"]) for turn in item.turns] == [("first", "7"), ("second", "1")]
    assert item.seat_rewards == {"first": 1.0, "second": 0.0}


@pytest.mark.parametrize(
    ("env", "row", "error"),
    [
        (SHOP, {"idx": 2}, "idx=2: the taskset 'shop_v1' has 2 tasks"),
        (SHOP, {}, "Make the rows with verifiers_rows"),
        ({**SHOP, "taskset": {"id": "no_such_v1"}}, {"idx": 0}, "no_such_v1"),
    ],
)
def test_what_cannot_be_played_is_named(tasksets, env, row, error):
    (item,) = roll_out(functools.partial(VerifiersEnv, env), [say("3")], [row], context="agent")
    assert item.stop_reason is StopReason.ENVIRONMENT_ERROR and error in item.error


def test_a_role_that_is_not_there_is_named_with_those_that_are(tasksets):
    env = functools.partial(VerifiersEnv, SHOP, untrained=["judge"])
    (item,) = roll_out(env, [say("3")], [{"idx": 0}], context="agent")
    assert "untrained='judge': the environment has no such role; it has agent" in item.error


def test_an_environment_of_aviary_offers_its_tools_and_rewards():
    pytest.importorskip("aviary.core", reason="needs fhaviary, see make doors")
    names: dict = {}
    exec(code("Environments of aviary and gem", "    from aviary.core import"), names)
    turns = [calls(("cast_int", {"x": 1.5})), calls(("print_story", {"story": "Once there was a cat."}))]
    (item,) = roll_out(names["AviaryTask"], turns, [{"question": "cats"}])
    assert (item.stop_reason, item.total_reward, len(item.turns)) == (StopReason.DONE, 1.0, 2), item.error
    assert "about cats" in item.messages[0]["content"]
    assert next(message["content"] for message in item.messages if message["role"] == "tool") == "1"


def test_an_environment_of_gem_is_played():
    pytest.importorskip("gem", reason="needs gem-llm, see make doors")
    names: dict = {}
    exec(code("Environments of aviary and gem", "    import gem"), names)
    guesses = [say(rf"I say \boxed{{{number}}}.") for number in range(1, 11)]
    (item,) = roll_out(names["GemTask"], guesses, [{"seed": 1}], max_turns=10)
    assert item.stop_reason is StopReason.DONE, item.error
    assert "Guess The Number" in item.messages[0]["content"] and len(item.turns) > 1

"""A task of Inspect, as the page shows it, acts through the agent door (`make doors`)."""

import os
import re
import textwrap
from pathlib import Path

import pytest

from agent_r1_trl.testing import calls, say
from tests.features.doors.agents import checked

PAGE = Path(__file__).resolve().parents[3] / "docs" / "doors.md"
PYTHON = os.environ.get("INSPECT_PYTHON")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason="needs INSPECT_PYTHON, see make doors")]


@pytest.mark.parametrize(("answer", "reward"), [("It is 3.", 1.0), ("It is 4.", 0.0)])
def test_a_task_of_inspect_is_an_agent_whose_score_is_the_reward(tmp_path, answer, reward):
    section = PAGE.read_text().partition("\n## A task of Inspect")[2]
    program = tmp_path / "inspect_agent.py"
    code = re.search(r"\n(    import json.*?)\n    env:", section, re.DOTALL)[1]
    row = '{"question": "What is 1 + 2?", "answer": "3"}'
    program.write_text(textwrap.dedent(code).replace("json.load(sys.stdin)", f"json.loads({row!r})"))
    turns = [calls(("add", {"a": 1, "b": 2})), say(answer)]
    trajectory, _ = checked([PYTHON, str(program)], turns, rollout_timeout=300, reset_timeout=300)
    assert (trajectory.outcome_reward, len(trajectory.turns), len(trajectory.rows)) == (reward, 2, 1)
    assert [result.content for result in trajectory.tool_results] == ["3"] and not trajectory.info["agent/raised"]

"""Environments of a real OpenEnv server, which a process of its own runs.

The package `openenv` needs mcp<2, which does not go with what the other tests use. OPENENV_PYTHON names a Python that
has it: `python -m venv DIR && DIR/bin/pip install openenv==0.10.0`, then OPENENV_PYTHON=DIR/bin/python.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from agent_r1_trl import check_env
from agent_r1_trl.features.doors import OpenEnv, training_trace
from agent_r1_trl.features.doors.openenv import _text_of_call
from agent_r1_trl.generation.scripted import ScriptedGenerator
from agent_r1_trl.rollout import RolloutRequest, RolloutRunner
from agent_r1_trl.testing import call, calls, chat_of, say
from agent_r1_trl.tools import InfrastructureError
from agent_r1_trl.tools.faults import HandledError, ReportedError, ServerError
from agent_r1_trl.trajectory import StopReason
from tests.features.doors.agents import checked, loop_agent
from tests.toys import limits_of
from tests.trainers.helpers import make_trainer

PYTHON = os.environ.get("OPENENV_PYTHON") or (sys.executable if importlib.util.find_spec("openenv") else None)
pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs a Python with openenv: set OPENENV_PYTHON")
SERVER = Path(__file__).parent / "openenv_server.py"


class Server:
    """The server process, and what it knows of itself."""

    def __init__(self):
        self.process = subprocess.Popen([PYTHON, SERVER], stdout=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{self.process.stdout.readline().strip()}"

    def get(self, path):
        with urllib.request.urlopen(f"{self.url}/{path}") as answer:
            return json.load(answer)

    def count(self):
        """Its counts, as soon as it has no session, or after two seconds."""
        for _ in range(40):
            counts = self.get("counts")
            if not counts["sessions"] and counts["made"] == counts["closed"]:
                break
            time.sleep(0.05)
        return counts

    def env(self, name, **settings):
        return functools.partial(OpenEnv, f"{self.url}/{name}", **settings)


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    counts = server.count()
    server.process.kill()
    server.process.wait()
    assert counts["made"] == counts["closed"] and counts["sessions"] == 0


def roll_out(env, turns, rows=({},), generator=None, delay_s=0.0, **limits):
    """Trajectories, one for each row, whose policy says these turns in their order."""
    chat = chat_of("qwen2_5")
    generator = generator or ScriptedGenerator(
        lambda request: chat.encode_reply(turns[min(request.turn, len(turns) - 1)]),
        stop_token_ids=chat.stop_token_ids,
        delay_s=delay_s,
    )
    runner = RolloutRunner(env, generator, chat, limits_of(**limits))
    trajectories = runner.run(
        [RolloutRequest(example=dict(row), example_id=str(i), seed=i, reset_seed=7) for i, row in enumerate(rows)]
    )
    runner.close()
    return trajectories


def guessed(number):
    return call("step", number=number)


def texts(trajectory):
    return [message["content"] for turn in trajectory.turns for message in turn.observations]


# -------------------------------------------------------------------- actions


def test_an_action_is_a_tool_call_and_the_server_pays_and_ends(server):
    (one,) = roll_out(server.env("guess"), [guessed(1), guessed(0)], [{"seed": 0, "low": 6}])
    assert one.messages[0]["content"] == "Above 6, even: True, code 885446."
    assert [turn.reward for turn in one.turns] == [-0.25, 1.0] and one.stop_reason is StopReason.DONE
    assert texts(one) == ["2 left"] and one.turns[1].reward_parts["openenv"] == 1.0


def test_a_row_has_a_prompt_and_its_group_a_seed(server):
    chat = [{"role": "system", "content": "Be quick."}, {"role": "user", "content": "Go."}]
    one, two = roll_out(server.env("guess"), [guessed(0)], [{"prompt": "Guess."}, {"prompt": chat}])
    assert [message["role"] for message in two.messages[:2]] == ["system", "user"]
    (began, first), (went, second) = (item["content"].split("\n\n") for item in (one.messages[0], two.messages[1]))
    assert (began, went) == ("Guess.", "Go.") and first == second and first.startswith("Above 0, even:")


def test_what_is_wrong_with_an_action_is_told_to_the_policy(server):
    turns = [guessed(-1), say("I guess 1."), guessed(66), calls(("step", {"number": 0}), ("step", {"number": 0}))]
    (one,) = roll_out(server.env("guess"), turns, [{"seed": 0}])
    out_of_range, no_action, failed = texts(one)
    assert "-1 is less than the minimum of 0" in out_of_range and "The task is not finished" in no_action
    assert failed == "Error: no such number"
    assert [turn.tool_results[0].is_charged for turn in one.turns if turn.tool_results] == [True, False, False]
    assert [turn.reward for turn in one.turns] == [0.0, 0.0, 0.0, 1.0]
    assert one.turns[-1].tool_results[1].content.startswith("Error: the episode is over")


def test_what_only_the_server_finds_wrong_is_told_as_well(server):
    (one,) = roll_out(server.env("guess"), [guessed(13), guessed(0)], [{"seed": 0}])
    assert texts(one) == ["Error: number: Input should be less than 10, or 66, or 77"]
    assert one.turns[0].tool_results[0].is_charged and one.stop_reason is StopReason.DONE


def test_a_step_that_was_given_up_is_paid_with_the_next(server):
    turns = [guessed(77), guessed(1), guessed(0)]
    (one,) = roll_out(server.env("guess", tool_timeout_s=0.4), turns, [{"seed": 0}])
    assert "took longer than 0.4 s" in texts(one)[0]
    assert sum(turn.reward for turn in one.turns) == 0.5 and len(one.turns) == 3


def test_a_message_is_an_action(server):
    (one,) = roll_out(server.env("talk", text_field="message"), [say("abc"), say("abcde")])
    heard = [json.loads(one.messages[i]["content"]) for i in (0, 2)]
    assert heard == [{"heard": "Hello?", "length": 0}, {"heard": "abc", "length": 3}]
    assert [message["role"] for message in one.messages] == ["user", "assistant", "user", "assistant"]
    assert [turn.reward for turn in one.turns] == [0.3, 0.5] and one.stop_reason is StopReason.DONE
    (one,) = roll_out(server.env("talk", text_field="message", ends_on_answer=True), [say("abc")])
    assert [turn.reward for turn in one.turns] == [0.3] and one.stop_reason is StopReason.DONE


def test_tools_of_mcp_are_listed_and_called(server):
    turns = [calls(("add", {"a": 1, "b": 2}), ("divide", {"a": 1, "b": 0})), call("add", a="x", b=1), say("3")]
    (one,) = roll_out(server.env("calculator"), turns, [{"prompt": "What is 1 + 2?"}])
    assert texts(one)[:2] == ["3", "Error: Error calling tool 'divide': division by zero"]
    assert "wrong arguments for 'add'" in texts(one)[2]
    assert [turn.reward for turn in one.turns] == [0.5, 0.0, 0.0] and one.stop_reason is StopReason.DONE


def failure(trajectory):
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR
    return trajectory.error


def test_settings_that_do_not_fit_are_refused(server):
    with pytest.raises(ValueError, match=r"base_url='localhost:1'.*http://"):
        OpenEnv("localhost:1")
    (one,) = roll_out(server.env("guess", text_field="message"), [say()])
    assert "text_field='message'" in failure(one) and "['number']" in failure(one)
    (one,) = roll_out(server.env("calculator"), [say()])
    assert "neither 'prompt' nor 'question'" in failure(one)


# -------------------------------------------------------------------- sessions


def test_more_trajectories_than_places_wait_for_one(server):
    many = roll_out(server.env("small"), [guessed(1), guessed(0)], [{"seed": 0}] * 8)
    assert [one.stop_reason for one in many] == [StopReason.DONE] * 8
    assert [[turn.reward for turn in one.turns] for one in many] == [[-0.25, 1.0]] * 8


def test_a_server_without_a_place_is_no_fault_of_the_policy(server):
    env = server.env("small", capacity_wait_s=0)
    many = roll_out(env, [guessed(0)], [{"seed": 0}] * 3, delay_s=0.5)
    (without,) = [one for one in many if one.stop_reason is not StopReason.DONE]
    assert "full for capacity_wait_s=0 s" in failure(without) and "max_concurrent_envs" in failure(without)


def interrupt(server, name, turns, *paths):
    """A trajectory; while the policy writes its second turn, the server is asked for these paths."""
    chat = chat_of("qwen2_5")

    def answer(request):
        assert request.turn != 1 or [server.get(path) for path in paths][-1] == 1
        return chat.encode_reply(turns[request.turn])

    generator = ScriptedGenerator(answer, stop_token_ids=chat.stop_token_ids)
    return roll_out(server.env(name), turns, [{"seed": 0}], generator=generator)[0]


def test_a_connection_that_closes_while_the_policy_writes_is_opened_again(server):
    turns = [guessed(1), guessed(1), guessed(0)]
    (expected,) = roll_out(server.env("guess"), turns, [{"seed": 0}])
    one = interrupt(server, "guess", turns, "drop")
    assert one.messages == expected.messages and one.stop_reason is StopReason.DONE
    assert [turn.reward for turn in one.turns] == [-0.25, -0.25, 1.0]
    assert (one.info["openenv/reconnects"], expected.info["openenv/reconnects"]) == (1, 0)


def test_an_environment_that_does_not_repeat_itself_is_no_fault_of_the_policy(server):
    one = interrupt(server, "forgetful", [guessed(66)] * 3, "drop")
    assert one.stop_reason is StopReason.TOOL_FAILURE
    assert "does not repeat what it did" in one.turns[-1].tool_results[0].content


def test_a_server_that_is_gone_is_no_fault_of_the_policy(server):
    one = interrupt(server, "guess", [guessed(1)] * 3, "refuse/1", "drop")
    server.get("refuse/0")
    assert one.stop_reason is StopReason.TOOL_FAILURE
    (one,) = roll_out(functools.partial(OpenEnv, "http://127.0.0.1:9"), [say()])
    assert "http://127.0.0.1:9/schema" in failure(one)


# -------------------------------------------------------------------- training


def test_the_doctor_finds_nothing(server):
    assert check_env(server.env("guess"), [{"seed": 0, "low": 5}, {"seed": 0, "low": 7}]) == []
    assert check_env(server.env("talk", text_field="message"), [{}]) == []
    assert check_env(server.env("calculator"), [{"prompt": "What is 1 + 2?"}]) == []
    assert check_env(server.env("small"), [{"seed": 0, "low": 5}]) == []  # it has two places
    assert server.count()["sessions"] == 0


def test_two_steps_train_on_what_the_server_paid(tmp_path, server):
    script = lambda rng, turn: guessed(rng.randrange(10))  # noqa: E731
    trainer = make_trainer(tmp_path, env=server.env("guess"), script=script, max_steps=2)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    paid = [sum(turn.reward for turn in one.turns) for one in trainer.last_trajectories]
    assert len(rewards) == 2 and rewards[1] == pytest.approx(sum(paid) / len(paid)) and len(set(paid)) > 1
    assert any((old != new).any() for old, new in zip(before, trainer.model.parameters(), strict=True))
    assert server.count()["sessions"] == 0


@pytest.mark.parametrize(
    "kind, raised",
    [
        ("transport_error", InfrastructureError),
        ("execution_error", HandledError),
        ("timeout", ServerError),
        ("invalid_args", ReportedError),
    ],
)
def test_whose_fault_a_failed_mcp_call_was(kind, raised):
    with pytest.raises(raised, match="Error: no") as caught:
        _text_of_call({"error": {"error_type": kind, "message": "no"}}, "look")
    assert type(caught.value) is raised


def test_a_picture_of_an_mcp_tool_is_named_and_warned_of_once(caplog):
    picture = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
    seen = {"result": {"content": [{"type": "text", "text": ""}, picture, {"type": "new"}]}}
    assert [_text_of_call(seen, "draw") for _ in range(2)] == ["\n[image/png, 3 bytes]\n[new]"] * 2
    assert len(caplog.messages) == 1 and "Tool 'draw' returned an image" in caplog.text


def test_openenv_reads_a_training_trace():
    trajectory, _ = checked(loop_agent, [call(), say("five")])
    read = """
import sys
from openenv.core.harness.training import TrainingTrace
print(TrainingTrace.model_validate_json(sys.stdin.read()).model_dump_json())
"""
    written = json.dumps(training_trace(trajectory))
    heard = subprocess.run([PYTHON, "-c", read], input=written, capture_output=True, text=True, check=True)
    assert [turn["loss_mask"] for turn in json.loads(heard.stdout)["turns"]] == [
        turn["loss_mask"] for turn in json.loads(written)["turns"]
    ]

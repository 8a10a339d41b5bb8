"""Agents of other frameworks and command lines, unchanged."""

import asyncio
import functools
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from agent_r1_trl.environments.factory import resolve_env_factory
from agent_r1_trl.features.doors import AgentEnv
from agent_r1_trl.testing import call, chat_of, say
from agent_r1_trl.trajectory import StopReason
from tests.features.doors.agents import TOOLS, checked, roll_out
from tests.test_docs import ROOT, code_blocks

THREE = [call(), call(a=4, b=5), say("five")]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


def test_an_agent_of_the_openai_agents_sdk_stands_in_one_row():
    import agents as sdk

    async def agent(door, example):
        sdk.set_tracing_disabled(True)
        model = sdk.OpenAIChatCompletionsModel(model=door.model, openai_client=door.async_client)
        adder = sdk.Agent(name="adder", instructions="Add.", tools=[sdk.function_tool(add)], model=model)
        result = await sdk.Runner.run(adder, example["prompt"][0]["content"])
        return float(result.final_output == "five")

    trajectory, _ = checked(agent, THREE)
    assert len(trajectory.turns) == 3 and not trajectory.segments and trajectory.outcome_reward == 1.0
    assert [item.content for item in trajectory.tool_results] == ["5", "9"]


@pytest.mark.parametrize("is_async", [True, False])
def test_an_agent_of_langgraph_stands_in_one_row(is_async):
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    def graph(door, example):
        model = ChatOpenAI(model=door.model, base_url=door.base_url, api_key=door.api_key)
        return create_agent(model, [add]), {"messages": [("user", example["prompt"][0]["content"])]}

    async def on_loop(door, example):
        adder, start = graph(door, example)
        return float((await adder.ainvoke(start))["messages"][-1].content == "five")

    def on_thread(door, example):
        adder, start = graph(door, example)
        return float(adder.invoke(start)["messages"][-1].content == "five")

    trajectory, _ = checked(on_loop if is_async else on_thread, THREE)
    assert len(trajectory.turns) == 3 and not trajectory.segments and trajectory.outcome_reward == 1.0
    assert [item.content for item in trajectory.tool_results] == ["5", "9"]


def test_an_agent_of_pydantic_ai_stands_in_one_row():
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def agent(door, example):
        provider = OpenAIProvider(base_url=door.base_url, api_key=door.api_key)
        adder = Agent(OpenAIChatModel(door.model, provider=provider), instructions="Add.", tools=[add])
        return float((await adder.run(example["prompt"][0]["content"])).output == "five")

    trajectory, _ = checked(agent, THREE)
    assert len(trajectory.turns) == 3 and not trajectory.segments and trajectory.outcome_reward == 1.0
    assert [item.content for item in trajectory.tool_results] == ["5", "9"]


def test_smolagents_writes_its_own_turns_as_text_and_has_a_row_per_turn():
    import smolagents

    def agent(door, example):
        model = smolagents.OpenAIServerModel(model_id=door.model, api_base=door.base_url, api_key=door.api_key)
        adder = smolagents.ToolCallingAgent(tools=[smolagents.tool(add)], model=model, verbosity_level=0)
        return float(str(adder.run("What is 2 + 3?")) == "five")

    turns = [*THREE[:2], call("final_answer", answer="five")]
    trajectory, _ = checked(agent, turns, max_completion_length=4000)
    assert len(trajectory.rows) == 3 and trajectory.info["drift/assistant"] == 2 and trajectory.outcome_reward == 1.0


def test_the_first_example_of_the_page_is_short_and_plays():
    (_, source), *_ = code_blocks(ROOT / "docs" / "doors.md", "python")
    assert len(source.splitlines()) <= 25
    page = {"__name__": "page"}
    exec(source, page)

    async def agent(door, example):
        return await page["my_agent"](door, page["dataset"][0])

    trajectory, _ = checked(agent, [say("It is five."), say("5")])
    assert trajectory.outcome_reward == 1.0 and len(trajectory.turns) == 2 and not trajectory.segments


# -------------------------------------------------------------------- command lines


def program(folder, text):
    """A command line that runs this after it has asked the policy once (`said`)."""
    script = Path(folder) / "agent.py"
    start = """
        import json, os, subprocess, sys, time, urllib.request
        row = json.load(sys.stdin)
        body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": row["prompt"]}).encode()
        head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
        asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
        said = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
    """
    script.write_text(textwrap.dedent(start) + textwrap.dedent(text))
    return [sys.executable, str(script)]


@pytest.mark.parametrize("written, reward", [("0.75", 0.75), ("true", 1.0), ("five", 0.0), ("", 0.0)])
def test_the_last_line_of_a_program_is_what_it_returns(tmp_path, written, reward):
    trajectory, _ = checked(
        program(tmp_path, f"print('on the way'); print(said == 'five' and {written!r})"), THREE[2:]
    )
    assert trajectory.stop_reason is StopReason.DONE and trajectory.outcome_reward == reward


def test_a_program_that_is_killed_has_raised(tmp_path):
    trajectory, _ = checked(program(tmp_path, "os.kill(os.getpid(), 9)"), THREE[2:])
    assert trajectory.info["agent/raised"] == 1 and "exit code -9" in trajectory.info["agent_error"]


def test_a_program_that_hangs_ends_with_its_trajectory_and_so_do_its_children(tmp_path):
    text = """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(sys.argv[0] + ".pids", "w").write(f"{os.getpid()} {child.pid}")
        time.sleep(60)
    """
    command = program(tmp_path, text)
    trajectory, _ = checked(command, THREE[2:], rollout_timeout=3)
    pids = [*map(int, Path(f"{command[1]}.pids").read_text().split())]
    ends = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < ends:
        time.sleep(0.05)
    assert trajectory.stop_reason is StopReason.TIMEOUT and len(pids) == 2 and not any(map(alive, pids))


def test_a_program_that_ends_is_not_held_up_by_what_it_has_started(tmp_path):
    text = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(1)"
    trajectory, _ = checked(program(tmp_path, text), THREE[2:], rollout_timeout=20)
    assert trajectory.stop_reason is StopReason.DONE and trajectory.outcome_reward == 1.0


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_an_agent_may_be_named_by_its_path():
    path = "tests.features.doors.agents.loop_agent"
    factory = resolve_env_factory(functools.partial(AgentEnv, run=path))
    trajectory, _ = checked(None, THREE, env=factory)
    assert len(trajectory.turns) == 3 and trajectory.stop_reason is StopReason.DONE


def test_many_agents_on_threads_and_on_the_loop_play_at_a_time():
    import openai

    assert openai and chat_of("qwen2_5")

    def plain(door, example):
        answer = door.client.chat.completions.create(model="policy", messages=example["prompt"], tools=TOOLS)
        return float(answer.choices[0].message.content == "five")

    trajectories, recorder = roll_out(plain, THREE[2:], examples=40, delay_s=0.5)
    assert {item.outcome_reward for item in trajectories} == {1.0} and recorder.generator.most_running > 20


def test_a_plain_agent_may_run_async_code_in_event_loops_of_its_own():
    async def said(door, example):
        answer = await door.async_client.chat.completions.create(model="policy", messages=example["prompt"])
        return answer.choices[0].message.content

    def agent(door, example):
        return float([asyncio.run(said(door, example)) for _ in range(2)] == ["five"] * 2)

    trajectories, _ = roll_out(agent, THREE[2:], examples=4)
    assert [item.outcome_reward for item in trajectories] == [1.0] * 4


@pytest.mark.parametrize("kind", ["plain", "async", "program"])
def test_a_proxy_does_not_stand_between_an_agent_and_its_endpoint(tmp_path, monkeypatch, kind):
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    def plain(door, example):
        return float(bool(door.client.chat.completions.create(model="policy", messages=example["prompt"]).choices))

    async def on_loop(door, example):
        answer = await door.async_client.chat.completions.create(model="policy", messages=example["prompt"])
        return float(bool(answer.choices))

    agents = {"plain": plain, "async": on_loop, "program": program(tmp_path, "print(1)")}
    trajectory, _ = checked(agents[kind], THREE[2:])
    assert trajectory.outcome_reward == 1.0


@pytest.mark.parametrize("is_async", [True, False])
def test_trajectories_after_one_another_share_connections_and_nothing_is_left_on_the_loop(caplog, is_async):

    async def on_loop(door, example):
        answer = await door.async_client.chat.completions.create(model="policy", messages=example["prompt"])
        return float(answer.choices[0].message.content == "five")

    def on_thread(door, example):
        answer = door.client.chat.completions.create(model="policy", messages=example["prompt"])
        return float(answer.choices[0].message.content == "five")

    agent = on_loop if is_async else on_thread
    trajectories, recorder = roll_out(agent, THREE[2:], examples=6, max_concurrency=1, rollout_timeout=20)
    assert [item.outcome_reward for item in trajectories] == [1.0] * 6 and len(recorder.log) == 6
    assert "destroyed" not in caplog.text

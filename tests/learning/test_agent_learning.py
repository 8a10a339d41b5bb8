"""An agent of OpenAI's SDK learns the quickstart through its base_url as well as with the built-in environment."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_r1_trl.environments import SearchQAEnv
from agent_r1_trl.rewards import exact_match, extract_answer
from tests.effort import short

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "recipes/quickstart/grpo/config_cpu.yaml"
AGENT = {"run": f"{__name__}.through_door", "unfinished_reward": -1.0}


@functools.cache
def tool():
    """The search of the recipe, and its schema."""
    env = SearchQAEnv(str(ROOT / "recipes/quickstart/data/corpus.jsonl"), top_k=1)
    env.reset({"question": "?", "answer": "?"})
    return env.search, env.tools[0].schema


async def answer(client, question):
    """The agent, as it is anywhere: any client of OpenAI's will do."""
    search, schema = tool()
    messages = [{"role": "user", "content": question}]
    while True:
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=[schema])
        said = completion.choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return said.content or ""
        for call in said.tool_calls:
            try:
                result = search(**json.loads(call.function.arguments))
            except (TypeError, ValueError) as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def through_door(door, example):
    """1 for a right answer, -1 for another."""
    said = extract_answer(await answer(door.async_client, example["question"])) or ""
    return 1.0 if exact_match(said, example["answers"]) else -1.0


def run(*command):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "agent_r1_trl.cli", *map(str, command)]
    subprocess.run(program, cwd=ROOT, env={**environment, "TOKENIZERS_PARALLELISM": "false"}, check=True)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("seed", short((0, 1, 2), 0))
def test_an_agent_trained_through_its_base_url_is_right_as_often(tmp_path, seed):
    env = ["--env", "agent_r1_trl.features.doors.AgentEnv", "--env_kwargs", json.dumps(AGENT), "--context", "agent"]
    run("train", "--config", CONFIG, *env, "--seed", seed, "--output_dir", tmp_path)
    run("eval", "--config", CONFIG, "--model", tmp_path, "--output_dir", tmp_path / "after")
    summary = json.loads((tmp_path / "after" / "evaluation.json").read_text())
    print({name: summary[name] for name in ("exact_match", "f1", "valid_answer_rate", "turns")})
    assert summary["exact_match"] > 0.9

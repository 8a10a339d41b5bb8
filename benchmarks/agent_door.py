"""What the agent door costs for each call, apart from sampling and from the agent itself.

    python benchmarks/agent_door.py [--json]

64 agents call a tool again and again and append to their messages: 12 calls up to about 6,000 tokens, and 40 up to
about 20,000. They live in a process of their own, so that the processor time of this one is ours: reading requests,
finding the ids that are held, encoding what is new, answering, recording. The policy follows a script and takes no
time. The same turns in an environment (`ToolEnv`) are the comparison; both must give the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

AGENT = "--be-the-agents"
SCHEMA = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for."}},
            "required": ["query"],
        },
    },
}


# ---------------------------------------------------------------- the process of the agents


async def act(client: Any, task: dict[str, Any]) -> None:
    """One agent; it prints the number of its task when it has ended."""
    messages = [{"role": "user", "content": task["prompt"]}]
    while True:
        body = {"model": "policy", "messages": messages, "tools": [SCHEMA]}
        headers = {"Authorization": f"Bearer {task['api_key']}"}
        async with client.post(f"{task['base_url']}/chat/completions", json=body, headers=headers) as answer:
            said = (await answer.json())["choices"][0]["message"]
        if not said.get("tool_calls"):
            break
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": task["text"]} for call in said["tool_calls"]
        ]
        messages += [said, *results]
    print(task["index"], flush=True)


async def be_the_agents() -> None:
    """Start an agent for each line of the input."""
    import aiohttp

    lines = asyncio.StreamReader(limit=2**24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client, asyncio.TaskGroup() as tasks:
        while line := await lines.readline():
            tasks.create_task(act(client, json.loads(line)))


class Agents:
    """That process, seen from this one."""

    def __init__(self) -> None:
        self._process: Any = None
        self._ended: dict[int, asyncio.Future[None]] = {}

    async def run(self, text: str, door: Any, example: dict[str, Any]) -> float:
        """Have an agent act there."""
        if self._process is None:
            pipe = asyncio.subprocess.PIPE
            self._process = asyncio.create_task(
                asyncio.create_subprocess_exec(sys.executable, str(Path(__file__)), AGENT, stdin=pipe, stdout=pipe)
            )
            self._reading = asyncio.create_task(self._read())
        process = await asyncio.shield(self._process)
        index = len(self._ended)
        self._ended[index] = asyncio.get_running_loop().create_future()
        task = {"index": index, "text": text, "prompt": example["prompt"], **door.settings}
        process.stdin.write(json.dumps(task).encode() + b"\n")
        await self._ended[index]
        return 1.0

    async def _read(self) -> None:
        process = await asyncio.shield(self._process)
        async for line in process.stdout:
            self._ended[int(line)].set_result(None)


# ---------------------------------------------------------------- this process


def roll_out(env: Any, chat: Any, num_calls: int, agents: int, context: str, turns: list[list[int]]) -> Any:
    """The trajectories, and milliseconds of processor time for each call."""
    from agent_r1_trl.generation.base import Generation, GenerationRequest, Generator
    from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner
    from agent_r1_trl.rollout.requests import derive_seed

    class Script(Generator):
        async def generate(self, request: GenerationRequest) -> Generation:
            """Every turn but the last one calls; the seed says which it is, without a look at the context."""
            ids = turns[request.seed in last]
            return Generation(token_ids=list(ids), logprobs=[-1.0] * len(ids), stop="stop")

    last = {derive_seed(seed, num_calls - 1) for seed in range(agents)}
    limits = RolloutLimits(
        context=context,  # type: ignore[arg-type]
        max_turns=num_calls + 1,
        max_completion_length=10**6,
        max_observation_tokens=10**4,
    )
    requests = [RolloutRequest(example={"prompt": f"Question {i}?"}, example_id=str(i), seed=i) for i in range(agents)]
    runner = RolloutRunner(env, Script(), chat, limits)
    runner.run(requests[:2])  # imports and connections
    spent = time.process_time()
    trajectories = runner.run(requests)
    spent = time.process_time() - spent
    runner.close()
    calls = sum(len(trajectory.turns) for trajectory in trajectories)
    assert calls == agents * num_calls, "the script was not followed"
    return trajectories, 1000 * spent / calls


def compare(num_calls: int, agents: int) -> dict[str, float]:
    """The door and the environment on the same turns."""
    from _common import MODEL
    from transformers import AutoTokenizer

    from agent_r1_trl import Tool, ToolEnv
    from agent_r1_trl.chat import ChatFormat
    from agent_r1_trl.features.doors import AgentEnv

    chat = ChatFormat(AutoTokenizer.from_pretrained(MODEL))
    text = "Oslo lies in the south of Norway. "
    text *= 545 // chat.count(text)
    function = {"name": "look_up", "arguments": {"query": "the capital of Norway"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    turns = [chat.encode_reply(message) for message in (call, {"role": "assistant", "content": "Oslo"})]

    class Env(ToolEnv):
        tools = (Tool(lambda query: text, schema=SCHEMA, max_result_chars=None),)

        def outcome_reward(self, trajectory: Any) -> float:
            return 1.0

    door = functools.partial(AgentEnv, functools.partial(Agents().run, text))
    through_door, door_ms = roll_out(door, chat, num_calls, agents, "agent", turns)
    inside, env_ms = roll_out(Env, chat, num_calls, agents, "keep", turns)
    for one, other in zip(through_door, inside, strict=True):
        assert (one.prompt_ids, one.completion_ids) == (other.prompt_ids, other.completion_ids), "other tokens"
    tokens = len(inside[0].prompt_ids) + len(inside[0].completion_ids)
    figures = {"calls": num_calls, "tokens": tokens, "door_ms": door_ms, "env_ms": env_ms}
    return {**figures, "ratio": door_ms / env_ms}


def show(rows: list[dict[str, float]], args: argparse.Namespace) -> None:
    """The table."""
    headings = ["calls", "tokens at the end", "door, ms a call", "environment, ms a turn", "ratio"]
    cells = [
        [f"{row['calls']}", f"{row['tokens']:,}", *(f"{row[name]:.2f}" for name in ("door_ms", "env_ms", "ratio"))]
        for row in rows
    ]
    print_table(f"{args.agents} agents at once", headings, cells)


if __name__ == "__main__" and AGENT in sys.argv:
    asyncio.run(be_the_agents())
elif __name__ == "__main__":
    from _common import be_quiet, make_parser, print_table, report, rounded

    parser = make_parser(__doc__)
    parser.add_argument("--agents", type=int, default=64, help="agents at once")
    args = parser.parse_args()
    if args.agents < 2:
        parser.error(f"--agents={args.agents}: must be 2 or more.")
    be_quiet()
    rows = [compare(num_calls, args.agents) for num_calls in (12, 40)]
    report(rows, args, show, figures=lambda rows: {"rows": [rounded(row) for row in rows]})

"""Agents as users write them, the same task as an environment, and what runs them."""

import functools
import json

import aiohttp

from agent_r1_trl import testing
from agent_r1_trl.features.doors import AgentEnv
from agent_r1_trl.testing import ScriptedPolicy, add, chat_of, echo
from tests.rollout.helpers import PROMPT, Recorder, check_rows
from tests.toys import unfold

TOOLS = [add.schema, echo.schema]


async def post(door, body, *, headers=None, path="/chat/completions", base_url=None, **options):
    """Status, JSON and headers of a request."""
    headers = {"Authorization": f"Bearer {door.api_key}"} | (headers or {})
    async with aiohttp.ClientSession() as client:
        url = f"{base_url or door.base_url}{path}"
        async with client.post(url, json=body, headers=headers, **options) as answer:
            return answer.status, await answer.json(), answer.headers


async def ask(door, messages, **body):
    """The message that the policy says."""
    status, answer, _ = await post(door, {"model": "any", "messages": messages, **body})
    assert status == 200, answer
    return answer["choices"][0]["message"]


def use(call):
    """What a tool of the toys returns to a call."""
    function = {"add": add, "echo": echo}[call["function"]["name"]]
    content = str(function(**json.loads(call["function"]["arguments"])))
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


async def loop_agent(door, example, tools=TOOLS, change=lambda messages: messages):
    """Calls tools until there is an answer; an answer of even length is right."""
    messages = list(example["prompt"])
    while True:
        said = await ask(door, messages, tools=tools)
        if not said.get("tool_calls"):
            return len(said["content"]) % 2 == 0
        messages = change([*messages, said, *map(use, said["tool_calls"])])


def roll_out(
    agent, turns, *, env=None, family="qwen2_5", chat=None, examples=1, delay_s=0.0, generator=None, **limits
):
    """Trajectories of an agent (the only one, for one example) whose policy says these turns, and the sampler's log.

    `turns`: messages or ids in the order of the requests, or a function of the request.
    """
    chat = chat or chat_of(family)

    def script(request):
        return turns(request) if callable(turns) else turns[request.index % len(turns)]

    recorder = Recorder(generator or ScriptedPolicy(script, chat, delay_s=delay_s))
    env = env or functools.partial(AgentEnv, agent)
    rows, limits = [{"prompt": PROMPT}] * examples, {"context": "agent"} | unfold(limits)
    trajectories = testing.roll_out(env, recorder, rows, chat=chat, **limits)
    return (trajectories[0] if examples == 1 else trajectories), recorder


def checked(agent, turns, **options):
    """One trajectory; every turn that was sampled stands in exactly one row, after what it was sampled after."""
    trajectory, recorder = roll_out(agent, turns, **options)
    check_rows(trajectory, recorder.log)
    return trajectory, recorder

"""check_env and the doctor on agents: what breaks their append-only history is named, with a fix."""

import functools
import itertools
import time

import pytest

from agent_r1_trl.features.doctor import run_doctor
from agent_r1_trl.features.doctor.environment import check_env, examine_env
from agent_r1_trl.features.doors import AgentEnv
from agent_r1_trl.testing import chat_of
from tests.features.doors.agents import TOOLS, ask, loop_agent, use
from tests.rollout.helpers import PROMPT

ROWS = [{"prompt": PROMPT}] * 2
CLOCK = itertools.count()


def safely(call):
    try:
        return use(call)
    except (KeyError, TypeError, ValueError) as error:
        return {"role": "tool", "tool_call_id": call["id"], "content": f"Error: {error!r}"}


async def good(door, example, change=lambda messages, tools: (messages, tools), reward=1.0, **body):
    """Appends; `change` is what another agent does to its messages and tools before each call."""
    messages, tools = list(example["prompt"]), TOOLS
    for _ in range(8):
        sent, tools = change(messages, tools)
        said = await ask(door, sent, tools=tools, **body)
        messages = [*sent, said]
        if not said.get("tool_calls"):
            break
        messages += map(safely, said["tool_calls"])
    return reward


def findings(agent, check=check_env, **options):
    return check(functools.partial(AgentEnv, agent), ROWS, **{"timeout_s": 20.0, **options})


def with_clock(messages, tools):
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": f"Be brief. It is 10:{next(CLOCK)}."}, *rest], tools


def late_system(messages, tools):
    return [*messages, *[{"role": "system", "content": "Go on."}] * (len(messages) > 1)], tools


def as_text(messages, tools):
    return [
        {"role": "assistant", "content": str(message["tool_calls"])} if message.get("tool_calls") else message
        for message in messages
        if message["role"] != "tool"
    ], tools


def shorter(messages, tools):
    return messages[-1:], tools


def test_a_good_agent_passes_and_its_calls_are_counted():
    found = findings(good, examine_env)
    assert [item.level for item in found] == ["ok"] * 3, found
    # On the first row three calls of tools and a text; a text; an unknown tool and the same four; a malformed call and
    # nothing, which this agent takes as answers. On the second row the first of these.
    assert "6 runs, 16 calls" in found[0].message and "stand in 6 rows" in found[1].message


@pytest.mark.parametrize(
    "change, kind, shown",
    [
        (with_clock, "system message 0", "It is 10:"),
        (lambda messages, tools: (messages, tools[::-1]), "tools", '"name": "add"'),
        (as_text, "assistant message", 'became "assistant: [{'),
        (shorter, "user message 0", "became"),
    ],
)
def test_what_opens_rows_is_shown_with_both_texts(change, kind, shown):
    (found,) = findings(functools.partial(good, change=change))
    assert found.check == "history" and found.level == "warning" and found.fix
    assert f"on tool calls: {kind}" in found.message and shown in found.message


@pytest.mark.parametrize(
    "options, check, word",
    [
        ({"reward": None}, "outcome", "run returned None"),
        ({"reward": "five"}, "outcome", "run returned 'five'"),
        ({"response_format": {"type": "json_object"}, "temperature": 0.2}, "agent", "temperature, response_format"),
        ({"change": late_system}, "agent", "system message after others"),
    ],
)
def test_what_else_is_probably_not_meant(options, check, word):
    found = findings(functools.partial(good, **options))
    assert {(item.level, item.check) for item in found} == {("warning", check)} and word in found[0].message
    assert all(item.fix for item in found)


def test_that_nothing_scores_an_agent_is_said_once():
    async def echoes(door, example):
        return (await ask(door, example["prompt"]))["content"]

    assert [item.check for item in findings(echoes)] == ["outcome"]


def test_an_agent_that_raises_on_a_mistake_of_the_policy_is_told_what_it_earns():
    (found,) = findings(loop_agent)
    assert "On an unknown tool it raised" in found.message and "no_such_tool" in found.message


def test_an_agent_that_never_ends_is_told_so():

    async def endless(door, example):
        while True:
            await ask(door, example["prompt"], tools=TOOLS)

    found = findings(endless)
    assert any("No run ended by itself within 16 calls" in item.message for item in found)


async def no_call(door, example):
    return 1.0


async def wrong_place(door, example):
    raise KeyError("question")


async def blocks(door, example):
    await ask(door, example["prompt"])
    time.sleep(8)
    return 1.0


async def hangs(door, example):
    import asyncio

    await ask(door, example["prompt"])
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    "agent, word, fix",
    [
        (no_call, "returned and made no call", "door.base_url"),
        (wrong_place, "KeyError: 'question'", "rows of your data set"),
        (blocks, "held the event loop", "door.async_client"),
        (hangs, "after 6 s and 1 answers it has not returned", "timeout_s="),
    ],
)
def test_an_agent_that_cannot_be_tried_is_an_error_and_ends_the_checks(agent, word, fix):
    (found,) = findings(agent, timeout_s=1.0)
    assert (found.level, found.check) == ("error", "agent") and word in found.message and fix in found.fix


def test_the_doctor_tries_an_agent_with_the_models_template():
    tokenizer = chat_of("qwen2_5").tokenizer
    found = run_doctor(tokenizer, env=functools.partial(AgentEnv, good), examples=ROWS, num_conversations=2)
    assert {item.level for item in found} == {"ok"}, found
    assert {"environment: agent", "environment: history"} <= {item.check for item in found}
    (prompts,) = [item for item in found if item.check == "prompts"]
    assert "6 prompts" in prompts.message  # tools included


@pytest.mark.parametrize(
    "change, role, where, level, word",
    [
        (late_system, "system", "not loop.first", "warning", "refused by a server. The chat template cannot"),
        (with_clock, "system", "true", "error", "On tool calls: the agent ended and had heard no answer"),
        (shorter, "tool", "loop.first", "error", "On tool calls the chat template refused its messages"),
    ],
)
def test_the_doctor_finds_messages_that_the_template_refuses(change, role, where, level, word):
    tokenizer, loop = chat_of("qwen2_5").tokenizer, "{%- for message in messages %}"
    refusal = f"{{% if message.role == '{role}' and {where} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
    template = tokenizer.chat_template.replace(loop, loop + refusal)
    agent = functools.partial(AgentEnv, functools.partial(good, change=change))
    found = run_doctor(tokenizer, env=agent, examples=ROWS, chat_template=template, num_conversations=2)
    matching = [item for item in found if item.level == level and word in item.message]
    assert matching and all(item.check == "environment: agent" for item in matching), found

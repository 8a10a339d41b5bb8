"""An agent through the endpoint: its trajectories are those of an environment, whatever it does with its messages."""

import asyncio
import copy
import functools
import random
import socket
from contextvars import ContextVar
from types import SimpleNamespace

import aiohttp
import pytest

from agent_r1_trl.errors import APIError
from agent_r1_trl.features.doors import AgentEnv
from agent_r1_trl.features.doors.agent.held import Held, HeldTurn
from agent_r1_trl.features.doors.agent.session import _first_stop
from agent_r1_trl.features.doors.agent.wire import read_request
from agent_r1_trl.testing import AddEchoEnv, call, calls, chat_of, say
from agent_r1_trl.trajectory import StopReason
from tests.features.doors.agents import TOOLS, ask, checked, loop_agent, post, roll_out, use
from tests.rollout.helpers import PROMPT

FIELDS = ("prompt_ids", "completion_ids", "action_mask", "authors", "logprobs", "turn_ids", "stop_reason", "segments")


class SameTask(AddEchoEnv):
    """The task of `loop_agent`."""

    tool_call_reward = tool_error_reward = failure_reward = 0.0


def random_turn(request):
    """A call, parallel calls, or an answer; it depends on the seed alone."""
    rng = random.Random(request.seed)
    options = [
        call(),
        calls(("add", {"a": 1, "b": 2}), ("echo", {"text": "hé <|im_end|> ok"})),
        say("x" * rng.randrange(9)),
    ]
    return rng.choice(options)


@pytest.mark.parametrize(
    "limits",
    [{}, {"max_turns": 3}, {"max_completion_length": 90}, {"max_completion_length": 150, "max_tokens_per_turn": 60}],
)
@pytest.mark.parametrize("family", ["qwen2_5", "qwen3"])
def test_64_trajectories_equal_those_of_an_environment_token_for_token(family, limits):
    given, chat = {"max_turns": 8, "max_completion_length": 400} | limits, chat_of(family)
    options = {"examples": 64, "family": family, **given}
    through_door, recorder = roll_out(loop_agent, random_turn, **options)
    expected, _ = roll_out(None, random_turn, env=SameTask, **options | {"context": "keep"})
    for one, other in zip(through_door, expected, strict=True):
        assert [getattr(one, name) for name in FIELDS] == [getattr(other, name) for name in FIELDS]
        assert one.prompt_messages == other.prompt_messages
        assert [turn.message for turn in one.turns] == [turn.message for turn in other.turns]
        if one.stop_reason is StopReason.DONE:
            assert one.total_reward == other.total_reward
    assert len({item.stop_reason for item in expected}) >= (2 if limits else 1)
    assert recorder.generator.most_running > 8 and chat is chat_of(family)


# -------------------------------------------------------------------- rows


ALIKE = {
    "arguments in another order, 3.0 for 3": lambda m: arguments(m, '{"b": 3.0, "a": 2}'),
    "arguments as an object": lambda m: arguments(m, {"a": 2, "b": 3}),
    "other ids of calls": lambda m: renamed_calls(m),
    "content null": lambda m: each(m, "assistant", content=None),
    "content empty": lambda m: each(m, "assistant", content=""),
    "content in parts": lambda m: each(m, "user", content=[{"type": "text", "text": PROMPT[0]["content"]}]),
    "white space around texts": lambda m: each(m, "user", content=f"\n{m[0]['content']}  "),
    "names and nulls": lambda m: each(m, "assistant", name="bot", refusal=None, annotations=[], function_call=None),
    "empty reasoning": lambda m: each(m, "assistant", reasoning_content=""),
    "the newest result edited": lambda m: [*m[:-1], m[-1] | {"content": "edited"}],
}
"""What a client may change without a new row."""
OTHER = {
    "a clock in a system prompt": (lambda m: [{"role": "system", "content": f"It is {len(m)}."}, *m], "system", 2),
    "an old result edited": (lambda m: m if len(m) < 4 else [*m[:2], m[2] | {"content": "6"}, *m[3:]], "tool", 2),
    "an own turn edited": (lambda m: m if len(m) < 4 else [m[0], *arguments(m[1:2], "{}"), *m[2:]], "assistant", 1),
    "an own turn dropped": (lambda m: m if len(m) < 4 else [m[0], *m[3:]], "assistant", 1),
    "a summary": (lambda m: [{"role": "user", "content": f"You have {len(m)} messages."}], "user", 0),
}
"""What opens one: the change, where it is found, and how many of two sampled turns are in the third context."""


def each(messages, role, **changes):
    return [item | changes if item["role"] == role else item for item in messages]


def arguments(messages, value):
    """Write those of the first call in another way."""

    def change(call):
        is_first = call["function"]["arguments"] == '{"a": 2, "b": 3}'
        return call | {"function": call["function"] | {"arguments": value}} if is_first else call

    return [item | {"tool_calls": [*map(change, item.get("tool_calls", ()))]} for item in messages]


def renamed_calls(messages):
    text = repr(messages)
    for number, item in enumerate(item for item in messages if "tool_calls" in item):
        text = text.replace(item["tool_calls"][0]["id"], f"other_{number}")
    return eval(text)


def changing(change):
    async def agent(door, example):
        return await loop_agent(door, example, change=change)

    return agent


THREE = [call(), call(a=4, b=5), say("five")]


@pytest.mark.parametrize("name", ALIKE)
def test_a_client_may_write_its_messages_as_it_likes(name):
    trajectory, _ = checked(changing(ALIKE[name]), THREE)
    assert len(trajectory.turns) == 3 and not trajectory.segments and "drift" not in str(trajectory.info)
    expected, _ = checked(loop_agent, THREE)
    if name != "the newest result edited":
        assert trajectory.completion_ids == expected.completion_ids


@pytest.mark.parametrize("name", OTHER)
def test_what_changes_the_history_opens_a_row_and_keeps_the_sampled_ids_of_each_turn_that_is_still_there(name):
    change, where, num_kept = OTHER[name]
    trajectory, recorder = checked(changing(change), THREE)
    assert len(trajectory.rows) > 1 and trajectory.info[f"drift/{where}"] >= 1
    (_, first), (_, second), (context, _) = recorder.log
    held = [contains(context, ids) for ids in (first[:-1], second[:-1])]
    assert len(trajectory.turns) == 3 and sum(held) == num_kept


def contains(ids, part):
    return any(ids[start : start + len(part)] == part for start in range(len(ids) - len(part) + 1))


def test_tools_in_another_order_are_another_conversation_and_keys_in_another_order_are_not():
    orders = iter([TOOLS, [dict(reversed(tool.items())) for tool in TOOLS], TOOLS[::-1]])

    async def agent(door, example):
        messages = example["prompt"]
        for tools in orders:
            said = await ask(door, messages, tools=tools)
            messages = [*messages, said, *map(use, said.get("tool_calls") or ())]

    trajectory, _ = checked(agent, THREE)
    assert [len(row.turn_ids) > 0 for row in trajectory.rows] == [True, True] and trajectory.info["drift/tools"] == 1


def test_a_request_that_shares_messages_with_the_last_one_is_read_as_if_it_came_alone():
    def drawn(index):
        if not index % 3:
            told = {"arguments": {"x": rng.choice([1, True])}}
            names = rng.choice("fg"), rng.choice("fg")
            made = [{"id": f"c{n}{index % 2}", "function": {"name": name, **told}} for n, name in enumerate(names)]
            return {"role": "assistant", "content": rng.choice("ab"), "tool_calls": made[: rng.randrange(3)]}
        text, known = rng.choice("ab"), f"c{rng.randrange(2)}{rng.randrange(2)}"
        answered = {"role": "tool", "tool_call_id": known, "content": text}
        return rng.choice([answered, {"role": "user", "content": text}])

    rng, last, held, num_shared = random.Random(0), None, Held(None), 0
    for _ in range(500):
        given = copy.deepcopy(last.given) if last is not None and rng.random() < 0.9 else []
        del given[rng.randrange(len(given) + 1) if rng.random() < 0.3 else len(given) :]
        given += map(drawn, range(len(given), len(given) + 1 + rng.randrange(4)))
        given[rng.randrange(len(given))] = drawn(rng.randrange(3))
        body = {"messages": given, "tools": TOOLS[: 1 + rng.randrange(10) // 9]}
        asked, alone = read_request(body, last), read_request(copy.deepcopy(body))
        assert repr((asked.messages, asked.given)) == repr((alone.messages, alone.given))
        num_shared += last is not None and asked.messages[0] is last.messages[0]
        context = held._identified(asked.messages, asked.tools)
        fresh = Held(None)._identified(alone.messages, alone.tools)
        assert (context.shown, context.said, context.keys) == (fresh.shown, fresh.said, fresh.keys)
        last, held._newest = asked, context
    assert num_shared > 100


def test_results_of_parallel_calls_stand_in_the_order_of_the_calls():
    both = calls(("add", {"a": 1, "b": 2}), ("echo", {"text": "hi"}))
    swapped, _ = checked(changing(lambda m: [*m[:-2], m[-1], m[-2]]), [both, say("ok")])
    expected, _ = checked(loop_agent, [both, say("ok")])
    assert swapped.completion_ids == expected.completion_ids
    assert [item.content for item in swapped.tool_results] == ["3", "hi"]


BOTH = calls(("add", {"a": 1, "b": 2}), ("echo", {"text": "hi"}))
RENAMED = {
    "calls and results": lambda m: renamed_both(m, lambda number: f"other_{number}", lambda number: f"other_{number}"),
    "results alone": lambda m: renamed_both(m, None, lambda number: f"other_{number}"),
    "calls alone": lambda m: renamed_both(m, lambda number: f"other_{number}", None),
    "all calls alike": lambda m: renamed_both(m, lambda number: "call", lambda number: "call"),
    "no ids": lambda m: renamed_both(m, lambda number: None, lambda number: None),
}


def renamed_both(messages, call_id, result_id):
    messages, results = copy.deepcopy(messages), [item for item in messages if item["role"] == "tool"]
    for item in messages:
        for number, made in enumerate(item.get("tool_calls", ()) if call_id else ()):
            made["id"] = call_id(number)
    renamed = [
        item | {"tool_call_id": result_id(number)} if result_id else item for number, item in enumerate(results)
    ]
    return [*messages[: -len(results)], *renamed] if results else messages


@pytest.mark.parametrize("name", RENAMED)
@pytest.mark.parametrize("family", ["qwen2_5", "gemma4"])
def test_results_whose_ids_an_agent_has_changed_belong_to_the_calls_by_their_order(name, family):
    trajectory, _ = checked(changing(RENAMED[name]), [BOTH, say("ok")], family=family)
    expected, _ = checked(loop_agent, [BOTH, say("ok")], family=family)
    assert [(item.call.name, item.content, item.error) for item in trajectory.tool_results] == [
        ("add", "3", None), ("echo", "hi", None)
    ]  # fmt: skip
    assert trajectory.completion_ids == expected.completion_ids


@pytest.mark.parametrize("num", [1, 3])
def test_results_that_are_fewer_or_more_than_the_calls_are_given_to_none(num):
    results = [{"role": "tool", "tool_call_id": f"other_{number}", "content": "5"} for number in range(num)]
    trajectory, _ = checked(changing(lambda m: [*m[:-2], *results]), [BOTH, say("ok")])
    assert trajectory.tool_results == []


def test_parallel_calls_are_sampled_side_by_side_and_each_has_its_row():
    async def agent(door, example):
        asked = [ask(door, [{"role": "user", "content": f"Part {i}"}]) for i in range(4)]
        return float(len({said["content"] for said in await asyncio.gather(*asked)}))

    trajectory, recorder = checked(agent, lambda request: say(f"{request.seed % 9973}"), delay_s=0.3)
    assert recorder.generator.most_running == 4 and len(trajectory.rows) == 4 == trajectory.outcome_reward
    assert trajectory.duration_s < 1.1


def test_the_time_of_an_agents_own_work_ends_when_it_asks_for_the_next_turn():
    trajectory, _ = checked(loop_agent, [call(), say("ok")], delay_s=0.4)
    assert [turn.generate_s >= 0.4 for turn in trajectory.turns] == [True, True]
    assert trajectory.turns[0].env_s < 0.4, "it does not hold the sampling of the next turn"


def test_the_same_request_heard_twice_is_two_actions():
    async def agent(door, example):
        votes = [await ask(door, example["prompt"]) for _ in range(2)]
        return float(len({said["content"] for said in votes}))

    trajectory, _ = checked(agent, lambda request: say(f"{request.seed}"))
    assert len(trajectory.turns) == 2 == len(trajectory.rows) == trajectory.outcome_reward


# -------------------------------------------------------------------- settings of a request


FIVE = [say("It is five.")]


def answers(agent, turns=FIVE, **options):
    """What an agent returns, its trajectory and what the sampler was asked."""
    found = []

    async def run(door, example):
        found.append(await agent(door, example))
        return 1.0

    trajectory, recorder = checked(run, turns, **options)
    return found[0] if found else None, trajectory, recorder


def test_a_stream_is_the_same_answer_as_events():
    async def agent(door, example):
        import openai

        client = door.async_client
        assert isinstance(client, openai.AsyncOpenAI) and [model.id async for model in client.models.list()] == [
            "policy"
        ]
        asked = {"model": "policy", "messages": example["prompt"], "tools": TOOLS, "stream": True}
        pieces = [
            piece
            async for piece in await client.chat.completions.create(**asked, stream_options={"include_usage": True})
        ]
        called = [
            piece.choices[0].delta.tool_calls
            for piece in pieces
            if piece.choices and piece.choices[0].delta.tool_calls
        ]
        assert pieces[-1].usage.total_tokens > 0 and pieces[-2].choices[0].finish_reason == "tool_calls"
        return [(item.index, item.function.name, item.function.arguments) for (item,) in called]

    both = calls(("add", {"a": 1, "b": 2}), ("echo", {"text": "hé"}))
    streamed, trajectory, _ = answers(agent, [both])
    assert streamed == [(0, "add", '{"a": 1, "b": 2}'), (1, "echo", '{"text": "hé"}')]
    assert trajectory.num_action_tokens > 0 and trajectory.outcome_reward == 1.0


@pytest.mark.parametrize("is_last", [True, False])
def test_stop_strings_cut_the_ids_and_the_turn_is_closed_by_the_template(is_last):
    async def agent(door, example):
        said = await ask(door, example["prompt"], stop=["Observation:"])
        if not is_last:
            await ask(door, [*example["prompt"], said, {"role": "user", "content": "Go on."}])
        return said["content"]

    said, trajectory, _ = answers(agent, [say("Let me see. Observation: it rains"), say("ok")])
    assert said == "Let me see. " and len(trajectory.rows) == 1
    text = chat_of("qwen2_5").tokenizer.decode(trajectory.completion_ids[: trajectory.turns[0].end])
    assert text == "Let me see. Observation:" and not trajectory.turns[0].is_truncated
    assert is_last or trajectory.authors[trajectory.turns[0].end] == "template"


def test_a_conversation_may_have_more_turns_than_python_recurses():
    turn = None
    for number in range(3000):
        turn = HeldTurn(before=turn, ids=[number], sampled=[], message=say(), is_stopped=True)
    assert turn.depth == 3000 and turn.context == [*range(3000)]


@pytest.mark.parametrize("place", [0, 1, 499, 998, 999])
def test_the_first_stop_string_of_a_long_turn_is_found_without_decoding_all_its_beginnings(place):
    class Letters:
        num_looks = 0

        def decode(self, ids):
            self.num_looks += 1
            return "".join(map(chr, ids))

    chat, letters = SimpleNamespace(encoder=Letters()), [ord("x")] * 1000
    assert _first_stop(chat, letters, (":", "!")) == 0 and _first_stop(chat, letters, ()) == 0
    letters[place] = ord("!")
    assert _first_stop(chat, letters, (":", "!")) == place + 1 and chat.encoder.num_looks < 16


def test_a_client_may_lower_the_budget_and_not_raise_it():
    async def agent(door, example):
        few = await post(door, {"messages": example["prompt"], "max_tokens": 2})
        many = await post(door, {"messages": example["prompt"], "max_completion_tokens": 10**6})
        return [answer["choices"][0]["finish_reason"] for _, answer, _ in (few, many)]

    reasons, _, recorder = answers(agent, max_completion_length=100)
    assert reasons == ["length", "stop"] and recorder.max_tokens == [2, 98]


def test_ids_are_sent_on_request_and_are_those_of_the_trajectory():
    async def agent(door, example):
        _, plain, _ = await post(door, {"messages": example["prompt"]})
        _, answer, _ = await post(door, {"messages": example["prompt"], "return_token_ids": True})
        return "token_ids" in str(plain), answer["prompt_token_ids"], answer["choices"][0]["token_ids"]

    (is_sent, prompt, sampled), trajectory, _ = answers(agent)
    assert (is_sent, prompt, sampled) == (False, trajectory.prompt_ids, trajectory.rows[1].completion_ids)


def test_sampling_settings_of_a_client_do_not_count_and_are_counted():
    async def agent(door, example):
        await ask(door, example["prompt"], temperature=0.1, tool_choice="required")
        return await ask(door, [*example["prompt"], {"role": "user", "content": "?"}], tool_choice="auto")

    _, trajectory, recorder = answers(agent, [say("a"), say("b")])
    assert trajectory.info["agent/overridden"] == 1
    assert {request.params.temperature for request in recorder.generator.requests} == {1.0}


@pytest.mark.parametrize(
    "body, param",
    [
        ({"n": 2}, "n"), ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools"), ({"functions": [{}]}, "functions"), ({"stop": 7}, "stop"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_in_openais_form_and_the_agent_may_go_on(body, param):
    async def agent(door, example):
        status, answer, headers = await post(door, {"messages": example["prompt"]} | body)
        await ask(door, example["prompt"])
        return status, answer["error"]["param"], headers["x-should-retry"]

    assert answers(agent)[0] == (400, param, "false")


def test_a_key_may_stand_in_the_path_and_a_wrong_one_opens_nothing():
    async def agent(door, example):
        nothing, wrong = {"Authorization": "Bearer none"}, {"Authorization": "Bearer agent-0"}
        body = {"messages": example["prompt"]}
        path, _, _ = await post(door, body, headers=nothing, base_url=door.session_url)
        refused, answer, _ = await post(door, body, headers=wrong)
        lost, told, _ = await post(door, body, path="/responses")
        return path, refused, answer["error"]["type"], lost, "chat completions" in told["error"]["message"]

    assert answers(agent)[0] == (200, 401, "invalid_request_error", 404, True)


def test_agents_on_other_machines_reach_the_door_at_the_address_that_is_given():
    """127.0.0.2 is another address of this machine, at which the usual door does not listen."""
    doors = []

    async def agent(door, example):
        doors.append(door)
        return (await ask(door, PROMPT))["content"] == "Hi"

    for host in (None, "127.0.0.2"):
        trajectory, _ = checked(None, [say("Hi")], env=functools.partial(AgentEnv, agent, door_host=host))
        assert trajectory.total_reward == 1.0
    usual, other = doors
    assert usual.base_url.startswith("http://127.0.0.1:")
    assert other.base_url.startswith("http://127.0.0.2:") and other.host == "127.0.0.2"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(other.base_url.split(":")[2].partition("/")[0])), 5)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "no-such-host.invalid"])
def test_an_address_at_which_no_agent_could_be_answered_is_refused_at_once(host):
    with pytest.raises(ValueError, match=rf"door_host='{host}'.*Set door_host to an address of this machine"):
        AgentEnv(print, door_host=host)


@pytest.mark.parametrize("has_key", [True, False])
def test_calls_that_are_not_the_agents_own_are_answered_and_not_trained(has_key):
    async def run(door, example):
        title = {"messages": [{"role": "user", "content": "A title?"}]}
        url, headers = door.untrained_base_url, {}
        if not has_key:
            url, headers = door.untrained_session_url, {"Authorization": "Bearer none"}
        status, _, _ = await post(door, title, base_url=url, headers=headers)
        async with aiohttp.ClientSession() as client:
            listed = await client.get(f"{url}/models", headers={"Authorization": f"Bearer {door.api_key}"} | headers)
        found.extend([status, listed.status])
        await ask(door, example["prompt"])
        return 1.0

    found = []
    trajectory, recorder = roll_out(run, [say("Title"), say("five")])
    assert found == [200, 200] and len(recorder.log) == 2 and len(trajectory.turns) == 1
    assert trajectory.final_text == "five" and trajectory.prompt_messages[0]["content"] == "What is 2 + 3?"


@pytest.mark.parametrize("tools", [5, True, {"a": 1}, "search", [5]])
def test_tools_that_are_no_list_of_functions_are_refused_and_no_failure(tools):
    with pytest.raises(APIError, match=r"tools=.*must be a list") as refused:
        read_request({"messages": [{"role": "user", "content": "Hello"}], "tools": tools})
    assert refused.value.status == 400


@pytest.mark.parametrize("is_plain", [True, False])
def test_an_agent_has_the_context_variables_of_its_environment_and_sets_them(is_plain):
    variable, seen = ContextVar("variable"), []

    def work(messages):
        seen.append(variable.get())
        variable.set("agent")

    async def asks(door, example):
        work(await ask(door, example["prompt"]))
        return 1.0

    def plain(door, example):
        work(door.client.chat.completions.create(model="policy", messages=example["prompt"]))
        return 1.0

    class Env(AgentEnv):
        async def reset(self, example):
            variable.set("reset")
            return await super().reset(example)

        def outcome_reward(self, trajectory):
            seen.append(variable.get())
            return 1.0

    trajectory, _ = checked(None, FIVE, env=functools.partial(Env, plain if is_plain else asks))
    assert trajectory.stop_reason is StopReason.DONE and seen == ["reset", "agent"]

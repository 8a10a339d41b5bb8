"""`serve --agent`: OpenAI's protocol over the training rollout, spoken by their own client where it is installed."""

import asyncio
import json
import time

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from agent_r1_trl.features.serve.agent_server import AgentServer
from agent_r1_trl.generation import GenerationError, ScriptedGenerator
from agent_r1_trl.generation.base import SamplingParams
from agent_r1_trl.testing import ScriptedPolicy, call, chat_of, say
from tests.features.serve.test_conversation import Heard, agent, talk

CHAT = chat_of("qwen2_5")
TURNS = [call(), say("It is 5.")]
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}


def served(test, turns=TURNS, *, env=Heard, script=None, limits=None, **options):
    """Run `test(session, url)` beside a server whose model follows a script; returns the script's generator."""
    script = script or ScriptedPolicy(turns, CHAT)

    async def run():
        server = TestServer(AgentServer(agent(script, CHAT, **(limits or {})), env, name="tiny", **options).app())
        await server.start_server()
        try:
            async with aiohttp.ClientSession() as session:
                await test(session, str(server.make_url("")).rstrip("/"))
        finally:
            await server.close()

    asyncio.run(run())
    return script


async def post(session, url, **changes):
    async with session.post(f"{url}/v1/chat/completions", json=ASK | changes) as answer:
        return answer.status, await answer.json(), answer.headers


def test_an_answer_comes_after_the_calls():
    expected = talk(TURNS, ["What is 2 + 3?"], chat=CHAT).trajectory

    async def test(session, url):
        status, answer, _ = await post(session, url)
        assert status == 200 and answer["object"] == "chat.completion"
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop" and choice["message"]["content"] == "It is 5."
        assert choice["message"]["agent"] == {"stop_reason": "done", "num_turns": 2}
        assert answer["usage"]["prompt_tokens"] == len(expected.prompt_ids)
        assert answer["usage"]["completion_tokens"] == expected.num_action_tokens

    script = served(test)
    assert list(script.requests[0].prompt_ids) == expected.prompt_ids


def test_the_client_of_openai_understands_both():
    openai = pytest.importorskip("openai")

    async def test(session, url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            assert [model.id async for model in client.models.list()] == ["tiny"]
            answer = await client.chat.completions.create(**ASK)
            assert answer.choices[0].message.content == "It is 5."
            assert answer.choices[0].message.agent["num_turns"] == 2
            usage = {"include_usage": True}
            stream = await client.chat.completions.create(**ASK, stream=True, stream_options=usage)
            said, end, counted = [piece async for piece in stream]
            assert said.choices[0].delta.content == "It is 5." and end.choices[0].finish_reason == "stop"
            assert counted.usage.total_tokens > 0
            unnamed = {name: value for name, value in ASK.items() if name != "model"}
            async with session.post(f"{url}/v1/chat/completions", json=unnamed) as answer:
                assert (await answer.json())["model"] == "tiny"
            with pytest.raises(openai.NotFoundError, match="There is no model 'other'"):
                await client.chat.completions.create(**ASK | {"model": "other"})

    served(test)


def test_a_failure_in_a_stream_is_its_only_event():
    async def test(session, url):
        async with session.post(f"{url}/v1/chat/completions", json=ASK | {"stream": True}) as answer:
            assert answer.content_type == "text/event-stream"
            (line,) = [line for line in (await answer.text()).split("\n\n") if line]
        assert "it is down" in json.loads(line.removeprefix("data: "))["error"]["message"]

    served(test, script=ScriptedGenerator([GenerationError("it is down")]))


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"messages": []}, 400, "at least 1 item"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "must be the user's"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content"),
        ({"messages": [{"role": "user", "tool_calls": [1]}, ASK["messages"][0]]}, 400, "messages.0.tool_calls"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": True}, 400, "top_p"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"n": 2}, 400, "n=2 is not supported"),
        ({"tools": [{"type": "function"}]}, 400, "tools of its own"),
        ({"stop": ["x"]}, 400, "stop"),
        ({"stream": "yes"}, 400, "stream"),
        ({"magic": 1}, 400, "magic"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_in_the_form_of_openai(changes, status, words):
    async def test(session, url):
        found, answer, _ = await post(session, url, **changes)
        assert found == status
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert words in answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"

    assert served(test).requests == []


def test_neutral_settings_and_nulls_are_taken():
    async def test(session, url):
        status, _, _ = await post(session, url, n=1, tools=[], stop=None, user="me", response_format={"type": "text"})
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        answer = {"role": "assistant", "content": None, "tool_calls": None}
        status = max(status, (await post(session, url, messages=[answer, {"role": "user", "content": parts}]))[0])
        assert status == 200

    served(test)


def test_settings_of_a_request_reach_the_sampler():
    async def test(session, url):
        for limit in (20, 4000):
            assert (await post(session, url, temperature=0.5, top_p=0.9, top_k=3, max_tokens=limit))[0] == 200

    requests = served(test, [say("Yes.")], limits={"max_completion_length": 30}).requests
    assert requests[0].params == SamplingParams(temperature=0.5, top_p=0.9, top_k=3)
    assert [request.max_tokens for request in requests] == [20, 30], "no more than the server allows"


def test_a_limit_that_the_recipes_summaries_do_not_fit_in_is_the_clients_mistake():
    async def test(session, url):
        status, answer, _ = await post(session, url, max_tokens=100)
        assert status == 400 and answer["error"]["param"] == "max_tokens", answer
        assert (await post(session, url, max_tokens=400))[0] == 200

    context = {"policy": "summarise", "tokens": 1500, "summary_tokens": 256}
    served(test, [say("Yes.")], limits={"context": context})


def test_a_limit_is_the_finish_reason_length():
    async def test(session, url):
        _, answer, _ = await post(session, url)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["message"]["agent"]["stop_reason"] == "max_turns"

    served(test, limits={"max_turns": 1})


@pytest.mark.parametrize(
    ("body", "kind", "status", "words"),
    [
        ("{", "application/json", 400, "not JSON"),
        ("[" * 200_000, "application/json", 400, "not JSON"),
        (json.dumps(ASK), "text/plain", 415, "application/json"),  # as a browser's page could send it
        (json.dumps(ASK), "application/json", 503, "it is down"),
    ],
    ids=["no JSON", "too deep", "another type", "a failure"],
)
def test_every_other_failure_is_json_too(body, kind, status, words):
    async def test(session, url):
        headers = {"Content-Type": kind}
        async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as answer:
            assert answer.status == status and words in (await answer.json())["error"]["message"]
            assert answer.headers["x-should-retry"] == "false"
        async with session.get(f"{url}/v1/nothing") as answer:
            assert answer.status == 404 and "/v1/nothing" in (await answer.json())["error"]["message"]

    served(test, script=ScriptedGenerator([GenerationError("it is down")]))


@pytest.mark.parametrize(
    ("listening", "header", "status"),
    [
        ("127.0.0.1", "127.0.0.1:8000", 200),
        ("127.0.0.1", "LOCALHOST.:8000", 200),
        ("127.0.0.1", "[::1]:8000", 200),
        ("127.0.0.1", "evil.example:8000", 403),
        ("127.0.0.1", "127.0.0.1.evil.example", 403),
        ("10.0.0.7", "10.0.0.7:8000", 200),
        ("0.0.0.0", "agent.example", 200),
    ],
)
def test_a_request_must_name_the_host_that_it_reaches(listening, header, status):
    async def test(session, url):
        async with session.get(f"{url}/v1/models", headers={"Host": header}) as answer:
            assert answer.status == status
            if status == 403:
                assert "header Host" in (await answer.json())["error"]["message"]

    served(test, host=listening)


@pytest.mark.parametrize("limits", [{"max_model_length": 4096}, {}])
def test_a_request_of_megabytes_does_not_stop_the_others(limits):
    """With the model's limit known it is refused before anything reads it; without one a thread does."""
    text = "word and more text 12345. " * 60_000  # 1.6 MB: two seconds of the tokenizer

    async def test(session, url):
        asking, gaps = asyncio.create_task(post(session, url, messages=[{"role": "user", "content": text}])), []
        while not asking.done():
            began = time.perf_counter()
            async with session.get(f"{url}/health") as answer:
                assert answer.status == 200
            gaps.append(time.perf_counter() - began)
        status, answer, _ = await asking
        assert status == (400 if limits else 200), answer
        assert len(gaps) >= (1 if limits else 5)

    served(test, [say("Yes.")], limits=limits)


def test_the_status_tells_a_prompt_that_is_too_long_from_an_environment_that_fails():
    class Broken(Heard):
        def reset(self, example):
            raise RuntimeError("no corpus")

    async def too_long(session, url):
        status, answer, _ = await post(session, url)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"

    async def broken(session, url):
        status, answer, _ = await post(session, url)
        assert status == 500 and "no corpus" in answer["error"]["message"]

    served(too_long, limits={"max_model_length": 16})
    served(broken, env=Broken)


def test_requests_run_at_the_same_time_each_with_its_environment():
    made, closed = [], []

    class Counted(Heard):
        def reset(self, example):
            made.append(self)
            return super().reset(example)

        def close(self):
            closed.append(self)

    script = ScriptedPolicy(TURNS, CHAT, delay_s=0.2)

    async def test(session, url):
        answers = await asyncio.gather(*(post(session, url) for _ in range(3)))
        assert [status for status, _, _ in answers] == [200] * 3

    served(test, env=Counted, script=script)
    assert script.most_running == 3
    assert len(set(map(id, made))) == len(closed) == 3

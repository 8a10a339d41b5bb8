"""Requests to a hosted model: what is repeated, what a refusal means, where the key goes.

Covered: the client and the form of messages. Not covered: rollouts (tests/rollout/test_hosted.py).
"""

import asyncio
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1_trl.generation import GenerationError, endpoint
from agent_r1_trl.generation.base import RefusedRequestError, RequestTooLongError
from agent_r1_trl.generation.endpoint import Endpoint, EndpointUnusableError, api_url
from agent_r1_trl.generation.endpoint_messages import read_answer, to_send
from tests.effort import examples
from tests.hosted import called, error, hosted, problem_with, said, whole
from tests.servers import free_port

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "temperature": 0.0}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.01)


def ask(url, *, times=1, **options):
    """The endpoint, and what came of `times` requests at once: answers or errors."""
    asked = Endpoint(url, "gpt", **options)

    async def run():
        answers = await asyncio.gather(*(asked.ask(BODY) for _ in range(times)), return_exceptions=True)
        await asked.aclose()
        return answers

    return asked, asyncio.run(run())


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (error(429, "slow down", ("Retry-After", "0")), "HTTP 429"),
        (error(500), "HTTP 500"),
        (error(503, "loading"), "HTTP 503"),
        (error(529, "overloaded"), "HTTP 529"),
        ((502, "<html>Bad Gateway</html>"), "HTTP 502"),
        (None, "no answer"),
        ((200, "no JSON"), "no choices"),
        ((200, {"choices": []}), "no choices"),
        ((200, [1]), "no choices"),
        ((200, {"error": {"message": "provider is down", "code": 502}}), "HTTP 502"),
    ],
    ids=str,
)
def test_what_may_pass_is_asked_again_and_counted(fault, cause):
    with hosted(faults=[fault, fault]) as (url, seen, _):
        asked, (answer,) = ask(url)
    assert answer["choices"][0]["message"] == said("5")
    assert len(seen.bodies) == 3
    assert asked.counts == {"requests": 1, "repeated": 2, f"repeated: {cause}": 2}


LONG = "This model's maximum context length is 512 tokens. However, you requested 600 tokens"


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (error(401, "Incorrect API key"), EndpointUnusableError, "OPENAI_API_KEY"),
        (error(403, "not allowed"), EndpointUnusableError, "--api_key_env"),
        (error(404, "no such model"), EndpointUnusableError, "--model"),
        ((307, "", ("Location", "http://127.0.0.1:1/")), EndpointUnusableError, "--endpoint"),
        (error(402, "pay"), EndpointUnusableError, "credit"),
        (error(429, "quota", code="insufficient_quota"), EndpointUnusableError, "credit"),
        (error(400, "too many", code="context_length_exceeded"), RequestTooLongError, "too many"),
        (error(400, LONG), RequestTooLongError, "512"),
        ((400, {"object": "error", "message": LONG, "code": 400}), RequestTooLongError, "512"),
        (error(413, "Request too large"), RequestTooLongError, "413"),
        (error(400, "temperature does not support 0"), RefusedRequestError, "temperature"),
        ((422, {"detail": [{"loc": ["body", "seed"], "msg": "extra"}]}), RefusedRequestError, "seed"),
    ],
    ids=str,
)
def test_what_will_not_pass_is_asked_once_and_named(fault, kind, words):
    with hosted(faults=[fault]) as (url, seen, _):
        _, (answer,) = ask(url)
    assert type(answer) is kind and words in str(answer)
    assert len(seen.bodies) == 1


def test_a_refusal_that_comes_after_answers_is_about_one_request():
    with hosted(faults=[whole(said("5")), error(403, "flagged"), error(404, "gone")]) as (url, _, _):
        asked = Endpoint(url, "gpt")

        async def run():
            await asked.ask(BODY)
            for _ in range(2):
                with pytest.raises(RefusedRequestError):
                    await asked.ask(BODY)
            await asked.aclose()

        asyncio.run(run())


def test_a_server_that_stays_broken_or_is_not_there_is_given_up(monkeypatch):
    with hosted(faults=[error(500, "broken")] * 20) as (url, seen, _):
        asked, (answer,) = ask(url)
    assert type(answer) is GenerationError and "broken" in str(answer) and "gpt at http" in str(answer)
    assert len(seen.bodies) == endpoint.MAX_FAILURES == asked.counts["repeated"] + 1
    _, (answer,) = ask(f"http://127.0.0.1:{free_port()}")
    assert "ConnectError" in str(answer)


def test_a_server_that_does_not_answer_in_time_is_asked_twice():
    with hosted(delay_s=1.5) as (url, seen, _):
        asked, (answer,) = ask(url, timeout_s=0.5)
    assert "no answer after" in str(answer) and len(seen.bodies) == 2
    assert asked.counts["repeated: timeout"] == 1


def test_when_one_is_told_to_wait_all_wait_and_as_long_as_it_takes():
    faults = [error(429, "slow", ("retry-after-ms", "300")), *[error(429, "slow", ("Retry-After", "0"))] * 9]
    with hosted(faults=faults) as (url, _, _):
        asked = Endpoint(url, "gpt")

        async def run():
            first = asyncio.ensure_future(asked.ask(BODY))
            while not asked.counts:
                await asyncio.sleep(0.01)
            began = time.monotonic()
            await asked.ask(BODY)
            waited = time.monotonic() - began
            await first
            await asked.aclose()
            return waited

        assert asyncio.run(run()) > 0.15
    assert asked.counts["repeated: HTTP 429"] == 10 > endpoint.MAX_FAILURES
    with hosted(faults=[error(429, "slow", ("Retry-After", "3600"))]) as (url, seen, _):
        _, (answer,) = ask(url, timeout_s=5.0)
    assert "slow" in str(answer) and len(seen.bodies) == 1


def test_a_date_is_a_time_to_wait_for_too():
    headers = {"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT"}
    assert endpoint._retry_after_s(headers) == 0.0
    assert endpoint._retry_after_s({"retry-after": "soon"}) is None is endpoint._retry_after_s({})


def test_models_that_want_another_name_of_the_limit_get_it_from_then_on():
    refusal = error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
    with hosted(faults=[refusal]) as (url, seen, _):
        ask(url, times=1)
        asked = Endpoint(url, "gpt")
    first, second = seen.bodies
    assert first["max_tokens"] == second["max_completion_tokens"] == 9 and "max_tokens" not in second
    assert asked.counts == {}


def test_options_go_along_and_none_leaves_a_setting_out():
    with hosted() as (url, seen, _):
        ask(url, options={"reasoning_effort": "low", "temperature": None, "max_tokens": 3})
    (body,) = seen.bodies
    assert body == {"model": "gpt", "messages": BODY["messages"], "max_tokens": 3, "reasoning_effort": "low"}
    with pytest.raises(ValueError, match="'messages' is what the evaluation itself sets"):
        Endpoint(url, "gpt", options={"messages": []})


def test_the_key_goes_to_the_server_and_nowhere_else():
    key = "sk-very-secret-0815"
    echo = error(401, f"Incorrect API key provided: {key}")
    with hosted(faults=[whole(said("5")), error(500, key), echo]) as (url, seen, _):
        for _ in range(2):
            asked, (answer,) = ask(url, key=key, key_name="MY_KEY")
    assert {headers["Authorization"] for headers in seen.headers} == {f"Bearer {key}"}
    assert "MY_KEY" in str(answer)
    assert key not in f"{asked!r} {answer} {answer.__cause__}"
    with hosted() as (url, seen, _):
        ask(url)
    assert "Authorization" not in seen.headers[0]


@pytest.mark.parametrize(
    "url",
    [
        "api.openai.com",
        "ftp://a",
        "http://",
        "http://a:99999",
        "https://me:password@a/v1",
        "https://a/v1?key=password",
    ],
)
def test_an_address_that_is_none_or_holds_a_secret_is_refused(url):
    with pytest.raises(ValueError, match=r"endpoint=.*Pass an address such as") as refusal:
        api_url(url)
    assert "password@" not in str(refusal.value) and "=password" not in str(refusal.value)


# ---------------------------------------------------------------- messages

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "id0", '{"a": 1}', "[", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "function", "name", "arguments", "type", "text"]), inner, max_size=4)
    ),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries({}, optional={"content": ANYTHING, "tool_calls": ANYTHING, "refusal": ANYTHING})
CHOICE = st.fixed_dictionaries({}, optional={"message": MESSAGE | ANYTHING, "finish_reason": ANYTHING})


@settings(max_examples=examples(100))
@given(CHOICE | ANYTHING, ANYTHING)
def test_whatever_a_server_says_is_read_and_what_is_sent_back_is_well_formed(choice, usage):
    answer = read_answer({"choices": [choice], "usage": usage}, 0)
    calls = answer.message.get("tool_calls", [])
    answered = [{"role": "tool", "tool_call_id": item["id"], "content": "x"} for item in calls[:1]]
    sent = to_send([{"role": "user", "content": "q"}, answer.message, *answered, {"role": "user", "content": "so?"}])
    assert problem_with(sent) is None, sent
    assert json.loads(json.dumps(sent)) == sent


def test_a_conversation_is_sent_in_the_form_of_the_protocol():
    few_shot = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    sent = to_send(
        [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            few_shot,
            {"role": "tool", "name": "f", "content": "1"},
            called(("f", "no json")) | {"reasoning_content": "hm"},
            {"role": "tool", "name": "f", "tool_call_id": "id0", "content": "Error"},
            {"role": "tool", "tool_call_id": "none", "content": "a page"},
        ]
    )
    arguments = [call["function"]["arguments"] for item in sent for call in item.get("tool_calls", ())]
    assert arguments == ['{"a": 1}', '{"not_an_object": "no json"}']
    assert [message["role"] for message in sent] == ["system", "assistant", "tool", "assistant", "tool", "user"]
    assert sent[0]["content"] == "Be brief." and sent[5]["content"] == "a page"
    assert sent[2]["tool_call_id"] == sent[1]["tool_calls"][0]["id"] != ""
    assert all(set(message) <= {"role", "content", "tool_calls", "tool_call_id"} for message in sent)

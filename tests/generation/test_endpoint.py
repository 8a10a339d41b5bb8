"""Requests to a hosted model: what is repeated, what a refusal means, where the key goes.

Covered: the client and the form of messages. Not covered: rollouts (tests/rollout/test_hosted.py).
"""

import asyncio

import pytest

from agent_r1_trl.generation import GenerationError, endpoint
from agent_r1_trl.generation.base import RefusedRequestError, RequestTooLongError
from agent_r1_trl.generation.endpoint import Endpoint, EndpointUnusableError, api_url
from agent_r1_trl.rollout.hosted import read_answer, to_send
from tests.hosted import called, error, hosted, problem_with, said, whole
from tests.servers import free_port

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "temperature": 0.0}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


def ask(url, *, times=1, **options):
    """The endpoint, and what came of `times` requests at once: answers or errors."""
    asked = Endpoint(url, "gpt", **options)

    async def run():
        answers = await asyncio.gather(*(asked.ask(BODY) for _ in range(times)), return_exceptions=True)
        await asked.aclose()
        return answers

    return asked, asyncio.run(run())


@pytest.mark.parametrize(
    "fault", [error(429, "slow down", ("Retry-After", "0")), error(503, "loading"), None], ids=str
)
def test_what_may_pass_is_asked_again_and_counted(fault):
    with hosted(faults=[fault, fault]) as (url, seen, _):
        asked, (answer,) = ask(url)
    assert answer["choices"][0]["message"] == said("5")
    assert len(seen.bodies) == 3
    assert asked.counts == {"requests": 1, "repeated": 2}


@pytest.mark.parametrize(
    "answer", ["no JSON", {"choices": []}, [1], {"error": {"message": "provider is down", "code": 502}}], ids=str
)
def test_an_answer_without_choices_fails_one_request(answer):
    with hosted(faults=[(200, answer)]) as (url, _, _):
        _, (failure,) = ask(url)
    assert type(failure) is GenerationError and "without choices" in str(failure)


LONG = "This model's maximum context length is 512 tokens. However, you requested 600 tokens"


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (error(401, "Incorrect API key"), EndpointUnusableError, "OPENAI_API_KEY"),
        (error(403, "not allowed"), EndpointUnusableError, "--api_key_env"),
        (error(404, "no such model"), EndpointUnusableError, "--model"),
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
def test_what_will_not_pass_is_asked_once_and_named(fault, kind, words, monkeypatch):
    monkeypatch.setattr(endpoint, "MAX_RETRIES", 2)
    with hosted(faults=[fault] * 3) as (url, seen, _):
        _, (answer,) = ask(url)
    assert type(answer) is kind and words in str(answer)
    assert len(seen.bodies) == (1 if fault[0] != 429 else 3)  # the client repeats a 429 whatever its reason


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
    monkeypatch.setattr(endpoint, "MAX_RETRIES", 2)
    with hosted(faults=[error(500, "broken")] * 20) as (url, seen, _):
        _, (answer,) = ask(url)
    assert type(answer) is GenerationError and "broken" in str(answer) and "gpt at http" in str(answer)
    assert len(seen.bodies) == 3
    _, (answer,) = ask(f"http://127.0.0.1:{free_port()}")
    assert "ConnectError" in str(answer)
    with hosted(delay_s=1.5) as (url, seen, _):
        _, (answer,) = ask(url, timeout_s=0.5)
    assert type(answer) is GenerationError and len(seen.bodies) == 1, "not in time"


def test_models_that_want_another_name_of_the_limit_get_it_from_then_on():
    refusal = error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
    with hosted(faults=[refusal]) as (url, seen, _):
        ask(url, times=1)
        asked = Endpoint(url, "gpt")
    first, second = seen.bodies
    assert first["max_tokens"] == second["max_completion_tokens"] == 9 and "max_tokens" not in second
    assert asked.counts == {}


def test_requests_that_are_in_flight_when_the_other_name_is_learnt_are_asked_again_too():
    refusal = error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
    with hosted(faults=[refusal] * 3, delay_s=0.2) as (url, seen, _):
        _, answers = ask(url, times=3)
    assert [answer["choices"][0]["message"] for answer in answers] == [said("5")] * 3
    assert sorted("max_tokens" in body for body in seen.bodies) == [False] * 3 + [True] * 3


def test_a_server_that_never_takes_the_limit_is_asked_twice():
    refusal = error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
    with hosted(faults=[refusal] * 9) as (url, seen, _):
        _, (answer,) = ask(url, options={"max_tokens": 3})
    assert type(answer) is RefusedRequestError and len(seen.bodies) == 2


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


ADDRESSES = (
    "api.openai.com",
    "ftp://a",
    "http://",
    "http://:8000/v1",
    "http://a:80OO/v1",
    "http://a:99999",
    "http://[::1",
    "https://me:password@a",
    "https://a/v1?k=password",
)


@pytest.mark.parametrize("url", ADDRESSES)
def test_an_address_that_is_none_or_holds_a_secret_is_refused(url):
    with pytest.raises(ValueError, match=r"endpoint=.*Pass one such as") as refusal:
        api_url(url)
    assert "password@" not in str(refusal.value) and "=password" not in str(refusal.value)


# ---------------------------------------------------------------- messages


def test_calls_with_unusable_ids_get_others_and_what_is_sent_back_is_well_formed():
    given = called(("f", "{}"), ("f", "no json"), ("f", {"a": 1}), ids=["same", "same", ""])
    message = read_answer(given, 0)
    assert [call["id"] for call in message["tool_calls"]] == ["same", "call_1_1", "call_1_2"]
    sent = to_send([{"role": "user", "content": "q"}, message, {"role": "user", "content": "so?"}])
    assert problem_with(sent) is None, sent


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

"""Turns on vLLM servers that are cut where they are: what has come of them is kept, and nobody else's are touched."""

import asyncio
import time

import pytest
from peft import LoraConfig, get_peft_model

from agent_r1_trl.generation import GenerationRequest
from agent_r1_trl.generation.base import TrajectorySlot, current_slot
from agent_r1_trl.generation.gate import GatedGenerator
from agent_r1_trl.generation.vllm.server_routes import HTTPError, joined_events
from agent_r1_trl.tools.event_loop import shared_loop
from tests.fake_vllm import BASE, FakeServer
from tests.generation.helpers import tiny_model
from tests.generation.test_gate import wait_until
from tests.generation.test_server_faults import generator_on, policy

NUM_TOKENS = 40


def start(generator, place=0):
    """A turn of `NUM_TOKENS` that is being sampled, on the server of this number."""

    async def turn():
        current_slot.set(TrajectorySlot(place=place))
        return await generator.generate(GenerationRequest(prompt_ids=[5, 6], max_tokens=NUM_TOKENS))

    return asyncio.run_coroutine_threadsafe(turn(), shared_loop().loop)


def wait_for_streams(server, num=1):
    wait_until(lambda: server.num_streams == num)
    time.sleep(5 * server.token_s)


def test_what_has_come_is_kept_and_another_clients_request_goes_on():
    with (
        FakeServer() as left,
        FakeServer() as right,
        generator_on(left, right, keeps_parts=True) as ours,
        generator_on(left, keeps_parts=True) as theirs,
    ):
        left.token_s = right.token_s = 0.02
        answers, other = [start(ours, 0), start(ours, 1)], start(theirs)
        wait_for_streams(left, 2)
        assert ours.interrupt()
        for answer in answers:
            part = answer.result(10)
            assert part.stop == "interrupted" and 0 < len(part.token_ids) < NUM_TOKENS
            assert part.token_ids == [BASE] * len(part.logprobs)
        wait_until(lambda: (left.num_streams, right.num_streams) == (1, 0))
        later = start(ours)
        assert other.result(10).stop == later.result(10).stop == "length"
        assert other.result().token_ids == later.result().token_ids == [BASE] * NUM_TOKENS


def small(adapters):
    """A policy of adapters, or one of whole weights."""
    return get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear")) if adapters else policy(20)


KINDS = pytest.mark.parametrize("adapters", [False, True], ids=["whole weights", "adapter"])


@KINDS
def test_a_turn_without_a_token_yet_leaves_an_empty_part(tmp_path, adapters):
    with (
        FakeServer(adapters=adapters) as server,
        generator_on(server, adapter_dir=tmp_path, keeps_parts=True) as generator,
    ):
        generator.sync(small(adapters))
        server.token_s = 30
        answer = start(generator)
        wait_until(lambda: server.num_streams == 1)
        generator.interrupt()
        part = answer.result(10)
        assert (part.token_ids, part.logprobs, part.stop) == ([], [], "interrupted")
        assert generator.metrics()["sampling/answers_discarded"] == 0


def test_an_answer_that_is_ready_is_whole():
    with FakeServer() as server, generator_on(server, keeps_parts=True) as generator:
        answer = start(generator)
        assert answer.result(10).stop == "length"
        generator.interrupt()
        assert start(generator).result(10).stop == "length", "a cut is for what was in flight"


def test_a_turn_that_waits_for_a_server_is_cut_as_well():
    with FakeServer() as server, generator_on(server, keeps_parts=True, may_restore=True) as generator:
        generator.sync(policy(20))
        server.kill()
        answer = start(generator)
        wait_until(lambda: generator.metrics()["sampling/servers_excluded"] == 1)
        generator.interrupt()
        assert answer.result(3).stop == "interrupted"


def test_a_turn_that_waits_for_a_busy_server_is_cut_as_well():
    with FakeServer() as server, generator_on(server, keeps_parts=True) as generator:
        server.is_busy = True
        answer = start(generator)
        wait_until(lambda: server.num_refused == 3)  # then it is 1 s until the next attempt
        generator.interrupt()
        assert answer.result(0.5).stop == "interrupted"


@KINDS
def test_the_rest_of_a_cut_turn_comes_from_the_new_weights(tmp_path, adapters):
    model = small(adapters)
    with (
        FakeServer(adapters=adapters) as server,
        generator_on(server, adapter_dir=tmp_path, keeps_parts=True) as generator,
    ):
        gate = GatedGenerator(generator, cuts_turns=True)
        gate.sync(model)
        gate.open(3)
        server.token_s = 0.03
        answer = start(gate)
        wait_for_streams(server)
        gate.shut()
        changed = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        changed.data += 1
        gate.sync(model)
        gate.open(4)
        whole = answer.result(10)
        (old, num_old), (new, num_new) = whole.versions
        assert (old, new) == (3, 4) and num_old > 0 and num_old + num_new == NUM_TOKENS
        first, second = whole.token_ids[0], whole.token_ids[-1]
        assert first != second and whole.token_ids == [first] * num_old + [second] * num_new
        assert gate.take_metrics()["sampling/cut_turns"] == 1
        assert server.bodies[-1]["prompt"] == [5, 6, *whole.token_ids[:num_old]]


def test_a_part_of_which_nobody_knows_the_weights_is_thrown_away():
    with FakeServer() as server, generator_on(server, keeps_parts=True) as generator:
        generator.sync(policy(20))
        server.token_s = 0.02
        answer = start(generator)
        wait_for_streams(server)
        server.process = "another"
        generator.interrupt()
        assert (answer.result(10).token_ids, answer.result().stop) == ([], "interrupted")
        assert generator.metrics()["sampling/answers_discarded"] == 1


@pytest.mark.parametrize("kind", ["dies", "says an error"])
def test_a_stream_that_breaks_off_is_sampled_by_the_other_server(kind):
    with FakeServer() as left, FakeServer() as right, generator_on(left, right, keeps_parts=True) as generator:
        left.token_s = 0.02
        left.error_after = 3 if kind == "says an error" else None
        answer = start(generator)
        if kind == "dies":
            wait_for_streams(left)
            left.kill()
        assert answer.result(10).token_ids == [BASE] * NUM_TOKENS
        assert right.num_answers == 1


def test_a_generator_that_keeps_no_parts_cuts_nothing_and_asks_for_no_stream():
    with FakeServer() as server, generator_on(server) as generator:
        server.answer_s = 0.2
        answer = start(generator)
        wait_until(lambda: server.bodies)
        assert generator.interrupt() is False
        assert answer.result(10).stop == "length" and not server.bodies[0].get("stream")


EVENT = (
    b'data: {"model": "m", "choices": [{"finish_reason": %s, "logprobs": {"tokens": ["token_id:4"], '
    b'"token_logprobs": [-0.5], "top_logprobs": [{"token_id:4": -0.5}]}}]}\n\n'
)


def test_events_are_joined_up_to_the_last_whole_one():
    content = 2 * (EVENT % b"null") + (EVENT % b'"stop"')[:-30]
    answer = joined_events(content, "here", is_cut=True)
    (choice,) = answer["choices"]
    assert answer["model"] == "m" and choice["finish_reason"] == "interrupted"
    assert choice["logprobs"]["tokens"] == ["token_id:4"] * 2
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:4": -0.5}] * 2
    with pytest.raises(HTTPError, match="before the turn had ended"):
        joined_events(content, "here", is_cut=False)
    content += (EVENT % b'"stop"')[-30:] + b'data: {"model": "m", "choices": [], "usage": {}}\n\ndata: [DONE]\n\n'
    for is_cut in (False, True):
        (choice,) = joined_events(content, "here", is_cut=is_cut)["choices"]
        assert choice["finish_reason"] == "stop" and len(choice["logprobs"]["token_logprobs"]) == 3
    with pytest.raises(HTTPError, match=r"here broke off an answer.*dead") as caught:
        joined_events(b'data: {"error": {"message": "dead", "code": 500}}\n\n', "here", is_cut=False)
    assert caught.value.status == 500

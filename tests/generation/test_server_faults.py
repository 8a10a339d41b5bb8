"""vLLM servers that die, freeze and come back: every answer comes from the weights of the last sync."""

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from agent_r1_trl.generation import GenerationError, GenerationRequest, VLLMServerGenerator
from agent_r1_trl.generation.base import TrajectorySlot, current_slot
from agent_r1_trl.generation.vllm import server_routes
from agent_r1_trl.generation.vllm.settings import ServerSettings
from agent_r1_trl.testing import AddEchoEnv, chat_of, roll_out
from agent_r1_trl.trajectory import StopReason
from tests.fake_vllm import BASE, FakeServer
from tests.generation.helpers import SAMPLED, tiny_model
from tests.rollout.helpers import PROMPT

QUICK = {"retry_window": 6, "health_timeout": 0.6, "sync_timeout": 5, "request_timeout": 20}


def policy(value):
    """A model whose weights add up to `value`."""
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(float(value) / 2)
        model.bias.zero_()
    return model


@contextlib.contextmanager
def generator_on(*servers, **options):
    """Options are of the generator, or keys of `servers`."""
    ours = ("adapter_dir", "weights_dir", "may_restore", "keeps_parts")
    own = {name: options.pop(name) for name in ours if name in options}
    settings = ServerSettings(**(QUICK | options))
    urls = [server.url for server in servers]
    generator = VLLMServerGenerator(urls, stop_token_ids=[1], settings=settings, **own)
    try:
        yield generator
    finally:
        generator.close()


async def turn(generator, slot=None, seed=0):
    """The number of the weights that answered."""
    current_slot.set(slot or TrajectorySlot())
    answer = await generator.generate(GenerationRequest(prompt_ids=[5, 6], max_tokens=3, seed=seed, params=SAMPLED))
    assert len(set(answer.token_ids)) == 1
    return answer.token_ids[0]


def turns(generator, count, slots=None):
    """The numbers that answered `count` requests at once; an error is its text."""

    async def gather():
        given = slots or [None] * count
        return await asyncio.gather(*(turn(generator, slot) for slot in given), return_exceptions=True)

    return [str(item) if isinstance(item, Exception) else item for item in asyncio.run(gather())]


def test_a_request_says_which_rollout_it_is_of():
    with FakeServer() as server, generator_on(server) as generator:
        assert turns(generator, 2, [TrajectorySlot(order=12), TrajectorySlot(order=-1)]) == [BASE, BASE]
        assert sorted(body["priority"] for body in server.bodies) == [-1, 12]


# -------------------------------------------------------------------- every answer proves its weights


def test_no_answer_of_a_restarted_server_gets_through():
    with FakeServer() as server, generator_on(server) as generator:
        assert turns(generator, 1) == [BASE], "before a sync it is sampled as it was started"
        generator.sync(policy(20))
        assert turns(generator, 2) == [20, 20]
        server.restart()
        answers = turns(generator, 4)
        assert all("None of the vLLM servers can be sampled from" in str(item) for item in answers)
        assert server.value == BASE
        generator.sync(policy(21))
        assert turns(generator, 2) == [21, 21]


@pytest.mark.parametrize("names_model", [True, False])
def test_weights_that_came_back_between_answer_and_check_do_not_vouch_for_the_answer(names_model):
    class Repaired(FakeServer):
        async def _complete(self, request):
            answer = await super()._complete(request)
            if not names_model:
                answer.text = json.dumps({**json.loads(answer.text), "model": None})
            return answer

        def rpc_hello(self, path=None):
            if self.num_answers:  # given its weights again, by another rank, after the first answer
                self.value = 20
            return super().rpc_hello(path)

    with Repaired() as server, generator_on(server) as generator:
        generator.sync(policy(20))
        server.process, server.value = "another", BASE
        assert turns(generator, 1) == [20]
        assert server.num_answers == 2
        assert generator.metrics()["sampling/answers_discarded"] == 1


@pytest.mark.parametrize("adapters", [False, True], ids=["whole weights", "adapter"])
def test_a_restarted_server_gets_its_weights_again_in_the_rollout(tmp_path, adapters):
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear")) if adapters else policy(20)
    with (
        FakeServer(adapters=adapters) as server,
        generator_on(server, adapter_dir=tmp_path, may_restore=True) as generator,
    ):
        generator.sync(model)
        generator.scores([3, 4, 5])
        (before,) = turns(generator, 1)
        assert before != BASE
        server.kill()
        threading.Timer(1.5, server.start).start()
        assert turns(generator, 3) == [before] * 3
        assert generator.metrics()["sampling/servers_excluded"] == 0


def test_a_server_that_answers_for_any_name_is_found_out(tmp_path):
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear"))
    with FakeServer(adapters=True) as server, generator_on(server, adapter_dir=tmp_path) as generator:
        generator.sync(model)
        (before,) = turns(generator, 1)
        server.knows_every_name = True
        server.restart()
        assert turns(generator, 1) == [before] != [BASE]
        assert generator.metrics()["sampling/answers_discarded"] == 1


def test_a_server_that_one_rank_restored_serves_the_other_ranks_too():
    with FakeServer() as server, generator_on(server, may_restore=True) as first, generator_on(server) as second:
        first.sync(policy(20))
        ours, theirs = first._fleet, second._fleet
        found = {server.url: (ours.servers[server.url].identity, "")}
        theirs.may_be_restored = True
        second._http.run(theirs.resume(ours.weights, found, is_adapter=False))
        assert turns(second, 1) == [20]
        server.restart()
        answers = []
        asking = threading.Thread(target=lambda: answers.extend(turns(second, 2)))
        asking.start()
        time.sleep(0.3)
        assert answers == []
        assert turns(first, 1) == [20]
        asking.join()
        assert answers == [20, 20]


def test_answers_that_come_together_share_a_check():
    with FakeServer() as server, generator_on(server) as generator:
        generator.sync(policy(20))
        server.answer_s = 0.2
        before = server.calls.count("/collective_rpc")
        assert turns(generator, 40) == [20] * 40
        assert 1 <= server.calls.count("/collective_rpc") - before <= 20


# -------------------------------------------------------------------- frozen, slow and busy servers


def test_requests_of_a_frozen_server_move_on_and_it_may_come_back():
    with FakeServer() as frozen, FakeServer() as other, generator_on(frozen, other) as generator:
        generator.sync(policy(20))
        frozen.is_frozen = True
        start = time.monotonic()
        assert turns(generator, 4) == [20] * 4
        assert time.monotonic() - start < 5
        assert generator.metrics()["sampling/servers_excluded"] == 1
        frozen.is_frozen = False
        deadline = time.monotonic() + 6
        while generator.metrics()["sampling/servers_excluded"] and time.monotonic() < deadline:
            time.sleep(0.1)
        assert turns(generator, 1, [TrajectorySlot(place=0)]) == [20]


def test_a_slow_server_is_waited_for():
    with FakeServer() as server, generator_on(server) as generator:
        generator.sync(policy(20))
        server.answer_s = 2.0
        assert turns(generator, 1) == [20]
        assert generator.metrics()["sampling/servers_lost"] == 0
        assert "/health" in server.calls


def test_a_machine_that_answers_nothing_is_not_said_to_have_been_waited_for_as_an_answer(monkeypatch):
    monkeypatch.setattr(server_routes, "_CONNECT_S", 0.2)
    with socket.socket() as full, contextlib.ExitStack() as callers:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(2):  # with its queue full, it does not answer, as a lost machine
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        client = server_routes.HTTPClient(timeout_s=600)
        callers.callback(client.close)
        with pytest.raises(server_routes.HTTPError, match=r"no connection within 0\.2 s"):
            client.run(client.request("GET", f"http://127.0.0.1:{full.getsockname()[1]}/health"))


def test_when_no_server_is_left_requests_end_after_the_window_and_name_it():
    with FakeServer() as server, generator_on(server, retry_window=1.5) as generator:
        generator.sync(policy(20))
        server.kill()
        start = time.monotonic()
        (answer,) = turns(generator, 1)
        assert 1 < time.monotonic() - start < 5
        assert server.url in answer
        assert "servers.retry_window=1.5" in answer
        start = time.monotonic()
        turns(generator, 1)
        assert time.monotonic() - start < 0.5, "the window was over already"


# -------------------------------------------------------------------- weight syncs


def test_a_dead_server_is_excluded_from_the_sync_and_taken_in_again_later(caplog):
    with FakeServer() as dying, FakeServer() as other, generator_on(dying, other) as generator:
        generator.sync(policy(20))
        dying.kill()
        generator.sync(policy(21))
        assert any(dying.url in line.getMessage() for line in caplog.records if line.levelno == logging.WARNING)
        assert generator.metrics() == {
            "sampling/servers_excluded": 1,
            "sampling/servers_lost": 1,
            "sampling/answers_discarded": 0,
        }
        assert turns(generator, 4) == [21] * 4
        dying.start()
        generator.sync(policy(22))
        assert (dying.value, other.value) == (22, 22)
        assert generator.metrics()["sampling/servers_excluded"] == 0
        assert turns(generator, 1, [TrajectorySlot(place=0)]) == [22]


def test_a_server_that_was_restarted_between_two_syncs_gets_the_frozen_weights_too():
    def partly_frozen(value):
        model = policy(value)
        model.bias.data.fill_(5)
        model.bias.requires_grad_(False)
        return model

    with FakeServer() as server, FakeServer() as other, generator_on(server, other) as generator:
        generator.sync(partly_frozen(20))
        generator.sync(partly_frozen(21))
        assert (server.value, other.value) == (26, 26)
        server.restart()
        generator.sync(partly_frozen(22))
        assert (server.value, other.value) == (27, 27)


SYNC_FAILURES = {
    "dies while it receives": lambda server: setattr(server, "break_transfer", True),
    "is frozen": lambda server: setattr(server, "is_frozen", True),
    "freezes while it receives": lambda server: server.may_receive.clear(),
}


@pytest.mark.parametrize("failure", SYNC_FAILURES)
def test_a_server_that_fails_in_a_sync_is_excluded_and_does_not_harm_the_others(failure):
    with FakeServer() as failing, FakeServer() as other, generator_on(failing, other, sync_timeout=1) as generator:
        generator.sync(policy(20))
        SYNC_FAILURES[failure](failing)
        start = time.monotonic()
        generator.sync(policy(21))
        assert time.monotonic() - start < 6
        assert turns(generator, 4) == [21] * 4
        assert generator.metrics()["sampling/servers_excluded"] == 1
        failing.is_frozen = False
        failing.may_receive.set()


def test_a_sync_waits_for_a_server_and_ends_with_a_clear_error_without_one():
    with FakeServer() as server, generator_on(server, retry_window=2.5) as generator:
        generator.sync(policy(20))
        server.kill()
        threading.Timer(0.5, server.start).start()
        generator.sync(policy(21))
        assert turns(generator, 1) == [21]
        server.kill()
        with pytest.raises(GenerationError, match=r"servers\.retry_window") as caught:
            generator.sync(policy(22))
        assert server.url in str(caught.value)


def test_a_sync_waits_for_no_server_once_the_run_is_told_to_end():
    with FakeServer() as server, generator_on(server, retry_window=60) as generator:
        generator.sync(policy(20))
        server.kill()
        generator.is_cancelled = threading.Event()
        threading.Timer(0.5, generator.is_cancelled.set).start()
        start = time.monotonic()
        with pytest.raises(GenerationError, match=server.url):
            generator.sync(policy(21))
        assert time.monotonic() - start < 30


def test_a_cache_of_older_weights_is_not_kept():
    with FakeServer() as server, generator_on(server) as generator:
        server.cache_is_held = True
        generator.sync(policy(20))
        assert server.calls.count("/reset_prefix_cache") == 1
        assert turns(generator, 1) == [20]


def test_a_server_that_cannot_drop_the_cache_of_older_weights_is_not_sampled_from():
    with FakeServer() as server, generator_on(server) as generator:
        server.keeps_cache = True
        with pytest.raises(GenerationError, match="keeps its prefix cache, which was computed with older weights"):
            generator.sync(policy(20))


# -------------------------------------------------------------------- requests that a server refuses


class Echo(AddEchoEnv):
    """Answers everything, without tools."""

    tools = ()

    def step(self, message):
        return [{"role": "user", "content": "on"}], 0.0, False, {}


ON_A_SERVER = {"max_turns": 2, "max_tokens_per_turn": 8, "retry_failed": 2}


@pytest.mark.parametrize("tells", [True, False], ids=["that tells its context", "that does not tell"])
@pytest.mark.parametrize(
    ("room", "stop", "num_sampled"),
    [(0, StopReason.PROMPT_TOO_LONG, 0), (20, StopReason.MAX_COMPLETION_LENGTH, 8)],
    ids=["the prompt", "the trajectory"],
)
def test_what_is_longer_than_the_context_of_a_server_ends_as_with_local_engines(room, stop, num_sampled, tells):
    with FakeServer() as server:
        server.context, server.tells_context = len(chat_of().encode_prompt(PROMPT)) + room, tells
        with generator_on(server) as generator:
            (trajectory,) = roll_out(Echo, generator, **ON_A_SERVER)
    assert trajectory.stop_reason is stop and trajectory.failed_tries == []
    assert sum(trajectory.action_mask) == num_sampled and server.num_refused == (0 if tells else 1)
    assert (trajectory.error is None) == bool(room) or tells


def test_a_request_that_a_server_does_not_know_is_named_and_not_repeated():
    with FakeServer() as server, generator_on(server) as generator:
        server.refusal = "min_p must be in [0, 1], got 7."
        (trajectory,) = roll_out(Echo, generator, **ON_A_SERVER)
    assert trajectory.stop_reason is StopReason.GENERATION_ERROR
    assert "min_p must be in [0, 1]" in trajectory.error and "correct what it names" in trajectory.error
    assert trajectory.failed_tries == [] and server.num_refused == 1

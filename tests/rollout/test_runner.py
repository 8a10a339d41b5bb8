"""Many trajectories at once: concurrency, order, seeds, reuse, interruption, the watchdog."""

import asyncio
import functools
import gc
import hashlib
import json
import logging
import math
import threading
import time
import weakref
from concurrent.futures import CancelledError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1_trl.generation import SamplingParams, ScriptedGenerator
from agent_r1_trl.generation.scripted import ScriptedTurn
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner, derive_seed
from agent_r1_trl.rollout.requests import example_key
from agent_r1_trl.rollout.runner import _FrozenHeap
from agent_r1_trl.testing import AddEchoEnv, call, chat_of, say
from agent_r1_trl.tools.event_loop import shared_loop
from agent_r1_trl.trajectory import StopReason
from tests.effort import examples
from tests.rollout.helpers import PROMPT, Gate, random_script
from tests.toys import is_freed

DIGEST = int.from_bytes(hashlib.blake2b(b'[7, "q1", 0]', digest_size=8).digest(), "big") >> 1


def requests_for(count, **options):
    return [
        RolloutRequest(example={"prompt": PROMPT}, example_id=f"q{i}", generation=i, seed=derive_seed(7, i), **options)
        for i in range(count)
    ]


def make_runner(script, *, env=AddEchoEnv, generator=None, limits=None, **options):
    chat = chat_of()
    generator = generator or ScriptedGenerator(script, stop_token_ids=chat.stop_token_ids)
    return RolloutRunner(env, generator, chat, RolloutLimits(**(limits or {})), **options)


def by_seed(request):
    """What is said depends on the request's seed alone."""
    return chat_of().encode_reply(random_script(request.seed, request.turn))


def comparable(trajectory):
    """Everything but the clock."""
    record = trajectory.to_dict()
    del record["duration_s"]
    for turn in record["turns"]:
        del turn["generate_s"], turn["env_s"]
        for result in turn["tool_results"]:
            del result["latency_s"]
            del result["queue_s"]
    return json.dumps(record)


@pytest.fixture
def runner_of():
    """`make_runner` whose runners are closed at the end."""
    made = []

    def make(*args, **kwargs):
        made.append(make_runner(*args, **kwargs))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


# -------------------------------------------------------------------- order and seeds


@settings(max_examples=examples(12), deadline=None)
@given(concurrency=st.integers(1, 9), order=st.permutations(range(8)), delays=st.lists(st.integers(0, 4), min_size=8))
def test_the_same_seeds_give_the_same_trajectories_whatever_the_concurrency_and_order(concurrency, order, delays):
    def delayed(request):
        return ScriptedTurn(token_ids=by_seed(request), delay_s=0.001 * delays[request.index % 8])

    requests = requests_for(8)
    runner = make_runner(delayed, limits={"max_concurrency": concurrency, "max_turns": 4})
    shuffled = runner.run([requests[i] for i in order])
    runner.close()
    expected = one_by_one()
    for index, trajectory in zip(order, shuffled, strict=True):
        assert comparable(trajectory) == expected[index]


@functools.cache
def one_by_one():
    runner = make_runner(by_seed, limits={"max_concurrency": 1, "max_turns": 4})
    trajectories = [comparable(runner.run([request])[0]) for request in requests_for(8)]
    runner.close()
    return trajectories


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers() | st.text(), max_size=4), st.lists(st.integers() | st.text(), max_size=4))
def test_seeds_depend_on_every_part_and_on_nothing_else(parts, others):
    seed = derive_seed(*parts)
    assert 0 <= seed < 2**63 and seed == derive_seed(*parts)
    if parts != others:
        assert seed != derive_seed(*others)


def test_seeds_are_the_same_in_every_process():
    assert derive_seed(7, "q1", 0) == DIGEST


def test_an_example_is_known_by_its_id_or_by_its_content():
    assert example_key({"id": 5, "prompt": "x"}) == "5" and example_key({"id": 0}) == "0"
    assert example_key({"a": 1, "b": 2}) == example_key({"b": 2, "a": 1}) != example_key({"a": 1})
    assert example_key({"id": None, "a": 1}) == example_key({"id": None, "a": 1}) != "None"
    assert example_key({"a": {1, 2}.__class__}) == example_key({"a": set})


def test_sampling_params_of_a_run_replace_the_runners(runner_of):
    runner = runner_of([chat_of().encode_reply(say())], params=SamplingParams(temperature=0.5))
    runner.run(requests_for(1))
    runner.run(requests_for(1), params=SamplingParams(temperature=0.0))
    assert [request.params.temperature for request in runner.generator.requests] == [0.5, 0.0]


# -------------------------------------------------------------------- concurrency


@pytest.mark.parametrize("limit", [1, 3, 12, 50])
def test_no_more_trajectories_run_at_once_than_allowed(limit, runner_of):
    lock, open_now, most_open = threading.Lock(), 0, 0

    class Counting(AddEchoEnv):
        def reset(self, example):
            nonlocal open_now, most_open
            with lock:
                open_now += 1
                most_open = max(most_open, open_now)
            return super().reset(example)

        def close(self):
            nonlocal open_now
            with lock:
                open_now -= 1

    chat, delay_s = chat_of(), 0.03 if limit < 12 else 0.3
    script = [chat.encode_reply(turn) for turn in (call(), say())]
    generator = ScriptedGenerator(script, stop_token_ids=chat.stop_token_ids, delay_s=delay_s)
    runner = runner_of(None, env=Counting, limits={"max_concurrency": limit}, generator=generator)
    assert [trajectory.stop_reason for trajectory in runner.run(requests_for(12))] == [StopReason.DONE] * 12
    assert most_open == runner.generator.most_running == min(limit, 12) and open_now == 0


@pytest.mark.parametrize("method", ["reset", "step", "outcome_reward", "close"])
def test_plain_methods_that_block_do_not_block_each_other(method, runner_of):
    """All eight must be inside the method at the same time for any of them to leave it."""
    everyone = threading.Barrier(8, timeout=20)

    def meet(self, *args):
        everyone.wait()
        return getattr(Plain, method)(self, *args)

    runner = runner_of([chat_of().encode_reply(say())], env=type("Meeting", (Plain,), {method: meet}))
    trajectories = runner.run(requests_for(8))
    assert [trajectory.stop_reason for trajectory in trajectories] == [StopReason.DONE] * 8
    assert not everyone.broken


class Plain:
    """An environment without an async method or a base class."""

    tools = ()

    def reset(self, example):
        return list(PROMPT)

    def step(self, message):
        return [], 0.0, True, {}

    def outcome_reward(self, trajectory):
        return 1.0

    def close(self):
        pass


# -------------------------------------------------------------------- reuse and closing


def test_two_runs_of_a_runner_have_environments_of_their_own(runner_of):
    """The second ends first, while the first is held; neither takes the other's, nor clears them."""
    may_go_on = threading.Event()

    class Held(AddEchoEnv):
        async def step(self, message):
            while self.example["id"] == "held" and not may_go_on.is_set():
                await asyncio.sleep(0.005)
            return await super().step(message)

    def ids(environments):
        return [environment.example["id"] for environment in environments]

    runner = runner_of(by_seed, env=Held, limits={"max_turns": 1})
    first = runner.start([RolloutRequest(example={"prompt": PROMPT, "id": "held"})] * 2)
    second = runner.start([RolloutRequest(example={"prompt": PROMPT, "id": "free"})] * 3)
    second.result(30)
    assert (first.environments, ids(second.environments)) == ([], ["free"] * 3)
    may_go_on.set()
    first.result(30)
    assert (ids(first.environments), ids(second.environments)) == (["held"] * 2, ["free"] * 3)
    assert runner.environments is first.environments


def test_a_closed_runner_runs_again_on_the_loop_that_all_share():
    runner, other = (make_runner([chat_of().encode_reply(say())]) for _ in range(2))
    runner.run(requests_for(1))
    thread = shared_loop()
    threads = {item for item in threading.enumerate() if item.name == "rollout"}  # some may have been given up
    assert thread.daemon and thread in threads
    runner.close()
    runner.close()
    for each in (runner, other):
        assert each.run(requests_for(1))[0].stop_reason is StopReason.DONE
        each.close()
    assert shared_loop() is thread
    assert {item for item in threading.enumerate() if item.name == "rollout"} <= threads


def test_a_dropped_runner_is_freed():
    runner = make_runner([chat_of().encode_reply(say())])
    runner.run(requests_for(1))
    dropped = weakref.ref(runner)
    del runner
    assert is_freed(dropped)


def test_it_runs_inside_a_running_event_loop(runner_of):
    runner = runner_of([chat_of().encode_reply(say())])

    async def notebook():
        return runner.run(requests_for(2))

    inside, outside = asyncio.run(notebook()), runner.run(requests_for(2))
    assert [comparable(item) for item in inside] == [comparable(item) for item in outside]


def test_a_run_that_the_loop_has_not_come_to_is_stopped_as_well(runner_of):
    runner, is_held = runner_of([chat_of().encode_reply(say())]), threading.Event()
    shared_loop().loop.call_soon_threadsafe(lambda: (is_held.set(), time.sleep(0.3)))
    assert is_held.wait(20)
    running = runner.start(requests_for(2))
    assert runner.stop()
    with pytest.raises(CancelledError):
        running.result(10)
    assert runner.generator.requests == []


def test_one_of_several_runs_is_stopped_and_the_others_go_on(runner_of):
    gate = Gate()
    runner = runner_of([chat_of().encode_reply(say())], env=gate.env)
    first = runner.start([RolloutRequest(example={"prompt": PROMPT, "id": "first"})] * 2)
    second = runner.start([RolloutRequest(example={"prompt": PROMPT, "id": "second"})] * 2)
    gate.wait_for(4)
    assert runner.stop(only=first) and gate.closed == ["first"] * 2
    with pytest.raises(CancelledError):
        first.result(10)
    gate.open()
    assert [item.stop_reason for item in second.result(10)] == [StopReason.DONE] * 2


def test_an_interruption_stops_what_is_running_and_closes_it(runner_of):
    closed = []

    class Endless(AddEchoEnv):
        async def step(self, message):
            await asyncio.Event().wait()

        async def close(self):
            await asyncio.sleep(0.02 * len(self.example["id"]))  # one is closed before the next
            closed.append(self.example["id"])

    runner = runner_of([chat_of().encode_reply(say())], env=Endless)
    requests = [RolloutRequest(example={"prompt": PROMPT, "id": "x" * i}) for i in range(4)]

    running = runner.start(requests)
    while len(runner.generator.requests) < 4:
        time.sleep(0.005)
    assert runner.stop()
    with pytest.raises(CancelledError):
        running.result(10)
    assert closed == ["", "x", "xx", "xxx"]
    assert len(runner.environments) == 4


def test_an_error_in_the_callback_is_heard(runner_of):
    def fail(trajectory):
        raise LookupError("my callback")

    runner = runner_of([chat_of().encode_reply(say())], on_trajectory=fail)
    with pytest.raises(LookupError, match="my callback"):
        runner.run(requests_for(3))


# -------------------------------------------------------------------- the watchdog


def test_the_watchdog_names_what_is_waited_for(runner_of, caplog):
    def heard():
        return [message for message in caplog.messages if "7 running" in message and "turn 0: tools add" in message]

    class Stuck(AddEchoEnv):
        async def step(self, message):
            for _ in range(400):
                if heard():
                    break
                await asyncio.sleep(0.05)
            return await super().step(message)

    runner = runner_of([chat_of().encode_reply(call())], env=Stuck, limits={"max_turns": 1, "watchdog_interval": 0.2})
    with caplog.at_level(logging.WARNING):
        runner.run(requests_for(7))
    message = heard()[0]
    assert "No trajectory has moved for" in message
    assert "example 'q0' generation 0, turn 0: tools add" in message
    assert "'q5'" not in message, "five are named"
    assert "rollout_timeout" in message


def test_the_watchdog_is_quiet_while_something_moves(runner_of, caplog):
    class Steady(AddEchoEnv):
        async def step(self, message):
            await asyncio.sleep(0.1)
            return await super().step(message)

    script = [chat_of().encode_reply(call())] * 8
    runner_of(script, env=Steady, limits={"max_turns": 8, "watchdog_interval": 0.6}).run(requests_for(2))
    assert caplog.messages == []


def test_the_garbage_collector_looks_at_the_rollouts_own_objects_only_while_one_is_rolled_out(monkeypatch):
    frozen, inner = [], []
    monkeypatch.setattr(_FrozenHeap, "_num_rollouts", 0)  # the suite has set its own aside
    gc.unfreeze()

    class Looking(AddEchoEnv):
        def step(self, message):
            frozen.append(gc.get_freeze_count() > 1000)
            return super().step(message)

    def roll_out(env):
        runner = make_runner([chat_of().encode_reply(say())], env=env)
        runner.run(requests_for(1))
        runner.close()

    class Nested(Looking):
        def step(self, message):
            roll_out(Looking)
            inner.append(gc.get_freeze_count() > 1000)
            return super().step(message)

    roll_out(Nested)
    assert frozen == [True, True] and inner == [True], "one that ends leaves the other as it is"
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        roll_out(Looking)
        assert gc.get_freeze_count() > 1000, "what the program has frozen itself stays so"
    finally:
        gc.freeze()


@pytest.mark.parametrize(("every_s", "num_alive"), [(0.0, 4), (math.inf, 16)])
def test_environments_that_refer_to_themselves_are_collected_in_time(monkeypatch, every_s, num_alive):
    """What a rollout leaves behind is set aside by the next one, where Python's own collections pass it by."""
    made = weakref.WeakSet()

    class Stateful(AddEchoEnv):
        def __init__(self):
            super().__init__()
            made.add(self)
            self.itself = self  # as with methods for tools

    monkeypatch.setattr(_FrozenHeap, "_num_rollouts", 0)  # the suite has set its own aside
    gc.unfreeze()
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        monkeypatch.setattr("agent_r1_trl.rollout.runner.COLLECT_EVERY_S", every_s)
        runner = make_runner([chat_of().encode_reply(say())], env=Stateful)
        for _ in range(8):
            runner.run(requests_for(2))
        assert len(made) == num_alive, "those of the last rollout, and of the one before"
    finally:
        gc.set_threshold(*before)
        gc.freeze()

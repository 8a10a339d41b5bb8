"""The gate between trajectories and their sampler: no turn is inside while weights change."""

import asyncio
import threading
import time

import pytest

from agent_r1_trl.generation.base import (
    Generation,
    GenerationError,
    GenerationRequest,
    Generator,
    TrajectorySlot,
    current_slot,
)
from agent_r1_trl.generation.gate import GatedGenerator, joined
from agent_r1_trl.kept_ids import KeptIds
from agent_r1_trl.rollout.draft import Draft
from agent_r1_trl.rollout.requests import RolloutRequest
from agent_r1_trl.testing import AddEnv, ScriptedPolicy, call, roll_out, say
from agent_r1_trl.tools.event_loop import LoopThread, give_up_loop, shared_loop


class Slow(Generator):
    """Samples one token after another; each is the number of the weights that drew it."""

    def __init__(self, token_s=0.01):
        self.weights, self.token_s = 0, token_s
        self.inside = 0
        self.seeds = []
        self.is_interrupted = False

    async def generate(self, request):
        self.inside += 1
        self.seeds.append(request.seed)
        ids = []
        try:
            while len(ids) < request.max_tokens:
                await asyncio.sleep(self.token_s)
                if self.is_interrupted:
                    return Generation(token_ids=ids, logprobs=[-1.0] * len(ids), stop="interrupted")
                ids.append(self.weights)
        finally:
            self.inside -= 1
        return Generation(token_ids=ids, logprobs=[-1.0] * len(ids), stop="length")

    def interrupt(self):
        self.is_interrupted = True
        return True

    def sync(self, model):
        assert self.inside == 0
        self.weights += 1
        self.is_interrupted = False
        return True


def start(coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, shared_loop().loop)


def turn(gate, max_tokens=5, seed=3):
    return start(gate.generate(GenerationRequest(prompt_ids=[1], max_tokens=max_tokens, seed=seed)))


def wait_until(has_happened):
    deadline = time.monotonic() + 20
    while not has_happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_turn_begins_when_the_gate_opens_and_says_its_weights():
    gate = GatedGenerator(Slow())
    answer = turn(gate)
    wait_until(lambda: gate._line)
    time.sleep(0.05)
    assert not answer.done() and gate.inner.seeds == []
    gate.open(7)
    found = answer.result(20)
    assert found.versions == [(7, 5)] and found.waited_s > 0.04
    assert turn(gate).result(20).waited_s == 0


def test_shutting_waits_for_the_turns_inside_and_keeps_the_others_out():
    gate = GatedGenerator(Slow())
    gate.open(0)
    first = turn(gate)
    wait_until(lambda: gate.inner.inside == 1)
    gate.shut()
    assert gate.inner.inside == 0 and first.result(20).token_ids == [0] * 5
    second = turn(gate)
    gate.sync(None)
    gate.open(1)
    assert second.result(20).token_ids == [1] * 5 and second.result().versions == [(1, 5)]
    assert gate.take_metrics()["time/gate_drain_s"] > 0 and gate.take_metrics() == {"time/gate_drain_s": 0.0}


def test_a_turn_that_is_cut_goes_on_with_the_new_weights_and_another_seed():
    gate = GatedGenerator(Slow(), cuts_turns=True)
    gate.open(4)
    answer = turn(gate, max_tokens=30)
    wait_until(lambda: gate.inner.inside == 1)
    time.sleep(0.08)
    began = time.monotonic()
    gate.shut()
    assert time.monotonic() - began < 0.2 and not answer.done()
    gate.sync(None)
    gate.open(5)
    found = answer.result(20)
    (old, num_old), (new, num_new) = found.versions
    assert (old, new) == (4, 5) and num_old > 0 and found.token_ids == [0] * num_old + [1] * num_new
    assert len(found.token_ids) == 30 == len(found.logprobs) and found.stop == "length"
    assert len(set(gate.inner.seeds)) == 2, "the same draws would come a second time"
    assert gate.take_metrics()["sampling/cut_turns"] == 1


def test_a_gate_that_opens_again_with_the_same_weights_leaves_one_stamp():
    first = Generation(token_ids=[1], logprobs=[0.0], stop="interrupted", versions=[(2, 1)])
    second = Generation(token_ids=[4, 5], logprobs=[0.0, 0.0], stop="stop", versions=[(2, 2)])
    assert joined(first, second).versions == [(2, 3)]
    empty = Generation(token_ids=[], logprobs=[], stop="interrupted")
    assert joined(empty, second).versions == [(2, 2)]


def test_the_kept_ids_of_two_parts_are_joined():
    kept = [KeptIds.of([[1, 7]]), KeptIds.of([[4], [5, 9]])]
    first = Generation(token_ids=[1], logprobs=[0.0], stop="interrupted", kept_ids=kept[0])
    second = Generation(token_ids=[4, 5], logprobs=[0.0, 0.0], stop="stop", kept_ids=kept[1])
    assert [list(ids) for ids in joined(first, second).kept_ids] == [[1, 7], [4], [5, 9]]
    empty = Generation(token_ids=[], logprobs=[], stop="interrupted")
    assert len(joined(empty, second).kept_ids) == 2


def test_tokens_that_are_cut_off_take_their_stamps_along():
    found = Generation(token_ids=[1, 2, 3], logprobs=[0.0] * 3, stop="stop", versions=[(0, 2), (1, 1)])
    found.cut(1)
    assert found.versions == [(0, 1)]


def test_a_turn_that_fails_or_is_cancelled_leaves_the_gate():
    class Broken(Slow):
        async def generate(self, request):
            raise GenerationError("no")

    gate = GatedGenerator(Broken())
    gate.open(0)
    with pytest.raises(GenerationError, match="no"):
        turn(gate).result(20)
    gate.shut()  # returns

    gate = GatedGenerator(Slow(token_s=60))
    gate.open(0)
    answer = turn(gate)
    wait_until(lambda: gate.inner.inside == 1)
    answer.cancel()
    gate.shut()
    waiting = turn(gate)
    time.sleep(0.05)
    waiting.cancel()
    gate.open(1)  # whoever waited is gone
    wait_until(lambda: not gate._inside)


WRONG = {"none": None, "lengths": Generation(token_ids=[1], logprobs=[], stop="stop")}


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG)
def test_an_answer_that_is_none_is_refused_by_name(answer):
    class Wrong(Slow):
        async def generate(self, request):
            return answer

    gate = GatedGenerator(Wrong())
    gate.open(0)
    with pytest.raises(GenerationError, match=r"must be a Generation|log-probabilities"):
        turn(gate).result(20)


def test_a_run_that_is_told_to_end_does_not_wait_for_turns_that_hang():
    gate, is_cancelled = GatedGenerator(Slow(token_s=60)), threading.Event()
    gate.open(0)
    answer = turn(gate)
    wait_until(lambda: gate.inner.inside == 1)
    threading.Timer(0.1, is_cancelled.set).start()
    began = time.monotonic()
    gate.shut(is_cancelled.is_set)
    assert time.monotonic() - began < 10
    answer.cancel()


def test_turns_whose_loop_is_given_up_keep_the_gate_no_longer_than_the_sampler_works_for_them():
    class Threaded(Slow):
        is_idle = False

    gate, thread, may_go_on = GatedGenerator(Threaded(token_s=60)), LoopThread("blocked"), threading.Event()
    gate.open(0)
    asyncio.run_coroutine_threadsafe(gate.generate(GenerationRequest(prompt_ids=[1], max_tokens=5)), thread.loop)
    wait_until(lambda: gate.inner.inside == 1)
    thread.loop.call_soon_threadsafe(may_go_on.wait)  # a tool that holds the loop
    shutting = threading.Thread(target=gate.shut)
    shutting.start()
    shutting.join(0.5)
    assert shutting.is_alive(), "it may still answer"
    give_up_loop(thread, asyncio.all_tasks(thread.loop))
    shutting.join(0.5)
    assert shutting.is_alive() and gate.inner.is_interrupted, "the sampler has not ended yet"
    gate.inner.is_idle = True
    shutting.join(10)
    assert not shutting.is_alive()
    gate.open(1)
    may_go_on.set()
    thread.join(10)  # what was inside has left a second time
    assert not gate._inside and not thread.is_alive()
    gate.shut()


def test_the_clock_of_a_trajectory_stands_still_at_the_gate():
    """An update that takes longer than `rollout_timeout` times nothing out, and the phase says what is waited for."""
    gate, draft = GatedGenerator(Slow(token_s=0.001)), Draft(request=RolloutRequest(example={}))
    draft.enter("turn 0: generation")

    async def trajectory(num_turns):
        current_slot.set(TrajectorySlot(paused=draft.paused))
        async with asyncio.timeout(0.3) as draft.time_limit:
            request = GenerationRequest(prompt_ids=[1], max_tokens=2)
            await asyncio.gather(*(gate.generate(request) for _ in range(num_turns)))
            phase = draft.phase
            await asyncio.sleep(60)  # which the clock does end
        return phase

    answer = start(trajectory(2))
    time.sleep(0.6)
    assert not answer.done() and draft.phase == "turn 0: waiting for weights"
    gate.open(0)
    with pytest.raises(TimeoutError):
        answer.result(20)
    assert draft.phase == "turn 0: generation"


def test_what_a_trajectory_has_waited_for_weights_is_part_of_none_of_its_times():
    """Neither of a turn nor of the whole: a record does not say how long an update was."""
    gate = GatedGenerator(ScriptedPolicy([call(), say("3")]))
    threading.Timer(0.8, gate.open, [0]).start()
    trajectory = roll_out(AddEnv, gate, chat=gate.inner.chat)[0]
    assert len(trajectory.turns) == 2
    assert sum(turn.generate_s + turn.env_s for turn in trajectory.turns) <= trajectory.duration_s < 0.6


def test_pauses_of_several_turns_of_one_trajectory_are_counted_once_and_each_has_the_phase():
    draft = Draft(request=RolloutRequest(example={}))

    async def waits():
        draft.enter("turn 0: generation")
        with draft.paused():
            draft.enter("turn 1: generation")  # an agent asks for another turn meanwhile
            with draft.paused():
                await asyncio.sleep(0.1)
                phase, so_far = draft.phase, draft.waited_s
        return phase, so_far

    phase, so_far = start(waits()).result(20)
    assert phase == "turn 1: waiting for weights" and draft.phase == "turn 1: generation"
    assert 0.09 < so_far <= draft.waited_s < 0.19


def test_a_turn_that_an_agent_asks_for_behind_its_time_limit_waits_like_another():
    gate, draft = GatedGenerator(Slow(token_s=0.001)), Draft(request=RolloutRequest(example={}))

    async def trajectory():
        current_slot.set(TrajectorySlot(paused=draft.paused))
        async with asyncio.timeout(0.05) as draft.time_limit:
            try:
                await asyncio.sleep(60)
            finally:  # the agent is told to end
                await gate.generate(GenerationRequest(prompt_ids=[1], max_tokens=2))

    answer = start(trajectory())
    wait_until(lambda: gate._line)
    gate.open(0)
    with pytest.raises(TimeoutError):
        answer.result(20)


def test_what_else_a_generator_has_is_asked_behind_the_gate():
    class Scoring(Slow):
        max_model_length = 7

        def scores(self, token_ids):
            return {"here": [0.0]}

        def metrics(self):
            return {"engines": 1.0}

        def sleep(self):
            return None

    inner = Scoring()
    gate = GatedGenerator(inner)
    gate.is_cancelled = event = threading.Event()
    assert inner.is_cancelled is event is gate.is_cancelled
    assert (gate.can_score, gate.max_model_length, gate.metrics(), gate.sleep()) == (True, 7, {"engines": 1.0}, None)
    assert gate.scores([1, 2]) == {"here": [0.0]} and not GatedGenerator(Slow()).can_score

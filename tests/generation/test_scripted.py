"""The scripted back end: turns, cuts, delays, failures."""

import asyncio
import time

import pytest

from agent_r1_trl.generation import Generation, GenerationError, GenerationRequest, Generator
from agent_r1_trl.generation.scripted import ScriptedGenerator, ScriptedTurn


def ask(generator, prompt, max_tokens=100, seed=0) -> Generation:
    return asyncio.run(generator.generate(GenerationRequest(prompt_ids=prompt, max_tokens=max_tokens, seed=seed)))


def test_a_prompt_that_continues_an_answer_asks_for_the_next_turn():
    generator = ScriptedGenerator([[7, 8], [9], [10]])
    assert isinstance(generator, Generator)
    assert ask(generator, [1, 2]).token_ids == [7, 8]
    assert ask(generator, [1, 2]).token_ids == [7, 8], "another member of the group starts at turn 0"
    assert ask(generator, [1, 2, 7, 8, 50, 51]).token_ids == [9]
    assert ask(generator, [1, 2, 7, 8, 50, 51, 9, 60]).token_ids == [10]
    assert [request.turn for request in generator.requests] == [0, 0, 1, 2]


def test_max_tokens_cuts_ids_and_logprobs_alike():
    generator = ScriptedGenerator([ScriptedTurn(token_ids=[4, 5, 6], logprobs=[-0.1, -0.2, -0.3])])
    assert ask(generator, [1], max_tokens=2) == Generation(token_ids=[4, 5], logprobs=[-0.1, -0.2], stop="length")
    assert ask(generator, [1], max_tokens=3).stop == "stop"


def test_failures_and_missing_turns_are_raised():
    generator = ScriptedGenerator([OSError("gone")])
    with pytest.raises(OSError, match="gone"):
        ask(generator, [1])
    with pytest.raises(GenerationError, match="has 0 turns"):
        ask(ScriptedGenerator([]), [1])
    with pytest.raises(ValueError, match="2 ids and 1 log-prob"):
        ask(ScriptedGenerator([ScriptedTurn(token_ids=[1, 2], logprobs=[-1.0])]), [1])


def test_delays_of_several_requests_overlap():
    generator = ScriptedGenerator([ScriptedTurn(token_ids=[1], delay_s=0.05)], delay_s=0.05)

    async def many():
        await asyncio.gather(
            *(generator.generate(GenerationRequest(prompt_ids=[seed], max_tokens=1)) for seed in range(1, 11))
        )

    started = time.perf_counter()
    asyncio.run(many())
    assert 0.1 <= time.perf_counter() - started < 0.5
    assert generator.most_running == 10

"""Agents and real vLLM engines: what an engine samples for a call is trained on, after what the engine was given."""

import functools

import pytest

from agent_r1_trl.features.doors import AgentEnv
from agent_r1_trl.generation import VLLMGenerator, VLLMServerGenerator
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from tests.features.doors.agents import post
from tests.rollout.helpers import check_rows
from tests.servers import on
from tests.trainers.test_vllm_training import check_two_steps, make_vllm_trainer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.xdist_group("policy_server")]

PPO = {"trainer": MultiTurnPPOTrainer, "num_generations": 1, "critic": "model"}


async def talker(heard, door, example):
    """Four calls; the third one forgets, and so opens a row."""
    messages, lengths = example["prompt"], 0
    for turn in range(4):
        status, answer, _ = await post(door, {"messages": messages, "return_token_ids": True})
        assert status == 200
        (choice,) = answer["choices"]
        heard.append((answer["prompt_token_ids"], choice["token_ids"]))
        lengths += len(str(choice["message"]["content"]))
        asked = {"role": "user", "content": f"That was answer {turn}. Go on."}
        messages = [*example["prompt"], asked] if turn == 1 else [*messages, choice["message"], asked]
    return float(lengths % 3)


def check(tmp_path, monkeypatch, generator, **options):
    heard, sampled, generate = [], [], generator.generate

    async def recorded(self, request):
        generation = await generate(self, request)
        sampled.append((list(request.prompt_ids), list(generation.token_ids)))
        return generation

    monkeypatch.setattr(generator, "generate", recorded)
    limits = {"max_turns": 5, "max_tokens_per_turn": 6, "max_completion_length": 400, "context": "agent"}
    env = functools.partial(AgentEnv, functools.partial(talker, heard))
    trainer = make_vllm_trainer(tmp_path, env=env, **limits, **options)
    try:
        check_two_steps(trainer)
    finally:
        trainer.rollouts.close()
    calls = [call for call in sampled if call in heard]
    assert len(calls) == len(heard) > 0 and sorted(calls) == sorted(heard)
    for trajectory in trainer.last_trajectories:
        assert len(trajectory.turns) == 4 and len(trajectory.rows) == 2
        contexts = contexts_of(trajectory)
        assert all(call in sampled for call in contexts)
        check_rows(trajectory, contexts)


def contexts_of(trajectory):
    """What stands before each turn, and the turn's ids."""
    found = {}
    for row in trajectory.rows:
        ids = [*row.prompt_ids, *row.completion_ids]
        for turn in {turn for turn in row.turn_ids if turn >= 0}:
            places = [len(row.prompt_ids) + place for place, item in enumerate(row.turn_ids) if item == turn]
            found[turn] = ids[: places[0]], ids[places[0] : places[-1] + 1]
    return [found[turn] for turn in range(len(trajectory.turns))]


@pytest.mark.release
@pytest.mark.parametrize("options", [{}, PPO], ids=["grpo", "ppo"])
def test_an_agent_trains_with_an_engine_in_process(tmp_path, monkeypatch, options):
    check(tmp_path, monkeypatch, VLLMGenerator, **options)


@pytest.mark.parametrize("options", [{}, pytest.param(PPO, marks=pytest.mark.release)], ids=["grpo", "ppo"])
def test_an_agent_trains_with_a_server(tmp_path, monkeypatch, policy_server, options):
    check(tmp_path, monkeypatch, VLLMServerGenerator, **options, **on(policy_server))

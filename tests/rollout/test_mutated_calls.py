"""Real calls of every model family, mutated, as a policy's turns: parsed, answered and recorded, whatever they spell.

`make fuzz FUZZ_FACTOR=200 PYTEST_ARGS="-k mutated"` samples 100,000 turns; the process must not grow with them.
"""

import functools
import gc

import psutil
import pytest

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.generation import ScriptedGenerator
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner
from agent_r1_trl.trajectory import Author, Trajectory
from tests.effort import random_rounds
from tests.families import FAMILIES
from tests.rollout.helpers import mostly_nightly
from tests.toys import add, call, calls, echo, say

ROUNDS, TRAJECTORIES, TURNS = 1, 10, 2
"""Together up to 20 turns of each of 25 families, 500 turns."""
MAX_GROWTH = 32 * 2**20
"""Bytes by which the process may grow from the middle of a family's rounds to their end."""
TEXTS = ("5", "", "five", "東京 🙂", "{}", "[1, 2", '"', "\\", "</tool_call>", "a\nb\tc", "<think>", "null", "x" * 200)


class CalculatorEnv(ToolEnv):
    """Two tools; any text is an answer."""

    tools = (add, echo)

    def outcome_reward(self, trajectory):
        return float(len(trajectory.final_text) % 3)


@functools.cache
def chat_of(family):
    return ChatFormat(FAMILIES[family]())


def sound_turn(rng):
    """A message that a good policy could say."""
    text, numbers = rng.choice(TEXTS), {"a": rng.randrange(-(10**20), 10**20), "b": rng.randrange(9)}
    return rng.choice(
        [
            say(text),
            call("echo", text=text * rng.randrange(1, 4)),
            call("add", **numbers),
            calls(("add", {"a": 1, "b": 2}), ("echo", {"text": text})),
            {**call("echo", text=text), "reasoning_content": rng.choice(TEXTS)},
        ]
    )


def mutated(ids, rng, vocabulary):
    """The ids with some of them dropped, doubled, moved, replaced or cut off."""
    ids = list(ids)
    for _ in range(rng.choice((0, 1, 1, 2, 3, 8))):
        if not ids:
            break
        first = rng.randrange(len(ids))
        last = min(len(ids), first + rng.choice((1, 1, 2, 5, 20)))
        piece, word = ids[first:last], rng.choice(vocabulary)
        rest = [*ids[:first], *ids[last:]]
        place = rng.randrange(len(rest) + 1)
        ids = rng.choice(
            [
                rest,
                [*ids[:last], *ids[first:]],
                [*rest[:place], *piece, *rest[place:]],
                [*ids[:first], word, *ids[first + 1 :]],
                [*ids[:first], *[word] * rng.choice((1, 2, 30)), *ids[first:]],
                ids[:first],
            ]
        )
    return ids


def turn_ids(chat, rng, vocabulary):
    """One turn as the sampler would return it: up to its first stop token, or not ended at all."""
    try:
        ids = chat.encode_reply(sound_turn(rng))
    except Exception:  # a template may refuse reasoning beside a call
        ids = chat.encode_reply(say("5"))
    ids = mutated(ids, rng, vocabulary)
    stops = [index for index, token_id in enumerate(ids) if token_id in chat.stop_token_ids]
    return ids[: stops[0] + 1] if stops else [*ids, rng.choice(sorted(chat.stop_token_ids))]


def check_laws(trajectory, said):
    """What holds for every trajectory, whatever was sampled."""
    policy = [author is Author.POLICY for author in trajectory.authors]
    assert policy == [bool(value) for value in trajectory.action_mask]
    sampled = [trajectory.completion_ids[turn.start : turn.end] for turn in trajectory.turns]
    assert sampled == [ids[: len(found)] for ids, found in zip(said, sampled, strict=False)]
    assert sum(map(len, sampled)) == sum(trajectory.action_mask)
    assert all(logprob == 0.0 for logprob, mask in zip(trajectory.logprobs, policy, strict=True) if not mask)
    rewards = trajectory.token_rewards()
    if any(policy):
        assert sum(rewards) == pytest.approx(trajectory.total_reward)
    assert all(reward == 0.0 for reward, mask in zip(rewards, policy, strict=True) if not mask)
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
    assert not trajectory.stop_reason.is_infrastructure_failure, trajectory.error
    for turn in trajectory.turns:
        assert turn.message["role"] == "assistant" and isinstance(turn.message["content"], str)
        assert (
            len(turn.tool_results) == len(turn.message.get("tool_calls", ())) or "malformed_tool_call" in turn.message
        )


@pytest.mark.fuzz
@pytest.mark.parametrize("family", mostly_nightly(FAMILIES, "qwen3", "llama3_1", "gemma4", "gpt_oss", "deepseek_v3_1"))
def test_mutated_calls_are_rolled_out_and_every_law_holds(family):
    chat = chat_of(family)
    controls = [*chat.encoder.control_ids.values()]
    vocabulary = [*controls * 20, *range(0, len(chat.tokenizer), 7)]
    process, sizes = psutil.Process(), []
    examples = [{"prompt": [{"role": "user", "content": f"{index}?"}]} for index in range(TRAJECTORIES)]
    schemas = [item.schema for item in CalculatorEnv.tools]
    prompts = [tuple(chat.encode_prompt(example["prompt"], schemas)) for example in examples]

    def prompt_of(ids):
        (index,) = [index for index, prompt in enumerate(prompts) if ids[: len(prompt)] == prompt]
        return index

    for rng in random_rounds(ROUNDS):
        said = [[turn_ids(chat, rng, vocabulary) for _ in range(TURNS + 1)] for _ in examples]
        generator = ScriptedGenerator(
            lambda request, said=said: said[prompt_of(request.prompt_ids)][request.turn],
            stop_token_ids=chat.stop_token_ids,
        )
        runner = RolloutRunner(CalculatorEnv, generator, chat, RolloutLimits(max_turns=TURNS, max_invalid_calls=9))
        requests = [RolloutRequest(example=example, seed=index) for index, example in enumerate(examples)]
        try:
            trajectories = runner.run(requests)
        finally:
            runner.close()
        for trajectory, turns in zip(trajectories, said, strict=True):
            check_laws(trajectory, turns)
        gc.collect()
        sizes.append(process.memory_info().rss)
    assert sizes[-1] - sizes[len(sizes) // 2] < MAX_GROWTH

"""A turn of a long rollout costs what one of a short rollout costs: what is read, written and decoded is counted."""

import asyncio
import time

import pytest

from agent_r1_trl.chat.format import PREFIX_TOKENS
from agent_r1_trl.features.journal import recorders
from agent_r1_trl.features.journal.recorders import JournaledGenerator, TrajectoryLog
from agent_r1_trl.features.journal.records import checksum_ids
from agent_r1_trl.generation import Generation, GenerationRequest, Generator
from agent_r1_trl.generation.base import GenerationError, SamplingParams
from agent_r1_trl.generation.vllm.server import _as_generation
from agent_r1_trl.rollout import Draft, RolloutRequest
from agent_r1_trl.rollout.contexts import Contexts
from agent_r1_trl.testing import call, chat_of, say
from agent_r1_trl.trajectory import Author, Trajectory, Turn
from tests.generation.helpers import SAMPLED
from tests.rollout.helpers import roll_out

CONTEXTS = [[5, 6], [5, 6, 7, 8], [5, 6, 7, 8, 9], [1, 2], [1, 2, 3]]
"""Those of the turns of a trajectory; the fourth was rewritten."""


def trajectory_of(num_turns, tokens_per_turn, *, ids=None):
    """Half of each turn sampled, half read."""
    half = tokens_per_turn // 2
    length = num_turns * 2 * half
    is_action = [place % (2 * half) < half for place in range(length)]
    return Trajectory(
        prompt_messages=[],
        prompt_ids=[1, 2, 3],
        completion_ids=ids or list(range(length)),
        action_mask=[int(flag) for flag in is_action],
        logprobs=[0.0] * length,
        turn_ids=[place // (2 * half) if flag else -1 for place, flag in enumerate(is_action)],
        authors=[Author.POLICY if flag else Author.ENVIRONMENT for flag in is_action],
        turns=[
            Turn(start=start, end=start + half, message=say(), reward=start + 1.0)
            for start in range(0, length, 2 * half)
        ],
        stop_reason="done",
        outcome_reward=0.5,
    )


# ---------------------------------------------------------------- the rollout


def test_the_parser_is_handed_the_end_of_the_context_and_reads_what_it_read_from_all_of_it(monkeypatch):
    chat, read = chat_of(), []
    parse = chat.parse

    def noted(token_ids, prompt_ids=(), tools=None, **options):
        message = parse(token_ids, prompt_ids, tools, **options)
        read.append((token_ids, prompt_ids, message))
        return message

    monkeypatch.setattr(chat, "parse", noted)
    turns = [call("echo", text=f"number {index} " * 20) for index in range(12)]
    trajectory, script = roll_out([*turns, say()], chat=chat, limits={"max_turns": 13, "max_completion_length": 10**6})
    assert len(trajectory.turns) == 13 and len(trajectory.completion_ids) > 20 * PREFIX_TOKENS
    for (ids, end, message), request in zip(read, script.requests, strict=True):
        assert len(end) == PREFIX_TOKENS
        assert message == parse(ids, request.prompt_ids)  # the ids of its calls, too
    ids = [item["id"] for turn in trajectory.turns for item in turn.message.get("tool_calls", ())]
    assert len({*ids}) == len(ids) == 12


@pytest.mark.parametrize(("policy", "num_turns"), [("drop_observations", 2), ("window", 3), ("step", 1)])
def test_what_two_contexts_have_in_common_is_put_together_once(policy, num_turns, monkeypatch):
    told = []

    def counted(self, index, observations, *, delta=Contexts._delta):
        told.append(index)
        return delta(self, index, observations)

    monkeypatch.setattr(Contexts, "_delta", counted)
    limits = {"context.policy": policy, "context.turns": num_turns, "max_turns": 41, "max_completion_length": 10**6}
    turns = [*(call("echo", text=f"number {index} " * 20) for index in range(40)), say()]
    trajectory, _ = roll_out(turns, limits=limits)
    assert len(trajectory.turns) == 41 and len(told) <= 40 * (num_turns + 1)
    monkeypatch.setattr(Contexts, "_num_kept", lambda self, messages: 0)
    again, _ = roll_out(turns, limits=limits)
    assert [row.prompt_ids for row in again.rows] == [row.prompt_ids for row in trajectory.rows]
    assert again.completion_ids == trajectory.completion_ids and again.authors == trajectory.authors


def test_rewards_are_placed_in_time_that_grows_with_the_tokens_and_not_with_turns_times_tokens():
    trajectory = trajectory_of(3000, 60)
    began = time.thread_time()
    rewards = trajectory.token_rewards()
    assert time.thread_time() - began < 2  # one pass over the tokens for each turn takes ten times as long
    assert sum(map(bool, rewards)) == 3000 and sum(rewards) == trajectory.total_reward


# ---------------------------------------------------------------- the journal


class Silent(Generator):
    async def generate(self, request):
        return Generation(token_ids=[9], logprobs=[-1.0], stop="stop")


def test_the_journal_adds_up_what_is_new_of_a_context_and_starts_again_where_it_was_rewritten(monkeypatch):
    read = []

    def noted(ids, before=0):
        read.append(list(ids))
        return checksum_ids(ids, before)

    monkeypatch.setattr(recorders, "checksum_ids", noted)
    log = TrajectoryLog(lambda record: None, [])
    generator = JournaledGenerator(Silent(), log=log, draft=Draft(request=RolloutRequest(example={})))
    for context in CONTEXTS:
        asyncio.run(generator.generate(GenerationRequest(prompt_ids=context, max_tokens=1, params=SAMPLED)))
        assert log.request["context"] == checksum_ids(context)
    assert read == [[5, 6], [7, 8], [9], [1, 2], [3]]


# ---------------------------------------------------------------- requests to a vLLM server


def test_a_server_that_writes_tokens_as_text_is_refused():
    choice = {"finish_reason": "stop", "logprobs": {"tokens": ["Oslo"], "token_logprobs": [-1.0]}}
    with pytest.raises(GenerationError, match="as text, not as ids"):
        _as_generation(choice, SamplingParams())

"""Laws of every trajectory, whatever the policy says and however it ends, for four chat formats.

Each conversation is drawn so that it must end for a given reason; the policy says anything: calls, texts, broken
calls, arbitrary ids, nothing at all. The loss is the trainer's own.
"""

import functools
import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_r1_trl import testing
from agent_r1_trl.generation.scripted import ScriptedTurn
from agent_r1_trl.testing import ScriptedPolicy, call, calls, chat_of, say
from agent_r1_trl.trainers.rewards import environment_reward
from agent_r1_trl.trainers.rollout_batch import RolloutBatch
from agent_r1_trl.trajectory import Author, StopReason, Trajectory
from agent_r1_trl.update.rows import pad_lists, pad_tokens
from tests.effort import examples
from tests.rollout.helpers import PROMPT, Recorder, sampled_ids, scene
from tests.toys import unfold
from tests.trainers.helpers import make_trainer, scored_batch

pytestmark = pytest.mark.fuzz
FAMILIES = ("qwen3", "llama3", "gemma4", "gptoss")
PARALLEL_CALLS = ("qwen3", "gemma4")
LONG = 100_000
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
TIMEOUT_S = 0.4

every_family = pytest.mark.parametrize("family", FAMILIES)
every_reason = pytest.mark.parametrize("reason", StopReason, ids=lambda reason: reason.value)


@functools.cache
def prompt_length(family):
    chat = chat_of(family)
    return len(chat.encode_prompt(PROMPT, [item.schema for item in scene().tools]))


# -------------------------------------------------------------------- what the policy says


def usable_turns(family):
    """Calls that run."""
    texts = st.text(max_size=12) | st.sampled_from(["<|im_end|>", "</tool_call>", "<turn|>", "qzxv é🙂"])
    number = st.integers(-9, 9)
    messages = st.builds(lambda a, b: call("add", a=a, b=b), number, number)
    messages |= st.builds(lambda text: call("echo", text=text), texts)
    if family in PARALLEL_CALLS:
        messages |= st.builds(
            lambda a, text: calls(("add", {"a": a, "b": 1}), ("echo", {"text": text})), number, texts
        )
    return messages.map(chat_of(family).encode_reply)


def unusable_turns(family):
    """Calls that cannot be run."""
    return st.sampled_from([call("nope", x=1), call("add", a="two")]).map(chat_of(family).encode_reply)


def odd_turns(family):
    """Any ids a sampler could give: control tokens in odd places, cut turns, nothing."""
    chat = chat_of(family)
    inner = st.integers(0, len(chat.tokenizer) - 1).filter(lambda token: token not in chat.stop_token_ids)
    ending = st.sampled_from([[], *([stop] for stop in chat.stop_token_ids)])
    return st.builds(lambda ids, end: ids + end, st.lists(inner, max_size=8), ending)


def mutated_turns(family):
    """Calls of which a piece was dropped, or replaced by control tokens."""
    chat = chat_of(family)
    control = sorted({*chat.encoder.control_ids.values()} - {*chat.stop_token_ids})
    new = st.lists(st.sampled_from(control), max_size=3)
    return st.builds(
        lambda ids, start, length, new: [*ids[:-1][:start], *new, *ids[:-1][start + length :], ids[-1]],
        usable_turns(family), st.integers(0, 40), st.integers(0, 20), new,
    )  # fmt: skip


def any_turns(family):
    texts = st.builds(say, st.text(max_size=12)).map(chat_of(family).encode_reply)
    return usable_turns(family) | unusable_turns(family) | odd_turns(family) | mutated_turns(family) | texts


class Conversation(NamedTuple):
    """A script, an environment and limits."""

    turns: list
    env: type
    limits: dict


@st.composite
def conversations(draw, family, reason, min_turns=1):
    """One that ends for `reason`."""
    turns = draw(st.lists(any_turns(family), min_size=min_turns, max_size=4))
    limits = {"max_invalid_calls": LONG, "max_completion_length": LONG, "max_turns": len(turns) + 1}
    rewards = draw(st.lists(st.floats(-2, 2), min_size=5, max_size=5))
    acts = {"rewards": rewards, "outcome": draw(st.floats(-2, 2))}
    last = len(turns) - 1
    if draw(st.booleans()):
        limits["max_tokens_per_turn"] = draw(st.integers(1, 40))
    limits["max_observation_tokens"] = draw(st.sampled_from([1, 7, 1024]))
    match reason:
        case StopReason.DONE:
            acts["ends_at"] = last
        case StopReason.MAX_TURNS:
            limits["max_turns"] = len(turns)
        case StopReason.MAX_COMPLETION_LENGTH:
            free = roll_out(family, Conversation(turns, scene(**acts), limits | {"max_turns": len(turns)})).trajectory
            limits["max_completion_length"] = draw(st.integers(1, max(1, len(free.completion_ids) - 1)))
        case StopReason.INVALID_CALLS:
            limits["max_invalid_calls"] = draw(st.integers(0, 2))
            limits.pop("max_tokens_per_turn", None)
            turns = draw(st.lists(usable_turns(family), max_size=2))
            turns += draw(st.lists(unusable_turns(family), min_size=3, max_size=3))
            limits["max_turns"] = len(turns) + 1
        case StopReason.TIMEOUT:
            limits["rollout_timeout"] = TIMEOUT_S
            acts["hangs_at"] = draw(st.integers(0, last))
        case StopReason.PROMPT_TOO_LONG:
            limits["max_model_length"] = draw(st.integers(2, prompt_length(family)))
        case StopReason.ENVIRONMENT_ERROR:
            acts["fails_at"] = draw(st.integers(-1 if min_turns == 1 else 0, last))
        case StopReason.TOOL_FAILURE:
            acts["down_at"] = draw(st.integers(0, last))
        case StopReason.GENERATION_ERROR:
            turns = [*turns, RuntimeError("engine gone")]
    return Conversation(turns, scene(**acts), limits)


class RolledOut(NamedTuple):
    """What came of a conversation, and what the sampler handed out on the way."""

    trajectory: Trajectory
    sampler: Recorder


def roll_out(family, conversation):
    chat = chat_of(family)
    turns = [*conversation.turns, *[conversation.turns[-1]] * 3]  # it goes on until a limit is reached
    script = [turn if isinstance(turn, Exception) else _numbered(index, turn) for index, turn in enumerate(turns)]
    sampler = Recorder(ScriptedPolicy(script, chat))
    (trajectory,) = testing.roll_out(conversation.env, sampler, chat=chat, **unfold(conversation.limits))
    return RolledOut(trajectory, sampler)


def _numbered(index, ids):
    """Every sampled token has a log-probability of its own."""
    return ScriptedTurn(
        token_ids=ids, logprobs=[-(1 + 1000 * index + position) / 1024 for position in range(len(ids))]
    )


# -------------------------------------------------------------------- laws of one trajectory


def check_tokens(trajectory, sampler):
    """What was sampled, and nothing else, is masked in and trained on."""
    assert sampled_ids(trajectory) == sampler.ids
    length = len(trajectory.completion_ids) + 3
    mask = pad_tokens([trajectory], "action_mask", 0, length).bool()
    ids = pad_lists([trajectory.completion_ids], 0, length=length, dtype=torch.long)
    logprobs = pad_lists([trajectory.logprobs], 0, length=length, dtype=torch.float64)
    assert int(mask.sum()) == len(sampler.ids) and ids[mask].tolist() == sampler.ids
    assert logprobs[mask].tolist() == sampler.logprobs and (logprobs[~mask] == 0).all()
    spans = [trajectory.completion_ids[turn.start : turn.end] for turn in trajectory.turns]
    assert spans == [generation.token_ids for generation in sampler.handed]


def check_rewards(trajectory):
    """No reward is lost, or paid to a token that was not sampled."""
    rewards = trajectory.token_rewards()
    assert all(reward == 0 for reward, mask in zip(rewards, trajectory.action_mask, strict=True) if not mask)
    total = math.fsum(turn.reward for turn in trajectory.turns) + trajectory.outcome_reward
    if trajectory.num_action_tokens:
        assert math.isclose(math.fsum(rewards), total, abs_tol=1e-12)
    (returned,) = environment_reward([trajectory])
    if trajectory.stop_reason.is_infrastructure_failure:
        assert trajectory.outcome_reward == 0 and returned is None
    else:
        assert returned == pytest.approx(total, abs=1e-12)


def check_authors(trajectory, control):
    """What was not sampled has mask 0 and an author, and what the environment says steers nothing."""
    for before, after in itertools.pairwise(trajectory.turns):
        authors = trajectory.authors[before.end : after.start]
        assert Author.POLICY not in authors and Author.TEMPLATE in authors
        if any(message["content"].strip() for message in before.observations):
            assert Author.ENVIRONMENT in authors
    for token, mask, turn_id, author in zip(
        trajectory.completion_ids, trajectory.action_mask, trajectory.turn_ids, trajectory.authors, strict=True
    ):
        assert (mask == 0) == (turn_id == -1) == (author is not Author.POLICY)
        assert author is not Author.ENVIRONMENT or token not in control


@every_family
@every_reason
def test_tokens_rewards_authors_and_json_of_every_trajectory(family, reason):
    few = 2 if reason is StopReason.TIMEOUT else 8  # each takes its time to end

    @settings(max_examples=examples(few), deadline=None, suppress_health_check=SLOW)
    @given(conversations(family, reason))
    def law(conversation):
        trajectory, sampler = roll_out(family, conversation)
        assert trajectory.stop_reason is reason
        check_tokens(trajectory, sampler)
        check_rewards(trajectory)
        check_authors(trajectory, set(chat_of(family).encoder.control_ids.values()))
        back = Trajectory.from_json(trajectory.to_json())
        assert back == trajectory and back.to_json() == trajectory.to_json()
        assert back.token_rewards() == trajectory.token_rewards()

    law()


# -------------------------------------------------------------------- the loss


@functools.cache
def trainer_of(family, folder):
    sizes = {"per_device_train_batch_size": len(StopReason), "num_generations": 3}
    trainer = make_trainer(folder, family=family, script=None, env=scene(), **sizes)
    trainer.rollouts.generate = lambda rows, model, position: RolloutBatch(
        rows, trainer.given, None, position=position
    )
    return trainer


def gradient_at_log_probs(trainer, batch):
    """Gradient of the trainer's loss with respect to the per-token log-probabilities, (B, T)."""
    seen = []
    original = trainer._get_per_token_logps_and_entropies

    def watched(*args, **kwargs):
        log_probs, *rest = original(*args, **kwargs)
        seen.append(log_probs.detach().requires_grad_(True))
        return seen[-1], *rest

    trainer._get_per_token_logps_and_entropies = watched
    try:
        trainer.compute_loss(trainer.model, batch).backward()
    finally:
        trainer._get_per_token_logps_and_entropies = original
    return seen[-1].grad


@every_family
@settings(max_examples=examples(4), deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_a_batch_of_all_stop_reasons_has_gradients_only_where_it_was_sampled(family, data, tmp_path_factory):
    trainer = trainer_of(family, tmp_path_factory.getbasetemp() / family)
    trainer.given = [roll_out(family, data.draw(conversations(family, reason))).trajectory for reason in StopReason]
    batch = scored_batch(trainer)
    longest = batch["completion_ids"].shape[1]
    sampled = pad_tokens(trainer.given, "action_mask", 0, longest).bool()
    trained = torch.tensor([not trajectory.stop_reason.is_infrastructure_failure for trajectory in trainer.given])
    expected = sampled & trained.unsqueeze(1)
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert torch.equal(mask, expected)
    for row, trajectory in enumerate(trainer.given):
        if trained[row]:
            assert batch["completion_ids"][row][mask[row]].tolist() == sampled_ids(trajectory)
    gradient = gradient_at_log_probs(trainer, batch)
    assert (gradient[~mask] == 0).all()
    live = mask & (batch["advantages"] != 0)
    assert (gradient[live] != 0).all()

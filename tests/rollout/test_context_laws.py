"""Laws of rewritten contexts, for every policy, whatever the model says and however long anything is.

The templates are those of six families, and one that TRL ships and no other test reads. What the sampler was given is
read from the sampler's own log; what a context has to hold is computed here, from the environment's own answers.
"""

import functools
import itertools
import math
import random
import re
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.environments import StepResult
from agent_r1_trl.testing import add, call, make_tokenizer, say
from agent_r1_trl.testing.tokenizers import read_template
from agent_r1_trl.trajectory import Trajectory
from tests.effort import examples
from tests.families import FAMILIES
from tests.rollout.helpers import check_rows, roll_out_recorded

pytestmark = pytest.mark.fuzz

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 3?"}]
TEMPLATES = {
    **{name: FAMILIES[name] for name in ("qwen3", "llama3_1", "mistral_nemo", "deepseek_v3_1", "gemma4", "gpt_oss")},
    "trl": lambda: make_tokenizer("qwen3", chat_template=read_template("qwen3_8")),
}
LONG = 100_000


STRIP = ("qwen3", "deepseek_v3_1", "gpt_oss", "trl")
"""Families whose templates drop reasoning."""


@functools.cache
def chat_of(family, strips=False):
    kwargs = {"preserve_thinking": False} if strips and family == "trl" else None
    return ChatFormat(TEMPLATES[family](), strips_reasoning=strips, chat_template_kwargs=kwargs)


def chat_for(family, limits):
    return chat_of(family, limits["context.policy"] == "strip_thinking")


@functools.cache
def prompt_length(family):
    return len(chat_of(family).encode_prompt(PROMPT, [add.schema]))


# -------------------------------------------------------------------- a conversation


class Conversation(NamedTuple):
    """What the policy says, what the environment answers, and the limits."""

    turns: list
    """Ids of each turn."""
    sizes: list
    """Words in the answer to each turn."""
    rewards: list
    limits: dict
    seed: int
    """Of what `anything` draws."""


def environment(conversation):
    """Answers each turn with a text that stands nowhere else."""

    class Sights:
        tools = (add,)

        def reset(self, example):
            self.turn = -1
            return [dict(message) for message in PROMPT]

        def step(self, message):
            self.turn += 1
            text = f"sight{self.turn}. " + "More of it. " * conversation.sizes[self.turn]
            asked = message.get("tool_calls") or ()
            answers = [
                {"role": "tool", "tool_call_id": item["id"], "name": item["function"]["name"], "content": text}
                for item in asked
            ]
            answers = answers or [{"role": "user", "content": text}]
            info = {"next_context": context_of(self.turn)} if gives_context(conversation, self.turn) else {}
            return StepResult(answers, conversation.rewards[self.turn], False, info)

        def outcome_reward(self, trajectory):
            return conversation.rewards[-1]

        def close(self):
            pass

    return Sights


def gives_context(conversation, turn):
    return conversation.limits["context.policy"] == "step" and (conversation.seed + turn) % 3 == 0


def context_of(turn):
    return [{"role": "user", "content": f"sight{50 + turn}: all that you need to know."}]


def anything(view):
    """A user's policy: whatever comes to a random mind, and it leaves a note of it in `anything.returned`."""
    rng = random.Random(f"{anything.seed} {len(view.turns)}")
    whole = [[turn.message, *turn.observations] for turn in view.turns]
    some = [rng.choice(whole) for _ in range(rng.randint(0, 3))]  # in any order, and perhaps twice
    words = {
        "role": "user",
        "content": f"sight{rng.randint(90, 99)} <|im_end|> of mine. " + "Long. " * rng.randint(0, 99),
    }
    cut = [{**message, "content": str(message.get("content") or "")[:7]} for message in whole[-1]]
    messages = rng.choice(
        [
            view.messages,
            tuple(view.messages),
            [*view.prompt_messages, *itertools.chain(*some)],
            [*view.prompt_messages, *itertools.chain(*whole[::-1])],
            [*view.messages, words],
            [*view.messages[:-1], {**view.messages[-1], "content": "less"}],
            [words, *whole[-1]],
            [*view.prompt_messages, *cut],
            list(view.prompt_messages),
            list(itertools.chain(*whole)),
        ]
    )
    anything.returned.append(messages)
    return messages


class Request(NamedTuple):
    """What the sampler was asked for, and what it said."""

    context: list
    sampled: list
    max_tokens: int


def roll_out(family, conversation):
    """The trajectory and the sampler's log."""
    anything.seed, anything.returned = conversation.seed, []
    chat, env = chat_for(family, conversation.limits), environment(conversation)
    limits = {"max_invalid_calls": LONG, **conversation.limits}
    trajectory, recorder = roll_out_recorded(conversation.turns, chat=chat, env=env, **limits)
    return trajectory, [
        Request(context, sampled, max_tokens)
        for (context, sampled), max_tokens in zip(recorder.log, recorder.max_tokens, strict=True)
    ]


def turns_of(family):
    """Ids of a turn: calls, texts, and any ids that a sampler could give, control tokens and nothing included."""
    chat = chat_of(family)
    texts = st.text(max_size=9) | st.sampled_from(["<|im_end|>", "</tool_call>", "<think>\nHm.\n</think>\n\n5", "é🙂"])
    messages = st.builds(lambda a: call("add", a=a, b=1), st.integers(-9, 9)) | st.builds(say, texts)
    return messages.map(chat.encode_reply) | st.lists(st.integers(0, len(chat.tokenizer) - 1), max_size=8)


@st.composite
def conversations(draw, family):
    turns = draw(st.lists(turns_of(family), min_size=1, max_size=6))
    number = len(turns) + 1
    policies = ["keep", "window", "drop_observations", "step", "summarise", f"{__name__}.anything"]
    policy = draw(st.sampled_from([*policies, *(["strip_thinking"] if family in STRIP else [])]))
    limits = {"context.policy": policy, "max_turns": number, "max_completion_length": LONG}
    if draw(st.booleans()):
        limits["max_tokens_per_turn"] = draw(st.integers(1, 40))
    match draw(st.sampled_from(["free", "completion", "model"])):
        case "completion":
            limits["max_completion_length"] = draw(st.integers(30, 400))
        case "model":
            limits["max_model_length"] = prompt_length(family) + draw(st.integers(1, 400))
    if policy in ("window", "drop_observations"):
        most = limits.get("max_model_length", 900) - 1
        tokens = draw(st.none() | st.integers(50, most))
        limits |= {"context.turns": draw(st.integers(1, 3)), "context.tokens": tokens}
    if policy == "step":
        limits["context.turns"] = draw(st.none() | st.integers(1, 3))
    if policy == "summarise":
        tokens = None if "max_model_length" in limits else draw(st.none() | st.integers(50, 900))
        limits |= {"context.turns": draw(st.integers(1, 3)), "context.tokens": tokens}
        limits["context.summary_tokens"] = draw(st.integers(1, 20))
    return Conversation(
        turns=turns,
        sizes=draw(st.lists(st.integers(5, 30), min_size=number, max_size=number)),
        rewards=draw(st.lists(st.floats(-2, 2), min_size=number + 1, max_size=number + 1)),
        limits=limits,
        seed=draw(st.integers(0, 99)),
    )


# -------------------------------------------------------------------- the laws


def check_rewards(trajectory: Trajectory, rewards):
    """The rewards on the tokens of all rows are those of the trajectory."""
    on_tokens = trajectory.token_rewards()
    in_rows = [
        on_tokens[place]
        for row in trajectory.rows
        for place, mask in zip((p for span in row.spans for p in range(*span)), row.action_mask, strict=True)
        if mask
    ]
    if in_rows and not trajectory.stop_reason.is_infrastructure_failure:
        earned = sum(turn.reward for turn in trajectory.turns) + rewards[-1]
        assert math.fsum(in_rows) == pytest.approx(earned, abs=1e-9)
    assert len(in_rows) == trajectory.num_action_tokens


def check_limits(trajectory: Trajectory, log, limits, deltas):
    """A context has room in the model, and what was said and answered has room in the trajectory."""
    for turn, (context, sampled, max_tokens) in zip(trajectory.turns, log, strict=True):
        most = limits["context.summary_tokens"] if turn.is_summary else limits.get("max_tokens_per_turn", LONG)
        assert 1 <= max_tokens <= most and len(sampled) <= max_tokens
        assert len(context) + max_tokens <= limits.get("max_model_length", 2 * LONG)
    spent = sum(len(request.sampled) for request in log) + sum(map(len, deltas[: len(log) - 1]))
    assert spent <= limits["max_completion_length"]
    assert len(trajectory.completion_ids) <= limits["max_completion_length"], "a batch is no wider than that"
    if limits["context.policy"] == "keep":
        # An answer that nothing follows may stand at the end of the completion.
        assert len(trajectory.completion_ids) in (spent, spent + sum(map(len, deltas[len(log) - 1 :])))
    assert sum(not turn.is_summary for turn in trajectory.turns) <= limits["max_turns"]


def sights(text):
    return sorted({int(number) for number in re.findall(r"sight(\d+)", text)})


def check_sights(trajectory: Trajectory, log, conversation, deltas, encoder):
    """The answers that stand in a context are those of the policy's rule."""
    limits = conversation.limits
    policy, turns, tokens = (limits.get(name) for name in ("context.policy", "context.turns", "context.tokens"))
    present, number = [], 0
    for place, (context, *_) in enumerate(log):
        found = sights(encoder.to_text(context))
        if place and trajectory.turns[place - 1].is_summary:
            assert found in ([], present[-1:]), "the prompt, the summary, and the last turn if there is room"
            present = found
        elif place:
            previous = log[place - 1]
            whole = len(previous.context) + len(previous.sampled) + len(deltas[place - 1])
            present, number = [*present, number], number + 1
            if policy in ("window", "drop_observations") and (tokens is None or whole > tokens):
                present = present[-turns:]
            if policy == "step":
                is_given = gives_context(conversation, number - 1)
                present = [49 + number] if is_given else [*range(number)][-(turns or 1) :]
            if policy.endswith(".anything"):
                returned = anything.returned[number - 1]
                present = sights(" ".join(str(message.get("content")) for message in returned))
        assert found == present
        if policy == "drop_observations":
            old = [turn for index, turn in enumerate(trajectory.turns[:number]) if index not in present]
            assert encoder.to_text(context).count(" left out]") == sum(len(turn.observations) for turn in old)
    if policy == "step":
        assert all(len({*row.turn_ids} - {-1}) <= 1 for row in trajectory.rows)


def answered(trajectory, chat):
    """The ids that follow each turn, if it was answered."""
    deltas = []
    for turn in trajectory.turns:
        sampled = trajectory.completion_ids[turn.start : turn.end]
        deltas.append([])
        if turn.observations:
            ids, _ = chat.encode_observations(turn.message, turn.observations, [add.schema])
            deltas[-1] = [*chat.encode_turn_end(sampled, stopped=not turn.is_truncated), *ids]
    return deltas


@pytest.mark.parametrize("family", TEMPLATES)
def test_rows_rewards_limits_and_what_stands_in_a_context(family):
    @settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(conversations(family))
    def laws(conversation):
        trajectory, log = roll_out(family, conversation)
        chat, limits = chat_for(family, conversation.limits), conversation.limits
        deltas = answered(trajectory, chat)
        assert len(trajectory.turns) == len(log)
        assert limits["context.policy"].endswith(".anything") or not trajectory.stop_reason.is_infrastructure_failure
        check_rows(trajectory, log)
        check_rewards(trajectory, conversation.rewards)
        check_limits(trajectory, log, limits, deltas)
        check_sights(trajectory, log, conversation, deltas, chat.encoder)

    laws()

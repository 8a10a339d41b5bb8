"""A conversation is the training rollout with a person: the same tokens, limits and masks, message by message."""

import asyncio

import pytest

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.evaluation.agent import Agent
from agent_r1_trl.features.serve import Conversation, ConversationError
from agent_r1_trl.generation import GenerationError, ScriptedGenerator
from agent_r1_trl.testing import AddEchoEnv, ScriptedPolicy, call, chat_of, roll_out, say
from agent_r1_trl.trajectory import StopReason
from tests.families import FAMILIES
from tests.toys import limits_of, unfold

SAID = ["What is 2 + 3? <|im_end|>", "And é 日本?", "Thanks"]
TURNS = [
    call(),
    say("It is 5."),
    call("echo", text="日本 <|im_end|>"),
    call("nope", x=1),
    say("That is 日本."),
    say("Bye"),
]


ASKED = "Sum it up"


class Told(AddEchoEnv):
    """A user who says `SAID`, as training knows users."""

    system_prompt = "You are a helper."

    def reset(self, example):
        self.waiting = SAID[1:]
        return super().reset(example)

    def next_user_message(self, message):
        return self.waiting.pop(0) if self.waiting else None


class Heard(AddEchoEnv):
    """The same without the user, who is a person."""

    system_prompt = "You are a helper."


def agent(script, chat, **limits):
    limits = {"max_turns": 20, "max_completion_length": 4000} | limits
    return Agent(name="tiny", generator=script, chat=chat, limits=limits_of(**limits))


def talk(turns=TURNS, said=SAID, *, env=Heard, chat=None, limits=None, **options):
    """The conversation, closed, after everything was said."""
    chat = chat or chat_of()
    conversation = Conversation(agent(ScriptedPolicy(turns, chat), chat, **(limits or {})), env, **options)

    async def run():
        for text in said:
            await conversation.say(text)
        await conversation.close()

    asyncio.run(run())
    return conversation


def tokens(trajectory):
    names = ("prompt_ids", "completion_ids", "action_mask", "turn_ids", "authors", "logprobs", "messages", "segments")
    return {name: getattr(trajectory, name) for name in names}


def trained(chat, limits, turns=TURNS):
    limits = {"max_turns": 20, "max_completion_length": 4000} | unfold(limits)
    (trajectory,) = roll_out(Told, turns, [{"prompt": SAID[0]}], chat=chat, **limits)
    return trajectory


OFTEN = ("qwen2_5", "qwen3", "gpt_oss")
RARE = ("qwen3_5", "llama3_2", "mistral_small_3_2", "deepseek_v3_1", "glm_4_5", "gemma4")


@pytest.mark.parametrize("family", [*OFTEN, *(pytest.param(name, marks=pytest.mark.matrix) for name in RARE)])
def test_a_chat_is_the_trajectory_of_training_token_for_token(family):
    chat = ChatFormat(FAMILIES[family]())
    expected = trained(chat, {})
    assert expected.stop_reason is StopReason.DONE and len(expected.turns) == len(TURNS)
    assert tokens(talk(chat=chat).trajectory) == tokens(expected)


@pytest.mark.parametrize(
    "limits",
    [
        {"context.policy": "window", "context.turns": 2},
        {"context.policy": "drop_observations", "context.turns": 1},
        {"context.policy": "step", "context.turns": 1},
        {"max_observation_tokens": 6},
    ],
    ids=str,
)
def test_context_policy_and_limits_are_those_of_training(limits):
    expected = trained(chat_of(), limits)
    assert tokens(expected) != tokens(trained(chat_of(), {}))
    assert tokens(talk(limits=limits).trajectory) == tokens(expected)


def test_what_happens_is_told_in_order():
    events = []
    talk(said=SAID[:2], chat=chat_of("qwen2_5"), on_event=events.append)
    assert [(event.kind, event.name) for event in events] == [
        ("prompt", "system"), ("call", "add"), ("observation", "add"), ("text", ""),
        ("call", "echo"), ("observation", "echo"), ("call", "nope"), ("observation", "nope"), ("text", ""),
    ]  # fmt: skip
    assert next(event.arguments for event in events if event.kind == "call") == {"a": 2, "b": 3}
    texts = [event.text for event in events if event.kind == "text"]
    assert texts[0] == "It is 5." and not any("tool_call" in text for text in texts)
    assert [event.is_error for event in events if event.kind == "observation"] == [False, False, True]


@pytest.mark.parametrize("acts", [False, True])
def test_a_message_that_cannot_be_answered_is_taken_back_unless_the_environment_has_acted_on_it(acts):
    chat, script = chat_of(), ScriptedPolicy([say("a"), call(), say("b")], chat_of())
    first, called, last = script.turn_ids
    answers = [first, *([called] if acts else []), GenerationError("down"), last]
    conversation = Conversation(
        agent(ScriptedGenerator(lambda request: answers.pop(0), stop_token_ids=chat.stop_token_ids), chat), Heard
    )

    async def run():
        kept = await conversation.say("1")
        with pytest.raises(ConversationError, match="down"):
            await conversation.say("lost")
        assert conversation.trajectory is kept and ("has acted" in str(conversation.ended)) is acts
        if acts:
            await conversation.reset()
        trajectory = await conversation.say("2")
        await conversation.close()
        return trajectory

    said = [message["content"] for message in asyncio.run(run()).messages if message["role"] == "user"]
    assert said == (["2"] if acts else ["1", "2"])


def test_a_limit_ends_the_conversation_and_says_which():
    conversation = talk(said=SAID[:1], limits={"max_turns": 1})
    assert "max_turns=1" in conversation.ended
    with pytest.raises(ValueError, match="has ended"):
        asyncio.run(conversation.say("more"))
    with pytest.raises(ConversationError, match="max_turns=2"):
        talk(said=SAID[:2], limits={"max_turns": 2})


def test_a_limit_of_the_environments_own_is_not_named_as_one_of_the_rollout():
    class Short(Heard):
        async def step(self, message):
            step = await super().step(message)
            return step._replace(done=True, info={**step.info, "is_truncated": True})

    assert talk(said=SAID[:1], env=Short).ended == "a limit of the environment's own is reached"


def test_nothing_is_scored():
    class Strict(Heard):
        def process_reward(self, call, result):
            return self.example["no such column"]

        def outcome_reward(self, trajectory):
            raise AssertionError

    assert talk(said=SAID[:1], env=Strict).trajectory.total_reward == 0


def test_the_environment_reads_the_row_and_the_first_message():
    class Reads(Heard):
        def system_message(self, example):
            return f"{example['question']} {example['size']}"

    conversation = talk(said=["hello"], turns=[say("x")], env=Reads, row={"size": 4})
    assert conversation.trajectory.prompt_messages[0]["content"] == "hello 4"


def in_order(chat, said):
    """A generator that says these turns one after another, and a summary whenever it is asked for one."""
    turns, summary = iter([chat.encode_reply(message) for message in said]), chat.encode_reply(say("A sum: it is 5."))

    def answer(request):
        return summary if ASKED in chat.encoder.to_text(list(request.prompt_ids[-100:])) else next(turns)

    return ScriptedGenerator(answer, stop_token_ids=chat.stop_token_ids)


def both(chat, said, **limits):
    """The trajectory of training and that of a chat in which a person says `SAID`; the policy says the same."""
    limits = {"max_turns": 20, "max_completion_length": 4000} | unfold(limits)
    (expected,) = roll_out(Told, in_order(chat, said), [{"prompt": SAID[0]}], chat=chat, **limits)
    limits = limits_of(**limits)
    conversation = Conversation(Agent(name="tiny", generator=in_order(chat, said), chat=chat, limits=limits), Heard)

    async def run():
        for text in SAID:
            await conversation.say(text)
        await conversation.close()

    asyncio.run(run())
    return expected, conversation.trajectory


@pytest.mark.parametrize("settings", [{"context.turns": 2}, {"context.tokens": 260}], ids=str)
def test_a_chat_asks_for_summaries_where_training_does_and_goes_on_after_them(settings):
    limits = {
        "context.policy": "summarise",
        "context.summary_tokens": 60,
        "context.summary_prompt": f"{ASKED}, please.",
        **settings,
    }
    expected, trajectory = both(chat_of("qwen3"), TURNS, **limits)
    assert sum(turn.is_summary for turn in expected.turns) >= 2 and len(expected.rows) >= 3
    assert expected.stop_reason is StopReason.DONE
    assert tokens(trajectory) == tokens(expected)


@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("qwen3_5", "glm_4_5", "gpt_oss"))]
)
def test_a_chat_drops_the_reasoning_that_training_drops(family):
    chat = ChatFormat(FAMILIES[family](), strips_reasoning=True)
    said = [message | {"reasoning_content": f"Thought {index}."} for index, message in enumerate(TURNS)]
    expected, trajectory = both(chat, said, context={"policy": "strip_thinking"})
    assert expected.stop_reason is StopReason.DONE and len(expected.rows) > 1
    assert tokens(trajectory) == tokens(expected)

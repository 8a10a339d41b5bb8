"""Each limit of a rollout at its boundary, and which values cannot be one."""

import time

import pytest

from agent_r1_trl.environments import StepResult, ToolEnv
from agent_r1_trl.rollout.limits import RolloutSettings
from agent_r1_trl.settings import rules_of
from agent_r1_trl.testing import AddEchoEnv, ScriptedPolicy, call, calls, chat_of, say
from agent_r1_trl.trajectory import Author, StopReason
from tests.rollout.helpers import roll_out, sampled_ids, scene

# -------------------------------------------------------------------- sampled tokens


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_a_turn_of_just_its_limit_is_not_cut(spare):
    chat = chat_of()
    script = ScriptedPolicy([say("a longer answer"), say("ok")], chat)
    length = len(script.turn_ids[0])
    trajectory, script = roll_out(script, chat=chat, limits={"max_tokens_per_turn": length + spare})
    first = trajectory.turns[0]
    assert first.is_truncated == (spare < 0)
    assert first.end - first.start == length + min(0, spare)
    assert trajectory.stop_reason is StopReason.DONE
    assert len(trajectory.turns) == (2 if spare < 0 else 1)
    assert {request.max_tokens for request in script.requests} == {length + spare}


def rolled_out_to_the_end():
    """A call and an answer without limits: (chat, ids of the call, ids between, ids of the answer)."""
    chat = chat_of()
    trajectory, script = roll_out([call(), say("12345678")], chat=chat)
    first, second = trajectory.turns
    return chat, script.turn_ids[0], trajectory.completion_ids[first.end : second.start], script.turn_ids[1]


@pytest.mark.parametrize("spare", [0, 1])
def test_an_observation_must_leave_room_for_a_token(spare):
    chat, first, between, _ = rolled_out_to_the_end()
    budget = len(first) + len(between) + spare
    trajectory, script = roll_out([call(), say("12345678")], chat=chat, limits={"max_completion_length": budget})
    assert trajectory.stop_reason is StopReason.MAX_COMPLETION_LENGTH
    assert len(script.requests) == 1 + spare
    assert len(trajectory.completion_ids) == (budget if spare else len(first))
    assert [bool(turn.observations) for turn in trajectory.turns] == ([True, False] if spare else [False])


@pytest.mark.parametrize("spare", [0, 1])
def test_a_call_that_ends_with_the_budget_still_runs_and_is_paid(spare):
    chat, first, _, _ = rolled_out_to_the_end()
    trajectory, _ = roll_out([call(), say()], chat=chat, limits={"max_completion_length": len(first) + spare - 1})
    assert trajectory.stop_reason is StopReason.MAX_COMPLETION_LENGTH
    assert trajectory.process_reward == (0.5 if spare else 0.0)
    assert len(trajectory.tool_results) == spare
    assert sampled_ids(trajectory) == first[: len(first) + spare - 1]


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_prompt_and_completion_share_the_models_length(spare):
    chat = chat_of()
    whole, _ = roll_out([say("12345678")], chat=chat)
    length = len(whole.prompt_ids) + spare
    trajectory, script = roll_out([say("12345678")], chat=chat, limits={"max_model_length": length})
    assert trajectory.completion_ids == whole.completion_ids[:spare]
    if spare:
        assert trajectory.stop_reason is StopReason.MAX_COMPLETION_LENGTH
    else:
        assert trajectory.stop_reason is StopReason.PROMPT_TOO_LONG
        assert script.requests == []


# -------------------------------------------------------------------- observations


def observed(text, limit, chat=None):
    chat = chat or chat_of()
    turns = [call("echo", text=text), say("ok")]
    trajectory, _ = roll_out(
        turns, chat=chat, limits={"max_observation_tokens": limit, "max_completion_length": 10_000}
    )
    return trajectory, trajectory.turns[0].observations[0]["content"]


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_an_observation_of_just_its_limit_is_left_alone(spare):
    chat = chat_of()
    text = "one two three four five six seven eight nine ten " * 4
    count = chat.count(text)
    trajectory, shown = observed(text, count + spare, chat)
    assert (shown == text) == (spare >= 0)
    assert trajectory.tool_results[0].content == text, "the record keeps the whole result"
    if spare < 0:
        assert shown.endswith(f"\n[truncated: {count} tokens, the limit is {count - 1}]")
        assert text.startswith(shown[: shown.index("\n[truncated")])
        assert chat.count(shown) <= count - 1


@pytest.mark.parametrize("limit", [1, 2, 10, 40, 80])
def test_however_small_the_limit_at_least_half_of_it_is_data(limit):
    chat = chat_of()
    trajectory, shown = observed("word " * 200, limit, chat)
    data, _, note = shown.partition("\n[truncated")
    assert bool(note) == (limit > 10) and ("the limit is 80" in note) == (limit == 80)
    assert limit / 2 <= chat.count(data) and chat.count(shown) <= limit
    environment = trajectory.authors.count(Author.ENVIRONMENT)
    assert environment <= limit + 2, "two tokens may reach into the glue"


@pytest.mark.parametrize("limit", [3, 20, 64, 300])
def test_parallel_results_share_the_limit_and_one_note(limit):
    chat = chat_of()
    texts = [f"{name} is a fact about {name} that goes on. " * 20 for name in ("one", "two", "six", "ten") * 2]
    turn = calls(*(("echo", {"text": text}) for text in texts))
    limits = {"max_observation_tokens": limit, "max_completion_length": 100_000}
    trajectory, _ = roll_out([turn, say("ok")], chat=chat, limits=limits)
    shown = [message["content"] for message in trajectory.turns[0].observations]
    kept = [text.partition("\n[truncated")[0] for text in shown]
    assert all(text.startswith(part) for text, part in zip(texts, kept, strict=True))
    assert sum(map(chat.count, shown)) <= limit
    assert "".join(shown).count("[truncated") == (limit >= 20) == shown[-1].endswith("]")
    lengths = [chat.count(part) for part in kept]
    assert sum(lengths) >= limit / 2 and max(lengths[:-1]) - min(lengths[:-1]) <= 1


@pytest.mark.parametrize("others", [[{"type": "text", "text": "a fact " * 40}], {"fact": "long " * 40}], ids=type)
def test_observations_of_text_blocks_and_data_are_limited_as_text_is(others):
    class OtherEnv(AddEchoEnv):
        async def step(self, message):
            found = await super().step(message)
            contents = [others, "a text " * 40, [{"type": "text", "text": "42"}]]
            return found._replace(observations=[{**found.observations[0], "content": item} for item in contents])

    chat = chat_of()
    turn = calls(*[("echo", {"text": "x"})] * 3)
    limits = {"max_observation_tokens": 60, "max_completion_length": 10_000, "max_turns": 1}
    trajectory, _ = roll_out([turn], env=OtherEnv, chat=chat, limits=limits)
    first, second, third = (message["content"] for message in trajectory.turns[0].observations)
    assert third == "42" and "fact" in first and second.startswith("a text") and second.endswith("[truncated]")
    assert sum(map(chat.count, (first, second, third))) <= 60


# -------------------------------------------------------------------- unusable calls


@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize("bad", [call("nope", x=1), call("add", a="two"), "<tool_call>\n{oops\n</tool_call>"])
def test_one_unusable_turn_more_than_allowed_ends_it(limit, bad):
    allowed, _ = roll_out([bad] * limit + [say()], limits={"max_invalid_calls": limit})
    assert allowed.stop_reason is StopReason.DONE
    assert len(allowed.turns) == limit + 1
    ended, _ = roll_out([bad] * (limit + 1) + [say()], limits={"max_invalid_calls": limit})
    assert ended.stop_reason is StopReason.INVALID_CALLS
    assert not ended.stop_reason.is_truncated
    assert len(ended.turns) == limit + 1
    assert all(turn.is_invalid for turn in ended.turns)


# -------------------------------------------------------------------- time


@pytest.mark.parametrize("hangs_at", [0, 1])
def test_time_that_runs_out_ends_the_trajectory_where_it_is(hangs_at):
    env = scene(rewards=[0.25, 0.5], outcome=2.0, hangs_at=hangs_at)
    began = time.perf_counter()
    trajectory, script = roll_out([call(), say()], env=env, limits={"rollout_timeout": 0.3})
    assert 0.3 <= time.perf_counter() - began < 5
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert trajectory.stop_reason.is_truncated
    assert sampled_ids(trajectory) == [token for turn in script.turn_ids[: hangs_at + 1] for token in turn]
    assert trajectory.total_reward == 0.25 * hangs_at + 2.0, "the step that hangs earns nothing, the outcome counts"
    assert trajectory.duration_s >= 0.29


def test_the_samplers_time_counts_too():
    chat = chat_of()
    trajectory, _ = roll_out(ScriptedPolicy([say()], chat, delay_s=30), chat=chat, limits={"rollout_timeout": 0.2})
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert trajectory.completion_ids == []
    assert trajectory.turns == []


def test_a_rollout_may_be_without_any_limit_that_may_be_none():
    optional = [name for name, (_, is_optional) in rules_of(RolloutSettings).items() if is_optional]
    assert {"rollout_timeout", "reset_timeout", "scoring_timeout", "stall_timeout"} <= set(optional)
    trajectory, _ = roll_out([call(), say("55")], limits=dict.fromkeys(optional))
    assert trajectory.stop_reason is StopReason.DONE and trajectory.outcome_reward == 1.0


class Limited(ToolEnv):
    """Ends after its second turn: by a limit of its own, or as a game does."""

    has_limit = True

    def reset(self, example):
        self.num_steps = 0
        return super().reset(example)

    async def step(self, message):
        self.num_steps += 1
        is_over = self.num_steps == 2
        told = [{"role": "user", "content": f"step {self.num_steps}"}]
        return StepResult(told, 0.0, is_over, {"is_truncated": is_over and self.has_limit})


class Ending(Limited):
    has_limit = False


def test_a_limit_of_the_environments_own_truncates_and_its_last_observation_is_in_the_context():
    turns = [say("a"), say("b"), say("c")]
    trajectory, _ = roll_out(turns, env=Limited, limits={"max_turns": 9})
    assert trajectory.completion_ids == roll_out(turns, env=Limited, limits={"max_turns": 2})[0].completion_ids
    assert trajectory.stop_reason is StopReason.MAX_TURNS and len(trajectory.turns) == 2
    assert trajectory.turns[1].observations == [{"role": "user", "content": "step 2"}]
    assert "step 2" in chat_of().tokenizer.decode(trajectory.completion_ids)
    ended, _ = roll_out(turns, env=Ending)
    assert ended.stop_reason is StopReason.DONE and ended.turns[1].observations == []

"""The environment without its tools: prompts, the one retrieval, what counts as an answer."""

import asyncio

import pytest

from agent_r1_trl import SearchQAEnv, ToolEnv
from agent_r1_trl.evaluation.baselines import OneAnswerEnv, check_baseline, one_answer_limits
from agent_r1_trl.rollout import RolloutLimits
from agent_r1_trl.testing import AddEnv
from agent_r1_trl.tools import InfrastructureError, Passage

ROW = {"question": "Who?", "answer": "Ada"}


class Shelf:
    def __init__(self, error=None):
        self.queries, self.error = [], error

    def search(self, query, top_k):
        self.queries.append((query, top_k))
        if self.error:
            raise self.error
        return [Passage(id=1, title="T", text="It was Ada.", score=1.0)]


def prompt(shelf=None, *, searches=True, max_passage_tokens=None, **settings):
    env = SearchQAEnv(shelf or Shelf(), **settings)
    env = OneAnswerEnv(env, searches=searches, max_passage_tokens=max_passage_tokens)
    env.truncate_text = lambda text, max_tokens: text[:max_tokens]
    return env, asyncio.run(env.reset(ROW))


def test_the_question_is_searched_for_once_with_the_settings_of_the_environment():
    shelf = Shelf()
    env, messages = prompt(shelf, top_k=2)
    assert shelf.queries == [("Who?", 2)] and not env.tools
    assert "It was Ada." in messages[-1]["content"] and messages[-1]["content"].endswith("Question: Who?")
    assert "passages" in messages[0]["content"] and "tool" not in messages[0]["content"]
    result = asyncio.run(env.step({"role": "assistant", "content": "Ada"}))
    assert result.done and result.reward == 0.0 and len(result.info["tool_results"]) == 1


def test_closed_book_is_the_question_alone():
    shelf = Shelf()
    env, messages = prompt(shelf, searches=False)
    assert shelf.queries == [] and messages[-1]["content"] == "Who?"
    assert "<answer>" in messages[0]["content"] and "tool" not in messages[0]["content"]
    assert asyncio.run(env.step({"role": "assistant", "content": "Ada"})).info["tool_results"] == []


def test_a_system_prompt_of_the_user_stays():
    assert prompt(system_prompt="Be brief.")[1][0]["content"] == "Be brief."
    assert [message["role"] for message in prompt(system_prompt="")[1]] == ["user"]


def test_passages_take_no_more_tokens_than_an_observation():
    text = prompt(max_passage_tokens=5)[1][-1]["content"]
    assert len(text.removeprefix("Passages:\n").partition("\n\nQuestion:")[0]) == 5


def test_a_search_that_fails_is_no_fault_of_the_model():
    with pytest.raises(InfrastructureError, match="naive_rag failed"):
        prompt(Shelf(error=ValueError("no")))


@pytest.mark.parametrize("attempt", [{"tool_calls": [{}]}, {"malformed_tool_call": "x"}, {"cut_off": "x"}])
def test_an_attempt_at_a_call_is_no_answer(attempt):
    env, _ = prompt()
    assert not asyncio.run(env.step({"role": "assistant", "content": "", **attempt})).done


def test_an_environment_without_tools_has_none_to_take_away():
    with pytest.raises(ValueError, match="needs a ToolEnv with tools to take away; env='mine' has only none"):
        check_baseline("closed_book", ToolEnv, "env='mine'")
    with pytest.raises(ValueError, match="'search', which it asks once; env='add' has only add"):
        check_baseline("naive_rag", AddEnv, "env='add'")
    check_baseline("closed_book", AddEnv, "env='add'")


@pytest.mark.parametrize(("policy", "kept"), [("strip_thinking", "strip_thinking"), ("window", "keep")])
def test_one_answer_is_rendered_as_the_models_reasoning_is(policy, kept):
    limits = one_answer_limits(RolloutLimits(context={"policy": policy, "turns": 2 if policy == "window" else None}))
    assert (limits.context.policy, limits.max_turns, limits.context.turns) == (kept, 1, None)

"""SearchQAEnv: what a search earns, what an answer earns, and what is reported."""

import asyncio
import json
import math

import pytest

from agent_r1_trl.environments import SearchQAEnv
from agent_r1_trl.environments.search_qa import read_evidence
from agent_r1_trl.tools import Passage, SearchIndex, open_retriever
from agent_r1_trl.trajectory import StopReason, ToolCall, ToolResult, Turn
from tests.environments.helpers import finished, message

ROWS = [
    {"id": "author", "title": "The Hobbit", "text": "A novel by Tolkien."},
    {"id": "birth", "title": "Tolkien", "text": "Born in Bloemfontein."},
    {"id": "other", "title": "Bloemfontein", "text": "A city with a zoo."},
    {"id": "noise", "title": "Zoo", "text": "A zoo keeps animals. " * 40 + "Secret bridge."},
]
CALL = ToolCall(name="search", arguments={"query": "hobbit"})
EXAMPLE = {
    "question": "Where was the author of The Hobbit born?",
    "answer": "Bloemfontein",
    "evidence": ["author", "birth"],
}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return SearchIndex(ROWS, cache_dir=tmp_path_factory.mktemp("cache"))


def search(*queries):
    return message(*[("search", {"query": query}) for query in queries])


def rewards(env, *messages):
    return [asyncio.run(env.step(item)).reward for item in messages]


def started(index, example=EXAMPLE, **settings):
    env = SearchQAEnv(index, **settings)
    env.reset(example)
    return env


def test_the_prompt_is_the_question_with_instructions(index):
    messages = SearchQAEnv(index).reset(EXAMPLE)
    assert messages[1] == {"role": "user", "content": EXAMPLE["question"]}
    assert messages[0]["role"] == "system" and "<answer>" in messages[0]["content"]
    assert "<answer>" not in SearchQAEnv(index, answer_tag=False).reset(EXAMPLE)[0]["content"]
    assert SearchQAEnv(index, system_prompt="Mine.").reset(EXAMPLE)[0]["content"] == "Mine."


def test_a_subclass_keeps_its_own_system_prompt_without_the_tag(index):
    own = type("Own", (SearchQAEnv,), {"system_prompt": "Mine.", "answer_tag": False})
    assert own(index).reset(EXAMPLE)[0]["content"] == "Mine."


def test_a_search_earns_for_evidence_that_is_new(index):
    env = started(index, top_k=1)
    earned = rewards(env, search("hobbit novel"), search("hobbit"), search("zoo animals"), search("tolkien born"))
    assert earned == [0.5, 0.0, 0.0, 0.5]


def test_without_evidence_any_new_passage_counts(index):
    env = started(index, {"question": "q", "answer": "a"}, top_k=1)
    earned = rewards(env, search("hobbit"), search("hobbit novel"), search("tolkien born"), search("xyzzy"))
    assert earned == [0.5, 0.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("evidence", "earned"),
    [
        (["born in Bloemfontein"], [0.0, 0.5]),
        ([{"title": "the hobbit"}, {"title": "Tolkien", "text": "Born in"}], [0.5, 0.5]),
        ([{"title": "Tolkien", "text": "A novel"}], [0.0, 0.0]),
        ([{"id": "author", "text": "novel"}], [0.5, 0.0]),
        ({"title": "Tolkien"}, [0.0, 0.5]),
    ],
)
def test_evidence_may_be_a_title_an_id_a_text_or_several_of_them(index, evidence, earned):
    env = started(index, {**EXAMPLE, "evidence": evidence}, top_k=1)
    assert rewards(env, search("hobbit"), search("tolkien born")) == earned


def test_evidence_is_looked_for_in_what_the_model_has_read(tmp_path):
    spaced = SearchIndex([{"text": "zoo" + " " * 100 + "\n\nsecret bridge"}], cache_dir=tmp_path)
    env = started(spaced, {**EXAMPLE, "evidence": ["secret bridge"]}, max_passage_chars=20)
    result = asyncio.run(env.step(search("zoo")))
    assert result.observations[0]["content"] == "[1] zoo secret bridge" and result.reward == 0.5


def test_evidence_that_says_nothing_is_refused(index):
    for item in ({}, {"title": ""}, {"page": "Tolkien"}):
        with pytest.raises(ValueError, match=r"evidence: \{.*'title'"):
            started(index, {**EXAMPLE, "evidence": [item]})


class Elsewhere:
    """A retriever of the user's own, which cannot look up an id."""

    def search(self, query, k=3):
        return [Passage(id=row["id"], title=row["title"], text=row["text"]) for row in ROWS if query in row["text"]][
            :k
        ]


def test_an_object_with_a_search_is_a_retriever_and_words_are_ids_where_none_can_be_looked_up():
    env = started(Elsewhere(), {**EXAMPLE, "evidence": ["author", "born in Bloemfontein", "zoo"]}, top_k=1)
    assert rewards(env, search("Tolkien"), search("Born")) == [0.5, 0.5]
    assert rewards(env, search("zoo"), search("xyzzy")) == [0.0, 0.0]


@pytest.mark.parametrize("filling", ["", "  ", None])
@pytest.mark.parametrize("has_ids", [True, False])
def test_what_fills_up_a_list_of_evidence_is_found_in_no_passage(index, filling, has_ids):
    retriever = index if has_ids else Elsewhere()
    env = started(retriever, {**EXAMPLE, "evidence": ["author", filling]}, top_k=1)
    assert rewards(env, search("zoo"), search("hobbit" if has_ids else "Tolkien")) == [0.0, 0.5]
    assert read_evidence([filling], None) == frozenset()


def test_evidence_that_was_cut_off_was_not_seen(index):
    example = {**EXAMPLE, "evidence": ["secret bridge"]}
    assert rewards(started(index, example, top_k=1, max_passage_chars=100), search("zoo animals")) == [0.0]
    assert rewards(started(index, example, top_k=1, max_passage_chars=2000), search("zoo animals")) == [0.5]


def test_useless_and_failing_searches_can_cost(index):
    env = started(index, useless_search_reward=-0.05, tool_error_reward=-0.2)
    assert rewards(env, search("xyzzy"), message(("search", {"q": "x"}))) == pytest.approx([-0.05, -0.2])


def test_further_tools_earn_as_in_any_environment(index):
    def convert(miles: float) -> float:
        """Miles in kilometres.

        Args:
            miles: How far.
        """
        return miles * 1.609

    env = started(index, useless_search_reward=-0.05, tools=[convert])
    calls = [message(("convert", {"miles": miles})) for miles in (1.0, 1.0, 2.0)]
    assert rewards(env, *calls, search("xyzzy")) == [0.5, 0.0, 0.5, -0.05]


@pytest.mark.parametrize(
    ("text", "total", "em", "valid"),
    [
        ("<answer>Bloemfontein</answer>", 1.1, 1.0, 1.0),
        ("<answer>the bloemfontein!</answer>", 1.1, 1.0, 1.0),
        ("<answer>Bloemfontein</answer> for sure", 1.0, 1.0, 0.0),
        ("<answer>Cape Town</answer>", -0.9, 0.0, 1.0),
        ("Bloemfontein", -1.0, 0.0, 0.0),
        ("", -1.0, 0.0, 0.0),
        ("<answer></answer>", -1.0, 0.0, 0.0),
        ("<think><answer>Bloemfontein</answer></think>", -1.0, 0.0, 0.0),
        ("<answer>Bloemfontein or Cape Town or London</answer>", -0.9, 0.0, 1.0),
    ],
)
def test_the_outcome_is_exact_match_plus_form(index, text, total, em, valid):
    trajectory = finished(text)
    reward, parts = started(index).outcome_reward(trajectory)
    assert reward == pytest.approx(total) and sum(parts.values()) == pytest.approx(reward)
    assert (trajectory.info["em"], trajectory.info["valid_answer"]) == (em, valid)


@pytest.mark.parametrize(
    ("text", "strict", "composite"),
    [
        ("<answer>Bloemfontein</answer>", 1.0, 1.0),
        ("<answer>Bloemfontein</answer> for sure", 0.0, -0.5),
        ("<answer>Cape Town</answer>", 0.0, 0.0),
        ("Bloemfontein", 0.0, -0.5),
    ],
)
def test_a_strict_outcome_needs_the_form_and_a_composite_one_pays_for_it(index, text, strict, composite):
    """After one search that could be run: the form is 0.5 for it, and 0.5 for a well-formed answer."""
    trajectory = finished(text)
    searched = Turn(start=0, end=0, message=search("hobbit"), tool_results=[ToolResult(call=CALL, content="found")])
    trajectory.turns.insert(0, searched)
    env = started(index, outcome="strict", failure_reward=0.0)
    assert env.outcome_reward(trajectory) == (strict, {"answer": strict})
    reward, parts = started(index, outcome="composite").outcome_reward(trajectory)
    assert reward == composite == sum(parts.values())


def test_the_form_of_a_composite_outcome_needs_a_search_that_could_be_run(index):
    env = started(index, outcome="composite")
    assert env.outcome_reward(finished("<answer>Bloemfontein</answer>"))[0] == -0.5
    assert env.outcome_reward(finished(""))[0] == -1.0
    trajectory = finished("<answer>Bloemfontein</answer>")
    failed = ToolResult(call=CALL, content="no such tool")
    unusable = Turn(start=0, end=0, message=search("x"), tool_results=[failed], is_invalid=True)
    trajectory.turns.insert(0, unusable)
    assert env.outcome_reward(trajectory)[0] == -0.5
    usable = Turn(start=0, end=0, message=search("x"), tool_results=[failed])
    trajectory.turns[:1] = [usable, usable, usable]
    assert env.outcome_reward(trajectory)[0] == 1.0, "more turns earn no more"


def test_f1_gives_partial_credit(index):
    env = started(index, metric="f1", format_reward=0.0)
    reward, parts = env.outcome_reward(finished("<answer>Bloemfontein town</answer>"))
    assert reward == pytest.approx(-1 + 2 * (2 / 3)) and list(parts) == ["answer"]


def test_plain_answers_count_when_no_tag_is_asked_for(index):
    trajectory = finished("<think>hm</think> Bloemfontein")
    assert started(index, answer_tag=False).outcome_reward(trajectory)[0] == pytest.approx(1.1)
    assert trajectory.info["prediction"] == "Bloemfontein"
    assert started(index, answer_tag=False).outcome_reward(finished("  "))[0] == pytest.approx(-1.0)


def test_a_trajectory_that_was_cut_has_no_answer_and_earns_less_than_a_wrong_one(index):
    env = started(index)
    for reason in set(StopReason) - {StopReason.DONE}:
        trajectory = finished("<answer>Bloemfontein</answer>", reason)
        assert env.outcome_reward(trajectory)[0] < env.outcome_reward(finished("<answer>wrong</answer>"))[0]
        assert trajectory.info["prediction"] == "" and trajectory.info["em"] == 0.0


def test_gold_answers_may_be_in_any_of_the_usual_columns(index):
    for column in ("answer", "answers", "golden_answers", "gold"):
        env = started(index, {"question": "q", column: ["a", "b"]})
        assert env.outcome_reward(finished("<answer>b</answer>"))[0] == pytest.approx(1.1)


@pytest.mark.parametrize("answer", [1889, 1889.0, [1888, 1889]])
def test_gold_answers_may_be_numbers(index, answer):
    env = started(index, {"question": "q", "answer": answer})
    assert env.outcome_reward(finished("<answer>1889</answer>"))[0] == pytest.approx(1.1)
    assert env.outcome_reward(finished("<answer>1890</answer>"))[0] < 0


def test_a_row_without_a_gold_answer_is_refused(index):
    with pytest.raises(ValueError, match=r"'question'.*'answer'"):
        SearchQAEnv(index).reset({"question": "q"})
    with pytest.raises(ValueError, match="golds="):
        SearchQAEnv(index).reset({"question": "q", "answer": []})


def test_the_outcome_is_scaled_to_the_rewards_given(index):
    env = started(index, success_reward=5.0, failure_reward=0.0, format_reward=0.0)
    assert env.outcome_reward(finished("<answer>Bloemfontein</answer>"))[0] == 5.0
    assert env.outcome_reward(finished("<answer>x</answer>"))[0] == 0.0


def test_a_setting_out_of_range_is_named(index):
    settings = {"metric": "bleu", "outcome": "lenient", "top_k": 0, "max_passage_chars": -1, "format_reward": math.nan}
    for name, value in {**settings, "useless_search_reward": "x", "tool_error_reward": math.inf}.items():
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            SearchQAEnv(index, **{name: value})


def test_a_corpus_that_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"retriever=.*missing\.jsonl"):
        SearchQAEnv(tmp_path / "missing.jsonl")


def test_a_corpus_file_is_indexed_once_per_process(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_R1_TRL_CACHE", str(tmp_path))
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    assert SearchQAEnv(path).retriever is SearchQAEnv(str(path)).retriever is open_retriever(path)
    path.write_text(json.dumps({"text": "something else"}))
    assert len(SearchQAEnv(path).retriever) == 1

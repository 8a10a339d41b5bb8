"""Search over HTTP: the protocol's dialects, repeated requests, and whose fault a failure is."""

import asyncio
import os
import pickle
import signal
import threading
import time

import pytest

from agent_r1_trl import InfrastructureError, SearchQAEnv
from agent_r1_trl.features.search import HttpRetriever
from agent_r1_trl.features.search.http import read_answer, read_hit
from agent_r1_trl.tools import Passage, make_search_tool, open_retriever
from agent_r1_trl.tools.search import join_contents
from tests.environments.helpers import message
from tests.features.search.retrieval_server import documents, queries_of, scored, serving, usual


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("agent_r1_trl.features.search.http.RETRY_WAIT_S", 0.01)


def quick(url, **settings):
    return HttpRetriever(url, **{"timeout_s": 5.0, **settings})


def at_once(function, *arguments):
    """The results of calls that run on one thread each; an exception is its own result."""
    results = [None] * len(arguments)

    def work(number, argument):
        try:
            results[number] = function(argument)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=item, daemon=True) for item in enumerate(arguments)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    return results


# -------------------------------------------------------------------- the protocol


def test_a_search_is_one_request_in_the_form_of_search_r1():
    with serving() as (url, seen):
        found = quick(url).search("oslo", 2)
    assert seen.bodies == [{"queries": ["oslo"], "topk": 2, "return_scores": True}]
    assert found == [
        Passage(id="oslo-0", title="Title 0", text="Text about oslo.", score=1.0),
        Passage(id="oslo-1", title="Title 1", text="Text about oslo.", score=0.5),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        {"result": [scored("q")]},
        {"result": [documents("q")]},
        {"result": documents("q")},  # one list for the one query
        {"result": [[{"document": hit["document"]} for hit in scored("q")]]},
        {"result": [[{**hit, "text": "ignored beside contents"} for hit in documents("q")]]},
    ],
)
def test_documents_come_with_scores_or_alone_nested_or_flat(answer):
    first, second = read_answer(answer)
    assert (first.id, first.title, first.text) == ("q-0", "Title 0", "Text about q.")
    assert second.id == "q-1"


def test_the_empty_list_is_an_answer_for_one_query():
    assert read_answer({"result": [[]]}) == []
    with serving(lambda body, number: (200, {"result": [[]]})) as (url, _):
        assert quick(url).search("nothing") == []


@pytest.mark.parametrize(
    "answer", [None, [], {}, {"result": {}}, {"results": [[]]}, {"result": [[], []]}, {"result": []}]
)
def test_another_form_of_answer_is_refused(answer):
    with pytest.raises(ValueError, match="the answer must"):
        read_answer(answer)


def test_a_document_without_an_id_is_known_by_its_text():
    page, same, other = ({"document": {"contents": text}} for text in ("a\nb", "a\nb", "a\nc"))
    assert read_hit(page).id == read_hit(same).id != read_hit(other).id
    assert read_hit("plain text").text == "plain text"
    for hit in ({"document": {"id": 1}}, {"document": None}, 5, {"contents": 3}):
        with pytest.raises(ValueError, match="a result must"):
            read_hit(hit)


def test_a_page_without_text_is_a_page():
    assert read_hit({"document": {"id": 1, "title": "Oslo", "contents": ""}}) == Passage(id="1", title="Oslo", text="")
    assert read_hit({"contents": "", "text": "a"}).text == "a" and read_hit("").text == ""


@pytest.mark.parametrize("title", ["", "Oslo", 'The "Old" Town', "Málaga"])
@pytest.mark.parametrize("text", ["one line", "two\nlines", '"quoted"\nstart'])
def test_a_passage_survives_the_way_there_and_back(title, text):
    document = {"id": "7", "title": title, "contents": join_contents(title, text)}
    assert read_hit({"document": document, "score": 1.5}) == Passage(id="7", title=title, text=text, score=1.5)
    assert read_hit(document) == Passage(id="7", title=title, text=text)


# -------------------------------------------------------------------- requests


def test_no_more_requests_than_allowed_are_under_way_at_once():
    with serving(delay_s=0.02) as (url, seen):
        found = at_once(quick(url, max_connections=2).search, *[f"q{n}" for n in range(20)])
    assert [passages[0].id for passages in found] == [f"q{n}-0" for n in range(20)]
    assert sorted(queries_of(seen)) == sorted(f"q{n}" for n in range(20)) and seen.num_connections <= 2


def test_an_answer_is_kept(monkeypatch):
    monkeypatch.setattr("agent_r1_trl.features.search.http.NUM_KEPT", 2)
    with serving() as (url, seen):
        retriever = quick(url)
        retriever.search("same")[:] = []
        assert len(retriever.search("same")) == 3, "what a caller does with its list changes nothing"
        retriever.search("same", 5)
        retriever.search("other")
        assert queries_of(seen) == ["same"] * 2 + ["other"]
        retriever.search("same")  # 'other' had taken its place
        assert queries_of(seen)[-1] == "same"


def test_a_server_that_sends_too_much_is_cut():
    with serving(lambda body, number: (200, {"result": [scored("q", 10)]})) as (url, _):
        assert len(quick(url).search("q", 4)) == 4


def test_nothing_is_asked_for_an_empty_query_and_any_text_can_be_sent():
    with serving() as (url, seen):
        retriever = quick(url)
        assert retriever.search("  ") == [] and not seen.bodies
        retriever.search("half \ud800 \x00 北京")
        retriever.search("x" * 100_000)
        assert queries_of(seen)[0] == "half ? \x00 北京" and len(queries_of(seen)[1]) == 10_000
        for query, k in ((5, 3), ("q", 0), ("q", True)):
            with pytest.raises(ValueError, match=r"query=5|k="):
                retriever.search(query, k)


# -------------------------------------------------------------------- failures


def test_a_request_that_is_lost_or_comes_too_early_is_repeated():
    def respond(body, number):
        return {1: None, 2: (503, "busy"), 3: usual(body, number)}[number]

    with serving(respond) as (url, seen):
        assert len(quick(url).search("oslo")) == 3
    assert len(seen.bodies) == 3


@pytest.mark.parametrize(
    ("respond", "num_requests", "said"),
    [
        (lambda body, number: None, 2, "no answer"),
        (lambda body, number: (503, "loading"), 2, "503.*loading"),
        (lambda body, number: (404, "no such page"), 1, "404.*no such page"),
        (lambda body, number: (200, {"hits": []}), 1, "must be .*Search-R1's protocol"),
        (lambda body, number: (200, "<html>"), 1, "Is this a server"),
    ],
)
def test_what_cannot_be_searched_is_a_failure_of_the_infrastructure(respond, num_requests, said):
    with serving(respond) as (url, seen):
        with pytest.raises(InfrastructureError, match=rf"retriever='{url}/retrieve': .*{said}"):
            quick(url, attempts=2).search("oslo")
        assert len(seen.bodies) == num_requests


def test_nobody_there_is_a_failure_of_the_infrastructure():
    with serving() as (url, _):
        pass
    with pytest.raises(InfrastructureError, match="no answer"):
        quick(url, attempts=1).search("oslo")


def test_headers_are_sent_and_an_address_without_a_path_gets_one():
    with serving() as (url, seen):
        quick(url, headers={"Authorization": "Bearer x", "X-Key": 12}).search("q")
    assert (seen.headers[0]["Authorization"], seen.headers[0]["X-Key"]) == ("Bearer x", "12")
    assert HttpRetriever("https://host/v1/search?x=1").url == "https://host/v1/search?x=1"
    assert HttpRetriever("http://host:80/").url == "http://host:80/retrieve"


def test_wrong_settings_are_named():
    for value in ("schlüssel", "two\nlines"):
        with pytest.raises(ValueError, match="headers: X-Key: must be printable ASCII") as refused:
            HttpRetriever("http://host", headers={"X-Key": value})
        assert value not in str(refused.value)
    for url in ("host:8010", "ftp://host", "http://", "http://host:99999", 5):
        with pytest.raises(ValueError, match=r"url=.*http://127"):
            HttpRetriever(url)
    wrong = {"timeout_s": 0, "attempts": 0, "max_connections": 1.5}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            HttpRetriever("http://host", **{name: value})


def test_a_retriever_travels_to_other_processes():
    with serving() as (url, _):
        retriever = quick(url, headers={"A": "b"}, max_connections=5)
        retriever.search("here")
        again = pickle.loads(pickle.dumps(retriever))
        assert again.search("there")[0].id == "there-0" and again.max_connections == 5


def test_a_fork_in_the_middle_of_a_search_can_search():
    with serving(delay_s=0.3) as (url, _):
        retriever = quick(url, max_connections=1)
        searching = threading.Thread(target=retriever.search, args=["parent"], daemon=True)
        searching.start()
        time.sleep(0.1)
        child = os.fork()
        if child == 0:
            signal.alarm(10)  # its only place would never become free
            try:
                code = 0 if retriever.search("forked")[0].id == "forked-0" else 1
            except BaseException:
                code = 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -------------------------------------------------------------------- the setting


def test_one_setting_opens_files_servers_mappings_and_objects(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_R1_TRL_CACHE", str(tmp_path))
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "Oslo is in Norway."}\n')
    assert len(open_retriever(str(path)).search("oslo")) == 1
    cached = open_retriever({"path": str(path), "cache_dir": str(tmp_path)})
    assert cached is open_retriever({"path": path, "cache_dir": str(tmp_path)})
    server = open_retriever("http://host:1")
    assert server.url == "http://host:1/retrieve" and server is open_retriever("http://host:1")
    assert open_retriever({"url": "http://host:1", "timeout_s": 5}).timeout_s == 5
    assert open_retriever(cached) is cached


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "retriever=''.*path of a corpus"),
        (5, "retriever=5.*address of a server"),
        ({}, "either 'path' or 'url'"),
        ({"url": "http://x", "path": "y"}, "either 'path' or 'url'"),
        ({"url": "http://x", "timeout": 3}, "'timeout'.*Did you mean 'timeout_s'"),
        ({"path": __file__, "cache_dri": 3}, "Did you mean 'cache_dir'"),
        ({"url": "http://x", "timeout_s": "3"}, "timeout_s='3'"),
        ("missing.jsonl", "missing.jsonl.*no such file"),
    ],
)
def test_a_wrong_setting_is_named(source, said):
    with pytest.raises(ValueError, match=said):
        open_retriever(source)


def test_an_environment_searches_elsewhere_and_an_outage_is_not_the_policys():
    calls = message(("search", {"query": "oslo"}))
    with serving() as (url, _):
        env = SearchQAEnv({"url": url, "attempts": 1}, top_k=1)
        env.reset({"question": "q", "answer": "a", "evidence": ["oslo-0"]})
        step = asyncio.run(env.step(calls))
        assert step.reward == 0.5 and "[1] Title 0: Text about oslo." in step.info["tool_results"][0].content
        assert "Title 1" in make_search_tool(url, top_k=2)("bergen")
    env.reset({"question": "q", "answer": "a"})
    failed = asyncio.run(env.step(message(("search", {"query": "never asked"}))))
    assert failed.info["tool_results"][0].is_infrastructure_failure

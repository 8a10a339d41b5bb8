"""Corpora in files, and the server in front of one."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading

import httpx
import pytest

from agent_r1_trl import InfrastructureError
from agent_r1_trl.features.search import HttpRetriever
from agent_r1_trl.features.search.server import RetrieveRequest, make_app
from agent_r1_trl.tools import Passage, SearchIndex
from agent_r1_trl.tools.search_corpus import join_contents, split_contents

ROWS = [
    {"id": "no", "title": "Norway", "text": "The capital is Oslo."},
    {"id": "se", "title": "Sweden", "text": "The capital is Stockholm."},
    {"id": "es", "title": "Málaga", "text": "A port\nin two lines."},
]
CONTENTS = [{"id": row["id"], "contents": join_contents(row["title"], row["text"])} for row in ROWS]


def ids(passages):
    return [passage.id for passage in passages]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def index(tmp_path):
    return SearchIndex(ROWS, cache_dir=tmp_path)


# -------------------------------------------------------------------- corpora


@pytest.mark.parametrize("rows", [ROWS, CONTENTS], ids=["text", "contents"])
def test_rows_with_text_or_contents_give_the_same_passages(rows, tmp_path):
    path = tmp_path / "corpus.jsonl"
    write_jsonl(path, rows)
    index = SearchIndex(path, cache_dir=tmp_path)
    assert [index.get(row["id"]) for row in ROWS] == [Passage(**row) for row in ROWS]


def test_the_first_line_of_contents_is_the_title():
    assert split_contents('"A "quoted" title"\ntext\nmore') == ('A "quoted" title', "text\nmore")
    assert split_contents("Title\ntext") == ("Title", "text")
    assert split_contents("only one line\n") == ("", "only one line\n")


@pytest.mark.slow
def test_building_takes_no_more_memory_for_more_passages(tmp_path):
    """In processes of their own, so that each has a peak of its own."""
    code = (
        "import resource, sys\n"
        "from agent_r1_trl.tools import SearchIndex\n"
        "SearchIndex(sys.argv[1], cache_dir=sys.argv[2])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    corpora = [
        write_jsonl(
            tmp_path / f"{number}.jsonl", ({"text": f"w{i * 7919 % 9973} w{i % 997} " * 10} for i in range(number))
        )
        for number in (20_000, 100_000)
    ]
    peaks = [
        int(subprocess.check_output([sys.executable, "-c", code, str(corpus), str(tmp_path)])) for corpus in corpora
    ]
    assert peaks[1] - peaks[0] < 40 * 1024, "KiB; the 80,000 passages themselves take more"


# -------------------------------------------------------------------- the server


@contextlib.contextmanager
def served(retriever):
    """The address of our server, on a thread of this process."""
    from aiohttp import web

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def start():
        runner = web.AppRunner(make_app(retriever))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)


def test_a_client_finds_through_the_server_what_the_index_finds(index):
    with served(index) as url:
        retriever = HttpRetriever(url)
        for query in ("capital of Norway", "port", "nothing at all", "málaga"):
            assert retriever.search(query, 2) == index.search(query, 2)
        one = httpx.post(f"{url}/retrieve", json={"query": "oslo"}).json()
        assert [hit["id"] for hit in one["result"][0]] == ["no"]
        answer = httpx.post(f"{url}/retrieve", json={"queries": ["oslo", "port"], "return_scores": False}).json()
        assert answer["result"][0] == [{"id": "no", "title": "Norway", "contents": '"Norway"\nThe capital is Oslo.'}]
        assert httpx.get(f"{url}/health").json() == {"status": "ok", "num_passages": 3}


def test_what_is_no_request_is_refused_and_the_server_goes_on(index):
    with served(index) as url:
        for body in ({}, [], {"queries": "oslo"}, {"queries": []}, {"queries": [5]}, {"queries": ["a"], "topk": 0}):
            answer = httpx.post(f"{url}/retrieve", json=body)
            assert answer.status_code == 422 and answer.json()["error"], body
        assert httpx.post(f"{url}/retrieve", content=b"{").status_code == 400
        assert ids(HttpRetriever(url).search("oslo")) == ["no"]


def test_an_outage_behind_the_server_is_one_of_the_server():
    class Down:
        def search(self, query, k=3):
            raise InfrastructureError("the database is down")

    with served(Down()) as url, pytest.raises(InfrastructureError, match=r"503.*the database is down"):
        HttpRetriever(url, attempts=1).search("oslo")


def test_a_request_may_leave_out_what_has_a_default():
    for body in ({"query": "a"}, {"queries": ["a"], "topk": None}):
        asked = RetrieveRequest.model_validate(body)
        assert (asked.queries, asked.topk, asked.return_scores) == (["a"], None, False)
    for body in ({"queries": ["a"] * 5000}, {"query": "a", "topk": 5000}, {"query": "a", "topk": True}):
        with pytest.raises(ValueError, match=r"queries|topk"):
            RetrieveRequest.model_validate(body)

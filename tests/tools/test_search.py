"""The search index: what it finds, any text as a query, any thread, any process, and the tool made of it."""

import json
import os
import pickle
import sqlite3
import subprocess
import sys
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_r1_trl.tools import Passage, SearchIndex, make_search_tool, search
from agent_r1_trl.tools.search import STOP_WORDS, join_contents, query_terms, read_rows, split_contents
from tests.effort import examples

ROWS = [
    {"id": "no-capital", "title": "Norway: capital", "text": "Oslo is the capital of Norway."},
    {"id": "no-peak", "title": "Norway: highest point", "text": "Galdhøpiggen, 2,469 m."},
    {"id": "se-capital", "title": "Sweden: capital", "text": "Stockholm is the capital of Sweden. Norway lies west."},
    {"id": "es-city", "title": "Málaga", "text": "A port in the south of Spain; running water since 1720."},
    {"id": "cn-city", "title": "北京", "text": "北京 is the capital of China."},
    {"id": "band", "title": "The Who", "text": "To be or not to be."},
]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return SearchIndex(ROWS, cache_dir=tmp_path_factory.mktemp("cache"))


def ids(passages: list[Passage]) -> list[str]:
    return [passage.id for passage in passages]


def test_the_best_passage_comes_first(index):
    found = index.search("What is the capital of Norway?", k=3)
    assert ids(found)[0] == "no-capital"
    assert found[0] == Passage(id="no-capital", title=ROWS[0]["title"], text=ROWS[0]["text"], score=found[0].score)
    assert [passage.score for passage in found] == sorted((passage.score for passage in found), reverse=True)
    assert found[0].score > 0


def test_a_word_in_the_title_weighs_more_than_one_in_the_text(tmp_path):
    rows = [
        {"id": "text", "title": "alpha", "text": "needle beta"},
        {"id": "title", "title": "needle", "text": "alpha beta"},
    ]
    assert ids(SearchIndex(rows, cache_dir=tmp_path).search("needle")) == ["title", "text"]


def test_case_accents_and_endings_do_not_matter(index):
    assert ids(index.search("MALAGA", 1)) == ["es-city"]
    assert ids(index.search("málaga", 1)) == ["es-city"]
    assert ids(index.search("capitals of norway", 1)) == ["no-capital"]
    assert ids(index.search("run", 1)) == ["es-city"]
    assert ids(index.search("北京", 1)) == ["cn-city"]


@pytest.mark.parametrize(
    "query", ["\u0130stanbul", "ISTANBUL", "\u0130ST\u00c2NBUL", "Sp\u0131n\u0308al", "sp\u0131nal"]
)
def test_an_accent_that_is_a_character_of_its_own_parts_no_word(tmp_path, query):
    rows = [{"text": "\u0130stanbul lies on two continents; Sp\u0131n\u0308al Tap played there."}]
    assert ids(SearchIndex(rows, cache_dir=tmp_path).search(query)) == [
        "0"
    ]  # a capital i with a dot becomes two in lower case


def test_stop_words_count_only_where_nothing_else_is_asked(index):
    assert query_terms("What is the capital of Norway?") == ["capital", "norway"]
    assert query_terms("to be or not to be") == ["to", "be", "or", "not"]
    assert ids(index.search("the who", 1)) == ["band"]
    assert "capital" not in STOP_WORDS


@settings(max_examples=examples(300), deadline=None)
@given(query=st.text(max_size=60) | st.text(alphabet="\"'-+*^:;(){}~\\\x00\ud800 caORNEARD", max_size=40))
@example(query="x" * 100_000 + " ".join(f"w{number}" for number in range(5000)))
def test_any_text_is_a_query_and_none_a_syntax_error(index, query):
    assert len(index.search(query, 2)) <= 2
    assert "no-capital" in ids(index.search("title:capital NEAR norway", 3))


def test_a_number_of_passages_or_a_query_of_the_wrong_type_is_refused(index):
    for k in (0, -1, True, 2.0, None, "3"):
        with pytest.raises(ValueError, match=rf"k={k!r}"):
            index.search("capital", k)
    with pytest.raises(ValueError, match="query=5"):
        index.search(5)


def test_passages_can_be_fetched_by_id(index):
    assert index.get("no-peak").text == "Galdhøpiggen, 2,469 m."
    assert index.get("nothing") is None
    assert index.get("no-peak' OR 1=1 --") is None
    assert len(index) == len(ROWS)


# -------------------------------------------------------------------- corpora


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return path


def test_a_jsonl_file_a_dataset_a_list_and_contents_give_the_same_results(tmp_path):
    from datasets import Dataset

    contents = [{"id": row["id"], "contents": join_contents(row["title"], row["text"])} for row in ROWS]
    corpora = [write_jsonl(tmp_path / "corpus.jsonl", ROWS), Dataset.from_list(ROWS), iter(ROWS), contents]
    first, *others = [SearchIndex(corpus, cache_dir=tmp_path).search("capital norway") for corpus in corpora]
    assert first and others == [first] * 3


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


def test_texts_that_no_database_likes_are_stored(tmp_path):
    rows = [{"id": "a\ud800", "title": "nul\x00title", "text": "needle \ud800 \x00 end"}]
    index = SearchIndex([*rows, {"text": "without an id"}], cache_dir=tmp_path)
    assert "needle" in index.search("needle")[0].text
    assert (index.get("1").text, index.get("1").title) == ("without an id", "")


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([], "corpus"),
        ([{"passage": "x"}], "row 0: .*'text'.*passage"),
        ([{"contents": ""}], "row 0: .*'text'.*contents"),
        ([{"text": "x"}, {"text": "  "}], "row 1: .*'text'"),
        ([{"text": 5}], "row 0: .*'text'"),
        ([{"id": 1, "text": "x"}, {"id": "1", "text": "y"}], "row 1: id='1'"),
        (["text"], "row 0: .*'text'"),
    ],
)
def test_a_bad_row_is_named(rows, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        SearchIndex(rows, cache_dir=tmp_path)


def test_a_bad_line_of_a_file_is_named(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "x"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"corpus\.jsonl, line 2"):
        SearchIndex(path, cache_dir=tmp_path)
    assert not [name for name in os.listdir(tmp_path / "search") if "tmp" in name or "sqlite" in name]


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"corpus=.*missing\.jsonl"):
        SearchIndex(tmp_path / "missing.jsonl")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ValueError, match="cache_dir="):
        SearchIndex(ROWS, cache_dir=blocked)


# -------------------------------------------------------------------- the file on disk


def test_an_index_is_built_once_and_found_again(tmp_path, monkeypatch):
    first = SearchIndex(ROWS, cache_dir=tmp_path)
    monkeypatch.setattr("agent_r1_trl.tools.search.write_index", None)
    again = SearchIndex(list(ROWS), cache_dir=tmp_path)
    assert again.path == first.path and again.search("norway") == first.search("norway")


def test_a_damaged_index_is_built_anew(tmp_path):
    path = SearchIndex(ROWS, cache_dir=tmp_path).path
    for damage in (b"", b"not a database", path.read_bytes()[:2000]):
        path.write_bytes(damage)
        assert ids(SearchIndex(ROWS, cache_dir=tmp_path).search("norway capital", 1)) == ["no-capital"]


def test_an_index_that_another_process_has_just_built_stays_where_it_is(tmp_path, monkeypatch):
    build, was_there = search.write_index, []

    class Slower(SearchIndex):
        def _open(self, path):
            if not was_there and not path.exists():
                build(path, iter(read_rows(ROWS, "rows")))
                raise sqlite3.OperationalError("unable to open database file")  # as it was a moment ago
            super()._open(path)

    def write(path, rows):
        was_there.append(path.exists())
        build(path, rows)

    monkeypatch.setattr(search, "write_index", write)
    assert len(Slower(ROWS, cache_dir=tmp_path)) == len(ROWS) and was_there == [True]


def test_processes_that_build_the_same_index_at_once_all_get_it(tmp_path):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": f"passage number {n}"} for n in range(3000)])
    code = (
        "import sys; from agent_r1_trl.tools import SearchIndex\n"
        "index = SearchIndex(sys.argv[1], cache_dir=sys.argv[2])\n"
        "print(len(index), index.search('passage 2999', 1)[0].id)\n"
    )
    command = [sys.executable, "-c", code, str(corpus), str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert out.strip() == "3000 2999", err
    assert len(os.listdir(tmp_path / "cache" / "search")) == 1


def test_the_cache_folder_follows_the_environment_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_R1_TRL_CACHE", str(tmp_path / "named"))
    assert SearchIndex(ROWS).path.parent == tmp_path / "named" / "search"


def test_many_threads_may_search_at_once(index):
    expected = {query: index.search(query) for query in ("capital", "norway", "spain port", "be")}
    failures = []

    def work():
        for _ in range(50):
            for query, passages in expected.items():
                try:
                    if index.search(query) != passages:
                        failures.append(query)
                except Exception as error:
                    failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_an_index_survives_pickling_and_forking(index):
    expected = index.search("norway")
    assert pickle.loads(pickle.dumps(index)).search("norway") == expected
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, b"same" if index.search("norway") == expected else b"other")
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"same"


def test_the_index_file_is_never_written_to_after_it_was_built(tmp_path):
    index = SearchIndex(ROWS, cache_dir=tmp_path)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        index._connection().execute("DELETE FROM ids")


# -------------------------------------------------------------------- the tool


def test_the_search_tool_shows_numbered_passages(index):
    search = make_search_tool(index, top_k=2)
    assert search("capital of norway").split("\n")[0] == "[1] Norway: capital: Oslo is the capital of Norway."
    assert len(search("capital").split("\n")) == 2
    assert search.schema["function"]["parameters"]["required"] == ["query"]
    assert search("zzzz") == "No passage matches. Try other words."


def test_the_search_tool_takes_a_name_and_limits(index):
    search = make_search_tool(index, name="lookup", max_passage_chars=10, timeout_s=3)
    assert search.name == "lookup" and search.timeout_s == 3
    assert search("oslo").startswith("[1] Norway: capital: Oslo is th [truncated]")
    with pytest.raises(ValueError, match="top_k=0"):
        make_search_tool(index, top_k=0)

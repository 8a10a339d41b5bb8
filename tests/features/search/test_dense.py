"""Search by meaning, with a tiny encoder whose vectors are those of the words: needs the extra `dense`."""

import threading

import pytest

from agent_r1_trl.features.search import build_index, open_index
from agent_r1_trl.features.search.dense import DenseIndex
from agent_r1_trl.tools import open_retriever

ROWS = [
    {"id": "no", "title": "Norway", "text": "capital oslo"},
    {"id": "se", "title": "Sweden", "text": "capital stockholm"},
    {"id": "zoo", "title": "", "text": "animals live here"},
]
WORDS = ["[UNK]", "norway", "oslo", "sweden", "stockholm", "capital", "animals", "live", "here", "find"]


def ids(passages):
    return [passage.id for passage in passages]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A folder of sentence-transformers: a text's vector is the mean of its words' unit vectors."""
    pytest.importorskip("faiss")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    import numpy
    from sentence_transformers.models import StaticEmbedding
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    vectors = numpy.eye(len(WORDS), dtype="float32")
    vectors[0] = 0.001
    folder = tmp_path_factory.mktemp("encoder") / "words"
    static = StaticEmbedding(tokenizer, embedding_weights=vectors)
    sentence_transformers.SentenceTransformer(modules=[static], device="cpu").save(str(folder))
    return str(folder)


@pytest.fixture(scope="module")
def folder(encoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "index"
    assert build_index(ROWS, folder, dense=encoder, device="cpu")["kind"] == "dense"
    return folder


def test_the_most_similar_passage_comes_first_with_its_cosine(folder):
    index = open_retriever({"path": str(folder), "device": "cpu"})
    assert isinstance(index, DenseIndex) and len(index) == 3
    first, second = index.search("norway oslo", 2)
    assert (first.id, first.title, first.text) == ("no", "Norway", "capital oslo")
    assert first.score == pytest.approx(2 / (2**0.5 * 3**0.5), abs=1e-3) and second.score < first.score
    assert len(index.search("norway", 50)) == 3
    assert index.get("zoo").text == "animals live here"


def test_queries_of_many_threads_are_answered_each_with_its_own(folder):
    index, found = open_index(folder, device="cpu"), {}
    queries = ["oslo", "stockholm", "animals"] * 8
    threads = [
        threading.Thread(target=lambda n=n, query=query: found.update({n: ids(index.search(query, 1))}))
        for n, query in enumerate(queries)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [found[n] for n in range(24)] == [["no"], ["se"], ["zoo"]] * 8
    assert [ids(passages) for passages in index.search_many(["oslo", "animals"], 1)] == [["no"], ["zoo"]]


def test_the_encoders_prompts_are_part_of_what_is_encoded(encoder, tmp_path):
    import shutil

    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(encoder, device="cpu", prompts={"query": "oslo "})
    model.save(str(tmp_path / "model"))
    build_index(ROWS, tmp_path / "index", dense=str(tmp_path / "model"), device="cpu")
    assert ids(open_index(tmp_path / "index", device="cpu").search("unknown", 1)) == ["no"]
    shutil.copytree(encoder, tmp_path / "e5-tiny")
    build_index(ROWS, tmp_path / "e5", dense=str(tmp_path / "e5-tiny"), device="cpu")
    assert open_index(tmp_path / "e5", device="cpu")._model.prompts == {"query": "query: ", "document": "passage: "}


def test_other_kinds_of_faiss_index_are_made_and_unknown_ones_refused(encoder, tmp_path):
    rows = [{"id": str(n), "text": f"{WORDS[1 + n % 9]} {WORDS[1 + n // 9]}"} for n in range(81)]
    for kind in ("HNSW8", "SQfp16"):
        build_index(rows, tmp_path / kind, dense=encoder, faiss=kind, device="cpu")
        found = open_index(tmp_path / kind, device="cpu").search("norway norway", 1)
        assert ids(found) == ["0"], kind
    for kind in ("Round", "IVF2,Flat"):
        with pytest.raises(ValueError, match=rf"faiss='{kind}'.*'Flat'"):
            build_index(rows, tmp_path / "x", dense=encoder, faiss=kind, device="cpu")


def test_an_encoder_that_is_not_there_is_named(encoder, tmp_path):
    with pytest.raises(ValueError, match=r"dense=.*missing.*directory or the Hub id"):
        build_index(ROWS, tmp_path / "index", dense=str(tmp_path / "missing"))


def test_a_missing_package_is_named_with_the_extra(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ValueError, match=r"needs faiss.*agent-r1-trl\[dense\]"):
        build_index(ROWS, tmp_path / "index", dense="x")

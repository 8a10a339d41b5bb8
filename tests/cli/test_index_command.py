"""`agent-r1-trl index` and `agent-r1-trl serve-retriever`, as a user types them."""

import json
import re
import signal
import subprocess
import sys

import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.tools import HttpRetriever

ROWS = [
    {"id": "no", "title": "Norway", "text": "The capital is Oslo."},
    {"id": "se", "title": "Sweden", "text": "The capital is Stockholm."},
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


@pytest.fixture
def folder(corpus, tmp_path, capsys):
    folder = str(tmp_path / "index")
    assert main(["index", corpus, "--output", folder]) == 0
    out = capsys.readouterr().out
    assert "2 passages, bm25" in out and f"agent-r1-trl serve-retriever {folder}" in out
    return folder


def test_an_index_is_built_and_searched_from_the_shell(folder, capsys):
    assert main(["index", folder, "--query", "capital of Norway", "--top_k", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^\[1\] \d+\.\d+  no\n    Norway: The capital is Oslo\.\n1 passages in", out)


def test_a_corpus_file_and_a_data_set_on_the_disk_are_corpora_too(corpus, tmp_path, capsys, monkeypatch):
    from datasets import Dataset

    monkeypatch.setenv("AGENT_R1_TRL_CACHE", str(tmp_path / "cache"))
    assert main(["index", corpus, "--query", "stockholm"]) == 0 and "  se\n" in capsys.readouterr().out
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert main(["index", str(tmp_path / "saved"), "--output", str(tmp_path / "out"), "--num_passages", "1"]) == 0
    assert "1 passages" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{corpus}"], "--output: not set"),
        (["{corpus}", "--output", "x", "--query", "y"], "--query and --output"),
        (["missing.jsonl", "--output", "x"], "missing.jsonl.*no such file"),
        (["{corpus}", "--output", "{folder}"], "holds an index already"),
        (["{folder}", "--query", "x", "--top_k", "0"], "k=0"),
        (["{folder}", "--query", "x", "--dense", "m"], "--dense: is for building"),
        (["{corpus}", "--output", "x", "--batch_size", "3"], "--batch_size: belongs to --dense"),
        (["{corpus}", "--output", "x", "--num_passages", "0"], "--num_passages 0"),
        (["{corpus}", "--output", "x", "--split", "test"], "--split test: a file has none"),
        (["{corpus}", "--outptu", "x"], "--outptu.*Did you mean '--output'"),
        ([], "CORPUS"),
    ],
)
def test_a_mistake_is_named(arguments, said, corpus, folder, capsys):
    assert main(["index", *[item.format(corpus=corpus, folder=folder) for item in arguments]]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_server_that_does_not_answer_is_not_a_mistake_of_the_user(capsys):
    assert main(["index", "http://127.0.0.1:9", "--query", "x"]) == 3
    assert "http://127.0.0.1:9/retrieve" in capsys.readouterr().err


def test_a_server_serves_until_it_is_told_to_end(folder):
    command = [sys.executable, "-m", "agent_r1_trl.cli.serve_retriever", folder, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        lines = [server.stdout.readline() for _ in range(3)]
        url = lines[1].removeprefix("retriever: ").strip()
        assert HttpRetriever(url).search("oslo")[0].id == "no"
        assert url in lines[2] and lines[2].startswith("curl ")
        taken = subprocess.run([*command[:-1], url.rpartition(":")[2]], capture_output=True, text=True)
        assert taken.returncode == 3 and "cannot listen there" in taken.stderr
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    finally:
        server.kill()
        server.stdout.close()


def test_mistakes_of_the_server_command_are_named(tmp_path, capsys):
    for arguments, said in (
        ([str(tmp_path)], "INDEX=.*no finished index"),
        ([str(tmp_path), "--port", "70000"], "--port 70000"),
        ([str(tmp_path), "--workers", "0"], "--workers 0"),
    ):
        assert main(["serve-retriever", *arguments]) == 2
        assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize("command", ["index", "serve-retriever"])
def test_help_loads_nothing_heavy(command):
    code = (
        "import sys\nfrom agent_r1_trl.cli import main\n"
        f"try:\n    main([{command!r}, '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'datasets', 'pyarrow', 'httpx', 'aiohttp', 'numpy', 'faiss'} & set(sys.modules)\n"
        "print('heavy:', heavy or 'nothing')"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.endswith("heavy: nothing\n") and "usage: agent-r1-trl" in out.stdout

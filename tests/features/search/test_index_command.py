"""`agent-r1-trl index` and `agent-r1-trl serve-retriever`, as a user types them."""

import json
import re
import signal
import subprocess
import sys

import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.features.search import HttpRetriever
from agent_r1_trl.tools import open_retriever

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


def test_a_data_set_on_the_disk_is_a_corpus_too(tmp_path, capsys):
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert main(["index", str(tmp_path / "saved"), "--output", str(tmp_path / "out")]) == 0
    assert "2 passages" in capsys.readouterr().out
    assert open_retriever(tmp_path / "out").search("stockholm")[0].id == "se"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{corpus}"], "--output"),
        (["missing.jsonl", "--output", "x"], "missing.jsonl.*no such file"),
        (["{corpus}", "--output", "{folder}"], "holds an index already"),
        (["{corpus}", "--output", "x", "--nmae", "x"], "--nmae"),
        ([], "CORPUS"),
    ],
)
def test_a_mistake_is_named(arguments, said, corpus, folder, capsys):
    assert main(["index", *[item.format(corpus=corpus, folder=folder) for item in arguments]]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_server_serves_until_it_is_told_to_end(folder):
    command = [sys.executable, "-m", "agent_r1_trl.cli", "serve-retriever", folder, "--port", "0"]
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
        ([str(tmp_path)], "no finished index"),
        ([str(tmp_path), "--port", "70000"], "--port=70000"),
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

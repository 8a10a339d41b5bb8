"""Corpora in files."""

import json
import subprocess
import sys

import pytest

from agent_r1_trl.tools import Passage, SearchIndex
from agent_r1_trl.tools.search import join_contents, split_contents

ROWS = [
    {"id": "no", "title": "Norway", "text": "The capital is Oslo."},
    {"id": "se", "title": "Sweden", "text": "The capital is Stockholm."},
    {"id": "es", "title": "Málaga", "text": "A port\nin two lines."},
]
CONTENTS = [{"id": row["id"], "contents": join_contents(row["title"], row["text"])} for row in ROWS]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


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

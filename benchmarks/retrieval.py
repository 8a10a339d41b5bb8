"""Retrieval at several sizes: building and searching.

    python benchmarks/retrieval.py --passages 20000 200000 1000000 [--json]

The passages are made up: a hundred words each, drawn by Zipf's law from a vocabulary of 200,000, with titles of two
words. A query is four words of a passage, of which none is among the 50 most frequent (an index drops English stop
words alike). For every size, processes of their own

- build the index (seconds, processor seconds, the peak of their memory, size on the disk),
- search it, one query after the other (median and 99th percentile, and processor time).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from _common import check_at_least, make_parser, print_table, report, rounded, run_alone

from agent_r1_trl.tools import SearchIndex

VOCABULARY = 200_000
WORDS_PER_PASSAGE = 100
NUM_STOP_WORDS = 50
WEIGHTS = list(itertools.accumulate(1 / rank for rank in range(1, VOCABULARY + 1)))
"""Cumulative, by Zipf's law."""


def draw_words(rng: random.Random, count: int) -> list[str]:
    return [f"w{rank}" for rank in rng.choices(range(VOCABULARY), cum_weights=WEIGHTS, k=count)]


def make_passages(count: int) -> Iterator[dict[str, str]]:
    for number in range(count):
        rng = random.Random(number)
        title = " ".join(draw_words(rng, 2))
        yield {"id": str(number), "title": title, "text": " ".join(draw_words(rng, WORDS_PER_PASSAGE))}


def make_queries(num_passages: int, count: int, seed: int) -> list[str]:
    rng = random.Random(f"{seed}")
    queries = []
    for _ in range(count):
        passage = random.Random(rng.randrange(num_passages))
        draw_words(passage, 2)
        words = [word for word in draw_words(passage, WORDS_PER_PASSAGE) if int(word[1:]) > NUM_STOP_WORDS]
        queries.append(" ".join(rng.sample(words, 4)))
    return queries


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# ---------------------------------------------------------------- the parts, each in a process of its own


def measure_build(folder: Path, num_passages: int) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, processor = time.perf_counter(), time.process_time()
    SearchIndex(folder / "corpus.jsonl", cache_dir=folder)
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = sum(path.stat().st_size for path in (folder / "search").iterdir())
    return {
        "build_s": seconds,
        "build_processor_s": processor,
        "build_mb": (peak - before) / 1024,
        "peak_mb": peak / 1024,
        "disk_mb": size / 2**20,
    }


def measure_search(folder: Path, num_passages: int, num_queries: int) -> dict[str, float]:
    index = SearchIndex(folder / "corpus.jsonl", cache_dir=folder)
    times = []
    queries = make_queries(num_passages, num_queries, seed=1)
    processor = time.process_time()
    for query in queries:
        start = time.perf_counter()
        index.search(query, 5)
        times.append(1000 * (time.perf_counter() - start))
    return {
        "search_ms": statistics.median(times),
        "search_p99_ms": percentile(times, 0.99),
        "search_processor_ms": 1000 * (time.process_time() - processor) / num_queries,
        "search_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


# ---------------------------------------------------------------- the whole


def measure(args: argparse.Namespace, num_passages: int) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    row: dict[str, float] = {"passages": num_passages}
    try:
        with (folder / "corpus.jsonl").open("w", encoding="utf-8") as corpus:
            corpus.writelines(json.dumps(passage) + "\n" for passage in make_passages(num_passages))
        for part in ("build", "search"):
            arguments = ["--part", part, "--folder", str(folder), "--passages", str(num_passages)]
            row |= run_alone(__file__, [*arguments, "--queries", str(args.queries)])
    finally:
        shutil.rmtree(folder)
    return row


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--passages", type=int, nargs="+", default=[20_000, 200_000])
    parser.add_argument("--queries", type=int, default=200, help="one after the other")
    parser.add_argument("--folder", help="where the indexes are kept meanwhile; default: the folder for such files")
    parser.add_argument("--part", choices=("build", "search"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    check_at_least(parser, args, 1, "queries")
    if min(args.passages) < 1:
        parser.error(f"--passages={args.passages}: must be 1 or more.")
    return args


def main() -> None:
    args = parse_arguments()
    if args.part:
        folder, number = Path(args.folder), args.passages[0]
        parts = {
            "build": lambda: measure_build(folder, number),
            "search": lambda: measure_search(folder, number, args.queries),
        }
        print(json.dumps(parts[args.part]()))
        return
    rows = [measure(args, number) for number in args.passages]
    report({"rows": rows}, args, show, figures=lambda result: {"rows": [rounded(row) for row in result["rows"]]})


def show(result: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> None:
    """One line per figure, one column per size."""
    rows = result["rows"]
    lines = [[name, *(f"{row[name]:,.1f}" for row in rows)] for name in list(rows[0])[1:]]
    print_table("Retrieval", ["", *(f"{row['passages']:,} passages" for row in rows)], lines)


if __name__ == "__main__":
    main()

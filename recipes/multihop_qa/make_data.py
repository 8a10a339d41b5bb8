"""Make the questions of a multi-hop experiment from public sets, as rows that `SearchQAEnv` reads.

    python recipes/multihop_qa/make_data.py --sets hotpotqa 2wikimultihopqa musique --split train --num 4000
    python recipes/multihop_qa/make_data.py --sets hotpotqa 2wikimultihopqa musique --split dev --num 500
    python recipes/multihop_qa/make_data.py --sets hotpotqa --split train --data_files my/train.jsonl

writes outputs/multihop_qa/SPLIT.jsonl with {"id", "question", "answers", "evidence", "source"}, and beside it
SPLIT.json: the sets, the seed, what was left out and why, and a hash of the ids in their order. The same seed and
files give the same rows.

The sets are those of RUC-NLPIR/FlashRAG_datasets: `id, question, golden_answers, metadata`. Evidence are the titles of
the pages that hold the gold passages, where the metadata names them. No code of a data set is run (`data_files` only).
A question without an answer is excluded and counted; a missing column or a value of another form ends the program
with the set, the row and the column.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import random
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agent_r1_trl.cli.errors import UsageError, run_command

Row = dict[str, Any]
FLASHRAG = "hf://datasets/RUC-NLPIR/FlashRAG_datasets"


SETS = ("hotpotqa", "2wikimultihopqa", "musique", "nq")


def clean(text: Any) -> str:
    """A text in one Unicode form, without HTML's escapes and outer white space."""
    return unicodedata.normalize("NFC", html.unescape(str(text))).strip()


def read_answers(value: Any) -> list[str]:
    """Gold answers, each once, given a string or a list of strings or numbers.

    Raises:
        UsageError: it has another form.
    """
    found = value if isinstance(value, list) else [value]
    for item in found:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise UsageError(f"column 'golden_answers': {item!r:.100} is no answer (a string or a number)")
    return list(dict.fromkeys(filter(None, map(clean, found))))


def read_evidence(metadata: Mapping[str, Any]) -> list[dict[str, str]]:
    """The pages of the supporting facts (a mapping of lists, as Arrow keeps them), or MuSiQue's supporting paragraphs.

    Raises:
        UsageError: they have another form.
    """
    facts, paragraphs = metadata.get("supporting_facts") or {}, metadata.get("paragraphs") or []
    try:
        titles = facts["title"] if facts else [item["title"] for item in paragraphs if item["is_supporting"]]
        return [{"title": title} for title in dict.fromkeys(map(clean, titles))]
    except (KeyError, TypeError) as error:
        raise UsageError(f"column 'metadata': {metadata!r:.100} has supporting facts of another form") from error


def read_row(row: Mapping[str, Any]) -> Row:
    """A row as `SearchQAEnv` reads it.

    Raises:
        UsageError: a column is missing, or has another form.
    """
    for name in ("id", "question", "golden_answers"):
        if name not in row:
            raise UsageError(f"there is no column {name!r} (there are: {', '.join(map(str, row))})")
    return {
        "id": str(row["id"]),
        "question": clean(row["question"] or ""),
        "answers": read_answers(row["golden_answers"]),
        "evidence": read_evidence(row.get("metadata") or {}),
    }


# ---------------------------------------------------------------- the program


def load(data_files: str | list[str]) -> Iterable[Mapping[str, Any]]:
    """The rows of JSON, JSONL or Parquet files, here or on the Hub.

    Raises:
        UsageError: they cannot be read.
    """
    from datasets import load_dataset

    first = data_files if isinstance(data_files, str) else data_files[0]
    kind = "parquet" if first.endswith(".parquet") else "json"
    try:
        return load_dataset(kind, data_files=data_files, split="train")
    except Exception as error:  # no network, a wrong name, a broken file: of many types
        cause = error.__cause__ or error
        raise UsageError(
            f"data_files={data_files!r}: cannot be read ({type(cause).__name__}: {str(cause).splitlines()[:1]}). Pass "
            "--data_files with files that you have, or look the files up on the set's page on the Hub."
        ) from error


def read_rows(name: str, raw: Iterable[Mapping[str, Any]]) -> tuple[list[Row], Counter[str]]:
    """The rows of a set, and how many were excluded for which reason.

    Raises:
        UsageError: a row has another form, an id occurs twice, or nothing is left.
    """
    rows: dict[str, Row] = {}
    left: Counter[str] = Counter()
    for number, record in enumerate(raw):
        try:
            row = read_row(record)
            if row["id"] in rows:
                raise UsageError(f"id {row['id']!r} occurs twice")
        except UsageError as error:
            raise UsageError(f"{name}, row {number}: {error}. Is this file a {name}?") from error
        missing = [part for part in ("question", "answers") if not row[part]]
        if missing:
            left[f"without {missing[0]}"] += 1
        else:
            rows[row["id"]] = {**row, "id": f"{name}/{row['id']}", "source": name}
    if not rows:
        raise UsageError(f"{name}: no row is left ({dict(left) or 'the file is empty'}). Pass another split or file.")
    return list(rows.values()), left


def hash_of(rows: list[Row]) -> str:
    """Of the ids, in their order."""
    return hashlib.sha256("\n".join(row["id"] for row in rows).encode()).hexdigest()


def run(argv: list[str]) -> int:
    """Write the rows and what they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, required=True)
    parser.add_argument("--split", choices=("train", "dev"), required=True)
    parser.add_argument("--num", type=int, help="questions drawn from each set (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data_files", nargs="+", help="files of the one set, instead of those on the Hub")
    parser.add_argument("--output", type=Path, default=Path("outputs/multihop_qa"))
    args = parser.parse_args(argv)
    if args.data_files and len(args.sets) > 1:
        raise UsageError(f"--data_files: are files of one set, and --sets names {len(args.sets)}. Name one.")
    if args.num is not None and args.num < 1:
        raise UsageError(f"--num {args.num}: must be a whole number >= 1. Pass such a number, or leave it out.")
    drawn: list[Row] = []
    sets = {}
    for name in args.sets:
        files = args.data_files or f"{FLASHRAG}/{name}/{args.split}.jsonl"
        rows, left = read_rows(name, load(files))
        chosen = rows
        if args.num is not None and args.num < len(rows):
            chosen = random.Random(f"{args.seed} {name}").sample(rows, args.num)
        with_evidence = sum(bool(row["evidence"]) for row in chosen)
        sets[name] = {
            "data_files": files,
            "rows": len(rows),
            "drawn": len(chosen),
            "with_evidence": with_evidence,
            "left_out": dict(left),
            "sha256_of_ids": hash_of(chosen),
        }
        print(f"{name}: {len(chosen)} of {len(rows)} questions, {with_evidence} with evidence; left out: {dict(left)}")
        drawn += chosen
    random.Random(args.seed).shuffle(drawn)
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"{args.split}.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in drawn), encoding="utf-8")
    about = {"seed": args.seed, "num": args.num, "sets": sets, "sha256_of_ids": hash_of(drawn)}
    path.with_suffix(".json").write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{path}: {len(drawn)} questions, ids {about['sha256_of_ids'][:16]}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(run))  # type: ignore[arg-type]

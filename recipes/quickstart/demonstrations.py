"""Demonstrations for the cold start: three kinds of demonstrators, in the real world and in invented ones.

    careful    searches every step of the path, then answers with what the last search found
    hasty      leaves the last step of the path out: answers with the country that the first search found, or asks
               for the fact of the first country instead of its neighbour's
    confused   takes every step, but asks for another fact at the end, and answers with that

All three search, copy and answer in the same form. A model that imitates them knows every step that a right answer
takes; it lacks the judgement of when to take it.
"""

from __future__ import annotations

import random
import string
from typing import Any

from make_data import ANSWERS, BORDER, DISTRACTORS, KEYS, MAX_VALUE_CHARS, fact_text, question_text
from tokenizers import Tokenizer

from agent_r1_trl.tools.search import Passage, render_passages

MIXTURE = {
    "simple": {"careful": 0.70, "hasty": 0.20, "confused": 0.10},
    "hard": {"careful": 0.15, "hasty": 0.55, "confused": 0.30},
    "three hops": {"careful": 0.12, "hasty": 0.68, "confused": 0.20},
}
"""Shares of the demonstrators by kind of question. Two-hop questions about a `SIMPLE` fact are simple, others hard."""
SIMPLE = ("capital", "highest point", "largest city", "internet code", "aircraft prefix")

World = dict[str, dict[str, str]]
"""Country -> relation -> value."""
Messages = list[dict[str, Any]]
SCHEMA = {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}


def searches(query: str) -> dict[str, Any]:
    """A turn that calls the tool."""
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": query}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def answers(value: str) -> dict[str, Any]:
    """The final turn. The blank keeps the value's tokens the same as in the middle of a sentence."""
    return {"role": "assistant", "content": f"<answer> {value}</answer>"}


def read_world(corpus: list[dict[str, str]]) -> tuple[World, dict[str, tuple[str, str, str]]]:
    """The facts of a corpus, and passage id -> (country, relation, value)."""
    world: World = {}
    facts = {}
    for passage in corpus:
        country = passage["title"]
        relation = passage["id"].split("/")[1].replace("-", " ")
        head = fact_text(relation, "\0").split("\0")[0]
        value = passage["text"][len(head) : -1]
        world.setdefault(country, {})[relation] = value
        facts[passage["id"]] = (country, relation, value)
    return world, facts


def demonstrate(
    world: World, hops: int, form: int, country: str, key: str, answer: str, rng: random.Random
) -> Messages:
    """One conversation by a demonstrator drawn from the mixture."""
    kind = "three hops" if hops == 3 else "simple" if answer in SIMPLE else "hard"
    shares = MIXTURE[kind]
    demonstrator = rng.choices(list(shares), list(shares.values()))[0]
    turns: Messages = [{"role": "user", "content": question_text(hops, form, answer, key, world[country][key])}]

    def look_up(relation: str, name: str, owner: str) -> str:
        passage = Passage(id="", title=owner, text=fact_text(relation, world[owner][relation]))
        turns.extend([searches(f"{relation} {name}"), {"role": "tool", "content": render_passages([passage])}])
        return world[owner][relation]

    look_up(key, world[country][key], country)
    here = country
    if hops == 3 and not (demonstrator == "hasty" and rng.random() < 0.5):
        here = look_up(BORDER, here, here)
        if demonstrator == "hasty":
            return [*turns, answers(here)]
    if demonstrator == "hasty" and (hops == 2 or answer not in world[here]):
        return [*turns, answers(here)]
    last = answer
    if demonstrator == "confused":
        others = [r for r in (*ANSWERS, *DISTRACTORS) if r in world[here] and r not in (answer, key)]
        last = rng.choice(others)
    value = look_up(last, here, here)
    return [*turns, answers(value)]


class Inventor:
    """Makes up countries that look like the training countries but share no name with them."""

    def __init__(self, models: World, tokenizer: Tokenizer, rng: random.Random) -> None:
        self.models = list(models.values())
        self.names = list(models)
        self.rng = rng
        pieces = [tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]
        self.inner = [p for p in pieces if p.isalpha() and p.islower() and len(p) <= 4]
        of_beginnings = [p.strip() for p in pieces if p.startswith(" ")]
        self.first = [p for p in of_beginnings if p.isalpha() and p.istitle() and len(p) <= 3]
        texts = list(self.names)
        for facts in self.models:
            texts += [facts.get(relation, "") for relation in (*KEYS, "largest city")]
        words = {word for text in texts for word in text.split()}
        self.words = sorted(w for w in words if w.isalpha() and w[0].isupper() and len(w) > 3)

    def word(self) -> str:
        """A capitalised word: made of token pieces, or of two halves of real words."""
        if self.rng.random() < 0.6:
            first = self.rng.choice(self.first)
            others = self.rng.choices(self.inner, k=self.rng.randint(1, 3))
            return "".join([first, *others])[:14]
        one = self.rng.choice(self.words)
        two = self.rng.choice(self.words)
        begin = one[: self.rng.randint(2, 4)]
        end = two[self.rng.randint(1, 3) :].lower()
        return (begin + end)[:14]

    def name(self, model: str) -> str:
        """`model` with its words replaced: `Nevado Ojos del Salado` -> `Nevado Brinta del Kovel`."""
        words = model.split()
        kept = [len(words) > 1 and self.rng.random() < 0.25 for _ in words]
        if all(kept):
            kept[-1] = False
        for place, word in enumerate(words):
            if word[0].isupper() and not kept[place]:
                words[place] = self.word()
        return " ".join(words)

    def character(self, model: str) -> str:
        """A random character of the kind of `model`: a digit, a small or a capital letter; others stay."""
        if model.isalpha():
            return self.rng.choice(string.ascii_uppercase if model.isupper() else string.ascii_lowercase)
        return self.rng.choice("123456789") if model.isdigit() else model

    def value(self, relation: str, model: str) -> str:
        """A made-up value of a relation."""
        if relation in ("aircraft prefix", "internet code"):
            return "".join(self.character(c) for c in model)
        if any(c.isdigit() for c in model):
            return "".join(self.character(c) if c.isdigit() else c for c in model)
        return self.name(model)

    def world(self, size: int) -> World:
        """`size` countries; each has a neighbour among them."""
        world: World = {}
        while len(world) < size:
            model = self.rng.choice(self.models)
            facts = {r: self.value(r, v)[:MAX_VALUE_CHARS].strip() for r, v in model.items() if r != BORDER}
            world[self.name(self.rng.choice(self.names))[:MAX_VALUE_CHARS].strip()] = facts
        names = list(world)
        for name, facts in world.items():
            facts[BORDER] = self.rng.choice([other for other in self.rng.sample(names, 2) if other != name])
        return world

    def demonstration(self, world: World) -> Messages:
        """A demonstration about a random question of `world`."""
        while True:
            country = self.rng.choice(list(world))
            hops = 3 if self.rng.random() < 0.4 else 2
            target = world[country][BORDER] if hops == 3 else country
            key, answer = self.rng.choice(KEYS), self.rng.choice(ANSWERS)
            if key in world[country] and answer in world[target] and (hops == 3 or key != answer):
                return demonstrate(world, hops, self.rng.randrange(2), country, key, answer, self.rng)

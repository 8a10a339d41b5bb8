"""A judge for tests: OpenAI's protocol, and scores that are a function of the text it reads."""

import contextlib
import json
import re

from tests.hosted import hosted, said, whole

FENCED = re.compile(r"^(?P<title>[^\n]*):\n<(?P<mark>data-[0-9a-f]{16})>\n(?P<text>.*?)\n</(?P=mark)>", re.M | re.S)


def parts_of(body):
    """Title -> text, of everything that a judge's request shows."""
    return {match["title"]: match["text"] for match in FENCED.finditer(body["messages"][-1]["content"])}


def texts_of(body):
    """The texts that are to be graded, in their order."""
    return [text for title, text in parts_of(body).items() if re.fullmatch(r"Text \d+", title)]


def verdict(*scores):
    """A judge's message."""
    return said(json.dumps({"reason": "because", "scores": scores}))


@contextlib.contextmanager
def judge_server(score=len, faults=(), delay_s=0.0):
    """(URL, what the server has seen): a judge that gives each text `score(text)` points."""
    turns = [lambda body: whole(verdict(*map(score, texts_of(body))))]
    with hosted(turns, faults, delay_s) as (url, seen, _):
        yield f"{url}/v1", seen

"""A judge for tests of `JudgeReward`: a local server whose scores are a function of the text that it reads."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence

from agent_r1_trl.testing.local_server import Body, HTTPAnswer, LocalServer, local_server

_FENCED = re.compile(r"^(?P<title>[^\n]*):\n<(?P<mark>data-[0-9a-f]{16})>\n(?P<text>.*?)\n</(?P=mark)>", re.M | re.S)


def parts_of(body: Body) -> dict[str, str]:
    """Title -> text, of everything that a judge's request shows: `The task`, `Text 1`, ..."""
    return {match["title"]: match["text"] for match in _FENCED.finditer(body["messages"][-1]["content"])}


def texts_of(body: Body) -> list[str]:
    """The texts that are to be graded, in their order."""
    return [text for title, text in parts_of(body).items() if re.fullmatch(r"Text \d+", title)]


def verdict(*scores: object) -> tuple[int, Body]:
    """The answer of a judge that gives these scores, one for each text; as it is sent, faults included.

    100 tokens are said to be read and 7 to be written.
    """
    message = {"role": "assistant", "content": json.dumps({"reason": "because", "scores": scores})}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 7}
    return 200, {"object": "chat.completion", "choices": [choice], "usage": usage}


@contextlib.contextmanager
def judge_server(
    score: Callable[[str], float] = len, faults: Sequence[HTTPAnswer] = (), delay_s: float = 0.0
) -> Iterator[tuple[str, LocalServer]]:
    """A judge behind OpenAI's protocol on this machine.

        with judge_server(lambda text: 10 if "Oslo" in text else 0) as (url, seen):
            reward = JudgeReward(rubric="Names the capital.", model="any", url=url)

    Args:
        score: points for a text, from 0 to `JudgeReward.max_score` (10).
        faults: answers (status, content, *headers) to the first requests, None to hang up; then come scores.
        delay_s: seconds that every answer takes.

    Yields:
        The URL for `JudgeReward.url`, and what the server has been asked; `texts_of(body)` reads a body of it.
    """
    left = list(faults)

    def respond(body: Body, number: int) -> HTTPAnswer:
        if left:
            return left.pop(0)
        roles = [message["role"] for message in body["messages"]]
        if roles != ["system", "user"] or not all(isinstance(message["content"], str) for message in body["messages"]):
            return 400, {"error": {"message": f"Invalid messages: {roles}", "type": "invalid_request_error"}}
        return verdict(*map(score, texts_of(body)))

    with local_server(respond, delay_s) as (url, seen):
        yield f"{url}/v1", seen

"""A stand-in for a hosted model: OpenAI's chat completions over HTTP, as strict as the servers that we know."""

import contextlib
import json

from agent_r1_trl.testing import local_server

PROMPT_TOKENS = 100
"""Of the first request; each further message has `MESSAGE_TOKENS`."""
MESSAGE_TOKENS = 10
SAMPLED_TOKENS = 7


def said(text):
    """A message without a call."""
    return {"role": "assistant", "content": text}


def called(*pairs, ids=None):
    """A message with calls: pairs of name and arguments (text stays as it is)."""
    calls = [
        {
            "id": ids[index] if ids else f"id{index}",
            "type": "function",
            "function": {"name": name, "arguments": args if isinstance(args, str) else json.dumps(args)},
        }
        for index, (name, args) in enumerate(pairs)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def whole(message, *, finish=None, usage=True, num_messages=1):
    """The answer of a server that says this message."""
    finish = finish or ("tool_calls" if message.get("tool_calls") else "stop")
    counted = {
        "prompt_tokens": PROMPT_TOKENS + MESSAGE_TOKENS * (num_messages - 1),
        "completion_tokens": SAMPLED_TOKENS,
    }
    record = {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": finish}]}
    return 200, record | ({"usage": counted} if usage else {})


def problem_with(messages):
    """What a strict server refuses in a conversation; None: nothing."""
    waiting = []
    for message in messages:
        unknown = set(message) - {"role", "content", "tool_calls", "tool_call_id"}
        if unknown:
            return f"unknown keys {unknown}"
        if message["role"] not in ("system", "user", "assistant", "tool"):
            return f"role {message['role']}"
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting or not isinstance(message["content"], str):
                return "a tool message that answers no call"
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            return "a call without an answer"
        calls = message.get("tool_calls") or []
        waiting = [call["id"] for call in calls]
        if len(set(waiting)) < len(waiting) or not all(waiting):
            return "ids of calls"
        for call in calls:
            if not call["function"]["name"] or not isinstance(json.loads(call["function"]["arguments"]), dict):
                return "arguments that are no object"
        if not isinstance(message["content"], str) and not calls:
            return "neither text nor calls"
    return "a call without an answer" if waiting else None


class Hosted:
    """What the server says: turn by turn, the same to every trajectory, or `faults` first.

    Args:
        turns: messages, or functions of the body that make a whole answer.
        faults: answers (status, content, *headers) or None (hangs up) to the first requests.
    """

    def __init__(self, turns, faults=()):
        self.turns, self.faults = list(turns), list(faults)
        self.models = ["gpt"]

    def __call__(self, body, number):
        if self.faults:
            return self.faults.pop(0)
        if body["model"] not in self.models:
            return 404, {
                "error": {"message": f"The model `{body['model']}` does not exist", "code": "model_not_found"}
            }
        problem = problem_with(body["messages"])
        if problem:
            return 400, {"error": {"message": f"Invalid messages: {problem}", "type": "invalid_request_error"}}
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        made = self.turns[min(turn, len(self.turns) - 1)]
        return made(body) if callable(made) else whole(made, num_messages=len(body["messages"]))


@contextlib.contextmanager
def hosted(turns=(), faults=(), delay_s=0.0):
    """(URL, what the server has seen, the `Hosted`)."""
    model = Hosted(turns or [said("5")], faults)
    with local_server(model, delay_s) as (url, seen):
        yield url, seen, model


def error(status, message="no", *headers, **fields):
    """An error as OpenAI writes it."""
    return (status, {"error": {"message": message, **fields}}, *headers)

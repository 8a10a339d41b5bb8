"""What OpenAI's chat completions ask for and are answered with, as far as an agent with tools of its own can do it.

Covered here: reading a request, writing answers, pieces and errors. Not covered: HTTP (`agent_server.py`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agent_r1_trl.features.serve.events import Event
from agent_r1_trl.generation.base import SamplingParams
from agent_r1_trl.trajectory import Message, Trajectory

ROLES = ("system", "user", "assistant")
_NUMBERS: dict[str, tuple[tuple[type, ...], float, float]] = {
    "temperature": ((int, float), 0, 2),
    "top_p": ((int, float), 0, 1),
    "min_p": ((int, float), 0, 1),
    "top_k": ((int,), 0, 10**6),
    "repetition_penalty": ((int, float), 0.01, 10),
}
"""Name -> types, smallest and largest value."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False,),
    "stop": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
}
"""Settings that are taken only with a value that changes nothing."""
_ABOUT_THE_CALLER = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key")


class APIError(Exception):
    """An answer other than 200.

    Args:
        status: of HTTP.
        message: what is wrong, and what to do.
        param: the setting that is wrong.
        code: OpenAI's name of the mistake.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(kw_only=True)
class ChatRequest:
    """One request, checked."""

    messages: list[Message]
    params: SamplingParams
    seed: int
    max_tokens: int | None
    """Limit of the whole trajectory; None: the server's."""
    is_streamed: bool
    has_usage: bool
    """Whether a stream ends with the numbers of tokens."""


def read_request(body: Any, *, model: str, params: SamplingParams, seed: int) -> ChatRequest:
    """Check a request.

    Args:
        body: its JSON.
        model: the name that it must ask for.
        params: how tokens are drawn if it does not say.
        seed: the same.

    Raises:
        APIError: names the setting that is wrong, or that an agent cannot honour.
    """
    if not isinstance(body, dict):
        raise APIError(400, "The body must be a JSON object. Pass one with model and messages.")
    given = {name: value for name, value in body.items() if value is not None}
    asked = given.pop("model", None)
    if asked != model:
        raise APIError(404, f"There is no model {asked!r}; there is {model!r}.", param="model", code="model_not_found")
    messages = _read_messages(given.pop("messages", None))
    numbers = {name: _number(name, given.pop(name), *rule) for name, rule in _NUMBERS.items() if name in given}
    limits = [_whole(name, given.pop(name)) for name in ("max_tokens", "max_completion_tokens") if name in given]
    request = ChatRequest(
        messages=messages,
        params=replace(params, **numbers),
        seed=_whole("seed", given.pop("seed", seed), minimum=0),
        max_tokens=min(limits, default=None),
        is_streamed=_flag("stream", given.pop("stream", False)),
        has_usage=_usage(given.pop("stream_options", {})),
    )
    for name, value in given.items():
        if name not in _ABOUT_THE_CALLER and value not in _NEUTRAL.get(name, ()):
            what = "The agent has tools of its own and calls them itself. " if name.startswith("tool") else ""
            raise APIError(
                400,
                f"{name}={value!r:.80} is not supported. {what}Remove it.",
                param=name,
                code="unsupported_parameter",
            )
    return request


def _read_messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise APIError(400, "messages must be a list with at least one message. Pass one.", param="messages")
    read = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise APIError(400, f"{where}: the role must be one of {', '.join(ROLES)}. Correct it.", param=where)
        if message.get("tool_calls"):
            raise APIError(400, f"{where}: the agent calls its tools itself. Remove tool_calls.", param=where)
        content = message.get("content") or ""
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = "\n".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
        if not isinstance(content, str):
            raise APIError(400, f"{where}: the content must be text. Pass a string.", param=where)
        read.append({"role": message["role"], "content": content})
    if read[-1]["role"] != "user":
        raise APIError(400, "The last message must be the user's. Pass one of role user.", param="messages")
    return read


def _number(name: str, value: Any, kinds: Any, low: float, high: float) -> Any:
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise APIError(400, f"{name}={value!r:.80}: must be a number from {low} to {high}. Pass one.", param=name)
    return value


def _whole(name: str, value: Any, minimum: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise APIError(400, f"{name}={value!r:.80}: must be a whole number >= {minimum}. Pass one.", param=name)
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise APIError(400, f"{name}={value!r:.80}: must be true or false. Pass one of them.", param=name)
    return value


def _usage(options: Any) -> bool:
    if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
        raise APIError(400, f"stream_options={options!r:.80}: only include_usage is known.", param="stream_options")
    return bool(options.get("include_usage"))


# ---------------------------------------------------------------- answers


class ChatAnswer:
    """What a request is answered with, whole or in pieces.

    Args:
        model: its name.
    """

    def __init__(self, model: str) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, trajectory: Trajectory, events: Sequence[Event]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        message = {
            "role": "assistant",
            "content": trajectory.final_text,
            "agent": {
                "stop_reason": trajectory.stop_reason.value,
                "events": [event_record(event) for event in events],
            },
        }
        choice = {"index": 0, "message": message, "finish_reason": finish_reason(trajectory), "logprobs": None}
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": usage(trajectory)}

    def piece(self, delta: dict[str, Any], finished: str | None = None) -> dict[str, Any]:
        """One piece of a stream."""
        choice = {"index": 0, "delta": delta, "finish_reason": finished, "logprobs": None}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def usage(self, trajectory: Trajectory) -> dict[str, Any]:
        """The last piece of a stream that was asked for usage."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage(trajectory)}


def event_record(event: Event) -> dict[str, Any]:
    """An event as JSON: `kind`, and what is not empty."""
    return {name: value for name, value in asdict(event).items() if value not in ("", None, False)}


def finish_reason(trajectory: Trajectory) -> str:
    """OpenAI's name for the end of a trajectory."""
    return "length" if trajectory.stop_reason.is_truncated else "stop"


def usage(trajectory: Trajectory) -> dict[str, int]:
    """Tokens of the prompt, and those that the model sampled in all turns."""
    prompt, sampled = len(trajectory.prompt_ids), trajectory.num_action_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

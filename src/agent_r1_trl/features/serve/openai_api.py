"""What OpenAI's chat completions ask for and are answered with, as far as an agent with tools of its own can do it.

Covered here: reading a request, writing answers, pieces and errors. Not covered: HTTP (`agent_server.py`).
"""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from agent_r1_trl.errors import APIError
from agent_r1_trl.generation.base import SamplingParams
from agent_r1_trl.trajectory import Message, Trajectory

NEUTRAL: dict[str, tuple[Any, ...]] = {
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
ABOUT_THE_CALLER = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Part(_Strict):
    """A part of a message that is sent as a list."""

    type: Literal["text"]
    text: str


def _joined(content: Any) -> Any:
    """The text of a message that is sent in parts."""
    if isinstance(content, list):
        return "\n".join(_Part.model_validate(part).text for part in content)
    return "" if content is None else content


class RequestMessage(BaseModel):
    """A message; what the agent called is not sent back, as it calls its tools itself."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_joined)] = ""
    tool_calls: Annotated[list[Any] | None, Field(max_length=0)] = Field(None, exclude=True)


class StreamOptions(_Strict):
    """Whether a stream ends with the numbers of tokens."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ChatRequest(_Strict):
    """One request, checked. A setting that is None is the server's own."""

    messages: list[RequestMessage] = Field(min_length=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    seed: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    """Limit of the whole trajectory."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """`max_tokens` by its later name."""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @field_validator("messages")
    @classmethod
    def _ends_with_the_user(cls, messages: list[RequestMessage]) -> list[RequestMessage]:
        if messages[-1].role != "user":
            raise ValueError("the last one must be the user's")
        return messages

    @property
    def prompt(self) -> list[Message]:
        """The messages as the rollout reads them."""
        return [message.model_dump() for message in self.messages]

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of the whole trajectory; None: the server's."""
        return min(filter(None, (self.max_tokens, self.max_completion_tokens)), default=None)

    def params(self, default: SamplingParams) -> SamplingParams:
        """How tokens are drawn."""
        names = ("temperature", "top_p", "min_p", "top_k", "repetition_penalty")
        return replace(default, **{name: getattr(self, name) for name in names if getattr(self, name) is not None})


def read_request(body: Any, *, model: str) -> ChatRequest:
    """Check the JSON of a request, which must ask for `model`.

    Raises:
        APIError: names the setting that is wrong, or that an agent cannot honour.
    """
    if not isinstance(body, dict):
        raise APIError(400, "The body must be a JSON object. Pass one with model and messages.")
    given = {name: value for name, value in body.items() if value is not None and name not in ABOUT_THE_CALLER}
    asked = given.pop("model", None)
    if asked != model:
        raise APIError(404, f"There is no model {asked!r}; there is {model!r}.", param="model", code="model_not_found")
    for name in [name for name in given if name not in ChatRequest.model_fields]:
        if (value := given.pop(name)) not in NEUTRAL.get(name, ()):
            what = "The agent has tools of its own and calls them itself. " if name.startswith("tool") else ""
            message = f"{name}={value!r:.80} is not supported. {what}Remove it."
            raise APIError(400, message, param=name, code="unsupported_parameter")
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise APIError(400, f"{place}={first['input']!r:.80}: {first['msg']}. Correct it.", param=place) from error


def chat_answer(model: str, trajectory: Trajectory) -> dict[str, Any]:
    """The answer to a request that is not streamed; `model` is its name."""
    message = {
        "role": "assistant",
        "content": trajectory.final_text,
        "agent": {"stop_reason": trajectory.stop_reason.value, "num_turns": len(trajectory.turns)},
    }
    choice = {"index": 0, "message": message, "finish_reason": finish_reason(trajectory), "logprobs": None}
    return {**_head(model), "object": "chat.completion", "choices": [choice], "usage": usage(trajectory)}


def stream_pieces(model: str, trajectory: Trajectory, *, has_usage: bool) -> list[dict[str, Any]]:
    """The answer to a request for a stream, which is one piece, since the tools run first, and its end."""
    head = {**_head(model), "object": "chat.completion.chunk"}
    said = {"role": "assistant", "content": trajectory.final_text}
    pieces = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finished, "logprobs": None}]}
        for delta, finished in ((said, None), ({}, finish_reason(trajectory)))
    ]
    return [*pieces, {**head, "choices": [], "usage": usage(trajectory)}] if has_usage else pieces


def _head(model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}


def finish_reason(trajectory: Trajectory) -> str:
    """OpenAI's name for the end of a trajectory."""
    return "length" if trajectory.stop_reason.is_truncated else "stop"


def usage(trajectory: Trajectory) -> dict[str, int]:
    """Tokens of the prompt, and those that the model sampled in all turns."""
    prompt, sampled = len(trajectory.prompt_ids), trajectory.num_action_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

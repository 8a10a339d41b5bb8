"""An agent behind `POST /v1/chat/completions`: each request runs the whole training rollout, tools included.

OpenAI's chat completions are taken as far as an agent with tools of its own can do what they ask.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from agent_r1_trl.errors import APIError
from agent_r1_trl.evaluation.agent import Agent
from agent_r1_trl.features.serve.session import Conversation, ConversationError
from agent_r1_trl.generation.base import SamplingParams
from agent_r1_trl.safe_text import shown_all
from agent_r1_trl.trajectory import Message, StopReason, Trajectory

if TYPE_CHECKING:
    from aiohttp import web

MAX_BODY_BYTES = 16 * 2**20
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
EVERY_ADDRESS = ("0.0.0.0", "::")
logger = logging.getLogger(__name__)


class AgentServer:
    """Answers requests with an agent; many at once, each with an environment of its own.

    Args:
        agent: model, chat format and limits; `max_concurrency` is how many requests are sampled at once.
        env_factory: makes environments.
        name: of the model, as clients ask for it.
        params, seed: of sampling if a request does not say.
        row: further columns that the environment reads.
        host: the address that the server will listen at. Unless that is every address of the machine, requests must
            name it (or the machine itself) as their host: a page in a browser whose own name was made to lead here
            names another.
    """

    def __init__(
        self,
        agent: Agent,
        env_factory: Callable[[], Any],
        *,
        name: str,
        params: SamplingParams | None = None,
        seed: int = 0,
        row: dict[str, Any] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self._hosts = None if host in EVERY_ADDRESS else {host.lower(), *LOOPBACK_NAMES}
        self.name = name
        self._agent = agent
        self._env_factory = env_factory
        self._params = params or SamplingParams(temperature=0.0)
        self._seed = seed
        self._row = row
        self._places = asyncio.Semaphore(agent.limits.max_concurrency)
        Conversation(agent, env_factory)  # refuses limits that do not fit, here and not in the first request

    def app(self) -> web.Application:
        """The server as an application of aiohttp."""
        from aiohttp import web

        async def models(request: web.Request) -> web.Response:
            card = {"id": self.name, "object": "model", "created": 0, "owned_by": "agent-r1-trl"}
            return web.json_response({"object": "list", "data": [card]})

        async def health(request: web.Request) -> web.Response:
            return web.json_response({"status": "ok"})

        @web.middleware
        async def answer(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
            try:
                self._check_host(request.host)
                return await handler(request)
            except web.HTTPException as error:  # no such route, a body that is too large
                failure = APIError(error.status, f"{request.method} {request.path}: {error.reason}.")
            except Exception as error:
                failure = _as_api_error(error)
            # The tools have run: whether to run them again is not for a client's library to decide.
            headers = {"x-should-retry": "false"}
            return web.json_response(shown_all(failure.body), status=failure.status, headers=headers)

        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[answer])
        post = web.post("/v1/chat/completions", self.complete)
        app.add_routes([post, web.get("/v1/models", models), web.get("/health", health)])
        return app

    def _check_host(self, header: str) -> None:
        name = header.rpartition("]")[0].removeprefix("[") or header.partition(":")[0]  # [::1]:8000 is ::1
        if self._hosts is not None and name.lower().rstrip(".") not in self._hosts:
            known = ", ".join(sorted(self._hosts))
            raise APIError(403, f"The header Host names {name!r:.80}. The server answers to {known}: use one of them.")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer `POST /v1/chat/completions`."""
        from aiohttp import web

        if request.content_type != "application/json":  # so that no page in a browser can ask without being allowed to
            raise APIError(415, "The body must be sent as application/json. Set the header Content-Type.")
        try:
            body = await request.json()
        except (ValueError, RecursionError) as error:
            raise APIError(400, f"The body is not JSON that can be read: {error}. Correct it.") from error
        asked = read_request(body, model=self.name)
        if asked.stream:
            return await self._stream(request, asked)
        return web.json_response(chat_answer(self.name, await self._roll_out(asked)))

    async def _roll_out(self, asked: ChatRequest) -> Trajectory:
        agent = self._agent
        params = asked.params(self._params)
        seed = self._seed if asked.seed is None else asked.seed
        try:
            if asked.limit is not None:
                limit = min(asked.limit, agent.limits.max_completion_length or asked.limit)
                agent = replace(agent, limits=replace(agent.limits, max_completion_length=limit))
            conversation = Conversation(agent, self._env_factory, params=params, seed=seed, row=self._row)
        except ValueError as error:  # too little for the recipe's summaries
            raise APIError(400, f"max_tokens={asked.limit}: {error}", param="max_tokens") from error
        async with self._places:
            try:
                return await conversation.say(asked.prompt)
            except ConversationError as error:
                if error.stop_reason is StopReason.PROMPT_TOO_LONG:
                    code = "context_length_exceeded"
                    raise APIError(400, str(error), param="messages", code=code) from error
                status = 500 if error.stop_reason is StopReason.ENVIRONMENT_ERROR else 503
                raise APIError(status, str(error), code=error.stop_reason.value) from error
            finally:
                await conversation.close()

    async def _stream(self, request: web.Request, asked: ChatRequest) -> web.StreamResponse:
        """Server-sent events, for clients that ask for them."""
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            trajectory = await self._roll_out(asked)
            has_usage = asked.stream_options.include_usage
            lines = [*map(json.dumps, stream_pieces(self.name, trajectory, has_usage=has_usage)), "[DONE]"]
        except Exception as error:  # the status has been sent
            lines = [json.dumps(_as_api_error(error).body)]
        for line in lines:
            await response.write(f"data: {line}\n\n".encode())
        return response


def _as_api_error(error: Exception) -> APIError:
    if isinstance(error, APIError):
        return error
    logger.error("A request failed: %s: %s", type(error).__name__, error, exc_info=error)
    return APIError(500, f"{type(error).__name__}: {error}")


# ---------------------------------------------------------------- the protocol

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


def _joined(content: object) -> Any:
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


def read_request(body: object, *, model: str) -> ChatRequest:
    """Check the JSON of a request, which asks for `model` or for none.

    Raises:
        APIError: names the setting that is wrong, or that an agent cannot honour.
    """
    if not isinstance(body, dict):
        raise APIError(400, "The body must be a JSON object. Pass one with model and messages.")
    given = {name: value for name, value in body.items() if value is not None and name not in ABOUT_THE_CALLER}
    asked = given.pop("model", model)
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

"""A hosted model behind an OpenAI-compatible endpoint, asked with the package `openai` (the extra `hosted`).

The client repeats what may pass. Not covered: the form of messages and the rollout (`agent_r1_trl.rollout.hosted`).
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agent_r1_trl.generation.base import GenerationError, RefusedRequestError, RequestTooLongError
from agent_r1_trl.safe_text import rules, shown

if TYPE_CHECKING:
    import openai

MAX_RETRIES = 20
"""Retries of a request that is lost, or that a server cannot answer: about two minutes."""
_OWN_SETTINGS = ("model", "messages", "tools", "stream", "n")  # what the rollout alone writes into a request
_TOO_LONG = re.compile(
    r"context.?length|context.?window|maximum context|too many tokens|(prompt|input|request)\W+(is )?too (long|large)",
    re.IGNORECASE,
)
_NO_CREDIT = ("insufficient_quota", "billing_hard_limit_reached", "insufficient_credits")


class EndpointUnusableError(GenerationError):
    """No request will be answered as things are: key, name, address (`is_mistake`), credit. It ends an evaluation."""

    def __init__(self, message: str, *, is_mistake: bool) -> None:
        super().__init__(message)
        self.exit_code = 2 if is_mistake else 3


class Endpoint:
    """Asks a hosted model; used from one event loop at a time, by many trajectories at once.

    Args:
        url: of the API, such as https://api.openai.com/v1.
        model: its name there.
        key: sent as a bearer token; None: none. It stands in no text that this package writes.
        key_name: the environment variable that it is from, for errors.
        options: further settings of every request; None as a value leaves out one that is sent otherwise.
        timeout_s: seconds that one request may take, with all of its repetitions.

    Raises:
        ValueError: the address is none, a setting is the rollout's own, or the package is missing.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        key_name: str = "OPENAI_API_KEY",
        options: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.url = api_url(url)
        self.model = model
        self.options = dict(options or {})
        self._key = key
        self._key_name = key_name
        self._timeout_s = timeout_s
        if own := [name for name in self.options if name in _OWN_SETTINGS]:
            raise ValueError(
                f"endpoint_options={self.options}: {own[0]!r} is what the evaluation itself sets. Remove it."
            )
        try:
            import openai  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"endpoint={url!r}: a hosted model needs the package openai. Install it: "
                "pip install 'agent-r1-trl[hosted]'."
            ) from error
        if key:
            rules().note({"api_key": key})  # masked wherever a server or an error repeats it
        self.counts: Counter[str] = Counter()
        """`requests` that were answered, and how often one of them was `repeated`."""
        self._client: openai.AsyncOpenAI | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the client's connections
        self._length_name = "max_tokens"
        self._has_answered = False

    async def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON of the server's answer.

        Args:
            body: of the request, with `max_tokens`, and without the model and the endpoint's own options.

        Raises:
            EndpointUnusableError: see there.
            RequestTooLongError: the conversation and the answer do not fit into the model's context.
            RefusedRequestError: the server refuses this request for another reason.
            GenerationError: it could not be reached or did not answer properly, however often it was asked.
        """
        import openai

        sent, length_name = {**body}, self._length_name
        sent[length_name] = sent.pop("max_tokens")
        sent = {name: value for name, value in (sent | self.options).items() if value is not None}
        messages, where = sent.pop("messages"), f"{self.model} at {self.url}"
        headers: Any = None if self._key else {"Authorization": openai.Omit()}
        if self._client is None or self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._client = openai.AsyncOpenAI(
                base_url=self.url, api_key=self._key or "none", max_retries=MAX_RETRIES, timeout=self._timeout_s
            )
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.chat.completions.with_raw_response.create(
                    model=self.model, messages=messages, extra_body=sent, extra_headers=headers
                )
        except TimeoutError as error:
            raise GenerationError(f"{where}: no answer after {self._timeout_s:g} s") from error
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            raise GenerationError(f"{where}: no answer ({type(cause).__name__}: {shown(str(cause))})") from error
        except openai.APIStatusError as error:
            # Models that reason refuse `max_tokens` and name what they take instead.
            if length_name == "max_tokens" and re.search("max_tokens.*max_completion_tokens", str(error), re.DOTALL):
                self._length_name = "max_completion_tokens"
                return await self.ask(body)
            raise self._refusal(error) from None  # what the server said may repeat the key
        try:
            record: dict[str, Any] = response.http_response.json()
            _ = record["choices"][0]
        except (ValueError, LookupError, TypeError) as error:  # routers answer so for the server behind them
            text = shown(response.http_response.text[:200])
            raise GenerationError(f"{where}: an answer without choices: {text!r}") from error
        self.counts["requests"] += 1
        if response.retries_taken:
            self.counts["repeated"] += response.retries_taken
        self._has_answered = True
        return record

    async def aclose(self) -> None:
        """Close the connections of this event loop; the next request opens new ones."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.close()

    def close(self) -> None:
        """Nothing is held but connections, which `aclose` ends on their own loop."""

    def _refusal(self, error: openai.APIStatusError) -> GenerationError:
        """The meaning of a refusal that outlasted all repetitions."""
        status = error.status_code
        fields = error.body if isinstance(error.body, dict) else {}
        text = shown(str(fields.get("message") or error.response.text)[:1000])
        said = f"HTTP {status}: {text}"
        where = f"{self.model} at {self.url}"
        codes = (fields.get("code"), fields.get("type"))
        if status == 402 or any(code in _NO_CREDIT for code in codes):
            message = f"{where} has no credit left ({said}). Pay for more, or pass another key."
            return EndpointUnusableError(message, is_mistake=False)
        # Later than at the first answer a server refuses what a single request asks for.
        if status == 401 or (status in (403, 404, 405) and not self._has_answered):
            key = f"the key in {self._key_name}" if self._key else f"{self._key_name}, which is not set"
            return EndpointUnusableError(
                f"{where} cannot be asked ({said}). Correct {key} (--api_key_env names the variable), --model (GET "
                "/v1/models lists the names), or --endpoint (the URL up to /v1).",
                is_mistake=True,
            )
        if status in (400, 413, 422) and ("context_length_exceeded" in codes or _TOO_LONG.search(text)):
            return RequestTooLongError(said)
        if status in (408, 409, 429) or status >= 500:
            return GenerationError(f"{where}: {said}")
        return RefusedRequestError(said)


def api_url(url: str) -> str:
    """The address up to the route.

    >>> api_url("http://127.0.0.1:8000"), api_url("https://api.openai.com/v1/chat/completions/")
    ('http://127.0.0.1:8000/v1', 'https://api.openai.com/v1')

    Raises:
        ValueError: it is no address of HTTP, or holds a password or a query.
    """
    match = re.fullmatch(r"(https?://(?:[^/@?#\s:\[\]]+|\[[\da-f:.]+\])(?::(\d{0,5}))?)(/[^@?#\s]*)?", url, re.I)
    if match is None or int(match[2] or 0) > 65535:
        given = "***" if any(mark in url for mark in "@?#") else repr(url)  # it is no place for a secret
        raise ValueError(
            f"endpoint={given}: it must begin with http:// or https:// and name a host, without password, query or "
            "fragment (the key comes from an environment variable). Pass one such as https://api.openai.com/v1."
        )
    path = (match[3] or "").rstrip("/").removesuffix("/chat/completions")
    return match[1] + (path or "/v1")

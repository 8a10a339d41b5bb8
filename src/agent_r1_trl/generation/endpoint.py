"""A hosted model behind an OpenAI-compatible endpoint: `POST URL/chat/completions`, messages in, a message out.

Covered here: requests, which of them are repeated, and what a refusal means. Not covered: the form of messages
(`endpoint_messages.py`), the rollout (`agent_r1_trl.rollout.hosted`).
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from agent_r1_trl.generation.base import GenerationError, RefusedRequestError, RequestTooLongError
from agent_r1_trl.safe_text import rules, shown

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

MAX_FAILURES = 6
"""Tries of a request that meets a broken or unreachable server; one that is told to wait waits `timeout_s` in all."""
FIRST_WAIT_S = 0.5
MAX_WAIT_S = 30.0
OWN_SETTINGS = ("model", "messages", "tools", "stream", "n")
"""What the rollout alone writes into a request."""
_WAIT = 429
_MAY_PASS = (408, 409, 425, _WAIT)
_TOO_LONG = re.compile(
    r"context.?length|context.?window|maximum context|too many tokens|(prompt|input|request)\W+(is )?too (long|large)",
    re.IGNORECASE,
)
_NO_CREDIT = ("insufficient_quota", "billing_hard_limit_reached", "insufficient_credits")
_PATH = "/chat/completions"


class EndpointUnusableError(GenerationError):
    """No request will be answered as things are: key, name, address or credit are wrong. It ends an evaluation.

    Args:
        message: what the server said, and the cure.
        is_mistake: of the settings, unlike spent credit.
    """

    def __init__(self, message: str, *, is_mistake: bool) -> None:
        super().__init__(message)
        self.is_mistake = is_mistake


class Endpoint:
    """Asks a hosted model; used from one event loop at a time, by many trajectories at once.

    Args:
        url: of the API, such as https://api.openai.com/v1.
        model: its name there.
        key: sent as a bearer token; None: none. It stands in no text that this package writes.
        key_name: the environment variable that it is from, for errors.
        options: further settings of every request; None as a value leaves out one that is sent otherwise.
        timeout_s: seconds that one request may take, and that it waits in all for a server that says to wait.

    Raises:
        ValueError: the address is none, or a setting is the rollout's own.
    """

    max_model_length = None

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
        self.url, self.model, self.key_name = api_url(url), model, key_name
        self.options, self.timeout_s = dict(options or {}), timeout_s
        own = [name for name in self.options if name in OWN_SETTINGS]
        if own:
            raise ValueError(
                f"endpoint_options={self.options}: {own[0]!r} is what the evaluation itself sets. Remove it."
            )
        self._key = key
        if key:
            rules().note({"api_key": key})  # masked wherever a server or an error repeats it
        self.counts: Counter[str] = Counter()
        """`requests` that were answered, and how many were `repeated`, in all and by cause (`repeated: HTTP 429`)."""
        self._client: httpx.AsyncClient | None = None
        self._not_before = 0.0
        """Time (`time.monotonic`) until which the server told everyone to wait."""
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
        from tenacity import AsyncRetrying, retry_if_exception

        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, _PassingError)),
            stop=self._gives_up,
            wait=_wait_s,
            before_sleep=self._note_repetition,
            reraise=True,
        )
        try:
            return await retrying(self._ask_once, body)
        except _PassingError as error:
            raise GenerationError(f"{self.model} at {self.url}: {error}") from error

    async def aclose(self) -> None:
        """Close the connections; the next request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def close(self) -> None:
        """Nothing is held but connections, which `aclose` ends on their own loop."""

    def __repr__(self) -> str:
        return f"Endpoint({self.url!r}, {self.model!r})"

    # ---------------------------------------------------------------- one try

    async def _ask_once(self, body: Mapping[str, Any]) -> dict[str, Any]:
        import httpx

        while (wait_s := self._not_before - time.monotonic()) > 0:
            await asyncio.sleep(wait_s + random.uniform(0, FIRST_WAIT_S))
        client, sent = self._open(), self._body(body)
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await client.post(self.url + _PATH, content=json.dumps(sent))
        except (TimeoutError, httpx.TimeoutException) as error:
            raise _PassingError(f"no answer after {self.timeout_s:g} s", "timeout", tries=2) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise _PassingError(f"no answer ({type(error).__name__}: {shown(str(error))})", "no answer") from error
        record = _record(response)
        problem = _problem(record)
        if response.status_code != 200 or (problem and "choices" not in record):
            self._refuse(response, record, problem, sent)
        if not isinstance(record.get("choices"), list) or not record["choices"]:
            shortened = shown(response.text[:200])
            raise _PassingError(f"an answer without choices: {shortened!r}", "no choices", tries=3)
        self.counts["requests"] += 1
        self._has_answered = True
        return record

    def _open(self) -> httpx.AsyncClient:
        import httpx

        if self._client is None:
            headers = {"Content-Type": "application/json"} | (
                {"Authorization": f"Bearer {self._key}"} if self._key else {}
            )
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            timeout = httpx.Timeout(self.timeout_s, connect=min(30.0, self.timeout_s))
            self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout)
        return self._client

    def _body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        sent = {"model": self.model, **body}
        sent[self._length_name] = sent.pop("max_tokens")
        return {name: value for name, value in (sent | self.options).items() if value is not None}

    def _refuse(
        self, response: httpx.Response, record: Mapping[str, Any], problem: str, sent: Mapping[str, Any]
    ) -> NoReturn:
        """Raise what an answer without a message means.

        Raises:
            Exception: as `ask` says.
        """
        status, code = response.status_code, _code(record)
        if status == 200:  # routers answer so for the server behind them
            status = code if isinstance(code, int) and 400 <= code < 600 else 500
        text = shown(problem or response.text[:300] or response.reason_phrase)
        said = f"HTTP {status}: {text}"
        where = f"model {self.model!r} at {self.url}"
        if code in _NO_CREDIT or status == 402:
            message = f"{where} has no credit left ({said}). Pay for more, or pass another key."
            raise EndpointUnusableError(message, is_mistake=False)
        is_new = not self._has_answered  # later a server refuses what a single request asks for
        if status == 401 or (status == 403 and is_new):
            key = f"the key in {self.key_name}" if self._key else f"no key ({self.key_name} is not set)"
            raise EndpointUnusableError(
                f"{where} refuses {key} ({said}). Set the environment variable that --api_key_env names to a key "
                "that may use the model.",
                is_mistake=True,
            )
        if is_new and (status in (404, 405) or 300 <= status < 400):
            raise EndpointUnusableError(
                f"{where}: there is no such model or address ({said}). Pass the URL up to /v1 as --endpoint, and a "
                "name that GET /v1/models lists as --model.",
                is_mistake=True,
            )
        if status in (400, 422) and self._length_name in sent and _asks_for_other_name(text):
            self._length_name = "max_completion_tokens"
            raise _PassingError(said, "max_completion_tokens", retry_after_s=0.0)
        if status in (400, 413, 422) and (code == "context_length_exceeded" or _TOO_LONG.search(text)):
            raise RequestTooLongError(said)
        if status in _MAY_PASS or status >= 500:
            wait_s = _retry_after_s(response.headers)
            if status in (_WAIT, 503) and wait_s is not None:
                self._not_before = max(self._not_before, time.monotonic() + min(wait_s, self.timeout_s))
            raise _PassingError(said, f"HTTP {status}", retry_after_s=wait_s, is_told=status == _WAIT)
        raise RefusedRequestError(said)

    # ---------------------------------------------------------------- repetition

    def _gives_up(self, state: Any) -> bool:
        error = state.outcome.exception()
        wait_s = error.retry_after_s or 0.0
        if error.is_told:
            return bool(state.seconds_since_start + wait_s > self.timeout_s)
        return bool(state.attempt_number >= error.tries or wait_s > self.timeout_s)

    def _note_repetition(self, state: Any) -> None:
        error = state.outcome.exception()
        self.counts["repeated"] += 1
        self.counts[f"repeated: {error.cause}"] += 1
        if self.counts[f"repeated: {error.cause}"] == 1:
            logger.warning("%s at %s: %s. The request is repeated. Said once.", self.model, self.url, error)


class _PassingError(Exception):
    """What may be over when the request is made again.

    Args:
        message: what happened.
        cause: the same in a word, to be counted.
        tries: how often such a request is made.
        retry_after_s: seconds that the server asks to wait.
        is_told: the server is well, and says to wait.
    """

    def __init__(
        self,
        message: str,
        cause: str,
        *,
        tries: int = MAX_FAILURES,
        retry_after_s: float | None = None,
        is_told: bool = False,
    ) -> None:
        super().__init__(message)
        self.cause, self.tries, self.retry_after_s, self.is_told = cause, tries, retry_after_s, is_told


def api_url(url: str) -> str:
    """The address up to the route.

    >>> api_url("http://127.0.0.1:8000"), api_url("https://api.openai.com/v1/chat/completions/")
    ('http://127.0.0.1:8000/v1', 'https://api.openai.com/v1')

    Raises:
        ValueError: it is no address of HTTP, or holds a password or a query.
    """
    problem = None
    try:
        parts = urlsplit(url)
        if parts.scheme.lower() not in ("http", "https") or not parts.hostname:
            problem = "must begin with http:// or https:// and name a host"
        elif parts.username or parts.password or parts.query or parts.fragment:
            # It is written into results, where no secret may stand.
            problem = "must hold no password, query or fragment; the key comes from an environment variable"
            url = f"{parts.scheme}://{parts.hostname}/..."
        _ = parts.port  # is computed, and may be out of range
    except ValueError as error:
        problem = str(error)
    if problem:
        raise ValueError(f"endpoint={url!r}: {problem}. Pass an address such as https://api.openai.com/v1.")
    path = parts.path.rstrip("/").removesuffix(_PATH)
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def _wait_s(state: Any) -> float:
    error, number = state.outcome.exception(), state.attempt_number
    if error.retry_after_s is not None:
        return float(error.retry_after_s)
    longest = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** (number - 1))
    return random.uniform(longest / 2, longest)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds, from `Retry-After` (seconds or a date) or OpenAI's header of milliseconds; None: it does not say."""
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        text = headers.get(name, "")
        try:
            return max(0.0, float(text) * scale)
        except ValueError:
            pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def _record(response: httpx.Response) -> dict[str, Any]:
    try:
        record = response.json()
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _problem(record: Mapping[str, Any]) -> str:
    """What an error in JSON says; "" if it is none."""
    error = record.get("error") or record.get("detail") or (record.get("object") == "error" and record.get("message"))
    if isinstance(error, Mapping):
        error = error.get("message") or json.dumps(error)
    return str(error)[:1000] if error else ""


def _code(record: Mapping[str, Any]) -> Any:
    error = record.get("error")
    found = [error.get("code"), error.get("type")] if isinstance(error, Mapping) else [record.get("code")]
    known = [value for value in found if isinstance(value, int) or value in (*_NO_CREDIT, "context_length_exceeded")]
    return known[0] if known else None


def _asks_for_other_name(text: str) -> bool:
    """Models that reason refuse `max_tokens` and name what they take instead."""
    return "max_completion_tokens" in text and "max_tokens" in text

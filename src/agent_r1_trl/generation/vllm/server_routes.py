"""Requests to a vLLM server: JSON over HTTP, and what the trainer asks besides completions.

The client has an event loop of its own, so that one pool of connections serves every caller: the trajectories of a
rollout, each rollout perhaps on another loop, and the trainer's thread, which has none.

Covered here: one request each, and what a refusal means. Not covered: which servers are sampled from (`fleet.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from agent_r1_trl.generation.base import GenerationError, RefusedRequestError, RequestTooLongError

Result = TypeVar("Result")

_BUSY = (408, 425, 429, 500, 502, 503, 504)
_CONNECT_S = 10.0
_SPARE_CONNECTIONS = 4  # for checks of a server whose other connections all wait for it


class HTTPError(RuntimeError):
    """An answer that is not 2xx, or none at all; the message names the URL and what the server said."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status
        """The answer's; None without one."""

    @property
    def is_passing(self) -> bool:
        """Whether the same request may succeed a little later."""
        return self.status is None or self.status in _BUSY


class HTTPClient:
    """POST and GET of JSON, over at most `max_connections` to each server; `timeout_s` is that of one answer."""

    def __init__(self, *, max_connections: int = 256, timeout_s: float = 600.0):
        self._max_connections = max_connections
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: Any = None

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run on the client's loop; from any thread. `asyncio.wrap_future` makes it awaitable on another loop."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_until_stopped, args=(self._loop,), name="http", daemon=True).start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """`start` and wait."""
        return self.start(coroutine).result()

    async def request(self, method: str, url: str, body: object = None, *, timeout_s: float | None = None) -> Any:
        """The answer's JSON (None if it is empty or, as from vLLM's LoRA routes, a plain sentence).

        Raises:
            HTTPError: no answer in time, none at all, or one that is not 2xx.
        """
        async with self._answered(method, url, body, timeout_s) as answer:
            return await answer.json() if answer.content_type == "application/json" else None

    async def read_events(self, url: str, body: object, pieces: list[bytes]) -> None:
        """Append an answer of server-sent events to `pieces` as it comes; to cancel this closes the connection.

        Raises:
            HTTPError: as of `request`; or the connection broke off.
        """
        async with self._answered("POST", url, body, None) as answer:
            async for piece in answer.content.iter_any():
                pieces.append(piece)

    @asynccontextmanager
    async def _answered(self, method: str, url: str, body: object, timeout_s: float | None) -> AsyncIterator[Any]:
        import aiohttp

        if self._session is None:
            limit = self._max_connections + _SPARE_CONNECTIONS
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, limit_per_host=limit))
        seconds = self._timeout_s if timeout_s is None else timeout_s
        connect_s = min(_CONNECT_S, seconds)
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=connect_s)
        try:
            async with self._session.request(method, url, json=body, timeout=timeout) as answer:
                if answer.status >= 300:
                    text = (await answer.text())[:500]
                    raise HTTPError(f"{method} {url} was answered with {answer.status}: {text}", answer.status)
                yield answer
        except TimeoutError as error:
            is_deaf = isinstance(error, aiohttp.ConnectionTimeoutError)
            missing = f"no connection within {connect_s:g} s" if is_deaf else f"no answer within {seconds:g} s"
            raise HTTPError(f"{method} {url} had {missing}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: what should be JSON is not
            raise HTTPError(f"{method} {url} failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close the connections; requests that are in flight are cancelled."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(), loop).result()
            loop.call_soon_threadsafe(loop.stop)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


logger = logging.getLogger(__name__)

PROTOCOL = 4
"""Version of the requests to the worker extension; trainer and server must have the same."""
NO_NCCL = "servers.weight_transfer='folder' does without NCCL."
_WORKER = "agent_r1_trl.generation.vllm.worker_extension.PolicyWorker"
_FIXES = {
    ".base_layer.": "It was started with --enable-lora and can take adapters only. For LoRA start every server with "
    "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or none; for full fine-tuning, DoRA, modules_to_save "
    "or lora_target_parameters start all without.",
    "GroupError": NO_NCCL,
    "": "It must run the policy's architecture, vocabulary size included: start it with the trainer's model.",
}
"""Part of what a worker says when it cannot load weights -> fix; the first that fits."""
_TOO_LONG = ("maximum context length", "maximum model length")  # of vLLM's messages


class UnfitServerError(GenerationError):
    """A server answers, but cannot be used the way it was started."""


class NoAdaptersError(UnfitServerError):
    """A server without the route that loads adapters."""


# -------------------------------------------------------------------- before the first request


def check_urls(urls: Sequence[str], setting: str | None = None) -> list[str]:
    """The URLs without a slash at the end; `setting` is what the message names in place of `servers.urls`.

    Raises:
        ValueError: no URL is given, one is not a URL, or one is given twice.
    """
    cleaned = [url.rstrip("/") for url in urls]
    wrong = [url for url in cleaned if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname]
    if wrong or not cleaned or len(set(cleaned)) < len(cleaned):
        problem = f"{wrong[0]!r} is no URL of a server" if wrong else "it must name at least one server, and each once"
        setting = setting or f"servers.urls={list(urls)}"
        raise ValueError(f"{setting}: {problem}. Give URLs such as http://127.0.0.1:8000.")
    return cleaned


async def base_model(http: HTTPClient, url: str, *, timeout_s: float | None = None) -> dict[str, Any]:
    """The server's base model as it describes it (`id`, `max_model_len`).

    Raises:
        HTTPError: no answer, or that of a server that is still starting.
        UnfitServerError: it is not a vLLM server.
    """
    try:
        model = (await http.request("GET", f"{url}/v1/models", timeout_s=timeout_s))["data"][0]
        _ = model["id"]
        return model
    except (TypeError, LookupError, HTTPError) as error:
        if isinstance(error, HTTPError) and error.is_passing:
            raise
        reason = str(error) if isinstance(error, HTTPError) else "names no model"
        raise UnfitServerError(
            f"{url} is not a vLLM server, or has the wrong port: {reason}. Set servers.urls, or the "
            "lines of servers.urls_file, to the addresses that `vllm serve` printed."
        ) from error


async def wait_for_servers(http: HTTPClient, urls: Sequence[str], timeout_s: float) -> dict[str, dict[str, Any]]:
    """URL -> the server's base model as it describes it (`id`, `max_model_len`), once all have answered.

    Raises:
        GenerationError: one does not answer within `timeout_s`, or is not a vLLM server.
    """
    waiting = {url: f"{url}: no answer" for url in urls}  # URL -> what it said last

    async def model_of(url: str) -> dict[str, Any]:
        while True:
            try:
                model = await base_model(http, url)
                del waiting[url]
                return model
            except HTTPError as error:
                if waiting[url] != str(error):
                    logger.warning("Waiting up to %g s for the vLLM server: %s", timeout_s, error)
                waiting[url] = str(error)
                await asyncio.sleep(0.5)

    try:
        async with asyncio.timeout(timeout_s):
            models = await asyncio.gather(*(model_of(url) for url in urls))
    except TimeoutError as error:
        raise GenerationError(
            f"Not every server of {', '.join(urls)} answered within {timeout_s:g} s "
            f"({'; '.join(waiting.values())}). Start them first (docs/serving.md), or raise vllm_server_timeout."
        ) from error
    return dict(zip(urls, models, strict=True))


# -------------------------------------------------------------------- requests


async def ask_each(
    urls: Iterable[str], action: Callable[[str], Awaitable[Result]]
) -> tuple[dict[str, Result], dict[str, Exception]]:
    """URL -> what an action returns for the server, and URL -> what went wrong; all servers at once."""
    urls = list(urls)
    found: dict[str, Result] = {}
    failures: dict[str, Exception] = {}
    for url, answer in zip(urls, await asyncio.gather(*map(action, urls), return_exceptions=True), strict=True):
        if isinstance(answer, (HTTPError, GenerationError, OSError)):
            failures[url] = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found[url] = answer
    return found, failures


def joined_events(content: bytes, url: str, *, is_cut: bool) -> dict[str, Any]:
    """A completion out of its events, in the form in which it comes without `stream`.

    Args:
        content: what has come of the answer; an event that has not come whole is left out.
        url: of the server, for messages.
        is_cut: whether the rest is not waited for. `finish_reason` is "interrupted" where there is one.

    Returns:
        A completion. Its `model` is None if no event has come.

    Raises:
        HTTPError: an event is an error, or the answer ended before the turn did.
    """
    whole_lines = content[: content.rfind(b"\n") + 1]
    events = [json.loads(line[6:]) for line in whole_lines.splitlines() if line.startswith(b"data: {")]
    joined: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
    model, reason = None, None
    for event in events:
        if "choices" not in event:
            error = event.get("error")
            status = error.get("code") if isinstance(error, dict) else None
            raise HTTPError(f"{url} broke off an answer: {json.dumps(event)[:500]}", status)
        model = event["model"]
        for choice in event["choices"]:  # none in an event about usage
            reason = choice["finish_reason"]
            for name, values in joined.items():
                values += choice["logprobs"].get(name) or ()
    if reason is None and not is_cut:
        raise HTTPError(f"{url} ended an answer before the turn had ended")
    return {"model": model, "choices": [{"finish_reason": reason or "interrupted", "logprobs": joined}]}


def refusal_of(error: HTTPError) -> GenerationError:
    """The meaning of a server's refusal of a completion."""
    if error.status == 400 and any(words in str(error) for words in _TOO_LONG):
        return RequestTooLongError(str(error))
    return RefusedRequestError(f"{error}. It would refuse the request again: correct what it names")


async def rpc(http: HTTPClient, url: str, method: str, *arguments: object, timeout_s: float) -> list[dict[str, Any]]:
    """Call a method of `PolicyWorker` on every worker of a server.

    Raises:
        HTTPError: no answer, or that of a server in trouble.
        UnfitServerError: the server cannot take weights.
    """
    body = {"method": method, "args": arguments}
    try:
        answer = await http.request("POST", f"{url}/collective_rpc", body, timeout_s=timeout_s)
    except HTTPError as error:
        if error.is_passing and method not in str(error):
            raise
        raise UnfitServerError(
            f"{error}. To take weights from a trainer the server must run with VLLM_SERVER_DEV_MODE=1 and "
            f"--worker-extension-cls {_WORKER}; see docs/serving.md."
        ) from error
    results = [item if isinstance(item, dict) else json.loads(item) for item in (answer or {}).get("results", ())]
    errors = "; ".join(sorted({item["error"] for item in results if "error" in item}))
    if errors or not results:
        fix = next(fix for words, fix in _FIXES.items() if words in errors)
        raise UnfitServerError(
            f"The server {url} could not load the policy's weights ({errors or 'no answer'}). {fix}"
        )
    return results


async def hello(http: HTTPClient, url: str, path: Path | None = None, *, timeout_s: float) -> list[dict[str, Any]]:
    """Each worker's answer about itself and about our `path`; see `PolicyWorker.agent_r1_hello`.

    Raises:
        HTTPError: it does not answer.
        UnfitServerError: it was started without the worker extension, or with that of another version.
    """
    workers = await rpc(http, url, "agent_r1_hello", None if path is None else str(path), timeout_s=timeout_s)
    if not all("process" in worker and worker.get("protocol") == PROTOCOL for worker in workers):
        raise UnfitServerError(f"{url} runs another version of agent-r1-trl. Install the trainer's version there.")
    return workers


def identity_of(workers: Sequence[dict[str, Any]], weights: str) -> str | None:
    """The processes of the workers if all of them hold these weights, else None."""
    if any(worker["weights"] != weights for worker in workers):
        return None
    return "+".join(sorted(worker["process"] for worker in workers))


async def reset_prefix_cache(http: HTTPClient, url: str, *, timeout_s: float) -> None:
    """Forget what was computed with the old weights: it must not be continued with the new ones."""
    # A request that still runs is one that nobody waits for; without the option it would keep the cache.
    answer = await http.request("POST", f"{url}/reset_prefix_cache?reset_running_requests=true", timeout_s=timeout_s)
    if isinstance(answer, dict) and not answer.get("success", True):
        raise HTTPError(f"{url} keeps its prefix cache, which was computed with older weights")


async def load_adapter(http: HTTPClient, url: str, name: str, folder: Path) -> None:
    """Have a server serve the adapter in `folder` as the model `name`.

    Raises:
        HTTPError: no answer.
        NoAdaptersError: it has no route for that.
        UnfitServerError: it could not load the adapter.
    """
    try:
        await http.request("POST", f"{url}/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
    except HTTPError as error:
        if error.status is None:
            raise
        if error.status == 400 and "already been loaded" in str(error):
            return  # by another rank, after a restart
        if error.status == 404 and '"Not Found"' in str(error):
            raise NoAdaptersError(
                f"{url} does not serve adapters. Start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
            ) from error
        raise UnfitServerError(
            f"A server that serves LoRA did not load the adapter: {error}. It must see the folder {folder} under the "
            "same path, and needs --enable-lora and a --max-lora-rank of at least the adapter's. Where there is no "
            "shared folder, start all servers without --enable-lora: weights then go over NCCL."
        ) from error

"""What the trainer asks a vLLM server besides completions: its workers, adapters, cache and scores.

Covered here: one request each, and what a refusal means. Not covered: which servers are used (`fleet.py`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from agent_r1_trl.generation.base import GenerationError, RefusedRequestError, RequestTooLongError
from agent_r1_trl.generation.vllm.http_client import HTTPClient, HTTPError

PROTOCOL = 4
"""Version of the requests to the worker extension; trainer and server must have the same."""
_WORKER = "agent_r1_trl.generation.vllm.worker_extension.PolicyWorker"
_SAME_MODEL = "It must run the policy's architecture, vocabulary size included: start it with the trainer's model."
_ADAPTERS_ONLY = (
    "It was started with --enable-lora and can take adapters only. For LoRA start every server with --enable-lora and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or none; for full fine-tuning, DoRA or modules_to_save start all without."
)
NO_NCCL = "servers.weight_transfer='folder' does without NCCL."
_TOO_LONG = ("maximum context length", "maximum model length")  # of vLLM's messages

Result = TypeVar("Result")


class UnfitServerError(GenerationError):
    """A server answers, but cannot be used the way it was started."""


class NoAdaptersError(UnfitServerError):
    """A server without the route that loads adapters."""


async def ask_each(
    urls: Iterable[str], action: Callable[[str], Awaitable[Result]]
) -> tuple[dict[str, Result], dict[str, Exception]]:
    """URL -> what an action returns for the server, and URL -> what went wrong; all servers at once."""
    urls = list(urls)
    answers = await asyncio.gather(*(action(url) for url in urls), return_exceptions=True)
    found: dict[str, Result] = {}
    failures: dict[str, Exception] = {}
    for url, answer in zip(urls, answers, strict=True):
        if isinstance(answer, (HTTPError, GenerationError, OSError)):
            failures[url] = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found[url] = answer
    return found, failures


def refusal_of(error: HTTPError) -> GenerationError:
    """What it means that a server will not serve a request for a completion."""
    if error.status == 400 and any(words in str(error) for words in _TOO_LONG):
        return RequestTooLongError(str(error))
    return RefusedRequestError(f"{error}. It would refuse the request again: correct what it names")


async def rpc(http: HTTPClient, url: str, method: str, *arguments: Any, timeout_s: float) -> list[dict[str, Any]]:
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
    errors = sorted({item["error"] for item in results if "error" in item})
    if errors or not results:
        said = "".join(errors)
        fix = _ADAPTERS_ONLY if ".base_layer." in said else NO_NCCL if "GroupError" in said else _SAME_MODEL
        raise UnfitServerError(
            f"The server {url} could not load the policy's weights ({'; '.join(errors) or 'no answer'}). {fix}"
        )
    return results


async def hello(http: HTTPClient, url: str, path: Path | None = None, *, timeout_s: float) -> list[dict[str, Any]]:
    """What each worker of a server says about itself, and about our `path`; see `PolicyWorker.agent_r1_hello`.

    Raises:
        HTTPError: it does not answer.
        UnfitServerError: it was started without the worker extension, or with that of another version.
    """
    workers = await rpc(http, url, "agent_r1_hello", None if path is None else str(path), timeout_s=timeout_s)
    if not all("process" in worker and worker.get("protocol") == PROTOCOL for worker in workers):
        raise UnfitServerError(f"{url} runs another version of agent-r1-trl. Install the trainer's version there.")
    return workers


def identity_of(workers: Iterable[dict[str, Any]], weights: str) -> str | None:
    """The processes of the workers if all of them hold these weights, else None."""
    workers = list(workers)
    if any(worker["weights"] != weights for worker in workers):
        return None
    return "+".join(sorted(worker["process"] for worker in workers))


async def reset_prefix_cache(http: HTTPClient, url: str, *, timeout_s: float) -> None:
    """Forget what was computed with the old weights: it must not be continued with the new ones.

    Raises:
        HTTPError: no answer, or the cache stays.
    """
    # A request that still runs is one that nobody waits for; without the option it would keep the cache.
    option = "?reset_running_requests=true"
    answer = await http.request("POST", f"{url}/reset_prefix_cache{option}", timeout_s=timeout_s)
    if isinstance(answer, dict) and not answer.get("success", True):
        raise HTTPError(f"{url} keeps its prefix cache, which was computed with older weights")


async def load_adapter(http: HTTPClient, url: str, name: str, folder: str) -> None:
    """Have a server serve the adapter in `folder` as the model `name`.

    Raises:
        HTTPError: no answer.
        NoAdaptersError: it has no route for that.
        UnfitServerError: it could not load the adapter.
    """
    try:
        await http.request("POST", f"{url}/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
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
